"""Fakes of `ports.py`, held to the same contract tests as the real adapters. No torch, no disk, no processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from services.trainer.domain.tokens import LossFn
from services.trainer.ports import Exported, Loaded, RankInfo, RewardBatch, Row, Scores, Snapshot, TrainState
from shared.columns import F32, I32, U8, unpack
from shared.errors import Conflict, Corrupt, Fatal, NotFound
from shared.weights.publisher import Shard

_PEFT = "base_model.model."
_PLACES = {"a.weight": slice(0, 2), "b.weight": slice(2, 4)}
_SUMS = ("loss", "clipped_low", "clipped_high", "abs_log_ratio", "kl", "mismatch_kl", "ratio", "most_ratio")


class FakeEngine:
    """A policy of four numbers, whose gradient is the sum of advantage x token over all completion tokens.

    It never calls the loss function, which wants torch's tensors.
    """

    rank = RankInfo()

    def __init__(self, adapter_json: str = "") -> None:
        """Start without a model; with `adapter_json` the four numbers are an adapter's, on a model of four others."""
        self.adapter_json = adapter_json
        self._base = np.zeros(0, F32)
        self._weights = np.zeros(0, F32)
        self._moment = np.zeros(0, F32)
        self._gradient = np.zeros(0, np.float64)
        self._tokens = 0
        self.rests = False
        """Whether it was told to rest since it last computed."""
        self.closed = False

    def load_hf(self, source: Path) -> None:
        """Begin with the same weights whatever the directory holds."""
        del source
        self._base = np.arange(5, 9, dtype=F32)
        self._weights = np.arange(1, 5, dtype=F32)
        self._moment = np.zeros(4, F32)
        self._gradient, self._tokens = np.zeros(4, np.float64), 0

    def logprobs(self, batches: Sequence[Sequence[Row]]) -> list[bytes]:
        """See `PolicyEngine.logprobs`."""
        self.rests = False
        return [np.full(row.n_trained, -1.0, F32).tobytes() for rows in batches for row in rows]

    def reference_logprobs(self, batches: Sequence[Sequence[Row]]) -> list[bytes]:
        """See `PolicyEngine.reference_logprobs`."""
        return [np.full(row.n_trained, -1.5, F32).tobytes() for rows in batches for row in rows]

    def values(self, batches: Sequence[Sequence[Row]]) -> list[bytes]:
        """See `Critic.values`."""
        return [np.full(row.n_trained, 0.5, F32).tobytes() for rows in batches for row in rows]

    def accumulate(self, batches: Sequence[Sequence[Row]], loss: LossFn) -> dict[str, float]:
        """See `PolicyEngine.accumulate`."""
        del loss
        self.rests = False
        before = self._tokens
        for row in (row for rows in batches for row in rows):
            tokens = unpack(row.completion, I32)
            if row.trained:
                tokens = tokens[unpack(row.trained, U8).astype(bool)]
            self._gradient += row.advantage * float(np.sum(tokens, dtype=np.int64)) * np.arange(1, 5)
            self._tokens += len(tokens)
        n_tokens = float(self._tokens - before)
        return {"tokens": n_tokens, "divisor": n_tokens, **dict.fromkeys(_SUMS, 0.0)}

    def step(self, learning_rate: float) -> float:
        """See `PolicyEngine.step`."""
        if not self._tokens:
            return 0.0
        mean = (self._gradient / self._tokens).astype(F32)
        self._gradient[:], self._tokens = 0.0, 0
        self._moment = (self._moment * F32.type(0.5) + mean).astype(F32)
        self._weights = (self._weights - F32.type(learning_rate) * self._moment).astype(F32)
        return float(np.linalg.norm(mean))

    def export_shards(self, what: Exported = "model") -> Iterator[Shard]:
        """See `PolicyEngine.export_shards`."""
        values = self._weights
        if self.adapter_json and what != "adapter":
            values = self._base if what == "base" else self._base + self._weights
        for name, part in (("a.weight", values[:2]), ("b.weight", values[2:])):
            yield Shard(_PEFT * (what == "adapter") + name, "float32", (2,), (0,), (2,), part.tobytes())

    def load_shards(self, shards: Iterable[Shard], what: Loaded = "base") -> None:
        """See `PolicyEngine.load_shards`."""
        places = {_PEFT * (what == "adapter") + name: at for name, at in _PLACES.items()}
        values = self._base if self.adapter_json and what == "base" else self._weights
        for shard in shards:
            if shard.name not in places or shard.local_shape != (2,):
                raise Fatal(f"tensor {shard.name} of shape {list(shard.local_shape)} does not belong to this model")
            values[places.pop(shard.name)] = np.frombuffer(shard.data, F32)
        if places:
            raise Fatal(f"the weights lack {len(places)} tensors of this model")

    def snapshot(self) -> Snapshot:
        """See `PolicyEngine.snapshot`."""
        text = json.dumps({"weights": self._weights.tolist(), "moment": self._moment.tolist()})

        def write(directory: Path) -> None:
            (directory / "fake.json").write_text(text, encoding="utf-8")

        return write

    def load(self, directory: Path) -> None:
        """See `PolicyEngine.load`."""
        self._gradient[:], self._tokens = 0.0, 0
        try:
            state = json.loads((directory / "fake.json").read_text(encoding="utf-8"))
            self._weights, self._moment = np.asarray(state["weights"], F32), np.asarray(state["moment"], F32)
        except (OSError, ValueError, KeyError) as error:
            raise Corrupt(f"checkpoint {directory} does not fit this model: {error}") from error

    def rest(self) -> None:
        """See `PolicyEngine.rest`."""
        self.rests = True

    def close(self) -> None:
        """See `PolicyEngine.close`."""
        self.closed = True


class FakeRewards:
    """A reward function in this process."""

    def __init__(self, function: Callable[[RewardBatch], Scores]) -> None:
        """Answer each group with `function`."""
        self._function = function
        self.closed = False

    async def start(self) -> None:
        """See `RewardFunction.start`."""

    async def score(self, batch: RewardBatch) -> Scores:
        """See `RewardFunction.score`."""
        return self._function(batch)

    async def close(self) -> None:
        """See `RewardFunction.close`."""
        self.closed = True


class MemoryWeights:
    """Committed versions in memory; hand the same one to a trainer's successor."""

    def __init__(self) -> None:
        """Start without a version."""
        self.versions: dict[int, list[Shard]] = {}
        self.adapters: dict[int, tuple[int, str]] = {}
        """Adapter version -> its base, and PEFT's configuration."""
        self.canaries: dict[int, str] = {}
        """Version -> the trainer's answer to the probe."""

    async def head(self) -> int:
        """See `WeightPublisher.head`."""
        return max(self.versions, default=-1)

    async def publish(
        self,
        version: int,
        shards: Iterable[Shard],
        *,
        expect: int,
        base_version: int | None = None,
        adapter_json: str = "",
        canary_json: str = "",
    ) -> None:
        """See `WeightPublisher.publish`."""
        if await self.head() != expect:
            raise Conflict(f"the head is {await self.head()}, not {expect}")
        self.versions[version] = _copies(shards)
        self.canaries[version] = canary_json
        if base_version is not None:
            self.adapters[version] = base_version, adapter_json

    async def equals(self, version: int, shards: Iterable[Shard]) -> bool | None:
        """See `WeightPublisher.equals`."""
        return _copies(shards) == self.versions[version] if version in self.versions else None

    async def fetch(self, version: int) -> Iterator[Shard]:
        """See `WeightPublisher.fetch`."""
        if version not in self.versions:
            raise NotFound(f"version {version} is no longer kept")
        return iter(self.versions[version])

    async def close(self) -> None:
        """See `WeightPublisher.close`."""


class MemoryCheckpoints:
    """The last two checkpoints, of which only the engine's files are on disk."""

    def __init__(self, folder: Path) -> None:
        """Let the engine write below `folder`."""
        self._folder = folder
        self._kept: list[tuple[TrainState, Path]] = []

    def save(self, state: TrainState, write: Snapshot) -> None:
        """See `CheckpointStore.save`."""
        directory = self._folder / str(state.step)
        directory.mkdir(parents=True, exist_ok=True)
        write(directory)
        self._kept = [*self._kept, (state, directory)][-2:]

    def newest(self) -> tuple[TrainState, Path] | None:
        """See `CheckpointStore.newest`."""
        return self._kept[-1] if self._kept else None

    def fallback(self) -> TrainState | None:
        """See `CheckpointStore.fallback`."""
        return self._kept[0][0] if len(self._kept) == 2 else None


class MemoryFolder:
    """What would be on disk."""

    def __init__(self) -> None:
        """Start empty."""
        self.rows: dict[int, dict[str, float]] = {}
        self.model: list[Shard] = []
        self.adapter: list[Shard] = []
        self.batches: dict[str, list[Row]] = {}
        self.troubles: dict[int, list[str]] = {}
        """Step -> what its loggers have to complain of."""

    def begin(self, spec_json: str, step: int) -> None:
        """See `RunFolder.begin`."""
        del spec_json
        self.rows = {number: row for number, row in self.rows.items() if number < step}

    def log_step(self, step: int, metrics: dict[str, float]) -> list[str]:
        """See `RunFolder.log_step`."""
        self.rows[step] = metrics
        return self.troubles.pop(step, [])

    def keep_batch(self, name: str, rows: Sequence[Row]) -> Path:
        """See `RunFolder.keep_batch`."""
        self.batches[name] = list(rows)
        return Path(name)

    def export(self, shards: Iterable[Shard]) -> Path:
        """See `RunFolder.export`."""
        self.model = _copies(shards)
        return Path("model")

    def export_adapter(self, shards: Iterable[Shard], adapter_json: str) -> Path:
        """See `RunFolder.export_adapter`."""
        del adapter_json
        self.adapter = _copies(shards)
        return Path("adapter")

    def close(self) -> list[str]:
        """See `RunFolder.close`."""
        return []


def _copies(shards: Iterable[Shard]) -> list[Shard]:
    return [shard._replace(data=bytes(shard.data)) for shard in shards]
