"""What a job works with, and what outlives the process: checkpoints, published weights, the run's folder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from rlboost.services.trainer.domain.canary_prompts import CanaryPrompts
from rlboost.services.trainer.domain.curriculum import SkipFunction
from rlboost.services.trainer.domain.loss.function import LossFn
from rlboost.services.trainer.domain.metrics import UNKNOWN_HARDWARE, TrainingHardware
from rlboost.services.trainer.domain.plan import TrainingRow
from rlboost.services.trainer.ports.engine import Critic, PolicyEngine, Snapshot
from rlboost.services.trainer.ports.samples import Data, Environments, RewardFunction
from rlboost.shared.job.agent import SessionId
from rlboost.shared.job.run_profile import RunProfile
from rlboost.shared.streams.bus import START
from rlboost.shared.weights.manifest import ChunkCopy, Shard
from rlboost.shared.wire import RoutedShape

# --- What outlives the trainer process: checkpoints, published weights, and the folder of a run -----------------------


@dataclass(frozen=True, slots=True)
class TrainState:
    """The position of a job: with its weights, enough to resume as if it had not been interrupted."""

    step: int
    """The next step to train; the checkpoint's weights are of this version."""
    finished_cursor: str
    """Position in `rollouts.finished` before the first entry that this step or a later one needs."""
    train_rows: int
    """Number of training prompts. With the job's seed and the step it determines which prompts come next."""
    read_cursor: str = START
    """Position up to which `rollouts.finished` was read. Entries between the two positions may be of earlier steps."""
    data_digest: str = ""
    """Digest of the training prompts, see `job.checkpoints.fingerprint`; empty: not checked."""


class LoggedSample(NamedTuple):
    """A sample as the job's loggers show it."""

    step: int
    prompt: str
    completion: str
    reward: float


class CheckpointStore(Protocol):
    """Checkpoints of one job; a checkpoint is stored whole or not at all. All calls block, one at a time."""

    def save(self, state: TrainState, write: Snapshot) -> None:
        """Store a checkpoint, then delete all but the newest ones; if this raises, the earlier ones are unchanged.

        Args:
            state: the job's position.
            write: writes the engine's files into the directory it is given.

        Raises:
            DiskFull: there is no space; the same call may be repeated.
            Fatal: it cannot be written for another reason.

        """

    def newest(self) -> tuple[TrainState, Path] | None:
        """Return the newest checkpoint that verifies, None if there is none. Corrupt ones are skipped with a warning.

        Its files stay in the directory until the next call of `save`.

        Raises:
            ConfigError: the location of the checkpoints cannot be used.
            Corrupt: there are checkpoints, and none verifies.
            StoreUnavailable: the store did not answer in time.

        """

    def fallback(self) -> TrainState | None:
        """Return the oldest retained checkpoint once the store is full: entries before its position are not needed."""

    def progress(self) -> str:
        """Return how far the transfer of a checkpoint is, empty if there is none; callable at any time."""


class Images(Protocol):
    """The images of a job's prompts in the weight store. Both methods retry while it is unavailable."""

    async def upload(self, step: int, images: Iterable[tuple[str, int]]) -> None:
        """Upload images of prompts of a step, (digest, bytes) each, that the store lacks."""

    async def renew(self, step: int) -> None:
        """Keep the images of a step and of later ones in the store for another hour."""


class WeightPublisher(Protocol):
    """One job's weights in the weight store.

    Every method retries while the store is unavailable, and raises `WaitTimedOut` once its limit has passed.
    """

    async def head(self) -> int:
        """Return the newest committed version, -1 before the first."""

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
        """Commit the shards as `version`, if the head is `expect`.

        Args:
            version: the weight version.
            shards: the tensors.
            expect: the head before the commit.
            epoch: of the trainer's lease on the job, which it must still hold; None: not checked.
            base_version: for an adapter, the version of its base model, which is retained as long as this one.
            adapter_json: for an adapter, PEFT's `adapter_config.json`.
            parity_json: what workers must reproduce, see `ParityReference`.

        Raises:
            Conflict: another version is the head, or another trainer holds the job.

        """

    async def equals(self, version: int, shards: Iterable[Shard]) -> bool | None:
        """Return True if a committed version holds exactly these tensors; None if it is no longer retained."""

    async def digest(self, version: int, shards: Iterable[Shard]) -> str:
        """Return a digest of the tensors of a committed version, of `shards` if it is no longer retained."""

    async def damaged(self) -> frozenset[str]:
        """Return the digests of chunks that the store has lost and workers ask for, also those of other jobs.

        Empty while the store is unavailable.
        """

    def chunks_among(self, shards: Iterable[Shard], digests: AbstractSet[str]) -> list[ChunkCopy]:
        """Return copies of the chunks of the engine's shards that have these digests. Runs in the device's thread."""

    async def restore(self, chunks: Sequence[ChunkCopy]) -> None:
        """Upload chunks again."""

    async def fetch(self, version: int) -> Iterator[Shard]:
        """Download a committed version and return its tensors, which are read while they are iterated.

        Raises:
            NotFound: it is no longer retained.
            Corrupt: it does not verify.

        """

    async def close(self) -> None:
        """Release connections."""


RunEnd = Literal["completed", "failed", "cancelled", "stopped"]
"""How a process ends its run of a job; `stopped`: another one continues it."""


class RunFolder(Protocol):
    """The files of a job that people read. All calls block.

    All but `dump_batch` and `close` raise `DiskFull` if there is no space; the same call may then be repeated.
    """

    def begin(self, spec_json: str, step: int, data_digest: str = "") -> None:
        """Write the resolved job file; delete metrics of `step` and later, which will be trained again.

        The run's record names the job file and the digest of the training prompts.
        """

    def log_step(self, step: int, metrics: dict[str, float], samples: Sequence[LoggedSample] = ()) -> list[str]:
        """Append a row to the run log, and pass it to the job's loggers, with some of its samples.

        Returns:
            New problems of the loggers, each once.

        """

    def path_of(self, name: str) -> Path:
        """Return where a file or folder of this name is, or may be written by others."""

    def record_step(self, step: int, metrics: dict[str, float], groups: bytes, weights: str) -> None:
        """Add a step to the run's record, once its row is in the run log.

        Args:
            step: number of the step.
            metrics: that row.
            groups: its samples, as `shared.job.run_record.pack_groups` returns them; empty if none were generated.
            weights: digest of the weights that it trained (`WeightPublisher.digest`); empty if it published none.

        """

    def record_end(self, weights: str) -> None:
        """End the run's record, once the final model is written; `weights` is the digest of its last version."""

    def write_profile(self, profile: RunProfile) -> None:
        """Replace the run's measurements."""

    def dump_batch(self, name: str, rows: Sequence[TrainingRow]) -> Path:
        """Write rows with a non-finite loss into a file of this name, for debugging, and return its path."""

    def export(self, shards: Iterable[Shard]) -> Path:
        """Write the final model as a Hugging Face directory and return its path."""

    def export_adapter(self, shards: Iterable[Shard], adapter_json: str) -> Path:
        """Write the final adapter as a PEFT directory and return its path."""

    def close(self, end: RunEnd) -> list[str]:
        """Tell the loggers how the run ends, and flush them, for some seconds at most.

        Returns:
            As `log_step`.

        """


# --- Other models of a job, which workers serve alongside its own -----------------------------------------------------


class ChatTokenizer(Protocol):
    """The tokenizer and chat template of a judge."""

    stop_token_ids: tuple[int, ...]
    vocab_size: int
    """Number of token ids of the model."""

    def question(self, text: str, max_tokens: int) -> bytes:
        """Return the tokens of a user's message, up to where the answer begins; an int32 column.

        Args:
            text: the message.
            max_tokens: of the answer.

        Raises:
            ConfigError: the model would not see the text as it is, or has too few positions.

        """

    def decode(self, tokens: bytes) -> str:
        """Return the text of an int32 column, without special tokens."""


class ScoreTokenizer(Protocol):
    """How a reward model that workers serve is asked: for the log-probability of one token after a conversation."""

    digest: str
    """Of its weights."""
    forced: bytes
    """That token, an int32 column."""
    vocab_size: int
    """Number of token ids of the model."""

    def conversation(self, prompt: Any, completion: Any, columns: Mapping[str, Any]) -> bytes:
        """Return the tokens of a prompt and its completion, in the form of `RewardBatch`; an int32 column.

        Args:
            prompt: text or messages.
            completion: likewise.
            columns: of the row.

        Raises:
            ConfigError: the model would not see them as they are, or has too few positions.

        """

    def score(self, logprobs: bytes) -> float | None:
        """Return the score that a float32 column of one log-probability means; None if it is too large to tell."""


@dataclass(frozen=True, slots=True)
class OtherModel:
    """Another model of a job."""

    job_id: str
    """Id of the job that serves it."""
    weights: WeightPublisher
    shards: Callable[[], Iterable[Shard]]
    """Reads its tensors."""
    chat: ChatTokenizer | None = None
    """Set if it is a judge."""
    scores: ScoreTokenizer | None = None
    """Set if it is a reward model."""


# --- The resources of one job -----------------------------------------------------------------------------------------


class Machines(Protocol):
    """The machines that a job's engine runs on, if they are not the trainer's own."""

    async def gather(self) -> None:
        """Wait until enough of them have joined. Call it before the engine loads.

        Raises:
            WaitTimedOut: too few have joined.

        """


@dataclass(frozen=True, slots=True)
class JobResources:
    """The engine, data, user code and storage of one job."""

    engine: PolicyEngine
    model: Path
    """The Hugging Face directory of the base model."""
    loss: LossFn
    data: Data
    rewards: RewardFunction
    checkpoints: CheckpointStore
    weights: WeightPublisher
    folder: RunFolder
    critic: Critic | None = None
    """The engine, if it has a critic."""
    environments: Environments | None = None
    """Set if samples are conversations; for an agent, one that runs it (`shared.job.agent`)."""
    session_key: Callable[[SessionId], str] | None = None
    """Returns the API key of a session of an agent; set if the job has one."""
    predecessor: Callable[[], tuple[TrainState, Path]] | None = None
    """Finds the checkpoint of another job that this one starts from (`trainer.resume` names it). Raises `ConfigError`
    if there is none."""
    hardware: TrainingHardware = UNKNOWN_HARDWARE
    machines: Machines | None = None
    """Set if `trainer.nodes` is more than 1."""
    skip_function: SkipFunction | None = None
    """`data.curriculum.function`, if there is one."""
    canary_prompts: CanaryPrompts | None = None
    """The input of the parity check that each version is published with; None: workers skip the check."""
    models: Mapping[str, OtherModel] = field(default_factory=dict)
    """Name -> another model of the job."""
    images: Images | None = None
    """Set if prompts have images."""
    replayed: RoutedShape | None = None
    """Shape of the routed experts that training replays; None: routers decide again (`trainer.router_replay`)."""
