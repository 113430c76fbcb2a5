"""A fake of `ports.Engine`, held to the same contract tests as the real ones. No inference library."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from services.rollout_worker.adapters.rows import Rows
from services.rollout_worker.domain.kv_room import Room
from services.rollout_worker.domain.uniforms import uniforms
from services.rollout_worker.ports import Emission, EngineFailed, EngineStats, Key, Request, Sequences
from shared.canary import Canary
from shared.errors import Fatal, NotFound

if TYPE_CHECKING:
    import torch


class FakeEngine:
    """An engine whose token at offset o is a hash of (seed, o), whatever the prompt and the weights.

    Args:
        slots: how many requests run at once.
        vocabulary: tokens are 0..vocabulary-1, equally likely.
        max_len: of prompt and completion.
        interval_s: each running request gets a token in every interval of the clock; None = only when `tick` is called.
        clock: seconds.
        room: of the KV cache that it might have; None = for every slot.

    """

    def __init__(
        self,
        slots: int = 8,
        *,
        vocabulary: int = 128,
        max_len: int = 4096,
        interval_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        room: Room | None = None,
    ) -> None:
        self.slots = slots
        self.kv_tokens = room.tokens if room else 0
        self.kv_row_tokens = room.max_len if room else 0
        self.kv_page_tokens = 0
        self.scored = 0
        """How often it was asked to score."""
        self.awake = False
        """Whether it has taken the memory of its device, if it had one."""
        self.says = 0.0
        """How far from the truth its scores are."""
        self.vocabulary = vocabulary
        self._rows = Rows(slots, max_len, vocabulary, room)
        self._tensors: dict[str, torch.Tensor] = {}
        self._suspended = False
        self._interval_s = interval_s
        self._clock = clock
        self._last_tick_at = clock()
        self._ended = asyncio.Event()
        self._closed = False
        self._failure: Exception | None = None

    def tick(self) -> bool:
        """Make one token for each running request; False when there was nothing to do."""
        if self._suspended or self._closed or self._rows.version < 0 or not (self._rows.n or self._rows.pending):
            return False
        self._rows.admit(budget_tokens=1 << 30)
        drawn = uniforms(self._rows.seeds, self._rows.offsets)
        logprobs = np.full(self._rows.n, -np.log(self.vocabulary), np.float32)
        self._rows.commit((drawn * self.vocabulary).astype(np.int64), logprobs)
        return True

    def fail(self, cause: Exception) -> None:
        """Die of `cause`."""
        self._failure = cause
        self._ended.set()

    def submit(self, requests: Sequence[Request]) -> None:
        """See `ports.Engine`."""
        self._catch_up()
        self._rows.submit(requests)

    def abort(self, keys: Iterable[Key]) -> None:
        """See `ports.Engine`."""
        self._catch_up()
        self._rows.abort(keys)
        self._rows.retire_aborted()

    def release(self, keys: Iterable[Key]) -> None:
        """See `ports.Engine`."""
        self._catch_up()
        self._rows.release(keys)
        self._rows.retire_aborted()

    def drain(self) -> list[Emission]:
        """See `ports.Engine`."""
        self._catch_up(closed_is_fine=True)
        return self._rows.drain()

    def stats(self) -> EngineStats:
        """See `ports.Engine`."""
        self._catch_up(closed_is_fine=True)
        return EngineStats(self._rows.n, len(self._rows.pending), self._rows.made_total, self._rows.version)

    def running(self) -> set[Key]:
        """See `ports.Engine`."""
        return {request.key for request in self._rows.requests}

    async def load_weights(
        self, version: int, tensors: Iterable[tuple[str, torch.Tensor]], *, keep_kv: bool = False
    ) -> None:
        """See `ports.Engine`; any tensors will do, and there is no cache to keep."""
        del keep_kv
        self._catch_up()
        self.awake = True
        self._tensors.update(tensors)
        self._rows.begin_version(version)

    def loaded_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `ports.Engine`."""
        return iter(self._tensors.items())

    async def score(self, sequences: Sequences, temperature: float) -> list[list[float]]:
        """See `ports.Engine`."""
        del temperature  # of a uniform distribution
        self._catch_up()
        self.awake = True
        self.scored += 1
        return [[self.says - float(np.log(self.vocabulary))] * len(completion) for _, completion in sequences]

    async def suspend(self, *, keep_kv: bool = False) -> None:
        """See `ports.Engine`."""
        self._catch_up()
        self._suspended = True
        self.awake = self.awake and keep_kv

    async def resume(self) -> None:
        """See `ports.Engine`."""
        self._catch_up()
        self._suspended = False
        self.awake = True

    async def close(self) -> None:
        """See `ports.Engine`."""
        self._closed = True
        self._ended.set()

    async def wait_failed(self) -> None:
        """See `ports.Engine`."""
        await self._ended.wait()
        if self._failure is not None:
            raise self._death() from self._failure

    def _death(self) -> EngineFailed:
        return EngineFailed(f"the inference engine died: {self._failure!r}")

    def _catch_up(self, *, closed_is_fine: bool = False) -> None:
        """Raise if the engine is no more; make the tokens that are due by the clock."""
        if self._failure is not None:
            raise self._death() from self._failure
        if self._closed and not closed_is_fine:
            raise Fatal("the inference engine is closed")
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

    def build(self, config_json: str) -> FakeEngine:
        """See `EngineFactory`."""
        self.built.append(config_json)
        self.engine = self._make()
        return self.engine


class FakeStagedWeights:
    """`ports.StagedWeights` without tensors; the first `wrong_loads` loads turn out not to be what was published."""

    def __init__(
        self, config_json: str = "{}", *, wrong_loads: int = 0, contents: Mapping[str, Hashable] | None = None
    ) -> None:
        self.config_json = config_json
        self.canary: Canary | None = None
        self.wrong_loads = wrong_loads
        self.contents = contents or {}
        self.read: list[set[str]] = []
        """The names whose tensors were asked for, load by load."""

    def tensors(self, names: Container[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """See `StagedWeights`."""
        self.read.append({name for name in self.contents if names is None or name in names})
        return iter(())

    def differing(self, loaded: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """See `StagedWeights`."""
        self.wrong_loads -= 1
        return ["model.norm.weight"] if self.wrong_loads >= 0 else list(dict(loaded))


class FakeWeights:
    """`ports.WeightSource` that has what a test has put into `versions`."""

    def __init__(self) -> None:
        self.versions: dict[tuple[str, int], FakeStagedWeights] = {}
        self.pulled: list[tuple[str, int]] = []
        self.may_come = asyncio.Event()
        """While not set, pulls take for ever."""
        self.may_come.set()

    async def pull(self, job_id: str, version: int) -> FakeStagedWeights:
        """See `WeightSource`."""
        self.pulled.append((job_id, version))
        await self.may_come.wait()
        try:
            return self.versions[job_id, version]
        except KeyError as error:
            raise NotFound(f"there is no version {version} of job {job_id}") from error
