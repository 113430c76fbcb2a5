"""A device that jobs of several trainers use in turns: one trains while samples of the others are generated.

*Keep*, while a job runs. Produces: renewals of the device's lease and of this job's claim each second.
*Make way*, while a job runs. Consumes: the claims of the other jobs. Produces: the device for a job that waits, as
`domain.device_turns` decides, after the state of this job is offloaded. Ends when: the job does, or a call holds the
device for too long while another job waits; then this process must end, because nothing else stops a call.

`compute` takes the lease before its call, unless this job holds it. The lease is fenced like all others: a trainer that
was suspended for longer than its lease learns at its next renewal that another job has the device, offloads, and waits
for its next turn. A killed trainer's lease expires, and its driver frees its memory.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TypeVar

import structlog

from rlboost.services.trainer.domain import device_turns
from rlboost.services.trainer.domain.device_turns import Claim
from rlboost.services.trainer.job.job import DeviceThread, Job, RetryingBus
from rlboost.shared.errors import Fatal, Fenced, ProcessEnded, Undecodable, WaitTimedOut
from rlboost.shared.job.offline import OfflineJob
from rlboost.shared.process.waiting import Waits
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import HashDelete, HashSet
from rlboost.shared.streams.fenced_lease import FencedLease

log = structlog.get_logger(__name__)

T = TypeVar("T")

LEASE_TTL_S = 10.0
"""Longer than that of a job: a holder that is only slow still has its state on the device."""
RENEWAL_INTERVAL_S = 1.0
POLL_S = 0.05
END_LIMIT_S = 30.0
"""How long the end of a job waits for its last call, and keeps the device."""


class SharedDevice(DeviceThread):
    """The device of one job, whose `compute` waits for the job's turn."""

    def __init__(
        self, thread: DeviceThread, bus: RetryingBus, waits: Waits, *, name: str, trainer: str, call_limit_s: float
    ) -> None:
        """Create it without a turn.

        Args:
            thread: the thread of all computation of this process.
            bus: the broker.
            waits: registry of waits.
            name: the device's, the same for all trainers that share it.
            trainer: name of this trainer.
            call_limit_s: this process ends if one call takes longer while another job waits.

        """
        self._executor = thread._executor  # noqa: SLF001 - of the same class
        self._bus = bus
        self._waits = waits
        self._claims = names.device_claims(name)
        self._lease = FencedLease(bus.raw, names.device_lease(name), names.device_epoch(name), LEASE_TTL_S)
        self._call_limit_s = call_limit_s
        self._claim = Claim(trainer)
        self._is_new = True
        self._job: Job
        self._value = ""
        """The lease's value during a turn."""
        self._holder = ""
        """Who has the device, for people."""
        self._changing = asyncio.Lock()
        """Held while the device is taken or given up."""
        self._writing = asyncio.Lock()
        """Held while the lease is renewed or released: a renewal after the release would take the device again."""
        self._n_calls = 0
        self._called_at = self._idle_since = self._counted_at = self._turn_began = self._renewed_at = 0.0
        self._turn_is_over = False
        """Whether the next call gives the device up first."""
        self._change_s = 0.0

    @property
    def is_shared(self) -> bool:
        """Return True: other jobs use it too."""
        return True

    @asynccontextmanager
    async def turns(self, job: Job) -> AsyncIterator[None]:
        """Take turns for a job, whose resources are built, until the body ends.

        Raises:
            ExceptionGroup: of the body's error, or of `ProcessEnded`: a call does not end.

        """
        self._job = job
        share = 1.0 if isinstance(job.spec, OfflineJob) else job.spec.elastic.share
        self._claim = replace(self._claim, weight=share)
        async with asyncio.TaskGroup() as tasks:
            keeping = [
                tasks.create_task(self._keep(), name=f"keep-device-{job.id}"),
                tasks.create_task(self._make_way_when_due(), name=f"make-way-{job.id}"),
            ]
            try:
                yield
            finally:
                for task in keeping:
                    task.cancel()
                await asyncio.wait(keeping)
                await self._end()

    async def compute(self, call: Callable[[], T]) -> T:
        """Run a call that uses the device, in this job's turn.

        Raises:
            Fatal: another job had the device for longer than the job waits for anything.

        """
        async with self._changing:
            if self._turn_is_over:
                await self._give_up()
            if not self._lease.is_held:
                await self._take()
            self._n_calls += 1
            self._called_at = time.monotonic()
        try:
            return await self.run(call)
        finally:
            self._n_calls -= 1
            self._idle_since = time.monotonic()

    # --- take ---

    async def _take(self) -> None:
        began, now = time.monotonic(), time.time()
        self._claim = device_turns.begin_waiting(self._claim, await self._others(), now, is_new=self._is_new)
        self._is_new = False
        await self._write_claim()
        if await self._try_to_take():
            return
        because = "trainers use it in turns"
        try:
            async with self._waits.on(
                "the device", because=because, limit_s=self._job.limit_s, progress=lambda: self._holder
            ):
                while not await self._try_to_take():  # noqa: ASYNC110 - the device is given up in another process
                    await asyncio.sleep(POLL_S)
        except WaitTimedOut as error:
            raise Fatal(
                f"{error}: {self._holder or 'no job has it'}. Check that trainer, cancel its job, or raise "
                "RLBOOST_TRAINER_SAMPLES_LIMIT_S"
            ) from error
        finally:
            self._claim = replace(self._claim, waits_since=0.0)  # others do not wait for a job that has ended its wait
            self.waited_s += time.monotonic() - began

    async def _try_to_take(self) -> bool:
        holder = await self._bus.retry(lambda _: self._lease.holder())
        if holder is not None:
            self._holder = _shown(holder)
            return False
        claims = {**await self._others(), self._job.id: self._claim}
        if (first := device_turns.next_job(claims)) != self._job.id:
            self._holder = f"{first} is the next one"
            return False
        value = self._value = json.dumps({"job": self._job.id, "trainer": self._claim.trainer, "since": time.time()})
        if not await self._bus.retry(lambda _: self._lease.acquire(value)):
            return False
        self._turn_began = self._counted_at = self._idle_since = time.monotonic()
        waits_since = self._claim.waits_since
        self._claim = replace(self._claim, waits_since=0.0, holds=True)
        await self._renew()
        if not self._lease.is_held:
            self._claim = replace(self._claim, waits_since=waits_since)
        return self._lease.is_held

    # --- keep ---

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            if time.monotonic() - self._renewed_at < RENEWAL_INTERVAL_S:
                continue
            if self._lease.is_held:
                await self._renew()
            elif not self._is_new:
                await self._write_claim()  # what it has used counts for new jobs while it generates, too

    async def _make_way_when_due(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            if not self._lease.is_held:
                continue
            now = time.monotonic()
            idle_s = 0.0 if self._n_calls else now - self._idle_since
            held_s = now - self._turn_began
            is_idle = idle_s >= device_turns.patience_s(self._change_s)
            if is_idle or held_s >= min(device_turns.turn_s(self._change_s), self._call_limit_s):
                await self._make_way(idle_s, held_s)

    async def _make_way(self, idle_s: float, held_s: float) -> None:
        """Give the device up, now or before the next call, if another job should have it."""
        others = await self._others()
        waiting = device_turns.next_job(others)
        if waiting and self._n_calls and time.monotonic() - self._called_at > self._call_limit_s:
            raise self._too_long(waiting)
        self._count()
        if device_turns.gives_up(self._claim, others, idle_s=idle_s, held_s=held_s, change_s=self._change_s):
            self._turn_is_over = True
            async with self._changing:
                if self._turn_is_over and not self._n_calls:
                    await self._give_up()

    def _too_long(self, waiting: str) -> ProcessEnded:
        return ProcessEnded(
            f"a call held the device for more than {self._call_limit_s:.0f} s while {waiting} waited for it: look "
            "for a loss function that hangs, lower trainer.micro_batch_tokens, or raise "
            "RLBOOST_TRAINER_DEVICE_CALL_LIMIT_S"
        )

    async def _renew(self) -> None:
        async with self._writing:
            if not self._lease.is_held:
                return
            self._count()
            self._claim = replace(self._claim, at=time.time())
            written = HashSet(self._claims, {self._job.id: self._claim.to_json()})
            try:
                await self._bus.retry(lambda _: self._lease.renew(self._value, [written]))
                self._renewed_at = time.monotonic()
            except Fenced as error:
                self._lease.invalidate()
                self._claim, self._turn_is_over = replace(self._claim, holds=False), False
                self.post(self._job.resources.engine.offload)
                await self._job.emit_event("device_lost", reason=str(error))

    def _count(self) -> None:
        """Add the time since the last call to what the job has used of the device."""
        now = time.monotonic()
        used_s = self._claim.used_s + (now - self._counted_at) / self._claim.weight
        self._claim, self._counted_at = replace(self._claim, used_s=used_s), now

    # --- give up ---

    async def _give_up(self) -> None:
        self._turn_is_over = False
        if not self._lease.is_held:
            return
        try:
            async with asyncio.timeout(self._call_limit_s):
                # It may first wait for calls that compute nothing, such as the capture of a checkpoint.
                self._change_s = 2 * await self.run(self._offload)  # onloading moves as many bytes
        except TimeoutError as error:
            raise self._too_long("another job") from error
        self._count()
        self._claim = replace(self._claim, holds=False)
        await self._write_claim()
        async with self._writing:
            with suppress(Fenced):  # then another job has it already
                await self._bus.retry(lambda _: self._lease.release())

    def _offload(self) -> float:
        """Offload the engine; return how long it took."""
        began = time.monotonic()
        self._job.resources.engine.offload()
        return time.monotonic() - began

    async def _end(self) -> None:
        """Free the device once the last call has ended; keep it until then.

        Raises:
            ProcessEnded: it does not end, although the job was cancelled.

        """
        await self._bus.transact([HashDelete(self._claims, (self._job.id,))])
        if not self._lease.is_held:
            return
        last = asyncio.wrap_future(self.post(lambda: None))
        until = time.monotonic() + END_LIMIT_S
        with suppress(Fenced):  # another job has it already
            while not (await asyncio.wait([last], timeout=RENEWAL_INTERVAL_S))[0]:
                if time.monotonic() < until:
                    await self._bus.retry(lambda _: self._lease.renew(self._value))
                elif self._job.cancelled.is_set():
                    raise ProcessEnded(f"the last call of the cancelled job took more than {END_LIMIT_S:.0f} s")
                else:
                    return
            await self._bus.retry(lambda _: self._lease.release())

    # --- claims ---

    async def _others(self) -> dict[str, Claim]:
        """Return the claims of the other jobs whose trainers live."""
        found = await self._bus.retry(lambda bus: bus.hash_all(self._claims))
        claims = {}
        for job, text in found.items():
            with suppress(Undecodable):  # of another version
                claims[job] = Claim.parse(text)
        claims.pop(self._job.id, None)
        return device_turns.live(claims, time.time())

    async def _write_claim(self) -> None:
        self._claim, self._renewed_at = replace(self._claim, at=time.time()), time.monotonic()
        await self._bus.transact([HashSet(self._claims, {self._job.id: self._claim.to_json()})])


def _shown(holder: str) -> str:
    """Return who holds the device and for how long, from the lease's value."""
    try:
        stored = json.loads(holder)
        return f"{stored['job']} of {stored['trainer']} has had it for {time.time() - float(stored['since']):.0f} s"
    except (ValueError, TypeError, KeyError):
        return "a trainer of another version has it"
