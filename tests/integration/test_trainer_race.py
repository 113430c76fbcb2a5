"""Two trainers and one job whose own trainer is gone, on a real Redis: one has it, whoever is faster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from rlboost.services.trainer.app import Timing
from rlboost.shared.messages import JobReport
from rlboost.shared.redis.bus import RedisBus
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import HashSet
from tests.support.eventually import eventually
from tests.support.trainer_rig import JOB, Rig


class InStep(RedisBus):
    """Two of these go on from their first look at the leases together, so that both see the same and act at once."""

    def __init__(self, url: str, together: asyncio.Barrier) -> None:
        super().__init__(url)
        self._together = together
        self.saw: list[str | None] | None = None
        """What both saw when they went on; None before."""

    async def cap_and_read_leases(self, leases: Sequence[str]) -> list[str | None]:
        found = await super().cap_and_read_leases(leases)
        if self.saw is None:
            async with asyncio.timeout(60.0):
                await self._together.wait()
            self.saw = found
        return found


@pytest.fixture
async def bus(redis_url: str) -> AsyncIterator[RedisBus]:
    bus = RedisBus(redis_url)
    yield bus
    await bus.close()


@pytest.mark.parametrize("attempt", range(2))
async def test_one_of_two_racing_trainers_takes_over_a_job(
    tmp_path: Path, redis_url: str, bus: RedisBus, attempt: int
) -> None:
    timing = Timing(block_s=0.01, takeover_check_s=0.02, lease_renewal_interval_s=0.05)
    together = asyncio.Barrier(2)
    rigs = [Rig(tmp_path / name, timing=timing) for name in ("a", "b")]
    buses = [InStep(redis_url, together) for _ in rigs]
    for rig, own in zip(rigs, buses, strict=True):
        rig.bus = own  # type: ignore[assignment]  # a rig only uses it as a bus
        rig.manager.bus = bus
    await rigs[0].command("create")
    [entry] = await bus.consume(names.JOB_COMMANDS, names.TRAINER_GROUP, "gone")
    await bus.transact([HashSet(names.JOB_TRAINERS, {JOB: "gone"})])
    async with AsyncExitStack() as stack:
        for rig, name in zip(rigs, ("a", "b"), strict=True):
            await stack.enter_async_context(rig.trainer(name=name))
        assert (await rigs[0].ended(20.0)).state == "completed"

        async def nobody_owns_it() -> bool:
            return await bus.hash_all(names.JOB_TRAINERS) == {}

        assert await eventually(nobody_owns_it)
    assert [own.saw for own in buses] == [[None], [None]], "there was a race"
    told = [(report.state, report.trainer) for report in await rigs[0].reports() if isinstance(report, JobReport)]
    [(_, winner), *_] = told
    assert told == [("running", winner), ("completed", winner)], entry
    assert [report.step for report in await rigs[0].steps()] == [0, 1, 2, 3, 4]
    assert sorted(len(rig.weights.versions) for rig in rigs) == [0, 6]
    for own in buses:
        await own.close()
