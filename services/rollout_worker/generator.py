"""Owns the inference engine of this process: none before the first weights, a new one after a change of model.

Consumes: requests (`submit`) and staged weights (`replace_weights`).
Produces: emissions (`take_emissions`), which the flush loop reports to the manager.
Waits for: the engine's thread, which acts between two decode steps. The engine decodes only while no `PauseReason` is
    set. `pause(reason)` returns once it has stopped; the `resume(reason)` that removes the last reason lets it decode
    again, after the parity check of weights that have not passed it yet. Each reason has one owner, who resumes it:
    "suspended": the manager's `Suspend` and `Resume` (`commands`);
    "loading": set by `replace_weights`, removed by `WeightUpdates` once the new weights are served; a failure keeps it;
    "unsent": the flush loop (`app`), while the queue of unsent messages is full;
    "shutdown": `WorkerApp.shutdown`, which never resumes.
Ends when: `close` is called. After the engine has died, every call but `running` raises `EngineFailed`.

Loaded weights are verified twice: their digests show that they are what was published (invariant 5), and the parity
check shows that the engine computes the same log-probabilities with them as the trainer.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import structlog

from rlboost.services.rollout_worker.domain.load import EngineStats, HangDetector
from rlboost.services.rollout_worker.domain.parity_check import (
    ParityCheckFailed,
    Precision,
    continuations,
    draws,
    in_order,
    judge,
    judge_continuations,
    judge_draws,
)
from rlboost.services.rollout_worker.domain.requests import NOT_A_NUMBER, Emission, Request, RequestKey
from rlboost.services.rollout_worker.domain.session import EnginePause, PauseReason
from rlboost.services.rollout_worker.domain.stop_strings import Decode, StopStrings
from rlboost.services.rollout_worker.ports import (
    Changes,
    Engine,
    EngineFactory,
    EngineFailed,
    MustBeMerged,
    StagedAdapter,
    StagedWeights,
)
from rlboost.shared.errors import Corrupt, UnsuitableWeights
from rlboost.shared.ids import WeightsRef
from rlboost.shared.messages import RESUMES_GRAMMAR
from rlboost.shared.model.experts import is_mixture
from rlboost.shared.process.system import run_in_thread
from rlboost.shared.weights.manifest import ParityReference

if TYPE_CHECKING:
    from rlboost.shared.weights.changed_words import ChangedWords

log = structlog.get_logger(__name__)

_PARITY_LIMIT_S = 300.0
"""Time limit of one parity check: the first forward pass may compile kernels."""

_REMEDY = (
    "Look for an engine that interprets the weights differently from the trainer, or for one that does not support "
    "this machine. If they differ by design, raise RLBOOST_WORKER_PARITY_TOLERANCE."
)
_SAMPLING_REMEDY = (
    "Look for options, plugins or kernels that change how the engine samples, or what it reports. If rounding explains "
    "the difference, raise RLBOOST_WORKER_PARITY_TOLERANCE."
)

LoadStage = Literal["load", "parity"]
"""A stage of `replace_weights`; "load" includes building the engine, and the check of the loaded bytes."""
AroundStage = Callable[[LoadStage], AbstractAsyncContextManager[None]]
"""Entered around each stage, to limit its time and to list what is waited for."""


class ReplacementTimes(NamedTuple):
    """How long the engine stood still for new weights, in seconds."""

    load_s: float
    """Until the weights were in the engine's memory, the start of the engine left out."""
    parity_s: float
    """For the parity check."""
    merged: str = ""
    """Why the engine merged the adapter, so that it can hold no others; empty if it did not."""


async def _find_words(weights: StagedWeights, loaded: StagedWeights, names: set[str]) -> ChangedWords | None:
    """Return `StagedWeights.changed_words`; None, too, if they cannot be found."""
    finding = run_in_thread("weights-compare", lambda: weights.changed_words(loaded, names))
    try:
        return await asyncio.shield(finding)
    except asyncio.CancelledError:
        finding.add_done_callback(_remove_words)
        raise
    except (Corrupt, OSError, MemoryError, RuntimeError) as error:  # torch has no memory, or not this dtype
        log.warning("weights_loaded_whole", reason=str(error) or type(error).__name__)
        return None


def _remove_words(found: asyncio.Future[ChangedWords | None]) -> None:
    if not found.cancelled() and found.exception() is None and (words := found.result()) is not None:
        words.remove()


_NOTHING = Changes(())
"""The engine has the model's weights already."""
Parts = tuple[StagedWeights, StagedAdapter | None]
"""A model's weights, and the adapter that the engine keeps apart from them."""


def _parts(engine: Engine, weights: StagedWeights) -> tuple[StagedWeights, StagedAdapter | None, str]:
    """Return what the engine loads as weights and as an adapter; and, if it must merge an adapter, why."""
    if engine.adapters is None:
        return weights, None, ""
    model, adapter = weights.unmerged()
    if adapter is None or not (why := engine.adapters.adapter_refusal(adapter)):
        return model, adapter, ""
    log.info("adapter_merged", reason=why)
    return weights, None, f"its adapter must be merged: {why}"


_NO_ENGINE = EngineStats(running=0, pending=0, tokens_generated_total=0, version=-1)


class Generator:
    """The `ports.Engine` of one worker. Methods that need an engine do nothing while there is none.

    Args:
        engines: builds engines.
        precision: what the engine computes in.
        tolerance: allowed mean difference of the parity check in nats; see `domain.parity_check.judge`.
        parity_limit_s: time limit of one parity check.
        suspects: engine options that may change how tokens are sampled, for the error of a failed check.
        decoder: returns what decodes tokens with a `tokenizer.json`, whose text may be empty; None if it is unusable.

    """

    def __init__(
        self,
        engines: EngineFactory,
        *,
        precision: Precision = "float32",
        tolerance: float = 0.0,
        parity_limit_s: float = _PARITY_LIMIT_S,
        suspects: str = "",
        decoder: Callable[[str], Decode | None] = lambda _: None,
    ) -> None:
        self._engines = engines
        self._decoder = decoder
        self._stops = StopStrings()
        self._precision: Precision = precision
        self._tolerance = tolerance
        self._parity_limit_s = parity_limit_s
        self._suspects = suspects
        self._unchecked: dict[str, tuple[int, ParityReference]] = {}
        """Job -> version and reference of its weights, until they have passed the parity check."""
        self._sampling_checked: set[tuple[float, float]] = set()
        """Temperature and top-p with which this engine has passed the sampling check."""
        self._hang_detector = HangDetector()
        self._prepared: asyncio.Future[None] | None = None
        self._config_json = ""
        self._tokenizer_json = ""
        self._building: asyncio.Future[Engine] | None = None
        self._engine: Engine | None = None
        self._untaken: list[Emission] = []
        """Emissions of an engine that was replaced before they were taken."""
        self._loading: asyncio.Future[None] | None = None
        self._loaded: StagedWeights | None = None
        """The verified weights, without adapters that are not merged: the next load may skip what is equal."""
        self._pause = EnginePause()
        self._transition = asyncio.Lock()
        """Held while the engine pauses, resumes or scores."""

    @property
    def exists(self) -> bool:
        """Return True if there is an engine. Before that, imports may block the whole process for seconds."""
        return self._engine is not None

    @property
    def is_paused(self) -> bool:
        """Return True once the engine has confirmed that it has stopped decoding."""
        return self._pause.is_paused

    @property
    def pause_reasons(self) -> frozenset[PauseReason]:
        """Return why the engine does not decode, or will soon stop."""
        return frozenset(self._pause.reasons)

    async def prepare(self) -> None:
        """Do the slow work that needs no model, such as imports.

        Raises:
            ConfigError: see `EngineFactory.prepare`.

        """
        self._prepared = run_in_thread("engine-prepare", self._engines.prepare)
        await asyncio.shield(self._prepared)

    def submit(self, requests: Sequence[Request]) -> None:
        if self._engine is not None:
            self._engine.submit(self._stops.submit(requests))
            self._hang_detector.on_submit(max((len(r.prompt) + len(r.tokens) for r in requests), default=0))

    def abort(self, keys: Sequence[RequestKey]) -> None:
        if self._engine is not None:
            self._stops.on_abort(keys)
            self._engine.abort(keys)

    def release(self, keys: Sequence[RequestKey]) -> None:
        if self._engine is not None:
            self._engine.release(keys)

    def hint(self, completions: Iterable[tuple[int, Sequence[int]]]) -> None:
        """See `Engine.hint`."""
        if self._engine is not None:
            self._engine.hint(completions)

    def set_images(self, key: RequestKey, images: Sequence[bytes] | str) -> None:
        """See `Engine.set_images`."""
        if self._engine is not None:
            self._engine.set_images(key, images)

    def take_emissions(self) -> list[Emission]:
        """See `Engine.take_emissions`; emissions of a replaced engine come first, and none passes a stop string."""
        untaken, self._untaken = self._untaken, []
        if (engine := self._engine) is None:
            return untaken
        # Those that the engine does not run emit nothing more after this.
        over = self._stops.ended - engine.running() if self._stops.ended else ()
        emissions, at_stop = self._stops.cut(engine.take_emissions())
        if at_stop:
            self.abort(at_stop)
        self._stops.forget(over)
        return untaken + emissions

    def stats(self) -> EngineStats:
        return self._engine.stats() if self._engine is not None else _NO_ENGINE

    @property
    def capabilities(self) -> dict[str, Any]:
        """Return what `WorkerHeartbeat` says about the engine; empty before there is an engine."""
        if (engine := self._engine) is None:
            return {}
        return {
            "max_adapters": engine.adapters.max_adapters if engine.adapters else 0,
            "kv_tokens": engine.kv_tokens,
            "kv_block_tokens": engine.kv_block_tokens,
            "max_request_tokens": engine.max_request_tokens,
            "returns_routed_experts": engine.returns_routed_experts,
            "sampling_options": tuple(sorted(engine.sampling_options | self._stops.options | {RESUMES_GRAMMAR})),
        }

    def running(self) -> set[RequestKey]:
        return self._engine.running() if self._engine is not None else set()

    def watch_tokens(self, elapsed_s: float) -> HangDetector:
        """Record whether the engine has generated tokens; return what all calls have found.

        Args:
            elapsed_s: time since the last call.

        """
        stats = self.stats()
        has_requests = stats.running + stats.pending > 0 and stats.can_generate
        busy = not self.is_paused and stats.version >= 0 and has_requests
        self._hang_detector.update(busy=busy, n_generated=stats.tokens_generated_total, elapsed_s=elapsed_s)
        return self._hang_detector

    # --- pausing ------------------------------------------------------------------------------------------------------

    async def pause(self, reason: PauseReason, *, keep_kv: bool = False) -> None:
        """Stop decoding at the next step boundary; return once the engine has stopped.

        The KV cache stays only if every reason so far was given with `keep_kv`. For "suspended" the device must be
        free afterwards: a load under way ends first, and the memory that it took is given back.
        """
        self._pause.reasons.add(reason)
        if reason == "suspended":
            await self.wait_for_load()
        async with self._transition:
            if not self.is_loading:  # a load has paused the engine itself, and reads what it has loaded
                await self._suspend(keep_kv=keep_kv)

    async def _suspend(self, *, keep_kv: bool) -> None:
        if self._engine is not None and self._pause.must_suspend(keep_kv=keep_kv):
            await self._engine.suspend(keep_kv=keep_kv)
            self._pause.on_suspended(keep_kv=keep_kv)

    async def resume(self, reason: PauseReason) -> None:
        """Remove a reason to pause; the engine decodes again when none is left.

        Raises:
            ParityCheckFailed: no other reason was left, and the loaded weights did not pass the parity check.

        """
        if reason not in self._pause.reasons:
            return
        async with self._transition:
            if self._pause.is_only(reason):
                await self._check_parity()
            self._pause.reasons.discard(reason)
            if self._engine is not None and not self._pause.reasons:
                self._pause.on_decoding()
                self._hang_detector.on_resume()
                await self._engine.resume()

    # --- weights ------------------------------------------------------------------------------------------------------

    async def wait_for_load(self) -> None:
        """Wait until a load under way has ended: the engine's thread cannot be interrupted."""
        if self._loading is not None:
            await asyncio.wait({self._loading})

    async def end_load(self) -> None:
        """Wait as `wait_for_load`; raise the error of the last load if it failed."""
        if self._loading is not None:
            await asyncio.shield(self._loading)

    @property
    def is_loading(self) -> bool:
        """Return True while the engine's thread loads weights."""
        return self._loading is not None and not self._loading.done()

    async def replace_weights(
        self,
        weights: StagedWeights,
        version: int,
        on_unloaded: Callable[..., None],
        *,
        job_id: str = "",
        alongside: bool = False,
        tokenizer_json: str = "",
        keep_kv: bool = False,
        around: AroundStage = lambda _: nullcontext(),
    ) -> ReplacementTimes:
        """Load weights and verify them twice (invariant 5).

        If the engine has the model's weights already, only the job's adapter is loaded, next to those of other jobs.

        Returns with the engine paused as "loading": the caller records that the weights are good, then calls
        `resume("loading")`. With another reason to pause, such as a trainer that uses the device, the last `resume`
        runs the parity check instead. If this raises, the weights are not usable and the engine stays paused.
        Cancelling it does not stop a load that has begun.

        Args:
            weights: to load.
            version: the version number that new tokens carry.
            on_unloaded: called once the engine has paused, before its current weights are overwritten; with `job_id` if
                those of other jobs stay.
            job_id: whose weights these are.
            alongside: refuse weights that would replace those of other jobs.
            tokenizer_json: see `EngineFactory.build`.
            keep_kv: let running requests continue with their current KV cache.
            around: see `AroundStage`.

        Raises:
            Corrupt: the loaded tensors differ from the published ones, or their files are damaged or missing.
            UnsuitableWeights: they do not fit the engine, or it does not support their model; or `alongside`, and the
                engine serves on. `MustBeMerged`: as will all versions of the job.
            ParityCheckFailed: the engine's log-probabilities differ from the trainer's.

        """
        async with around("load"):
            if alongside:
                self._require_same_engine(weights.config_json, tokenizer_json)
            engine = await self._engine_for(weights.config_json, tokenizer_json, on_unloaded)
            model, adapter, why = _parts(engine, weights)
            is_held = self._holds(engine, model)
            if alongside and not is_held:
                kind = MustBeMerged if why else UnsuitableWeights
                raise kind(why or "its model's weights are not those that this worker serves")
            async with nullcontext(_NOTHING) if is_held else self._changes(engine, model) as changes:
                began = time.monotonic()
                await self.pause("loading", keep_kv=keep_kv)
                on_unloaded(*([job_id] if is_held else []))
                load = self._load(engine, weights, (model, adapter), changes, version, job_id, keep_kv=keep_kv)
                self._loading = asyncio.create_task(load, name="load")
                await asyncio.shield(self._loading)
        loaded = time.monotonic()
        async with around("parity"), self._transition:
            if self._pause.is_only("loading"):
                await self._check_parity()
        return ReplacementTimes(loaded - began, time.monotonic() - loaded, why)

    async def unload_adapter(self, job_id: str) -> None:
        """See `AdapterEngine.unload_adapter`; ends a load under way first, which may be of this adapter."""
        await self.wait_for_load()
        self._loading = None  # if it failed, nothing of it is left
        self._unchecked.pop(job_id, None)
        if self._engine is not None and self._engine.adapters is not None:
            await self._engine.adapters.unload_adapter(job_id)

    def _holds(self, engine: Engine, model: StagedWeights) -> bool:
        """Return True if the engine has the weights of a model already, and can add adapters to them."""
        loaded = self._loaded
        return engine.adapters is not None and loaded is not None and loaded.contents == model.contents != {}

    def _require_same_engine(self, config_json: str, tokenizer_json: str) -> None:
        if self._building is None or self._config_json != config_json:
            raise UnsuitableWeights("its model's config.json is not that of the model that this worker serves")
        if self._tokenizer_json != tokenizer_json:
            raise UnsuitableWeights("its tokenizer.json is not that of the model that this worker serves")

    @asynccontextmanager
    async def _changes(self, engine: Engine, weights: StagedWeights) -> AsyncIterator[Changes | None]:
        """Find what differs from the loaded weights, while the engine generates with them; None to load everything.

        Writing changed words trusts the others in the engine's memory, so they are verified once more.
        """
        loaded = self._loaded
        if loaded is None or loaded.contents.keys() != (contents := weights.contents).keys():
            yield None
            return
        before, words = loaded.contents, None
        names = {name for name in contents if contents[name] != before[name]}
        changes: Changes | None = Changes(names)
        try:
            if engine.stats().running and not self._pause.reasons:  # else nothing stands still, and this takes longer
                began = time.monotonic()
                words = await _find_words(weights, loaded, names)
                if words is not None:
                    changes = Changes(names, words)
                    if wrong := await engine.differing(loaded):
                        log.error("loaded_weights_changed", tensors=len(wrong), first=wrong[0])
                        changes = None
                took_s = round(time.monotonic() - began, 3)
                log.info("weights_compared", tensors=len(names), found=words is not None, took_s=took_s)
            yield changes
        finally:
            if words is not None:
                if self._loading is not None and not self._loading.done():  # cancelled
                    self._loading.add_done_callback(lambda _: words.remove())
                else:
                    words.remove()

    async def _load(
        self,
        engine: Engine,
        weights: StagedWeights,
        parts: Parts,
        changes: Changes | None,
        version: int,
        job_id: str,
        *,
        keep_kv: bool,
    ) -> None:
        model, adapter = parts
        if changes is not _NOTHING:
            self._loaded = None
            self._unchecked.clear()
        self._unchecked.pop(job_id, None)
        self._pause.on_memory_taken()
        wrong = []
        if changes is not _NOTHING:
            wrong = await engine.load_weights(version, model, changes, keep_kv=keep_kv)
        if engine.adapters is not None:
            wrong += await engine.adapters.load_adapter(job_id, version, adapter, keep_kv=keep_kv)
        if wrong:
            log.error("loaded_weights_differ", version=version, tensors=len(wrong), first=wrong[0])
            raise Corrupt(
                f"version {version}: {len(wrong)} tensors in the engine, such as {wrong[0]}, are not what was "
                "published; the version is not served. Look for an engine that changes weights as it loads them, or "
                "for a bad disk or memory"
            )
        self._loaded = model
        if (reference := weights.parity_reference) is not None:
            self._unchecked[job_id] = version, reference
        async with self._transition:
            if self._pause.reasons and not self._pause.is_only("loading"):
                await self._suspend(keep_kv=False)

    async def _check_parity(self) -> None:
        for job_id, (version, reference) in list(self._unchecked.items()):
            await self._check_parity_of(job_id, version, reference)
            if self._unchecked.get(job_id) == (version, reference):
                del self._unchecked[job_id]

    async def _check_parity_of(self, job_id: str, version: int, reference: ParityReference) -> None:
        if (engine := self._engine) is None:
            return
        running = engine.stats().running
        if self._pause.keeps_kv and running:
            # Scoring needs the memory of the KV cache, which running requests keep: skip this version's check.
            log.info("parity_check_skipped", version=version, running=running)
            return
        self._pause.on_memory_taken()
        try:
            async with asyncio.timeout(self._parity_limit_s):
                await self._check_scores(engine, reference, version, job_id)
                if (reference.temperature, reference.top_p) not in self._sampling_checked:
                    await self._check_sampling(engine, reference, version, job_id)
        except TimeoutError as error:
            raise EngineFailed(
                f"the inference engine took more than {self._parity_limit_s:.0f} s for the parity check"
            ) from error

    async def _check_scores(self, engine: Engine, reference: ParityReference, version: int, job_id: str) -> None:
        """Compare the engine's log-probabilities of given tokens with the trainer's."""
        began = time.monotonic()
        rows = [(row.prompt, row.completion) for row in reference.rows]
        scored = await engine.score(rows, reference.temperature, job_id)
        verdict = judge(
            reference,
            scored,
            precision=self._precision,
            has_experts=is_mixture(json.loads(self._config_json)),
            tolerance=self._tolerance,
        )
        if not verdict.agrees:
            problem = f"its log-probabilities are not the trainer's: {verdict}"
            remedy = " ".join(filter(None, (_REMEDY, self._suspects)))
            raise ParityCheckFailed(WeightsRef(job_id, version), problem, remedy, verdict)
        took_s = round(time.monotonic() - began, 3)
        log.info("parity_check_passed", version=version, mean=verdict.mean, worst=verdict.worst, took_s=took_s)

    async def _check_sampling(self, engine: Engine, reference: ParityReference, version: int, job_id: str) -> None:
        """Sample as in training, and compare with what the engine reported; once per engine, temperature and top-p."""
        began = time.monotonic()
        remedy = self._suspects or _SAMPLING_REMEDY
        requests = [replace(request, job_id=job_id) for request in continuations(reference)]
        sampled = in_order(await engine.sample(requests), requests)
        errors = sorted({emission.error for emission in sampled if emission.error})
        if NOT_A_NUMBER in errors:
            problem = f"it reports log-probabilities that are not numbers for sampled tokens ({NOT_A_NUMBER})"
            raise ParityCheckFailed(WeightsRef(job_id, version), problem, remedy)
        if errors:
            # It fails the job's samples alike, and says why. Others can use this worker.
            log.warning("sampling_check_skipped", version=version, reason=errors[0])
            return
        sequences = [(request.prompt, emission.tokens) for request, emission in zip(requests, sampled, strict=True)]
        scored = await engine.score(sequences, reference.temperature, job_id)
        verdict = judge_continuations(
            reference,
            sampled,
            scored,
            precision=self._precision,
            has_experts=is_mixture(json.loads(self._config_json)),
            tolerance=self._tolerance,
        )
        if not verdict.agrees:
            problem = (
                f"the log-probabilities that it reports for sampled tokens are not those that it computes: {verdict}"
            )
            raise ParityCheckFailed(WeightsRef(job_id, version), problem, remedy, verdict)
        drawn = await engine.sample([replace(request, job_id=job_id) for request in draws(reference)])
        if contradiction := judge_draws(drawn):
            problem = f"it does not sample tokens as often as their log-probabilities say: {contradiction}"
            raise ParityCheckFailed(WeightsRef(job_id, version), problem, remedy)
        self._sampling_checked.add((reference.temperature, reference.top_p))
        took_s = round(time.monotonic() - began, 3)
        log.info("sampling_check_passed", version=version, mean=verdict.mean, worst=verdict.worst, took_s=took_s)

    async def _engine_for(self, config_json: str, tokenizer_json: str, on_unloaded: Callable[[], None]) -> Engine:
        """Return the engine of this model; build it if there is none yet, or one of another model."""
        if self._building is None or (self._config_json, self._tokenizer_json) != (config_json, tokenizer_json):
            on_unloaded()
            await self._close_old_engine()
            if self._prepared is not None:
                await asyncio.shield(self._prepared)
            self._config_json, self._tokenizer_json = config_json, tokenizer_json
            self._pause.on_decoding()
            self._loaded = None
            self._unchecked.clear()
            self._sampling_checked.clear()
            self._building = run_in_thread("engine-build", lambda: self._build(config_json, tokenizer_json))
        try:
            self._engine = await asyncio.shield(self._building)
        except UnsuitableWeights:
            self._building = None
            raise
        return self._engine

    def _build(self, config_json: str, tokenizer_json: str) -> Engine:
        engine = self._engines.build(config_json, tokenizer_json)
        self._stops = StopStrings(self._decoder(tokenizer_json))
        return engine

    async def _close_old_engine(self) -> None:
        """Close the engine, if there is one; the next needs its memory, so keep no reference to it."""
        if self._building is not None:
            try:
                old = await asyncio.shield(self._building)
            except UnsuitableWeights:  # built for an update that was cancelled
                self._building = None
                return
            self._untaken += self._stops.cut(old.take_emissions())[0]  # the last: its requests have been released
            self._engine = self._building = None
            await old.close()

    async def close(self) -> None:
        """Stop the engine for good."""
        if self._engine is not None:
            await self._engine.close()
