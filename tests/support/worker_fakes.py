"""Fakes of `ports`, held to the same contract tests as the real ones. No inference library is imported."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from rlboost.services.rollout_worker.domain.load import EngineStats, KvCapacity
from rlboost.services.rollout_worker.domain.request_table import RequestTable
from rlboost.services.rollout_worker.domain.requests import Emission, Request, RequestKey, uniforms
from rlboost.services.rollout_worker.ports import (
    AdapterEngine,
    Changes,
    EngineClosed,
    EngineFailed,
    Sequences,
    StagedAdapter,
    StagedWeights,
)
from rlboost.shared.errors import BadSignature, Corrupt, NotFound, UnsuitableWeights
from rlboost.shared.process.system import run_in_thread
from rlboost.shared.weights.manifest import ParityReference
from rlboost.shared.wire import ints

if TYPE_CHECKING:
    import torch


class FakeEngine:
    """`ports.Engine` whose token at offset o is a hash of (seed, o), independent of prompt and weights.

    Args:
        slots: maximum number of running requests.
        vocabulary: tokens are 0..vocabulary-1, equally likely.
        max_len: maximum length of prompt and completion together.
        interval_s: time per token of each running request; None = a token only when `tick` is called.
        clock: seconds.
        capacity: limits of its pretended KV cache; None = unlimited.
        max_adapters: see `ports.AdapterEngine`; 0: it merges adapters.

    """

    def __init__(
        self,
        slots: int = 8,
        *,
        vocabulary: int = 128,
        max_len: int = 4096,
        interval_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        capacity: KvCapacity | None = None,
        max_adapters: int = 0,
    ) -> None:
        self.slots = slots
        self.max_adapters = max_adapters
        self.adapters: AdapterEngine | None = self if max_adapters else None
        self.held: dict[str, StagedAdapter | None] = {}
        """Job -> its adapter, of `load_adapter`."""
        self.adapter_refusals: dict[int, str] = {}
        """Rank -> why an adapter of it must be merged."""
        self.kv_tokens = capacity.tokens if capacity else 0
        self.kv_block_tokens = 0
        self.max_request_tokens = capacity.max_request_tokens if capacity else 0
        self.scored = 0
        """Number of calls of `score`."""
        self.awake = False
        """True if it would hold device memory."""
        self.score_error = 0.0
        """Added to each log-probability that `score` returns."""
        self.sampled = 0
        """Number of calls of `sample`."""
        self.sample_error = 0.0
        """Added to each log-probability that `sample` returns."""
        self.hints: list[tuple[int, list[int]]] = []
        """Sample and completion of each `hint`."""
        self.vocabulary = vocabulary
        self._new_table = partial(RequestTable, slots, max_len, vocabulary, capacity, options={"forced"})
        self._table = self._new_table()
        self.returns_routed_experts = self._table.returns_routed_experts
        self.sampling_options = self._table.options
        self._tensors: dict[str, torch.Tensor] = {}
        self._suspended = False
        self._interval_s = interval_s
        self._clock = clock
        self._last_tick_at = clock()
        self._closed = False
        self._failure: Exception | None = None

    def tick(self) -> bool:
        """Generate one token for each running request; return False if none is running."""
        if self._suspended or self._closed or self._table.version < 0 or not (self._table.n or self._table.pending):
            return False
        self._step(self._table)
        return True

    def _step(self, table: RequestTable) -> None:
        table.admit(budget_tokens=1 << 30)
        drawn = uniforms(table.seeds, table.offsets)
        logprobs = np.full(table.n, -np.log(self.vocabulary), np.float32)
        tokens = (drawn * self.vocabulary).astype(np.int64)
        for slot, request in enumerate(table.requests):
            if request.sampling.forced:
                tokens[slot] = ints(request.sampling.forced)[table.offsets[slot]]
        table.commit(tokens, logprobs)

    def fail(self, cause: Exception) -> None:
        """Die of `cause`."""
        self._failure = cause

    def submit(self, requests: Sequence[Request]) -> None:
        self._catch_up()
        self._table.submit(requests)

    def abort(self, keys: Iterable[RequestKey]) -> None:
        self._catch_up()
        self._table.abort(keys)
        self._table.remove_aborted()

    def release(self, keys: Iterable[RequestKey]) -> None:
        self._catch_up()
        self._table.release(keys)
        self._table.remove_aborted()

    def hint(self, completions: Iterable[tuple[int, Sequence[int]]]) -> None:
        """See `ports.Engine`; kept in `hints`."""
        self._catch_up()
        self.hints += [(sample, list(completion)) for sample, completion in completions]

    def set_images(self, key: RequestKey, images: Sequence[bytes] | str) -> None:
        """See `ports.Engine`; a request with images has ended with an error."""
        del key, images

    def take_emissions(self) -> list[Emission]:
        self._catch_up(allow_closed=True)
        return self._table.take_emissions()

    def stats(self) -> EngineStats:
        self._catch_up(allow_closed=True)
        return EngineStats(self._table.n, len(self._table.pending), self._table.generated_total, self._table.version)

    def running(self) -> set[RequestKey]:
        return {request.key for request in self._table.requests}

    async def load_weights(
        self, version: int, weights: StagedWeights, changes: Changes | None = None, *, keep_kv: bool = False
    ) -> list[str]:
        """See `ports.Engine`; accepts any tensors, and has no cache to keep."""
        del keep_kv
        self._catch_up()
        self.awake = True
        try:
            self._tensors.update(weights.tensors(None if changes is None else changes.names))
        except (Corrupt, UnsuitableWeights):
            self._table.begin_version(-1)
            raise
        self._table.begin_version(version)
        self.held.clear()
        return await run_in_thread("weights-verify", lambda: weights.differing(self._tensors.items()))

    async def differing(self, weights: StagedWeights) -> list[str]:
        self._catch_up()
        return weights.differing(self._tensors.items())

    def adapter_refusal(self, adapter: StagedAdapter) -> str:
        return self.adapter_refusals.get(adapter.rank, "")

    async def load_adapter(
        self, job_id: str, version: int, adapter: StagedAdapter | None, *, keep_kv: bool = False
    ) -> list[str]:
        """See `ports.AdapterEngine`; in `held`."""
        del keep_kv
        self._catch_up()
        self.awake = True
        self.held[job_id] = adapter
        self._table.begin_version(version, job_id)
        return [] if adapter is None else adapter.factors_differing(adapter.factors())

    async def unload_adapter(self, job_id: str) -> None:
        self._catch_up()
        self.held.pop(job_id, None)

    async def score(self, sequences: Sequences, temperature: float, job_id: str = "") -> list[list[float]]:
        del temperature, job_id  # of a uniform distribution
        self._catch_up()
        self.awake = True
        self.scored += 1
        return [[self.score_error - float(np.log(self.vocabulary))] * len(completion) for _, completion in sequences]

    async def sample(self, requests: Sequence[Request]) -> list[Emission]:
        self._catch_up()
        self.awake = True
        self.sampled += 1
        table = self._new_table()
        table.begin_version(self._table.version)
        table.submit(requests)
        while table.n or table.pending:
            self._step(table)
        emissions = table.take_emissions()
        for emission in emissions:
            emission.logprobs = [logprob + self.sample_error for logprob in emission.logprobs]
        return emissions

    async def suspend(self, *, keep_kv: bool = False) -> None:
        self._catch_up()
        self._suspended = True
        self.awake = self.awake and keep_kv

    async def resume(self) -> None:
        self._catch_up()
        self._suspended = False
        self.awake = True

    async def close(self) -> None:
        self._closed = True

    def _death(self) -> EngineFailed:
        return EngineFailed(f"the inference engine died: {self._failure!r}")

    def _catch_up(self, *, allow_closed: bool = False) -> None:
        """Raise if the engine is dead or closed; generate the tokens that are due by the clock."""
        if self._failure is not None:
            raise self._death() from self._failure
        if self._closed and not allow_closed:
            raise EngineClosed("the inference engine is closed")
        if self._interval_s is None:
            return
        now = self._clock()
        while self._last_tick_at + self._interval_s <= now:
            self._last_tick_at = self._last_tick_at + self._interval_s if self.tick() else now


class FakeEngineFactory:
    """`ports.EngineFactory` of `FakeEngine`s; the newest is `engine`."""

    def __init__(self, make: Callable[[], FakeEngine] = FakeEngine) -> None:
        self._make = make
        self.engine: FakeEngine | None = None
        self.built: list[str] = []

    def prepare(self) -> None:
        """See `EngineFactory`."""

    def build(self, config_json: str, tokenizer_json: str = "") -> FakeEngine:
        del tokenizer_json
        self.built.append(config_json)
        self.engine = self._make()
        return self.engine


class FakeAdapter:
    """`ports.StagedAdapter` without tensors."""

    scaling = 1.0
    targets: tuple[str, ...] = ()

    def __init__(self, rank: int = 1) -> None:
        self.rank = rank

    def factors(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        return iter(())

    def factors_differing(self, loaded: Iterable[tuple[str, torch.Tensor, torch.Tensor]]) -> list[str]:
        return [name for name, *_ in loaded]


class FakeStagedWeights:
    """`ports.StagedWeights` without tensors; the first `wrong_loads` loads fail verification.

    With `base` it is an adapter version.
    """

    def __init__(
        self,
        config_json: str = "{}",
        *,
        wrong_loads: int = 0,
        contents: Mapping[str, Hashable] | None = None,
        base: FakeStagedWeights | None = None,
        rank: int = 1,
    ) -> None:
        self._base, self._adapter = base, FakeAdapter(rank)
        self.config_json = config_json
        self.parity_reference: ParityReference | None = None
        self.wrong_loads = wrong_loads
        self.contents = contents or {}
        self.location: Mapping[str, str] = {}
        self.read: list[set[str]] = []
        """The tensor names requested by each load."""
        self.compared: list[set[str]] = []
        """The tensor names that were to be compared with loaded weights."""

    def unmerged(self) -> tuple[FakeStagedWeights, FakeAdapter | None]:
        return (self, None) if self._base is None else (self._base, self._adapter)

    def tensors(self, names: Container[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        self.read.append({name for name in self.contents if names is None or name in names})
        return iter(())

    def changed_words(self, since: StagedWeights, names: Container[str]) -> None:
        del since
        self.compared.append({name for name in self.contents if name in names})

    def differing(self, loaded: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        self.wrong_loads -= 1
        return ["model.norm.weight"] if self.wrong_loads >= 0 else list(dict(loaded))


class FakeWeights:
    """`ports.WeightSource` of the versions that a test has put into `versions`."""

    def __init__(self) -> None:
        self.versions: dict[tuple[str, int], FakeStagedWeights] = {}
        self.pulled: list[tuple[str, int]] = []
        self.unsigned: set[tuple[str, int]] = set()
        """Versions that the trainer has not signed."""
        self.credential = ""
        self.images: dict[str, bytes] = {}
        """The newest one."""
        self.verified_again = 0
        """Number of calls of `verify_cache_again`."""
        self.may_pull = asyncio.Event()
        """While not set, pulls block."""
        self.may_pull.set()

    async def pull(self, job_id: str, version: int) -> FakeStagedWeights:
        self.pulled.append((job_id, version))
        await self.may_pull.wait()
        if (job_id, version) in self.unsigned:
            raise BadSignature(f"version {version} of job {job_id} is not signed")
        try:
            return self.versions[job_id, version]
        except KeyError as error:
            raise NotFound(f"there is no version {version} of job {job_id}") from error

    def verify_cache_again(self) -> None:
        self.verified_again += 1

    async def image(self, digest: str, n_bytes: int) -> bytes:
        del n_bytes
        if digest not in self.images:
            raise NotFound(f"no chunk {digest}")
        return self.images[digest]

    async def tokenizer_json(self, job_id: str) -> str:
        del job_id
        return ""

    def renew_access(self, credential: str) -> None:
        self.credential = credential
