"""Fakes of checkpoints, published weights and the run folder, in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from rlboost.services.trainer.domain.batches.training_row import TrainingRow
from rlboost.services.trainer.ports.engine import Snapshot
from rlboost.services.trainer.ports.storage import TrainState
from rlboost.shared.errors import Conflict, NotFound
from rlboost.shared.job.run_profile import RunProfile
from rlboost.shared.weights.shards import ChunkCopy, Shard, chunks_among


class MemoryWeights:
    """Committed versions in memory; hand the same one to a trainer's successor."""

    def __init__(self) -> None:
        """Start without a version."""
        self.versions: dict[int, list[Shard]] = {}
        self.adapters: dict[int, tuple[int, str]] = {}
        """Adapter version -> its base, and PEFT's configuration."""
        self.parity_references: dict[int, str] = {}
        """Version -> its parity reference, as JSON."""
        self.lost: set[str] = set()
        """Digests of lost chunks."""

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
        parity_json: str = "",
    ) -> None:
        """See `WeightPublisher.publish`."""
        if await self.head() != expect:
            raise Conflict(f"the head is {await self.head()}, not {expect}")
        self.versions[version] = _copies(shards)
        self.parity_references[version] = parity_json
        if base_version is not None:
            self.adapters[version] = base_version, adapter_json

    async def equals(self, version: int, shards: Iterable[Shard]) -> bool | None:
        """See `WeightPublisher.equals`."""
        return _copies(shards) == self.versions[version] if version in self.versions else None

    async def damaged(self) -> frozenset[str]:
        """See `WeightPublisher.damaged`."""
        return frozenset(self.lost)

    def chunks_among(self, shards: Iterable[Shard], digests: AbstractSet[str]) -> list[ChunkCopy]:
        """See `WeightPublisher.chunks_among`."""
        return chunks_among(shards, digests)

    async def restore(self, chunks: Sequence[ChunkCopy]) -> None:
        """See `WeightPublisher.restore`."""
        self.lost -= {ref.digest for ref, _ in chunks}

    async def fetch(self, version: int) -> Iterator[Shard]:
        """See `WeightPublisher.fetch`."""
        if version not in self.versions:
            raise NotFound(f"version {version} is no longer retained")
        return iter(self.versions[version])

    async def close(self) -> None:
        """See `WeightPublisher.close`."""


class MemoryCheckpoints:
    """The last two checkpoints; only the engine's files are on disk."""

    def __init__(self, folder: Path) -> None:
        """Write the engine's files below `folder`."""
        self._folder = folder
        self._retained: list[tuple[TrainState, Path]] = []

    def save(self, state: TrainState, write: Snapshot) -> None:
        """See `CheckpointStore.save`."""
        directory = self._folder / str(state.step)
        directory.mkdir(parents=True, exist_ok=True)
        write(directory)
        self._retained = [*self._retained, (state, directory)][-2:]

    def newest(self) -> tuple[TrainState, Path] | None:
        """See `CheckpointStore.newest`."""
        return self._retained[-1] if self._retained else None

    def fallback(self) -> TrainState | None:
        """See `CheckpointStore.fallback`."""
        return self._retained[0][0] if len(self._retained) == 2 else None

    def progress(self) -> str:
        """See `CheckpointStore.progress`."""
        return ""


class MemoryFolder:
    """A run folder in memory."""

    def __init__(self) -> None:
        """Start empty."""
        self.rows: dict[int, dict[str, float]] = {}
        self.model: list[Shard] = []
        self.adapter: list[Shard] = []
        self.batches: dict[str, list[TrainingRow]] = {}
        self.profile: RunProfile | None = None
        self.troubles: dict[int, list[str]] = {}
        """Step -> problems that its loggers report."""

    def begin(self, spec_json: str, step: int) -> None:
        """See `RunFolder.begin`."""
        del spec_json
        self.rows = {number: row for number, row in self.rows.items() if number < step}

    def log_step(self, step: int, metrics: dict[str, float]) -> list[str]:
        """See `RunFolder.log_step`."""
        self.rows[step] = metrics
        return self.troubles.pop(step, [])

    def write_profile(self, profile: RunProfile) -> None:
        """See `RunFolder.write_profile`."""
        self.profile = profile

    def dump_batch(self, name: str, rows: Sequence[TrainingRow]) -> Path:
        """See `RunFolder.dump_batch`."""
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
