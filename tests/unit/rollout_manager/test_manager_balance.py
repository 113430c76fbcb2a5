"""The manager's own decisions over a while: workers that take time to generate, on a manual clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from rlboost.services.rollout_manager.domain.effects import Now
from rlboost.services.rollout_manager.loop import Manager
from rlboost.shared.streams import names
from tests.support.builders import group_requested, job_created, job_running, job_spec
from tests.support.memory_bus import MemoryBus
from tests.support.sim_worker import SimWorker

TICK_S = 0.05
HEARTBEAT_S = 0.5


class Site:
    """A manager and workers of one kind, which differ in speed."""

    def __init__(self) -> None:
        self.clock = 100.0
        self.bus = MemoryBus(clock=lambda: self.clock)
        self.manager = Manager(self.bus, lease_s=2.0, redis_limit_s=9.0, clock=lambda: Now(self.clock, self.clock))
        self.speeds: dict[str, float] = {}
        self.workers: dict[str, SimWorker] = {}
        self.tokens: Counter[tuple[str, str]] = Counter()
        """(Worker, job) -> tokens that it generated."""
        self._due: dict[str, float] = {}
        """Worker -> the part of a decoding step that is done."""

    async def start(self, shares: dict[str, float], groups: Iterable[tuple[int, int]]) -> None:
        """Run jobs with these shares, each with groups of 8 samples: (number, tokens of each sample)."""
        groups = list(groups)
        for no, (job_id, share) in enumerate(shares.items(), 1):
            _, running, committed = job_running(job_id, no)
            spec = job_spec(elastic={"share": share})
            await self.bus.append(names.JOB_COMMANDS, job_created(job_id, no, spec))
            await self.bus.append(names.JOB_REPORTS, running)
            await self.bus.append(names.WEIGHTS_COMMITTED, committed)
            for number, length in groups:
                request = group_requested(number, job_id=job_id, job_no=no, n=8, max_tokens=length)
                await self.bus.append(names.rollouts_requested(job_id), request)
        assert await self.manager.try_lead()

    async def join(self, speed: float, slots: int) -> str:
        name = f"w{len(self.workers)}"
        self.workers[name] = SimWorker(self.bus, name, slots=slots)
        self.speeds[name], self._due[name] = speed, 0.0
        await self.workers[name].join()
        return name

    async def run(self, seconds: float) -> None:
        for tick in range(round(seconds / TICK_S)):
            self.clock += TICK_S
            for name, worker in self.workers.items():
                self._generate(name, worker)
                await worker.flush()
                if tick % round(HEARTBEAT_S / TICK_S) == 0:
                    await worker.send_heartbeat()
            await self.manager.turn()
            for worker in self.workers.values():
                await worker.execute_commands()

    def _generate(self, name: str, worker: SimWorker) -> None:
        running = len(worker.running())
        step_s = (0.02 + 0.002 * running) / self.speeds[name]
        worker.tokens_per_s = running / step_s
        self._due[name] += TICK_S / step_s
        before = sum(len(held.tokens) for held in worker.held.values())
        worker.generate(int(self._due[name]))
        self._due[name] %= 1.0
        self.tokens[name, worker.job_id] += sum(len(held.tokens) for held in worker.held.values()) - before


async def test_manager_migrates_running_samples_to_a_worker_that_joins() -> None:
    site = Site()
    await site.start({"j": 1.0}, [(0, 3000), (1, 3000)])
    busy = await site.join(1.0, slots=32)
    await site.run(12.0)
    assert len(site.workers[busy].held) == 16
    assert not site.manager.world.queues
    idle = await site.join(1.0, slots=32)
    await site.run(3.0)
    audit = site.manager.world.jobs["j"].audit
    assert len(site.workers[idle].held) == audit.migrations == 6, "10 and 6 samples: 40 and 32 ms between two tokens"
    assert audit.tokens_saved > 0
    assert not audit.tokens_regenerated
    await site.run(6.0)
    assert audit.migrations == 6, "what has migrated stays"


async def test_workers_generate_in_proportion_to_their_speeds() -> None:
    site = Site()
    speeds = (1.0, 0.6, 0.3)
    await site.start({"j": 1.0}, [(number, 40 + number % 40) for number in range(200)])
    names_of = [await site.join(speed, slots=8) for speed in speeds]
    await site.run(5.0)
    site.tokens.clear()
    await site.run(40.0)
    assert site.manager.world.queues, "samples are queued all the time"
    total = site.tokens.total()
    for name, speed in zip(names_of, speeds, strict=True):
        assert 100 * site.tokens[name, "j"] / total == pytest.approx(100 * speed / sum(speeds), abs=3.0)


async def test_jobs_get_workers_and_tokens_in_proportion_to_their_shares() -> None:
    site = Site()
    await site.start({"a": 1.0, "b": 3.0}, [(number, 60) for number in range(200)])
    for _ in range(8):
        await site.join(1.0, slots=4)
    await site.run(5.0)
    assert Counter(worker.job_id for worker in site.workers.values()) == {"a": 2, "b": 6}
    site.tokens.clear()
    await site.run(20.0)
    of_a = sum(tokens for (_, job_id), tokens in site.tokens.items() if job_id == "a")
    assert 100 * of_a / site.tokens.total() == pytest.approx(25.0, abs=3.0)
