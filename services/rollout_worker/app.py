"""The loops of one rollout worker.

commands: consumes the incarnation's commands in order and waits for the next; a pull of weights goes on beside it.
flush: moves what the engine has made to the token log; waits one flush interval.
beats: produces `WorkerJoined`, beats and the lease; waits one beat interval or for a change of state, and never for the
    engine or for weights.
hand-off: waits for the stop, from a signal, a notice that the machine goes, or the manager; then everything made goes
    to the log, and the last word is `WorkerLeft` (invariant 7).

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
from services.rollout_worker.domain.notices import Advice, Notice
from services.rollout_worker.domain.session import Weights
from services.rollout_worker.generator import Generator
from services.rollout_worker.link import REDIS_LIMIT_S, RETRY_S, Link
from services.rollout_worker.ports import EngineFailed, Request, WeightSource
from services.rollout_worker.startup import Startup
from shared import names
from shared.bus import Bus, Entry
from shared.columns import ints
from shared.errors import BusUnavailable, Fatal, NotFound, Timeout
from shared.lifecycle import Loop, supervise, until_stop
from shared.messages import Assignment, InFlight
from shared.waiting import Waits

log = structlog.get_logger(__name__)

_BLOCK_S = 1.0
_LAST_WORD_S = 2.0
"""How long a worker that fails tries to say why."""
_STILL_S = 1.0
"""How long the engine may take to stand still: a step lasts a fraction of it, a load of large weights many times."""
_CLOSE_S = 1.0
"""How long the engine may take to stop, once nothing more is needed of it."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How often a worker does what, and how long at most, in seconds; see `Settings`."""

    flush_interval_s: float
    beat_interval_s: float
    grace_s: float
    finish_limit_s: float = 600.0
    """How long new weights wait for the samples that are to end under the old ones; then these go on under the new
    ones, as without `in_flight: finish`. Only a newer version begins the wait anew, `max_staleness` times at most."""

    @property
    def hand_off_s(self) -> float:
        """Return how long flushing and saying good-bye may take: most of the grace; the process has to end in it."""
        return 0.8 * self.grace_s


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
        self._weights = weights
        self._pace = pace
        self._waits = waits
        self._heeds_advice = heeds_advice
        self._startup = startup or Startup()
        self._stop = asyncio.Event()
        self._changed = asyncio.Event()
        self._announced = asyncio.Event()
        self._flushed = asyncio.Event()
        self._commands_over = asyncio.Event()
        self._gone = asyncio.Event()
        self._deciding = asyncio.Lock()
        self._pulling: asyncio.Task[None] | None = None
        self._told_to_leave = ""
        self._notice = Notice("sigterm")

    async def run(self, stop: asyncio.Event, more: Mapping[str, Loop]) -> None:
        """Work until the stop, with `more` loops beside; then hand off."""
        self._stop = stop
        loops: dict[str, Loop] = {
            "commands": self._obey,
            "flush": self._flush,
            "beats": self._beat,
            "hand-off": self._hand_off,
            **more,
        }
        try:
            await supervise(loops, stop, grace_s=self._pace.grace_s)
        except ExceptionGroup as group:
            await self._say_why(group)
            raise

    # --- notices ------------------------------------------------------------------------------------------------------

    def take_notice(self, notice: Notice) -> None:
        """Hand off now and leave, because this machine will be taken away. The first reason to leave counts.

        However long the lead: it is not to be relied on, and a sample goes on elsewhere at the cost of one prefill.
        """
        if not self._stop.is_set():
            log.warning("notice", reason=notice.reason, lead_s=notice.lead_s)
            self._notice = notice
            self._stop.set()

    async def take_advice(self, advice: Advice) -> None:
        """Tell people, and leave if that is heeded."""
        try:
            await self._link.report_advice(advice.reason)
        except BusUnavailable as error:
            log.warning("redis_away", error=str(error), during="telling of advice")
        if self._heeds_advice:
            self._leave(advice.reason)

    async def handed_off(self) -> None:
        """Wait until the hand-off is done."""
        await self._gone.wait()

    def _leave(self, reason: str) -> None:
        if not self._stop.is_set():
            self._told_to_leave = reason
            self._stop.set()

    # --- commands -----------------------------------------------------------------------------------------------------

    async def _obey(self, stop: asyncio.Event) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                obeying = group.create_task(self._read_commands(stop, group), name="read-commands")
                await stop.wait()
                obeying.cancel()
                if self._pulling is not None:
                    self._pulling.cancel()
        finally:
            self._commands_over.set()

    async def _read_commands(self, stop: asyncio.Event, group: asyncio.TaskGroup) -> None:
        await self._announced.wait()
        self._generator.prepare()
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
                    await self._carry_out(me.session.handle(entry.message), stop, group, entry)

    async def _carry_out(
        self, actions: Sequence[Action], stop: asyncio.Event, group: asyncio.TaskGroup, entry: Entry | None = None
    ) -> None:
        for action in actions:
            match action:
                case Pull(job_id, version, in_flight):
                    self._startup.end("version")
                    await self._stop_pulling()
                    pull = self._pull((job_id, version), in_flight, stop, group)
                    self._pulling = group.create_task(pull, name=f"pull-{job_id}-{version}")
                case StopPulling():
                    await self._stop_pulling()
                case Leave(reason):
                    self._leave(reason)
                case Rejoin(reason):
                    await self._rejoin(reason)
                case Complain(reason):
                    if entry is not None:
                        await self._link.insist("report a protocol error", lambda: self._link.bury(entry, reason))
                case _:
                    await self._tell_engine(action)
        if self._link.has_news:
            self._changed.set()

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
        await self._stop_pulling()
        self._generator.abort(list(self._link.me.session.held.items()))
        await self._link.rejoin(reason)
        await self._generator.release("suspended")

    # --- weights ------------------------------------------------------------------------------------------------------

    async def _stop_pulling(self) -> None:
        pulling, self._pulling = self._pulling, None
        if pulling is None or pulling is asyncio.current_task():
            return
        pulling.cancel()
        await asyncio.wait({pulling})
        if self._link.me.session.serving is not None:
            await self._generator.release("loading")  # it had not begun to replace the weights

    async def _pull(self, weights: Weights, in_flight: InFlight, stop: asyncio.Event, group: asyncio.TaskGroup) -> None:
        session, began = self._link.me.session, time.monotonic()
        try:
            await self._generator.settled()
            staged = await self._weights.pull(*weights)
            self._startup.end("pull")
        except NotFound as error:
            reason = str(error)
            await self._link.insist("report missing weights", lambda: self._link.report_unavailable(weights, reason))
            async with self._deciding:
                await self._carry_out(session.unavailable(weights, reason), stop, group)
            return
        if in_flight == "finish" and session.serving is not None:
            await self._until_finished(weights)
        pulled = time.monotonic()
        await self._generator.load(staged, weights[1], session.unloaded, keep_kv=in_flight == "keep")
        self._startup.end("load")
        log.info(
            "weights_loaded",
            job=weights[0],
            version=weights[1],
            pull_s=round(pulled - began, 3),
            load_s=round(time.monotonic() - pulled, 3),
        )
        async with self._deciding:
            actions = session.loaded(weights)
            await self._generator.release("loading")
            await self._carry_out(actions, stop, group)

    async def _until_finished(self, weights: Weights) -> None:
        """Let the samples that the engine has end under the weights that it has, for a while at most."""
        session = self._link.me.session
        because = f"they end under their weights before version {weights[1]} of job {weights[0]} is loaded"
        try:
            async with self._waits.on("the samples in flight", because=because, limit_s=self._pace.finish_limit_s):
                while session.started:
                    self._flushed.clear()
                    await self._flushed.wait()
        except Timeout as error:
            log.warning("in_flight_not_finished", samples=session.started, reason=str(error))

    # --- regularly ----------------------------------------------------------------------------------------------------

    async def _flush(self, stop: asyncio.Event) -> None:
        while not await until_stop(stop, self._pace.flush_interval_s):
            try:
                made = self._generator.stats().tokens_made_total
                await self._link.flush()
                self._startup.flushed(made)
                self._flushed.set()
                await self._generator.release("unsent")
            except BusUnavailable as error:
                unsent = self._link.me.outbox
                log.warning("redis_away", error=str(error), during="flush", unsent_bytes=unsent.unsent_bytes)
                if unsent.full:
                    await self._generator.hold("unsent")
                await until_stop(stop, RETRY_S)

    async def _beat(self, _: asyncio.Event) -> None:
        answered = time.monotonic()
        while not self._gone.is_set():
            self._changed.clear()
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
            await until_stop(self._changed, self._pace.beat_interval_s)

    # --- the end ------------------------------------------------------------------------------------------------------

    async def _hand_off(self, stop: asyncio.Event) -> None:
        await stop.wait()
        link, began = self._link, time.monotonic()
        reason, lead_s = self._told_to_leave or self._notice.reason, self._notice.lead_s
        async with self._waits.on("the hand-off", because=reason, limit_s=self._pace.hand_off_s):
            if not self._told_to_leave:
                lead = self._pace.grace_s if lead_s is None else lead_s
                await link.insist("give notice", lambda: link.give_notice(reason, lead))
            await self._commands_over.wait()
            link.me.session.drain()
            self._changed.set()
            await self._stand_still()
            await link.insist("flush the last tokens", link.flush)
            samples = len(link.me.session.held)
            await link.insist("leave", lambda: link.leave(reason))
        log.info(
            "handed_off",
            samples=samples,
            tokens_made=self._generator.stats().tokens_made_total,
            took_s=round(time.monotonic() - began, 3),
        )
        self._gone.set()
        self._changed.set()
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._generator.close()
        except TimeoutError:
            log.warning("engine_not_closed", after_s=_CLOSE_S)

    async def _stand_still(self) -> None:
        """Return when the engine makes no more tokens of what is held."""
        try:
            async with asyncio.timeout(_STILL_S):
                await self._generator.hold("leaving")
        except TimeoutError:
            # In the middle of a load it makes nothing, and after it nothing of what it has forgotten.
            self._generator.abort(list(self._link.me.session.held.items()))

    async def _say_why(self, group: ExceptionGroup) -> None:
        """Tell the manager, if that is quickly done, so that the samples need not wait for the lease to run out."""
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        engine_failed = isinstance(error, EngineFailed) and not self._generator.stands_still
        try:
            async with asyncio.timeout(_LAST_WORD_S):
                await self._link.leave(f"failed: {error}", engine_failed=engine_failed)
        except (BusUnavailable, TimeoutError) as silent:
            log.warning("left_without_a_word", error=str(silent))


def _request(assignment: Assignment) -> Request:
    return Request(
        sample=assignment.sample,
        attempt=assignment.attempt,
        prompt=ints(assignment.prompt),
        tokens=ints(assignment.tokens),
        sampling=assignment.sampling,
        seed=assignment.seed,
    )
