"""The engine of this process: none before the first weights, another one after a change of model.

It decodes only while nobody holds it still. Each who wants it still says so under a name of his own (it is suspended,
its weights are not verified yet, the log does not take its tokens, the process ends), and it goes on when all have let
go: so nothing that ends early can start it while something else still needs it to stand.

What it holds is verified twice: the digests of what was loaded say that it is what was published, and before the engine
goes on, a fixed probe says that it computes with it what the trainer does.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Literal, TypeVar

import structlog

from services.rollout_worker.domain.canary import Verdict, judge
from services.rollout_worker.domain.progress import Progress
from services.rollout_worker.ports import (
    Emission,
    Engine,
    EngineFactory,
    EngineFailed,
    EngineStats,
    Key,
    Request,
    StagedWeights,
)
from shared.canary import Canary, Dtype
from shared.errors import Fatal

log = structlog.get_logger(__name__)

T = TypeVar("T")

Hold = Literal["suspended", "loading", "unsent", "leaving"]
_LOADS = 2
"""Loads that were tried when weights that still differ end the process."""
_SCORE_LIMIT_S = 300.0
"""How long an engine may take for the probe: the first forward pass may have kernels to compile."""
_NONE = EngineStats(running=0, pending=0, tokens_made_total=0, version=-1)


class CanaryFailed(Fatal):
    """The engine disagrees with the trainer about the weights that it holds."""

    def __init__(self, version: int, verdict: Verdict) -> None:
        super().__init__(
            f"version {version}: the engine holds what was published, but {verdict}; it is not served. Look for an "
            f"engine that uses the weights in another way than the trainer, or one that does not fit this machine; "
            f"where they differ by nature, raise RLBOOST_WORKER_CANARY_TOLERANCE"
        )
        self.version = version
        self.verdict = verdict


class Generator:
    """Owns the engine; methods that need one do nothing while there is none.

    Args:
        engines: makes it.
        dtype: what it computes in.
        tolerance: how far it may be from the trainer's answers to the probe; see `domain.canary.judge`.

    """

    def __init__(self, engines: EngineFactory, *, dtype: Dtype = "float32", tolerance: float = 0.0) -> None:
        self._engines = engines
        self._dtype: Dtype = dtype
        self._tolerance = tolerance
        self._owed: Canary | None = None
        """The probe of the weights that the engine holds, until it has passed."""
        self._progress = Progress()
        self._prepared: asyncio.Future[None] | None = None
        self._config_json = ""
        self._coming: asyncio.Future[Engine] | None = None
        self._engine: Engine | None = None
        self._left_behind: list[Emission] = []
        self._loading: asyncio.Future[None] | None = None
        self._loaded: Mapping[str, Hashable] = {}
        """`contents` of the verified weights that the engine holds: of the next ones, what is new is loaded."""
        self._holds: set[Hold] = set()
        self.stands_still = False
        """Whether the engine has said that it does."""
        self._keeps_kv = False
        """While it stands still: whether it has kept its KV cache."""
        self._woken = False
        """While it stands still: whether it has taken memory back since, for weights or for the canary."""
        self._one_at_a_time = asyncio.Lock()

    @property
    def exists(self) -> bool:
        """Tell whether there is an engine: before that, imports may stop the whole process for seconds."""
        return self._engine is not None

    async def prepare(self) -> None:
        """Do what takes long and needs no model.

        Raises:
            ConfigError: see `EngineFactory.prepare`.

        """
        self._prepared = in_thread("engine-prepare", self._engines.prepare)
        await asyncio.shield(self._prepared)

    def submit(self, requests: Sequence[Request]) -> None:
        """See `Engine.submit`."""
        if self._engine is not None:
            self._engine.submit(requests)
            self._progress.given(max((len(r.prompt) + len(r.tokens) for r in requests), default=0))

    def abort(self, keys: Sequence[Key]) -> None:
        """See `Engine.abort`."""
        if self._engine is not None:
            self._engine.abort(keys)

    def hand_back(self, keys: Sequence[Key]) -> None:
        """See `Engine.release`."""
        if self._engine is not None:
            self._engine.release(keys)

    def drain(self) -> list[Emission]:
        """See `Engine.drain`; what an engine had made before it was replaced comes first."""
        left, self._left_behind = self._left_behind, []
        return left + self._engine.drain() if self._engine is not None else left

    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        return self._engine.stats() if self._engine is not None else _NONE

    @property
    def kv(self) -> dict[str, int]:
        """Return what the engine says of its KV cache, by the names of `WorkerBeat`; nothing before there is one."""
        names = ("kv_tokens", "kv_row_tokens", "kv_page_tokens")
        return {name: getattr(self._engine, name) for name in names if self._engine is not None}

    def running(self) -> set[Key]:
        """See `Engine.running`."""
        return self._engine.running() if self._engine is not None else set()

    def progress(self, elapsed_s: float) -> Progress:
        """Look whether the engine gets on with its work; return what all the looks so far have shown.

        Args:
            elapsed_s: since the last look.

        """
        stats = self.stats()
        busy = not self.stands_still and stats.version >= 0 and stats.running + stats.pending > 0
        self._progress.look(busy=busy, made=stats.tokens_made_total, elapsed_s=elapsed_s)
        return self._progress

    # --- standing still -----------------------------------------------------------------------------------------------

    async def hold(self, name: Hold, *, keep_kv: bool = False) -> None:
        """Let the engine stand still from the next step boundary on; returns when it does.

        Its KV cache stays while everybody who holds it says `keep_kv`. When it is held as "suspended" the device is
        somebody else's: a load under way ends first, and what it has taken is given back.
        """
        self._holds.add(name)
        if name == "suspended":
            await self.settled()
        async with self._one_at_a_time:
            if not self._is_loading:  # a load stands still by itself, and reads what it has loaded
                await self._suspend(keep_kv=keep_kv)

    async def _suspend(self, *, keep_kv: bool) -> None:
        holds_memory = self._keeps_kv or self._woken
        if self._engine is not None and (not self.stands_still or (holds_memory and not keep_kv)):
            await self._engine.suspend(keep_kv=keep_kv)
            self.stands_still, self._keeps_kv, self._woken = True, keep_kv, False

    async def release(self, name: Hold) -> None:
        """Let the engine go on, unless somebody else holds it.

        Raises:
            CanaryFailed: it would have gone on, but it disagrees with the trainer.

        """
        if name not in self._holds:
            return
        async with self._one_at_a_time:
            if self._holds == {name}:
                await self._pass_canary()
            self._holds.discard(name)
            if self._engine is not None and not self._holds:
                self.stands_still = False
                self._progress.went_on()
                await self._engine.resume()

    # --- weights ------------------------------------------------------------------------------------------------------

    async def settled(self) -> None:
        """Wait until a load under way has ended: the engine's thread cannot be stopped in the middle."""
        if self._loading is not None:
            await asyncio.wait({self._loading})

    @property
    def _is_loading(self) -> bool:
        return self._loading is not None and not self._loading.done()

    async def load(
        self, weights: StagedWeights, version: int, before: Callable[[], None], *, keep_kv: bool = False
    ) -> None:
        """Load weights and compare what was loaded with what was published (invariant 5).

        Returns holding the engine as "loading": the caller calls `check_canary`, and lets go when it has noted that the
        weights are good. When this does not return, they are not, and the hold stays. A load that has begun goes on to
        its end even where it is given up.

        Args:
            weights: to load.
            version: the number that their tokens are to carry.
            before: called when the engine stands still and just before the weights it has are replaced.
            keep_kv: let running requests go on with the KV cache that they have.

        Raises:
            Fatal: the engine does not hold what was published, twice.
            ConfigError: the engine cannot take these weights.

        """
        if self._coming is None or self._config_json != weights.config_json:
            before()
            await self._replace_engine(weights.config_json)
        engine = await self._current()
        await self.hold("loading", keep_kv=keep_kv)
        before()
        self._loading = asyncio.create_task(self._put_in(engine, weights, version, keep_kv=keep_kv), name="load")
        await asyncio.shield(self._loading)

    async def _put_in(self, engine: Engine, weights: StagedWeights, version: int, *, keep_kv: bool) -> None:
        await self._load_verified(engine, weights, version, keep_kv=keep_kv)
        async with self._one_at_a_time:
            if self._holds != {"loading"}:
                await self._suspend(keep_kv=False)

    async def _load_verified(self, engine: Engine, weights: StagedWeights, version: int, *, keep_kv: bool) -> None:
        contents = weights.contents
        names: set[str] | None = {name for name in contents if contents[name] != self._loaded.get(name)}
        self._loaded, self._owed = {}, None
        self._woken = True
        for tries in range(1, _LOADS + 1):
            tensors = weights.tensors(names)
            await engine.load_weights(version, tensors, keep_kv=keep_kv)
            wrong = await in_thread("weights-verify", lambda: weights.differing(engine.loaded_tensors()))
            if not wrong:
                self._loaded, self._owed = contents, weights.canary
                return
            names = None
            log.error("loaded_weights_differ", version=version, tries=tries, tensors=len(wrong), first=wrong[0])
        raise Fatal(
            f"version {version}: {len(wrong)} tensors in the engine, such as {wrong[0]}, are not what was published, "
            f"after {_LOADS} loads; they are not served. Look for an engine that changes weights as it loads them, or "
            f"for bad memory"
        )

    async def check_canary(self) -> None:
        """Ask the engine for the probe of the weights that were loaded, if nobody else needs it to stand still.

        Where somebody does, such as a trainer that has the device, this is done before the engine goes on.

        Raises:
            CanaryFailed: it disagrees with the trainer.

        """
        async with self._one_at_a_time:
            if self._holds == {"loading"}:
                await self._pass_canary()

    async def _pass_canary(self) -> None:
        canary, engine = self._owed, self._engine
        if canary is None or engine is None:
            return
        stats, began = engine.stats(), time.monotonic()
        if self._keeps_kv and stats.running:
            # Their cache is of older weights and in the way: this version is scored by those who join with it.
            self._owed = None
            log.info("canary_left_out", version=stats.version, running=stats.running)
            return
        self._woken = True
        try:
            async with asyncio.timeout(_SCORE_LIMIT_S):
                scored = await engine.score([(row.prompt, row.completion) for row in canary.rows], canary.temperature)
        except TimeoutError as error:
            raise EngineFailed(f"the inference engine took more than {_SCORE_LIMIT_S:.0f} s for the canary") from error
        verdict = judge(canary, scored, dtype=self._dtype, tolerance=self._tolerance)
        if not verdict.agrees:
            raise CanaryFailed(stats.version, verdict)
        self._owed = None
        took_s = round(time.monotonic() - began, 3)
        log.info("canary_passed", version=stats.version, mean=verdict.mean, worst=verdict.worst, took_s=took_s)

    async def _replace_engine(self, config_json: str) -> None:
        if self._coming is not None:
            old = await asyncio.shield(self._coming)
            self._left_behind += old.drain()  # it makes no more: what it was given has been handed back
            self._engine = self._coming = None
            await old.close()
            del old  # its memory is needed for the next
        if self._prepared is not None:
            await asyncio.shield(self._prepared)
        self._config_json = config_json
        self.stands_still = False
        self._loaded, self._owed = {}, None
        self._coming = in_thread("engine-build", lambda: self._engines.build(config_json))

    async def _current(self) -> Engine:
        assert self._coming is not None, "an engine was asked for before it was ordered"
        self._engine = await asyncio.shield(self._coming)
        return self._engine

    async def close(self) -> None:
        """Stop the engine for good."""
        if self._engine is not None:
            await self._engine.close()


def in_thread(name: str, work: Callable[[], T]) -> asyncio.Future[T]:
    """Run blocking work in a thread of its own, which unlike those of a pool nobody waits for when the process ends."""
    result: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        if result.set_running_or_notify_cancel():
            try:
                result.set_result(work())
            except Exception as error:  # noqa: BLE001 - it is raised where the result is awaited
                result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return asyncio.wrap_future(result)
