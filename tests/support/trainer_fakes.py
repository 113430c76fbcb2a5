"""Fakes of the ports, in memory: without torch, processes or tokenizer."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import numpy as np

from rlboost.services.trainer.domain.loss.function import LossFn
from rlboost.services.trainer.domain.plan import SequenceRow, TrainingRow
from rlboost.services.trainer.ports.engine import Exported, Loaded, Snapshot
from rlboost.services.trainer.ports.samples import (
    CallRecord,
    EnvironmentFault,
    ResetResult,
    RewardBatch,
    Scores,
    StepResult,
)
from rlboost.services.trainer.ports.storage import LoggedSample, RunEnd, TrainState
from rlboost.shared.errors import Conflict, Corrupt, Fatal, NotFound
from rlboost.shared.job.environment import Environment, Message
from rlboost.shared.job.run_profile import RunProfile
from rlboost.shared.weights.manifest import ChunkCopy, Shard, chunks_among, digest_of
from rlboost.shared.wire import F32, I32, U8, unpack

# --- A fake `PolicyEngine` without torch ------------------------------------------------------------------------------


_PEFT = "base_model.model."
_PLACES = {"a.weight": slice(0, 2), "b.weight": slice(2, 4)}
_SUMS = ("loss", "clipped_low", "clipped_high", "abs_log_ratio", "kl", "mismatch_kl", "ratio", "max_ratio")


class FakeEngine:
    """`PolicyEngine` of four numbers, whose gradient is the sum of advantage x token over all loss tokens.

    It never calls the loss function, which needs torch tensors.
    """

    def __init__(self, adapter_json: str = "") -> None:
        """Start without a model; with `adapter_json` the four numbers are an adapter's, on a model of four others."""
        self.adapter_json = adapter_json
        self._base = np.zeros(0, F32)
        self._weights = np.zeros(0, F32)
        self._moment = np.zeros(0, F32)
        self._gradient = np.zeros(0, np.float64)
        self._tokens = 0
        self.is_offloaded = False
        """Whether it was offloaded since it last computed."""
        self.closed = False
        self.profiles: list[Path] = []
        """The folders of profiles, each once when it starts and once when it is written."""

    def start_profile(self, folder: Path) -> list[str]:
        self.profiles.append(folder)
        return []

    def stop_profile(self) -> list[str]:
        self.profiles.append(self.profiles[-1])
        return ["rank 0: no trace"]

    def load_hf(self, source: Path) -> None:
        """Start from the same weights for any directory."""
        del source
        self._base = np.arange(5, 9, dtype=F32)
        self._weights = np.arange(1, 5, dtype=F32)
        self._moment = np.zeros(4, F32)
        self._gradient, self._tokens = np.zeros(4, np.float64), 0

    def logprobs(self, batches: Sequence[Sequence[SequenceRow]]) -> list[bytes]:
        self.is_offloaded = False
        return [np.full(row.n_loss_tokens, -1.0, F32).tobytes() for rows in batches for row in rows]

    def reference_logprobs(self, batches: Sequence[Sequence[SequenceRow]]) -> list[bytes]:
        return [np.full(row.n_loss_tokens, -1.5, F32).tobytes() for rows in batches for row in rows]

    def values(self, batches: Sequence[Sequence[SequenceRow]]) -> list[bytes]:
        return [np.full(row.n_loss_tokens, 0.5, F32).tobytes() for rows in batches for row in rows]

    def accumulate(self, batches: Sequence[Sequence[TrainingRow]], loss: LossFn) -> dict[str, float]:
        del loss
        self.is_offloaded = False
        before = self._tokens
        for row in (row for rows in batches for row in rows):
            tokens = unpack(row.completion, I32)
            if row.loss_mask:
                tokens = tokens[unpack(row.loss_mask, U8).astype(bool)]
            products = unpack(row.advantages, F32).astype(np.float64) * tokens.astype(np.float64)
            self._gradient += float(products.sum()) * np.arange(1, 5)
            self._tokens += len(tokens)
        n_tokens = float(self._tokens - before)
        return {"tokens": n_tokens, "divisor": n_tokens, **dict.fromkeys(_SUMS, 0.0)}

    def step(self, learning_rate: float) -> float:
        if not self._tokens:
            return 0.0
        mean = (self._gradient / self._tokens).astype(F32)
        self._gradient[:], self._tokens = 0.0, 0
        self._moment = (self._moment * F32.type(0.5) + mean).astype(F32)
        self._weights = (self._weights - F32.type(learning_rate) * self._moment).astype(F32)
        return float(np.linalg.norm(mean))

    def export_shards(self, what: Exported = "model") -> Iterator[Shard]:
        values = self._weights
        if self.adapter_json and what != "adapter":
            values = self._base if what == "base" else self._base + self._weights
        for name, part in (("a.weight", values[:2]), ("b.weight", values[2:])):
            yield Shard(_PEFT * (what == "adapter") + name, "float32", (2,), (0,), (2,), part.tobytes())

    def load_shards(self, shards: Iterable[Shard], what: Loaded = "base") -> None:
        places = {_PEFT * (what == "adapter") + name: at for name, at in _PLACES.items()}
        values = self._base if self.adapter_json and what == "base" else self._weights
        for shard in shards:
            if shard.name not in places or shard.local_shape != (2,):
                raise Fatal(f"tensor {shard.name} of shape {list(shard.local_shape)} does not belong to this model")
            values[places.pop(shard.name)] = np.frombuffer(shard.data, F32)
        if places:
            raise Fatal(f"the weights lack {len(places)} tensors of this model")

    def snapshot(self) -> Snapshot:
        text = json.dumps({"weights": self._weights.tolist(), "moment": self._moment.tolist()})

        def write(directory: Path) -> None:
            (directory / "fake.json").write_text(text, encoding="utf-8")

        return write

    def drop_snapshot(self) -> None:
        """See `PolicyEngine.drop_snapshot`."""

    def load(self, directory: Path) -> None:
        self._gradient[:], self._tokens = 0.0, 0
        try:
            state = json.loads((directory / "fake.json").read_text(encoding="utf-8"))
            self._weights, self._moment = np.asarray(state["weights"], F32), np.asarray(state["moment"], F32)
        except (OSError, ValueError, KeyError) as error:
            raise Corrupt(f"checkpoint {directory} does not fit this model: {error}") from error

    def offload(self) -> None:
        self.is_offloaded = True

    def close(self) -> None:
        self.closed = True


# --- Fakes of environments and of their chat formatter, without processes and tokenizer -------------------------------


class FakeEnvironments:
    """Environments in this process."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        """Create an environment with `make` for each conversation."""
        self._make = make
        self._held: dict[int, tuple[Environment, int]] = {}
        self.n_made = 0
        self.closed = False

    async def start(self) -> None:
        """See `Environments.start`."""

    def record_calls(self, record: CallRecord) -> None:
        """Record nothing: priced models are called in processes of environments only."""

    async def reset(self, row: dict[str, Any], seed: int) -> ResetResult:
        environment = self._make()
        prompt = await self._call(environment.reset, row, seed)
        return ResetResult(prompt, list(getattr(environment, "tools", ())))

    async def step(
        self,
        conversation: int,
        row: dict[str, Any],
        seed: int,
        texts: Sequence[str],
        texts_raw: Sequence[str] | None = None,
        in_thought: Sequence[bool] | None = None,
    ) -> list[StepResult]:
        """See `Environments.step`; environments get no raw texts."""
        del texts_raw, in_thought
        if conversation not in self._held:
            environment = self._make()
            self.n_made += 1
            await self._call(environment.reset, row, seed)
            self._held[conversation] = environment, 0
        environment, n_heard = self._held[conversation]
        steps = [await self._call(environment.step, text) for text in texts[n_heard:]]
        self._held[conversation] = environment, len(texts)
        return [StepResult(step.observation, step.reward, step.done, step.warning, step.cost) for step in steps]

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            result = function(*arguments)
            return await result if inspect.isawaitable(result) else result
        except Exception as error:
            raise EnvironmentFault("raised", f"{type(error).__name__}: {error}") from error

    def release(self, conversation: int) -> None:
        self._held.pop(conversation, None)

    def stop(self, conversation: int) -> None:
        """See `Environments.stop`; no call runs while this is called."""
        self.release(conversation)

    @property
    def held(self) -> int:
        """Return how many environments are held."""
        return len(self._held)

    async def close(self) -> None:
        self.closed = True


class FakeChatFormatter:
    """`ChatFormatter` whose words are token ids."""

    max_length: int | None = None

    def format_prompt(
        self, prompt: Message, tools: Sequence[dict[str, Any]], columns: Mapping[str, Any] | None = None
    ) -> list[int]:
        del tools, columns
        return _ids(prompt)

    def format_observation(
        self,
        prompt: Message,
        last: int,
        observation: Message,
        tools: Sequence[dict[str, Any]],
        columns: Mapping[str, Any] | None = None,
    ) -> list[int]:
        del prompt, last, tools, columns
        return _ids(observation)


def _ids(text: Message) -> list[int]:
    if not isinstance(text, str) or not all(word.isdigit() for word in text.split()):
        raise EnvironmentFault("unformattable", f"{text!r} has words that are not token ids")
    return [int(word) for word in text.split()]


# --- A fake `RewardFunction` without processes ------------------------------------------------------------------------


class FakeRewards:
    """`RewardFunction` in this process."""

    def __init__(self, function: Callable[[RewardBatch], Scores]) -> None:
        self._function = function
        self.closed = False

    async def start(self) -> None:
        """See `RewardFunction.start`."""

    async def score(self, batch: RewardBatch) -> Scores:
        if not batch.verdicts:
            return self._function(batch)
        (given,) = batch.verdicts.values()
        rewards = tuple(verdict.reward for verdict in given if verdict.reward is not None)
        return Scores(rewards) if len(rewards) == len(given) else Scores(None, "missing", given[0].problem)

    async def close(self) -> None:
        self.closed = True


# --- Fakes of checkpoints, published weights and the run folder, in memory --------------------------------------------


class MemoryWeights:
    """`WeightPublisher` to memory; hand the same one to a trainer's successor."""

    def __init__(self) -> None:
        self.versions: dict[int, list[Shard]] = {}
        self.adapters: dict[int, tuple[int, str]] = {}
        """Adapter version -> its base, and PEFT's configuration."""
        self.parity_references: dict[int, str] = {}
        """Version -> its parity reference, as JSON."""
        self.lost: set[str] = set()
        """Digests of lost chunks."""

    async def head(self) -> int:
        return max(self.versions, default=-1)

    async def publish(
        self,
        version: int,
        shards: Iterable[Shard],
        *,
        expect: int,
        epoch: int | None = None,
        base_version: int | None = None,
        adapter_json: str = "",
        parity_json: str = "",
    ) -> None:
        del epoch
        if await self.head() != expect:
            raise Conflict(f"the head is {await self.head()}, not {expect}")
        self.versions[version] = _copies(shards)
        self.parity_references[version] = parity_json
        if base_version is not None:
            self.adapters[version] = base_version, adapter_json

    async def equals(self, version: int, shards: Iterable[Shard]) -> bool | None:
        return _copies(shards) == self.versions[version] if version in self.versions else None

    async def digest(self, version: int, shards: Iterable[Shard]) -> str:
        tensors = self.versions[version] if version in self.versions else _copies(shards)
        return digest_of(b"".join(bytes(shard.data) for shard in tensors))

    async def damaged(self) -> frozenset[str]:
        return frozenset(self.lost)

    def chunks_among(self, shards: Iterable[Shard], digests: AbstractSet[str]) -> list[ChunkCopy]:
        return chunks_among(shards, digests)

    async def restore(self, chunks: Sequence[ChunkCopy]) -> None:
        self.lost -= {ref.digest for ref, _ in chunks}

    async def fetch(self, version: int) -> Iterator[Shard]:
        if version not in self.versions:
            raise NotFound(f"version {version} is no longer retained")
        return iter(self.versions[version])

    async def close(self) -> None:
        """See `WeightPublisher.close`."""


class MemoryCheckpoints:
    """`CheckpointStore` of the last two checkpoints; only the engine's files are on disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._retained: list[tuple[TrainState, Path]] = []

    def save(self, state: TrainState, write: Snapshot) -> None:
        directory = self._folder / str(state.step)
        directory.mkdir(parents=True, exist_ok=True)
        write(directory)
        self._retained = [*self._retained, (state, directory)][-2:]

    def newest(self) -> tuple[TrainState, Path] | None:
        return self._retained[-1] if self._retained else None

    def fallback(self) -> TrainState | None:
        return self._retained[0][0] if len(self._retained) == 2 else None

    def progress(self) -> str:
        return ""


class MemoryFolder:
    """`RunFolder` in memory."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}
        self.model: list[Shard] = []
        self.adapter: list[Shard] = []
        self.end: RunEnd | None = None
        self.batches: dict[str, list[TrainingRow]] = {}
        self.profile: RunProfile | None = None
        self.samples: dict[int, list[LoggedSample]] = {}
        self.troubles: dict[int, list[str]] = {}
        """Step -> problems that its loggers report."""
        self.recorded: dict[int, tuple[bytes, str]] = {}
        """Step -> its packed groups, and the digest of the weights that it trained."""
        self.ended_with: str | None = None
        """Digest of the last weights, once the record has ended."""

    def begin(self, spec_json: str, step: int, data_digest: str = "") -> None:
        del spec_json, data_digest
        self.rows = {number: row for number, row in self.rows.items() if number < step}

    def log_step(self, step: int, metrics: dict[str, float], samples: Sequence[LoggedSample] = ()) -> list[str]:
        self.rows[step] = metrics
        self.samples[step] = list(samples)
        return self.troubles.pop(step, [])

    def path_of(self, name: str) -> Path:
        return Path(name)

    def record_step(self, step: int, metrics: dict[str, float], groups: bytes, weights: str) -> None:
        assert self.rows[step] == metrics
        self.recorded[step] = groups, weights

    def record_end(self, weights: str) -> None:
        self.ended_with = weights

    def write_profile(self, profile: RunProfile) -> None:
        self.profile = profile

    def dump_batch(self, name: str, rows: Sequence[TrainingRow]) -> Path:
        self.batches[name] = list(rows)
        return Path(name)

    def export(self, shards: Iterable[Shard]) -> Path:
        self.model = _copies(shards)
        return Path("model")

    def export_adapter(self, shards: Iterable[Shard], adapter_json: str) -> Path:
        del adapter_json
        self.adapter = _copies(shards)
        return Path("adapter")

    def close(self, end: RunEnd) -> list[str]:
        self.end = end
        return []


def _copies(shards: Iterable[Shard]) -> list[Shard]:
    return [shard._replace(data=bytes(shard.data)) for shard in shards]
