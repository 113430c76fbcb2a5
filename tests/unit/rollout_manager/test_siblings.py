"""Completions of ended samples go, as drafts, to the workers that run their siblings and use drafts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rlboost.services.rollout_manager.domain import world
from rlboost.services.rollout_manager.domain.effects import Now
from rlboost.services.rollout_manager.loop import Manager
from rlboost.shared.messages import SampleFinished, Siblings
from rlboost.shared.streams import names
from rlboost.shared.wire import I32, U32, U64, ints
from tests.support.builders import group_id, group_requested, job_running
from tests.support.memory_bus import MemoryBus
from tests.support.sim_worker import SimWorker
from tests.support.stream_entries import read_all


class Site:
    """A manager, and workers of two slots that run the samples of one group, on a manual clock."""

    def __init__(self) -> None:
        self.clock = 100.0
        self.bus = MemoryBus(clock=lambda: self.clock)
        self.manager = self.new_manager()
        self.workers: dict[str, SimWorker] = {}

    def new_manager(self) -> Manager:
        return Manager(self.bus, lease_s=2.0, redis_limit_s=9.0, clock=lambda: Now(self.clock, self.clock))

    async def start(
        self, n: int, answers: Sequence[Sequence[int]], *, uses_drafts: Sequence[bool] = (True, True)
    ) -> None:
        """Start workers; those of the first one generate `answers`, which end, and the other's samples go on."""
        for stream, message in zip(
            (names.JOB_COMMANDS, names.JOB_REPORTS, names.WEIGHTS_COMMITTED), job_running(), strict=True
        ):
            await self.bus.append(stream, message)
        await self.bus.append(names.rollouts_requested("j"), group_requested(n=n, max_tokens=100_000))
        assert await self.manager.try_lead()
        for name, uses in zip(("short", "long"), uses_drafts, strict=True):
            worker = SimWorker(self.bus, name, slots=n // 2, uses_drafts=uses)
            worker.answers = [list(answer) for answer in answers] if name == "short" else []
            self.workers[name] = worker
            await worker.join()

    async def run(self, turns: int = 20) -> None:
        for _ in range(turns):
            self.clock += 0.1
            for worker in self.workers.values():
                worker.generate(1)
                await worker.flush()
                await worker.send_heartbeat()
            await self.manager.turn()
            for worker in self.workers.values():
                await worker.execute_commands()

    def sent_to(self, name: str) -> list[Siblings]:
        return self.workers[name].siblings

    def texts(self, name: str) -> list[list[int]]:
        found = []
        for message in self.sent_to(name):
            tokens = iter(ints(message.tokens, I32))
            found += [[next(tokens) for _ in range(n)] for n in ints(message.lengths, U32)]
        return found

    def samples_of(self, name: str) -> set[int]:
        return {sample for message in self.sent_to(name) for sample in ints(message.samples, U64)}


ANSWERS = [[5, 6, 7], [8, 9]]


@pytest.fixture
def site() -> Site:
    return Site()


async def test_ended_samples_are_sent_once_to_workers_of_open_siblings(site: Site) -> None:
    await site.start(4, ANSWERS)
    await site.run()
    assert sorted(site.texts("long")) == ANSWERS
    assert site.samples_of("long") <= site.workers["long"].held.keys()
    assert site.texts("short") == [], "it has generated them"


async def test_worker_that_uses_no_drafts_is_sent_nothing_until_it_does(site: Site) -> None:
    await site.start(4, ANSWERS, uses_drafts=(True, False))
    await site.run()
    assert site.texts("long") == []
    site.workers["long"].uses_drafts = True
    await site.run(5)
    assert sorted(site.texts("long")) == ANSWERS


async def test_nothing_is_kept_while_no_worker_uses_drafts(site: Site) -> None:
    await site.start(4, ANSWERS, uses_drafts=(False, False))
    await site.run()
    assert site.manager.world.siblings.n_groups == 0


async def test_worker_that_takes_over_a_sample_is_sent_its_siblings(site: Site) -> None:
    await site.start(4, ANSWERS)
    await site.run()
    third = site.workers["third"] = SimWorker(site.bus, "third", slots=2, uses_drafts=True)
    await third.join()
    for name in ("short", "long"):
        await site.workers.pop(name).leave()
    await site.run()
    assert site.samples_of("third") <= third.held.keys()
    assert sorted(site.texts("third")) == ANSWERS


async def test_completions_are_forgotten_with_the_last_sample_of_their_group(site: Site) -> None:
    await site.start(4, ANSWERS)
    await site.run()
    assert site.manager.world.siblings.n_groups == 1
    for held in site.workers["long"].held.values():
        held.answer = [*held.tokens, 1]
    await site.run()
    entries = await read_all(site.bus, names.rollouts_finished("j"))
    assert sum(isinstance(entry.message, SampleFinished) for entry in entries) == 4
    assert site.manager.world.siblings.n_groups == 0


async def test_another_manager_continues_without_what_ended_before(site: Site) -> None:
    await site.start(4, ANSWERS, uses_drafts=(True, False))
    await site.run()
    site.clock += 10.0
    site.manager = site.new_manager()
    assert await site.manager.try_lead()
    site.workers["long"].uses_drafts = True
    await site.run()
    assert site.texts("long") == []
    assert group_id() in {sample.request.group for sample in site.manager.world.ledger.samples.values()}


async def test_bytes_and_completions_are_bounded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "MAX_COMPLETIONS", 3)
    monkeypatch.setattr(world, "MAX_SIBLING_BYTES", 1)
    answers = [[5 + n] * (2 + n // 2) for n in range(6)]
    await site.start(12, answers, uses_drafts=(True, False))
    await site.run()
    site.workers["long"].uses_drafts = True
    await site.run(2)
    assert len(site.texts("long")) == 1, "one exceeds the bytes of a turn"
    await site.run()
    assert sorted(site.texts("long")) == answers[-3:]
