"""Jobs of two trainers on one device: one computes at a time; a dead, slow or hanging one does not stop the other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlboost.services.trainer.domain import device_turns
from rlboost.services.trainer.domain.device_turns import Claim
from rlboost.services.trainer.job import shared_device
from rlboost.services.trainer.job.job import DeviceThread, Job, RetryingBus
from rlboost.services.trainer.job.shared_device import SharedDevice
from rlboost.shared.errors import Fatal, ProcessEnded, leaves
from rlboost.shared.messages import EngineProfile, Event
from rlboost.shared.process.waiting import Waits
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START
from rlboost.shared.streams.fenced_lease import FencedLease
from tests.support.eventually import eventually
from tests.support.memory_bus import MemoryBus
from tests.support.trainer_rig import Rig

LEASE = names.device_lease("gpu")


class Two:
    """Two trainers with a job each, in one process."""

    def __init__(self, folder: Path) -> None:
        self.rig = Rig(folder)
        self.bus: MemoryBus = self.rig.bus
        self.calls: list[str] = []
        """What used the device, in order."""

    @asynccontextmanager
    async def job(
        self, job_id: str, *, device: str = "gpu", limit_s: float = 20.0, call_limit_s: float = 900.0
    ) -> AsyncIterator[Job]:
        """A job that takes turns, and whose engine notes when it is offloaded."""
        thread, waits = DeviceThread(), Waits()
        shared = SharedDevice(
            thread,
            RetryingBus(self.bus, waits, 20.0),
            waits,
            name=device,
            trainer=f"trainer-{job_id}",
            call_limit_s=call_limit_s,
        )
        job = self.rig.claimed(shared)
        job.id, job.waits, job.limit_s = job_id, waits, limit_s
        job.resources.engine.offload = lambda: self.calls.append(f"offload {job_id}")  # type: ignore[method-assign]
        try:
            async with shared.turns(job):
                yield job
        finally:
            thread.close()

    async def compute(self, job: Job) -> None:
        await job.device.compute(lambda: self.calls.append(job.id))

    def claims(self) -> dict[str, str]:
        return self.bus._hashes.get(names.device_claims("gpu"), {})

    async def events(self, job_id: str) -> list[str]:
        entries = await self.bus.read({names.job_events(job_id): START})
        return [entry.message.kind for entry in entries if isinstance(entry.message, Event)]


@pytest.fixture
def two(tmp_path: Path) -> Two:
    return Two(tmp_path)


async def until_waiting(job: Job) -> str:
    """Return why, once the job waits for the device."""
    return await eventually(lambda: next((w.because for w in job.waits.current() if w.subject == "the device"), ""))


@asynccontextmanager
async def busy(job: Job) -> AsyncIterator[None]:
    """Have a call of the job run on the device."""
    begun, go_on = threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        go_on.wait(30)

    running = asyncio.create_task(job.device.compute(call))
    try:
        await eventually(begun.is_set)
        yield
    finally:
        go_on.set()
        await running


async def test_idle_job_offloads_and_gives_the_device_to_the_other(two: Two) -> None:
    async with two.job("a") as a, two.job("b") as b:
        await two.compute(a)
        await two.compute(b)
        await two.compute(a)
    assert two.calls == ["a", "offload a", "b", "offload b", "a"]


async def test_job_alone_keeps_the_device_and_is_not_offloaded(two: Two) -> None:
    async with two.job("a") as a:
        await two.compute(a)
        await asyncio.sleep(3 * device_turns.LEAST_PATIENCE_S)
        await two.compute(a)
        assert a.device.waited_s == 0.0
    assert two.calls == ["a", "a"]
    assert await two.bus.lease_values([LEASE]) == [None], "the job's end frees it"


async def test_call_waits_while_another_job_computes_and_names_it(two: Two) -> None:
    async with two.job("a") as a, two.job("b") as b:
        async with busy(a):
            waiting = asyncio.create_task(two.compute(b))
            assert (await until_waiting(b)).startswith("trainers use it in turns: a of trainer-a has had it for 0 s")
            assert not two.calls
        await waiting
        assert b.device.waited_s > 0
    assert two.calls == ["offload a", "b"]


async def test_long_turn_ends_between_two_calls(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_turns, "TURN_S", 0.1)
    monkeypatch.setattr(device_turns, "LEAST_PATIENCE_S", 60.0)
    async with two.job("a") as a, two.job("b") as b:
        await two.compute(a)
        waiting = asyncio.create_task(two.compute(b))
        await until_waiting(b)
        working = asyncio.create_task(work(two, a))
        await waiting
        working.cancel()
        await asyncio.wait([working])
    before = two.calls[: two.calls.index("b")]
    assert set(before[:-1]) == {"a"}
    assert before[-1] == "offload a"


async def work(two: Two, job: Job) -> None:
    """Compute without a pause."""
    while True:
        await two.compute(job)


async def test_other_devices_are_not_waited_for(two: Two) -> None:
    async with two.job("a") as a, two.job("b", device="other") as b, busy(a):
        await two.compute(b)
    assert two.calls == ["b"]


async def test_lease_of_a_dead_trainer_expires(two: Two) -> None:
    assert await two.bus.acquire_fenced(
        LEASE, "a dead trainer's", 60.0, epoch=names.device_epoch("gpu"), replacing=None
    )
    async with two.job("b") as b:
        waiting = asyncio.create_task(two.compute(b))
        assert await until_waiting(b)
        two.rig.lease_runs_out()
        await waiting
    assert two.calls == ["b"]


async def test_suspended_trainer_offloads_and_waits_for_its_next_turn(two: Two) -> None:
    """It held the device for longer than its lease, and another has taken it."""
    async with two.job("a") as a:
        await two.compute(a)
        two.rig.lease_runs_out()
        epoch = names.device_epoch("gpu")
        assert await two.bus.acquire_fenced(LEASE, "another's", 60.0, epoch=epoch, replacing=None)
        await eventually(lambda: two.calls == ["a", "offload a"])
        waiting = asyncio.create_task(two.compute(a))
        await until_waiting(a)
        two.rig.lease_runs_out()
        await waiting
        assert await two.events("a") == ["device_lost"]
    assert two.calls == ["a", "offload a", "a"]


async def test_job_fails_by_name_when_the_device_is_never_given_up(two: Two) -> None:
    with pytest.raises(ExceptionGroup) as failed:
        async with two.job("a") as a, busy(a), two.job("b", limit_s=0.2) as b:
            await two.compute(b)
    (error,) = leaves(failed.value)
    assert isinstance(error, Fatal)
    assert "a of trainer-a has had it for 0 s. Check that trainer, cancel its job" in str(error)


async def test_call_that_does_not_end_ends_the_trainer_if_another_waits(two: Two) -> None:
    go_on, begun = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def call() -> None:
        begun.set()
        go_on.wait(30)

    async def hang() -> None:
        try:
            async with two.job("a", call_limit_s=0.2) as a:
                await a.device.compute(call)
        except ExceptionGroup as group:
            failures.extend(leaves(group))

    hanging = asyncio.create_task(hang())
    await eventually(begun.is_set)
    async with two.job("b") as b:
        waiting = asyncio.create_task(two.compute(b))
        await eventually(lambda: "a" not in two.claims())  # its end has begun
        assert not hanging.done(), "it waits for the call, which may still end"
        go_on.set()
        await hanging
        await waiting
    assert [type(error) for error in failures] == [ProcessEnded]
    assert "while b waited for it: look for a loss function that hangs" in str(failures[0])


async def test_claim_is_renewed_while_the_job_generates(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has used then counts for new jobs, too."""
    monkeypatch.setattr(shared_device, "RENEWAL_INTERVAL_S", 0.05)
    async with two.job("a") as a, two.job("b") as b:
        await two.compute(a)
        await two.compute(b)
        before = Claim.parse(two.claims()["a"])
        await eventually(lambda: Claim.parse(two.claims()["a"]).at > before.at)
        after = Claim.parse(two.claims()["a"])
        assert (after.used_s, after.waits_since, after.holds) == (before.used_s, 0.0, False)
        assert Claim.parse(two.claims()["b"]).holds


async def test_lease_is_renewed_while_the_device_is_given_up(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """The offloading takes long, or waits for the capture of a checkpoint: until then the device is not free."""
    monkeypatch.setattr(shared_device, "RENEWAL_INTERVAL_S", 0.05)
    async with two.job("a") as a, two.job("b") as b:
        go_on, begun = threading.Event(), threading.Event()
        a.resources.engine.offload = partial(wait, begun, go_on)  # type: ignore[method-assign]
        await two.compute(a)
        waiting = asyncio.create_task(two.compute(b))
        await eventually(begun.is_set)
        before = Claim.parse(two.claims()["a"]).at
        await eventually(lambda: Claim.parse(two.claims()["a"]).at > before)
        go_on.set()
        await waiting
        assert await two.events("a") == []


async def test_device_is_kept_until_the_last_call_of_an_ended_job(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_device, "RENEWAL_INTERVAL_S", 0.05)
    go_on, begun, renewals = threading.Event(), threading.Event(), 0
    renew = FencedLease.renew

    async def counted(lease: FencedLease, *args: Any) -> None:
        nonlocal renewals
        renewals += 1
        await renew(lease, *args)

    async with two.job("b") as b:
        running = asyncio.create_task(hold(two, begun, go_on))
        await eventually(begun.is_set)
        running.cancel()
        await eventually(lambda: "a" not in two.claims())
        monkeypatch.setattr(FencedLease, "renew", counted)
        waiting = asyncio.create_task(two.compute(b))
        await eventually(lambda: renewals > 1)
        assert not two.calls
        go_on.set()
        await asyncio.wait([running])
        await waiting
    assert two.calls == ["b"]


async def test_call_that_outlasts_its_cancelled_job_ends_the_trainer(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_device, "RENEWAL_INTERVAL_S", 0.05)
    monkeypatch.setattr(shared_device, "END_LIMIT_S", 0.1)
    go_on, begun = threading.Event(), threading.Event()
    running = asyncio.create_task(hold(two, begun, go_on, is_cancelled=True))
    await eventually(begun.is_set)
    running.cancel()
    with pytest.raises(ExceptionGroup) as ended:
        await running
    go_on.set()
    assert [type(error) for error in leaves(ended.value)] == [ProcessEnded]


def wait(begun: threading.Event, go_on: threading.Event) -> None:
    """Compute until `go_on`."""
    begun.set()
    go_on.wait(30)


async def hold(two: Two, begun: threading.Event, go_on: threading.Event, *, is_cancelled: bool = False) -> None:
    """Run a call of a job until `go_on`."""
    async with two.job("a") as a:
        if is_cancelled:
            a.cancelled.set()
        await a.device.compute(partial(wait, begun, go_on))


async def test_hanging_call_before_the_offload_ends_the_trainer(two: Two) -> None:
    """It needs no turn, such as the capture of a checkpoint on a disk that hangs."""
    go_on = threading.Event()

    async def hang() -> None:
        async with two.job("a", call_limit_s=0.2) as a, two.job("b") as b:
            await two.compute(a)
            a.device.post(lambda: go_on.wait(30))
            threading.Timer(1.0, go_on.set).start()  # the end of the job waits for it
            await two.compute(b)

    with pytest.raises(ExceptionGroup) as ended:
        await hang()
    assert [type(error) for error in leaves(ended.value)] == [ProcessEnded]


async def test_long_call_may_continue_while_no_other_job_waits(two: Two) -> None:
    async with two.job("a", call_limit_s=0.1) as a, two.job("b"), busy(a):
        await asyncio.sleep(0.3)
    assert not two.calls


async def test_job_on_a_shared_device_tells_how_long_it_waited(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.shared_device = "gpu"
    assert (await rig.run()).state == "completed"
    assert all(row["time/device_wait_s"] == 0.0 for row in rig.folder.rows.values())


async def test_reserved_worker_on_a_shared_device_fails_the_job(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.shared_device = "gpu"
    rig.manager.engines = [
        EngineProfile(
            kind="k",
            role="reserved",
            workers=1,
            slots=8,
            kv_tokens=0,
            price_per_hour=0.0,
            update_s=0.0,
            step_s=0.1,
            per_sample_s=0.0,
            per_kv_token_s=0.0,
        )
    ]
    report = await rig.run()
    assert report.state == "failed"
    assert report.error.startswith("a reserved worker generates on the device that this trainer shares")
