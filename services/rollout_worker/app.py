"""The loops of one rollout worker.

prepare-engine: imports what the engine needs, once the worker has joined, and ends.
commands: consumes the incarnation's commands in order and waits for the next; a pull of weights goes on beside it.
flush: moves what the engine has made to the token log; waits one flush interval.
beats: produces `WorkerJoined`, beats and the lease; waits one beat interval or for a change of state, and never for the
    engine or for weights.
hand-off: waits for the stop, and hands off: see `leaving`.

All end at the stop; beats last, with the hand-off. A dead engine shows at the next flush and ends the process
(invariant 8).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog

from services.rollout_worker.domain.actions import (
    Abort,
    Action,
    Complain,
    Continue,
    Halt,
    HandBack,
    Leave,
    Pull,
    Rejoin,
    Return,
    StopPulling,
    Submit,
)
from services.rollout_worker.generator import Generator
from services.rollout_worker.leaving import Leaving
from services.rollout_worker.link import REDIS_LIMIT_S, RETRY_S, Link
from services.rollout_worker.ports import Request, WeightSource
from services.rollout_worker.pulling import Outcome, Pulling
from services.rollout_worker.startup import Startup
from shared import names
from shared.bus import Bus, Entry
from shared.columns import ints
from shared.errors import BusUnavailable, Fatal
from shared.lifecycle import Loop, supervise, until_stop
from shared.messages import Assignment
from shared.waiting import Waits

log = structlog.get_logger(__name__)

_BLOCK_S = 1.0


@dataclass(frozen=True, slots=True)
class Pace:
    """How often a worker does what, and how long at most, in seconds; see `Settings`."""

    flush_interval_s: float
    beat_interval_s: float
    grace_s: float
    finish_limit_s: float = 600.0
    """How long new weights wait for the samples that are to end under the old ones; then these go on under the new
    ones, as without `in_flight: finish`. Only a newer version begins the wait anew, `max_staleness` times at most."""


class Worker:
    """One worker process: an engine, and the link under which the manager knows it.

    With `heeds_advice` it leaves, as if the manager had drained it, when its machine is likely to be taken away.
    """

    def __init__(
        self,
        bus: Bus,
        link: Link,
        generator: Generator,
        weights: WeightSource,
        pace: Pace,
        waits: Waits,
        *,
        heeds_advice: bool = False,
        startup: Startup | None = None,
    ) -> None:
        self._bus = bus
        self._link = link
        self._generator = generator
        self._pace = pace
        self._startup = startup or Startup()
        self._pulling = Pulling(link, generator, weights, waits, self._startup, pace.finish_limit_s)
        self.leaving = Leaving(link, generator, waits, pace.grace_s, heeds_advice=heeds_advice)
        self._announced = asyncio.Event()
        self._deciding = asyncio.Lock()

    async def run(self, stop: asyncio.Event, more: Mapping[str, Loop]) -> None:
        """Work until the stop, with `more` loops beside; then hand off."""
        self.leaving.stop = stop
        loops: dict[str, Loop] = {
            "commands": self._obey,
            "flush": self._flush,
            "beats": self._beat,
            "hand-off": self.leaving.hand_off,
            **more,
        }
        try:
            await supervise(loops, stop, grace_s=self._pace.grace_s)
        except ExceptionGroup as group:
            await self.leaving.say_why(group)
            raise

    # --- commands -----------------------------------------------------------------------------------------------------

    async def _obey(self, stop: asyncio.Event) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._prepare_engine(), name="prepare-engine"),
                    group.create_task(self._read_commands(group), name="read-commands"),
                ]
                await stop.wait()
                for task in tasks:
                    task.cancel()
                self._pulling.cancel()
        finally:
            self.leaving.commands_over.set()

    async def _prepare_engine(self) -> None:
        await self._announced.wait()
        await self._generator.prepare()

    async def _read_commands(self, group: asyncio.TaskGroup) -> None:
        await self._announced.wait()
        while True:
            me = self._link.me
            try:
                entries = await self._bus.read({names.worker_commands(me.worker): me.cursor}, block_s=_BLOCK_S)
            except BusUnavailable as error:
                log.warning("redis_away", error=str(error), during="reading commands")
                await asyncio.sleep(RETRY_S)
                continue
            for entry in entries:
                async with self._deciding:
                    if me is not self._link.me:
                        break
                    me.cursor = entry.id
                    log.debug("command", command=entry.message.tag)
                    await self._carry_out(me.session.handle(entry.message), group, entry)

    async def _carry_out(self, actions: Sequence[Action], group: asyncio.TaskGroup, entry: Entry | None = None) -> None:
        for action in actions:
            match action:
                case Pull():
                    self._startup.end("version")
                    await self._begin_pull(action, group)
                case StopPulling():
                    await self._pulling.stop()
                case Leave(reason):
                    self.leaving.leave(reason)
                case Rejoin(reason):
                    await self._rejoin(reason)
                case Complain(reason):
                    if entry is not None:
                        await self._link.insist("report a protocol error", lambda: self._link.bury(entry, reason))
                case _:
                    await self._tell_engine(action)
        if self._link.has_news:
            self.leaving.changed.set()

    async def _begin_pull(self, pull: Pull, group: asyncio.TaskGroup) -> None:
        async def apply(outcome: Outcome) -> None:
            async with self._deciding:
                await self._carry_out(await outcome(), group)

        await self._pulling.begin(pull, group, apply)

    async def _tell_engine(self, action: Action) -> None:
        match action:
            case Submit(samples):
                self._startup.end("assignment")
                self._generator.submit([_request(sample) for sample in samples])
            case Abort(keys):
                self._generator.abort(keys)
            case HandBack(keys):
                self._generator.hand_back(keys)
            case Return(samples):
                self._link.give_back(samples)
            case Halt(keys):
                await self._generator.hold("suspended")
                await self._link.insist("flush before the suspension", self._link.flush)
                self._generator.abort(keys)
                self._link.me.session.halted()
            case Continue():
                await self._generator.release("suspended")

    async def _rejoin(self, reason: str) -> None:
        await self._pulling.stop()
        self._generator.abort(list(self._link.me.session.held.items()))
        await self._link.rejoin(reason)
        await self._generator.release("suspended")

    # --- regularly ----------------------------------------------------------------------------------------------------

    async def _flush(self, stop: asyncio.Event) -> None:
        while not await until_stop(stop, self._pace.flush_interval_s):
            try:
                made = self._generator.stats().tokens_made_total
                await self._link.flush()
                self._startup.flushed(made)
                self._pulling.flushed.set()
                await self._generator.release("unsent")
            except BusUnavailable as error:
                unsent = self._link.me.outbox
                log.warning("redis_away", error=str(error), during="flush", unsent_bytes=unsent.unsent_bytes)
                if unsent.full:
                    await self._generator.hold("unsent")
                await until_stop(stop, RETRY_S)

    async def _beat(self, _: asyncio.Event) -> None:
        answered, changed = time.monotonic(), self.leaving.changed
        while not self.leaving.is_over:
            changed.clear()
            try:
                await self._link.beat()
                answered = time.monotonic()
                self._announced.set()
                self._startup.end("join")
            except BusUnavailable as error:
                if time.monotonic() - answered > REDIS_LIMIT_S:
                    raise Fatal(
                        f"{error}; gave up after {REDIS_LIMIT_S:.0f} s: start Redis, then the worker"
                    ) from error
            await until_stop(changed, self._pace.beat_interval_s)


def _request(assignment: Assignment) -> Request:
    return Request(
        sample=assignment.sample,
        attempt=assignment.attempt,
        prompt=ints(assignment.prompt),
        tokens=ints(assignment.tokens),
        sampling=assignment.sampling,
        seed=assignment.seed,
    )
