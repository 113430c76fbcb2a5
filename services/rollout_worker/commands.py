"""The loop that reads the manager's commands and executes the effects that the session decides.

Consumes: the incarnation's command stream, in order.
Produces: calls of the engine, weight updates, new incarnations, dead letters.
Waits for: the next command (`Bus.read`); a suspension also waits for the engine to pause and for Redis to accept a
    flush. A weight update runs in the background (`WeightUpdates`), and has its own effects executed here.
Ends when: cancelled, by the shutdown.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import assert_never

import structlog

from rlboost.services.rollout_worker.domain.parity_check import ParityCheckFailed
from rlboost.services.rollout_worker.domain.requests import Request
from rlboost.services.rollout_worker.domain.session import (
    AbortRequests,
    CancelPull,
    DeadLetterCommand,
    DrainWorker,
    Effect,
    EngineEffect,
    HintSiblings,
    PullWeights,
    Rejoin,
    ReleaseRequests,
    ReleaseUnstarted,
    RenewAccess,
    ResumeEngine,
    Session,
    SubmitSamples,
    SuspendEngine,
    UnloadAdapter,
)
from rlboost.services.rollout_worker.generator import Generator, LoadStage, ReplacementTimes
from rlboost.services.rollout_worker.life import StartupTimer
from rlboost.services.rollout_worker.manager_connection import RETRY_INTERVAL_S, ManagerConnection
from rlboost.services.rollout_worker.ports import EngineClosed, EngineFailed, MustBeMerged, StagedWeights, WeightSource
from rlboost.shared.errors import (
    BadSignature,
    BusUnavailable,
    Corrupt,
    CredentialRejected,
    NotFound,
    RLBoostError,
    UnsuitableWeights,
    WaitTimedOut,
)
from rlboost.shared.ids import WeightsRef
from rlboost.shared.messages import Assignment
from rlboost.shared.process.waiting import Waits
from rlboost.shared.progress import LastDuration
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Entry
from rlboost.shared.wire import ints

log = structlog.get_logger(__name__)

# --- Replaces the engine's weights: pull, load, verify, parity check, serve -------------------------------------------
# Consumes: `PullWeights` effects of the session, one at a time: a newer one cancels the older.
# Produces: for the session, that the weights are loaded or unavailable; what it decides then is executed before the
#     next command is read.
# Waits for: the weight source (`WeightSource.pull`); with `in_flight: finish` also for the samples in the engine, which
#     `on_flush` reports and `finish_limit_s` bounds; then for the engine's load and parity check.
# Ends when: cancelled, by the shutdown, or an update fails.


LOAD_LIMIT_S = 3600.0
"""Time limit of the engine for one load, its build included: compiling a large model takes many minutes."""


YIELD_LIMIT_S = 7 * 86_400.0
"""How long a version may wait for the device. Each newer version restarts the wait."""
Execute = Callable[[Sequence[Effect]], Awaitable[None]]
"""Executes what the session has decided."""
Report = Callable[[WeightsRef, str], Awaitable[None]]
"""Reports weights that cannot be served, and why."""


class WeightUpdates:
    """Runs at most one weight update at a time.

    Args:
        connection: reports weights that are unavailable.
        generator: loads the weights.
        source: provides the weights.
        waits: lists what is waited for.
        startup: times the first update.
        finish_limit_s: how long new weights wait for samples that are to finish under the current ones.
        executing: held from a decision of the session to the end of its effects, here and by `CommandLoop`.

    """

    def __init__(
        self,
        connection: ManagerConnection,
        generator: Generator,
        source: WeightSource,
        waits: Waits,
        startup: StartupTimer,
        finish_limit_s: float,
        executing: asyncio.Lock,
    ) -> None:
        self._connection = connection
        self._generator = generator
        self._source = source
        self._waits = waits
        self._startup = startup
        self._finish_limit_s = finish_limit_s
        self._executing = executing
        self._requested: asyncio.Queue[PullWeights] = asyncio.Queue()
        """The next update; never more than one."""
        self._task: asyncio.Task[None] | None = None
        """The newest update."""
        self._job_id = ""
        """Its job."""
        self._flushed = asyncio.Event()
        self._may_load = asyncio.Event()
        self._may_load.set()
        self._starts, self._loads, self._checks = LastDuration(), LastDuration(), LastDuration()

    async def run(self, execute: Execute) -> None:
        """Run one update at a time until cancelled; `execute` takes what the session decides at their ends."""
        try:
            while True:
                pull = await self._requested.get()
                name, self._job_id = f"update-{pull.job_id}-{pull.version}", pull.job_id
                self._task = task = asyncio.create_task(self._update(pull, execute), name=name)
                await asyncio.wait({task})
                if not task.cancelled():
                    task.result()
        finally:
            await self._abandon()

    async def start(self, pull: PullWeights) -> None:
        """Start an update in the background; cancel the one under way."""
        await self.cancel()
        self._requested.put_nowait(pull)

    async def cancel(self) -> None:
        """Cancel the update under way and resume the engine if it still has its old weights.

        An adapter whose load has begun is loaded and verified to the end: requests may run with it.

        Raises:
            Corrupt, UnsuitableWeights, ParityCheckFailed: that failed, and requests of its job would run with it.

        """
        cancelled, session = await self._abandon(), self._connection.session
        if cancelled is None or session.serving is None:
            return
        try:
            await self._generator.end_load()
            await self._generator.resume("loading")
        except (Corrupt, UnsuitableWeights, ParityCheckFailed) as error:
            if session.n_submitted(cancelled):
                raise
            log.warning("cancelled_adapter_dropped", job=cancelled, reason=str(error))
            await self._generator.unload_adapter(cancelled)
            await self._generator.resume("loading")

    async def _abandon(self) -> str | None:
        """Cancel the update under way and leave the engine as it is; return its job, None if there was none.

        An update that cancels itself, by the effects of its own outcome, counts as none.
        """
        if not self._requested.empty():
            self._requested.get_nowait()
        task = self._task
        if task is None or task is asyncio.current_task():
            return None
        self._task = None
        task.cancel()
        await asyncio.wait({task})
        return self._job_id

    def renew_access(self, credential: str) -> None:
        """Pull weights with a new credential from now on."""
        self._source.renew_access(credential)

    def allow_loads(self, *, allowed: bool) -> None:
        """Say whether a pulled version may be loaded now; a load under way ends all the same."""
        if allowed:
            self._may_load.set()
        else:
            self._may_load.clear()

    def on_flush(self) -> None:
        """Check again whether the samples in flight have finished."""
        self._flushed.set()

    async def _update(self, pull: PullWeights, execute: Execute) -> None:
        weights, began = WeightsRef(pull.job_id, pull.version), time.monotonic()
        try:
            staged = await self._pull(weights, pull)
            pull_s = time.monotonic() - began
            began += await self._until_allowed(weights)  # which says nothing of how long an update takes
            times = await self._load(staged, weights, pull)
        except (NotFound, BadSignature) as error:
            await self._on_unavailable(weights, str(error), self._connection.report_weights_unavailable, execute)
            return
        except UnsuitableWeights as error:
            connection = self._connection
            not_shared = partial(connection.report_not_shared, lasting=isinstance(error, MustBeMerged))
            report = not_shared if pull.alongside else connection.report_weights_refused
            await self._on_unavailable(weights, str(error), report, execute)
            return
        except ParityCheckFailed as error:
            if not pull.alongside or error.weights != weights:
                raise
            failure, connection = error, self._connection
            with suppress(CredentialRejected):
                await connection.retry_until_ok(
                    "report a failed parity check", lambda: connection.report_parity_failure(failure)
                )
            await self._on_unavailable(weights, str(error), connection.report_not_shared, execute)
            return
        checked = time.monotonic()
        log.info(
            "weights_loaded",
            job=pull.job_id,
            version=pull.version,
            pull_s=round(pull_s, 3),
            load_s=round(times.load_s, 3),
            parity_s=round(times.parity_s, 3),
        )
        async with self._executing:
            session = self._connection.session
            self._connection.meters.on_weights_replaced(checked - began, times.load_s + times.parity_s)
            is_shared = bool(session.n_alongside)
            await execute(session.on_weights_loaded(weights, alone=bool(times.merged)))
            await self._generator.resume("loading")
        if times.merged and is_shared:
            with suppress(CredentialRejected):
                await self._connection.retry_until_ok(
                    "report a merged adapter",
                    lambda: self._connection.report_not_shared(weights, times.merged, lasting=True),
                )

    async def _pull(self, weights: WeightsRef, pull: PullWeights) -> StagedWeights:
        """Return the weights once the engine may load them."""
        if self._generator.is_loading:
            async with self._engine_wait(f"it ends an earlier load before {weights}", LastDuration()):
                await self._generator.wait_for_load()
        staged = await self._source.pull(*weights)
        self._startup.end("pull")
        if pull.in_flight == "finish" and self._connection.session.serving is not None:
            await self._until_finished(weights)
        return staged

    async def _until_allowed(self, weights: WeightsRef) -> float:
        """Wait while the device is the serving engine's; return how long, in seconds."""
        began = time.monotonic()
        if not self._may_load.is_set():
            because = f"{weights} is loaded when the serving engine beside this worker leaves it idle"
            async with self._waits.on("the device", because=because, limit_s=YIELD_LIMIT_S):
                await self._may_load.wait()
        return time.monotonic() - began

    async def _load(self, staged: StagedWeights, weights: WeightsRef, pull: PullWeights) -> ReplacementTimes:
        """Load the weights; pull them again if they are damaged."""
        replace = partial(
            self._generator.replace_weights,
            version=pull.version,
            job_id=pull.job_id,
            alongside=pull.alongside,
            on_unloaded=self._connection.session.on_weights_unloaded,
            tokenizer_json=await self._source.tokenizer_json(pull.job_id),
            keep_kv=pull.in_flight == "keep",
            around=partial(self._around_stage, weights),
        )
        try:
            return await replace(staged)
        except Corrupt as error:
            # Most likely a chunk was damaged after it had been verified: starting an engine again takes longer.
            log.warning("weights_pulled_again", job=pull.job_id, version=pull.version, error=str(error))
            self._source.verify_cache_again()
            return await replace(await self._source.pull(*weights))

    @asynccontextmanager
    async def _around_stage(self, weights: WeightsRef, stage: LoadStage) -> AsyncIterator[None]:
        if stage == "parity":
            because, last = f"it runs the parity check of {weights}", self._checks
        elif self._generator.exists:
            because, last = f"it loads {weights}", self._loads
        else:
            because, last = f"it starts, then loads {weights}", self._starts
        async with self._engine_wait(because, last):
            yield
        self._startup.end(stage)

    @asynccontextmanager
    async def _engine_wait(self, because: str, last: LastDuration) -> AsyncIterator[None]:
        """Wait for the engine, which does not say how far it is; `last` measures this time for the next."""
        limit_s = LOAD_LIMIT_S
        wait = self._waits.on(
            "the inference engine", because=because, limit_s=limit_s, progress=last.text, kind="engine"
        )
        async with wait:
            with last.measured():
                yield

    async def _on_unavailable(self, weights: WeightsRef, reason: str, report: Report, execute: Execute) -> None:
        """Report that the weights cannot be pulled, or do not fit the engine.

        The engine keeps its weights, unless a failed load has already unloaded them. If that was only an adapter, it
        serves the other jobs.
        """
        connection = self._connection
        # An incarnation that Redis rejects has no readers of its events any more.
        with suppress(CredentialRejected):
            await connection.retry_until_ok("report unavailable weights", lambda: report(weights, reason))
        async with self._executing:
            await execute(connection.session.on_weights_unavailable(weights, reason))
            if connection.session.serving is not None:
                if weights.job_id not in connection.session.loaded:
                    await self._generator.unload_adapter(weights.job_id)
                await self._generator.resume("loading")

    async def _until_finished(self, weights: WeightsRef) -> None:
        """Wait until the samples in the engine have finished under its current weights, up to `finish_limit_s`."""
        session = self._connection.session
        because = f"they finish under their weights before {weights} is loaded"
        try:
            async with self._waits.on("the samples in flight", because=because, limit_s=self._finish_limit_s):
                while session.n_submitted(weights.job_id):
                    self._flushed.clear()
                    await self._flushed.wait()
        except WaitTimedOut as error:
            log.warning("in_flight_finish_timed_out", samples=session.n_submitted(weights.job_id), reason=str(error))


# --- Loads the images of samples --------------------------------------------------------------------------------------


_IMAGE_CACHE_BYTES = 256 << 20
"""Images that are kept for other samples of their prompts."""
_IMAGE_LIMIT_S = 300.0
"""How long an image that the store lacks is waited for: its trainer uploads it again within a minute."""
_IMAGE_RETRY_S = 5.0


class ImageLoads:
    """Gives queued requests their images, each in a task of its own: others start meanwhile.

    Args:
        source: provides the images.
        generator: has the requests.

    """

    def __init__(self, source: WeightSource, generator: Generator) -> None:
        self._source = source
        self._generator = generator
        self._images: dict[tuple[str, int], asyncio.Task[bytes]] = {}
        """The newest last."""
        self._loads: set[asyncio.Task[None]] = set()

    def start(self, requests: Sequence[Request]) -> None:
        """Begin to load the images of requests that the engine has queued."""
        for request in requests:
            if request.sampling.images:
                load = asyncio.create_task(self._load(request), name=f"load-images-{request.sample}")
                self._loads.add(load)
                load.add_done_callback(self._loads.discard)

    async def close(self) -> None:
        """Cancel all loads."""
        tasks = [*self._loads, *self._images.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _load(self, request: Request) -> None:
        found: list[bytes] | str
        began, found = time.monotonic(), ""
        while not found:
            try:
                found = [await asyncio.shield(self._image(*image)) for image in request.sampling.images]
            except (NotFound, Corrupt) as error:
                if time.monotonic() - began >= _IMAGE_LIMIT_S:
                    found = f"its images cannot be loaded: {error}"
                else:
                    await asyncio.sleep(_IMAGE_RETRY_S)
            except RLBoostError as error:
                found = f"its images cannot be loaded: {error}"
        with suppress(EngineFailed):  # which the flush loop reports
            self._generator.set_images(request.key, found)

    def _image(self, digest: str, n_bytes: int) -> asyncio.Task[bytes]:
        key = digest, n_bytes
        if (task := self._images.pop(key, None)) is None or (task.done() and task.exception() is not None):
            task = asyncio.create_task(self._source.image(digest, n_bytes), name=f"image-{digest}")
        self._images[key] = task
        while sum(n for _, n in self._images) > _IMAGE_CACHE_BYTES and len(self._images) > 1:
            del self._images[next(iter(self._images))]
        return task


# --- Commands ---------------------------------------------------------------------------------------------------------


_BLOCK_S = 1.0


def _decide(session: Session, entry: Entry) -> list[Effect]:
    """Return what to do about a command; one that fails unexpectedly is dead-lettered, and the session replaced."""
    try:
        return session.on_command(entry.message)
    except Exception as error:
        log.exception("command_failed", command=entry.message.tag, entry=entry.id)
        reason = f"{entry.message.tag} cannot be executed: {error!r}"
        return [DeadLetterCommand(reason), Rejoin(reason)]


class CommandLoop:
    """Executes the manager's commands.

    Args:
        connection: provides the commands; its session decides.
        generator: the engine.
        updates: replaces the engine's weights.
        images: loads the images of samples.
        startup: times the first version and the first assignment.
        executing: held from a decision of the session to the end of its effects, here and by `WeightUpdates`.
        on_drain: called with the reason when the manager drains the worker.
        on_state_changed: called when the next heartbeat should not wait.

    """

    def __init__(
        self,
        connection: ManagerConnection,
        generator: Generator,
        updates: WeightUpdates,
        images: ImageLoads,
        startup: StartupTimer,
        executing: asyncio.Lock,
        *,
        on_drain: Callable[[str], None],
        on_state_changed: Callable[[], None],
    ) -> None:
        self._connection = connection
        self._generator = generator
        self._updates = updates
        self._images = images
        self._startup = startup
        self._executing = executing
        self._on_drain = on_drain
        self._on_state_changed = on_state_changed

    async def run(self) -> None:
        """Read and execute commands until cancelled."""
        while True:
            incarnation = self._connection.incarnation
            stream = names.worker_commands(incarnation.worker)
            try:
                entries = await incarnation.bus.read({stream: incarnation.cursor}, block_s=_BLOCK_S)
            except BusUnavailable as error:
                log.warning("redis_unavailable", error=str(error), during="read commands")
                await asyncio.sleep(RETRY_INTERVAL_S)
                continue
            for entry in entries:
                async with self._executing:
                    if incarnation is not self._connection.incarnation:
                        break
                    incarnation.cursor = entry.id
                    log.debug("command_received", command=entry.message.tag)
                    try:
                        await self.execute(_decide(incarnation.session, entry), entry)
                    except CredentialRejected as error:
                        await self._rejoin(str(error), is_rejected=True)

    async def execute(self, effects: Sequence[Effect], entry: Entry | None = None) -> None:
        """Execute what the session has decided, about the command in `entry` if there is one."""
        for effect in effects:
            match effect:
                case PullWeights():
                    self._startup.end("version")
                    await self._updates.start(effect)
                case CancelPull():
                    await self._updates.cancel()
                case DrainWorker(reason):
                    self._on_drain(reason)
                case RenewAccess(credential):
                    self._updates.renew_access(credential)
                case Rejoin(reason):
                    await self._rejoin(reason)
                case DeadLetterCommand(reason):
                    if entry is not None:
                        await self._connection.retry_until_ok(
                            "dead-letter a command", lambda: self._connection.dead_letter(entry, reason)
                        )
                case _:
                    await self._execute_on_engine(effect)
        if self._connection.state_changed:
            self._on_state_changed()

    async def _execute_on_engine(self, effect: EngineEffect) -> None:
        match effect:
            case SubmitSamples(samples):
                self._startup.end("assignment")
                session = self._connection.session
                requests = [_request(sample, session.job_of(sample.sample)) for sample in samples]
                self._generator.submit(requests)
                self._images.start(requests)
            case AbortRequests(keys):
                self._generator.abort(keys)
            case ReleaseRequests(keys):
                self._generator.release(keys)
            case HintSiblings(completions):
                self._generator.hint(completions)
            case ReleaseUnstarted(samples):
                self._connection.release_unstarted(samples)
            case SuspendEngine(keys):
                await self._generator.pause("suspended")
                try:
                    await self._connection.retry_until_ok("flush before the suspension", self._connection.flush)
                finally:
                    self._generator.abort(keys)  # the session has dropped them already
                self._connection.session.on_engine_suspended()
            case UnloadAdapter(job_id):
                with suppress(EngineClosed):  # another model's takes its place
                    await self._generator.unload_adapter(job_id)
            case ResumeEngine():
                await self._generator.resume("suspended")
            case _:
                assert_never(effect)

    async def yield_device(self) -> None:
        """Give the device to the serving engine beside this worker; idempotent. Loads wait until `take_device`."""
        self._updates.allow_loads(allowed=False)
        await self._generator.pause("suspended")  # at once, whatever command is being executed
        await self._decide_and_execute(Session.yield_device)

    async def take_device(self) -> None:
        """Take the device back; does nothing before the manager was told that it was given."""
        session = self._connection.session
        if session.yields and not self._connection.has_reported_suspension:
            return
        self._updates.allow_loads(allowed=True)
        if session.yields:
            await self._decide_and_execute(Session.take_device)

    async def use_seats(self, seats: int) -> None:
        """Hold at most this many samples; idempotent."""
        session = self._connection.session
        if session.seats != seats:
            self._generator.release(list(session.held.items())[seats:])  # at once, whatever command is being executed
            await self._decide_and_execute(lambda current: current.use_seats(seats))

    async def _decide_and_execute(self, decide: Callable[[Session], list[Effect]]) -> None:
        async with self._executing:
            try:
                await self.execute(decide(self._connection.session))
            except CredentialRejected as error:
                await self._rejoin(str(error), is_rejected=True)

    async def rejoin_rejected(self, reason: str) -> None:
        """Join again because Redis no longer accepts this incarnation."""
        async with self._executing:
            await self._rejoin(reason, is_rejected=True)

    async def _rejoin(self, reason: str, *, is_rejected: bool = False) -> None:
        await self._updates.cancel()
        self._generator.abort(list(self._connection.session.held.items()))
        try:
            await self._connection.rejoin(reason, is_rejected=is_rejected)
        except CredentialRejected as error:
            await self._connection.rejoin(str(error), is_rejected=True)
        await self._generator.resume("suspended")


def _request(assignment: Assignment, job_id: str) -> Request:
    return Request(
        sample=assignment.sample,
        attempt=assignment.attempt,
        prompt=ints(assignment.prompt),
        tokens=ints(assignment.tokens),
        sampling=assignment.sampling,
        seed=assignment.seed,
        job_id=job_id,
    )
