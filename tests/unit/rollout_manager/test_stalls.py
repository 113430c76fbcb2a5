"""Workers that take samples and give nothing, or too little: the samples end on others (invariant 8)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest

from rlboost.services.rollout_manager.domain.effects import Now
from rlboost.services.rollout_manager.domain.measurements import PROBE_SAMPLES
from rlboost.services.rollout_manager.domain.workers import LONGEST_SILENCE_S
from rlboost.services.rollout_manager.domain.world import World
from rlboost.services.rollout_manager.loop import Manager
from rlboost.shared.messages import Event, SampleFinished
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Renew
from tests.support.builders import group_requested, job_running, weights_committed
from tests.support.memory_bus import MemoryBus
from tests.support.sim_worker import SimWorker, check_completion
from tests.support.stream_entries import read_all

STALL_LIMIT_S = 9.0
TICK_S = 0.25

Generate = Callable[[SimWorker], object]


def nothing(_: SimWorker) -> None:
    """Hold what was assigned, and generate nothing."""


def steadily(worker: SimWorker) -> None:
    worker.generate(1)


class Site:
    """A manager and workers that behave as they are told, on a manual clock."""

    def __init__(self) -> None:
        self.clock = 100.0
        self.bus = MemoryBus(clock=lambda: self.clock)
        self.manager = Manager(
            self.bus,
            lease_s=2.0,
            redis_limit_s=9.0,
            clock=lambda: Now(self.clock, self.clock),
            stall_limit_s=STALL_LIMIT_S,
        )
        self.workers: dict[str, tuple[SimWorker, Generate]] = {}

    async def start(self, n_samples: int, max_tokens: int = 40, n_groups: int = 1) -> None:
        created = job_running()
        streams = (names.JOB_COMMANDS, names.JOB_REPORTS, names.WEIGHTS_COMMITTED)
        for stream, message in zip(streams, created, strict=True):
            await self.bus.append(stream, message)
        for number in range(n_groups):
            request = group_requested(number, n=n_samples, max_tokens=max_tokens)
            await self.bus.append(names.rollouts_requested("j"), request)
        assert await self.manager.try_lead()

    async def join(self, name: str, behave: Generate = steadily, slots: int = 1000) -> SimWorker:
        worker = SimWorker(self.bus, name, slots=slots)
        self.workers[name] = worker, behave
        await worker.join()
        return worker

    async def run(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.clock += TICK_S
            for worker, behave in list(self.workers.values()):
                if worker.dismissed:
                    continue
                behave(worker)
                await worker.flush()
                await worker.send_heartbeat()
            await self.manager.turn()
            for worker, _behave in self.workers.values():
                if not worker.dismissed:
                    await worker.execute_commands()

    @property
    def world(self) -> World:
        return self.manager.world

    async def finished(self) -> list[SampleFinished]:
        entries = await read_all(self.bus, names.rollouts_finished("j"))
        return [entry.message for entry in entries if isinstance(entry.message, SampleFinished)]

    async def events(self, kind: str) -> list[Event]:
        entries = await read_all(self.bus, names.job_events("j")) + await read_all(self.bus, names.FLEET_EVENTS)
        return [e.message for e in entries if isinstance(e.message, Event) and e.message.kind == kind]

    async def check_all_delivered(self, n: int) -> None:
        finished = await self.finished()
        assert len({message.sample for message in finished}) == len(finished) == n, "lost or doubled"
        for message in finished:
            check_completion(list(memoryview(message.tokens).cast("i")), message.spans)


async def test_worker_without_a_token_gets_a_probe_however_many_slots_it_claims() -> None:
    site = Site()
    await site.start(64, n_groups=4)
    await site.join("hole", nothing, slots=100_000)
    await site.run(2.0)
    assert len(site.world.fleet.workers["hole"].samples) == PROBE_SAMPLES


async def test_proven_worker_gets_a_full_batch_within_a_second() -> None:
    site = Site()
    await site.start(64, n_groups=4, max_tokens=1000)
    await site.join("good", slots=256)
    await site.run(1.5)
    assert len(site.world.fleet.workers["good"].samples) == 256
    assert site.world.fleet.workers["good"].trust.is_full


async def test_samples_of_a_worker_that_sends_nothing_end_on_another() -> None:
    site = Site()
    await site.start(20)
    await site.join("hole", nothing, slots=100_000)
    await site.run(1.0)
    await site.join("good")
    await site.run(STALL_LIMIT_S / 3 + 12.0)
    await site.check_all_delivered(20)
    (suspected,) = await site.events("worker_suspected")
    assert (suspected.fields["worker"], suspected.fields["samples"]) == ("hole", PROBE_SAMPLES)
    (unassigned,) = await site.events("samples_unassigned")
    assert unassigned.fields["cause"] == "stalled"


async def test_worker_that_falls_silent_after_tokens_loses_its_samples() -> None:
    """With the tokens that it has sent; it is drained after repeated offenses, and removed as it does not leave."""
    site = Site()
    await site.start(60, n_groups=8, max_tokens=400)
    silent = False
    await site.join("turncoat", lambda worker: None if silent else worker.generate(1))
    await site.run(2.0)
    assert len(site.world.fleet.workers["turncoat"].samples) > 200
    await site.join("good", slots=40)
    await site.run(1.0)
    silent = True
    await site.run(2.5 * STALL_LIMIT_S)
    assert not site.world.fleet.workers["turncoat"].samples
    assert site.world.jobs["j"].audit.tokens_saved > 0
    ignore = site.workers["turncoat"][0]
    ignore.leave = ignore.flush  # type: ignore[method-assign]  # it ignores the command to drain
    await site.run(25.0 * STALL_LIMIT_S)
    assert [event.fields["worker"] for event in await site.events("worker_rejected")] == ["turncoat"]
    assert site.world.fleet.workers.keys() == {"good"}


async def test_trickle_of_tokens_does_not_keep_samples() -> None:
    """A token of each sample every few seconds, where others generate one in each tick."""
    site = Site()
    await site.start(8, max_tokens=200)
    ticks = 0

    def trickle(worker: SimWorker) -> None:
        nonlocal ticks
        ticks += 1
        if ticks < 12 or ticks % 100 == 0:
            worker.generate(1)

    await site.join("miser", trickle, slots=4)
    await site.join("good1", slots=2)
    await site.join("good2", slots=2)
    await site.run(120.0)
    await site.check_all_delivered(8)


async def test_slow_worker_keeps_its_samples() -> None:
    site = Site()
    await site.start(8, max_tokens=60)
    ticks = 0

    def slowly(worker: SimWorker) -> None:
        nonlocal ticks
        ticks += 1
        if ticks % 8 == 0:
            worker.generate(1)

    await site.join("slow", slowly, slots=2)
    await site.join("good", slots=8)
    await site.run(4.0 * STALL_LIMIT_S)
    assert not await site.events("worker_suspected")
    assert site.world.fleet.workers["slow"].trust.offenses == 0


@pytest.mark.parametrize("n_workers", [1, 3])
async def test_fleet_that_stalls_as_a_whole_is_not_to_blame(n_workers: int) -> None:
    site = Site()
    await site.start(12, max_tokens=30)
    stalled = False
    for number in range(n_workers):
        await site.join(f"w{number}", lambda worker: None if stalled else worker.generate(1), slots=4)
    await site.run(2.0)
    stalled = True
    await site.run(10.0 * STALL_LIMIT_S)
    stalled = False
    await site.run(30.0)
    await site.check_all_delivered(12)
    assert sum(worker.trust.offenses for worker in site.world.fleet.workers.values()) == 0


async def test_samples_in_the_queue_of_a_busy_engine_stay_and_cost_nothing() -> None:
    site = Site()
    await site.start(9, max_tokens=400)
    await site.join("busy", slots=8)
    await site.run(5.0 * STALL_LIMIT_S)
    assert not await site.events("worker_suspected")
    assert site.world.jobs["j"].audit.migrations == 0


async def test_weight_update_that_never_ends_loses_the_samples_after_its_limit() -> None:
    """Serving continues on the other worker, which has loaded the version; a normal update loses nothing."""
    site = Site()
    await site.start(8, max_tokens=4000)
    await site.join("stuck", slots=4)
    await site.join("good", slots=8)
    await site.run(2.0)
    stuck, _ = site.workers["stuck"]
    held = set(stuck.held)
    assert held
    hanging = partial(setattr, stuck, "state", "pulling")
    site.workers["stuck"] = stuck, lambda _: hanging()
    await site.bus.append(names.WEIGHTS_COMMITTED, weights_committed(version=1))
    site.world.fleet.workers["stuck"].assigned_version = ("j", 1)
    await site.run(1.5 * STALL_LIMIT_S)
    assert site.world.fleet.workers["stuck"].samples.keys() == held
    await site.run(2.0 * STALL_LIMIT_S)
    assert not site.world.fleet.workers["stuck"].samples


async def test_worker_that_does_not_drain_is_removed_with_its_samples_taken() -> None:
    site = Site()
    await site.start(4, max_tokens=50)
    hole = await site.join("hole", nothing)
    hole.execute_commands = hole.flush  # type: ignore[method-assign]
    hole.state, hole.job_id, hole.version = "ready", "j", 0
    await site.run(1.0)
    worker = site.world.fleet.workers["hole"]
    assert worker.samples
    site.world.fleet.drain(worker, Now(site.clock, site.clock), "requested over REST")
    await site.run(1.0)
    assert worker.public()["state"] == "draining", "it goes on reporting 'ready'"
    await site.join("good")
    await site.run(STALL_LIMIT_S / 3 + 15.0)
    assert "hole" not in site.world.fleet.workers
    assert "did not hand off" in site.world.fleet.gone["hole"].gone_reason
    await site.check_all_delivered(4)


@pytest.mark.parametrize("ttl_s", [math.inf, 1e9])
async def test_lease_of_a_dead_worker_keeps_it_for_a_limited_time_only(ttl_s: float) -> None:
    """It wrote a lease that never ends, and exited; no other worker is there."""
    site = Site()
    await site.start(4)
    await site.join("undead", nothing)
    await site.run(1.0)
    await site.bus.transact([Renew(names.worker_lease("undead"), "1", ttl_s)])
    del site.workers["undead"]
    await site.run(LONGEST_SILENCE_S + 5.0)
    assert "undead" not in site.world.fleet.workers
    await site.join("good")
    await site.run(15.0)
    await site.check_all_delivered(4)
