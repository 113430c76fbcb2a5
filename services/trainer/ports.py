"""What only the trainer needs from the world. Importing this module imports neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from services.trainer.domain.canary import Probe
from services.trainer.domain.curriculum import Judge
from services.trainer.domain.row import Row as Row  # noqa: PLC0414 - the engine's port speaks of it: exported
from services.trainer.domain.tokens import LossFn
from services.trainer.domain.utilization import UNKNOWN_MACHINE, Machine
from services.trainer.ports_environment import Environments, Speech
from shared.bus import START
from shared.errors import Fatal
from shared.jobspec import JobSpec
from shared.weights.publisher import Shard

# --- the model --------------------------------------------------------------------------------------------------------


class RankInfo(NamedTuple):
    """A process's place among those that train one model together."""

    dp_rank: int = 0
    dp_size: int = 1
    is_output_rank: bool = True
    """True where `logprobs` and the metrics of `accumulate` come out (the last pipeline stage)."""


Exported = Literal["model", "base", "adapter"]
"""The model as it is, an adapter merged into it; the model below the adapter; the adapter. Without an adapter the
first two are the same, and there is no third."""
Loaded = Literal["base", "adapter"]
Snapshot = Callable[[Path], None]
"""Writes what was captured into an existing directory: once, in any thread, whatever the engine does meanwhile. Raises
`OSError` where that cannot be."""


class NotFinite(Fatal):
    """A loss, or the gradients that came of it, are no numbers; the weights are as they were."""


class PolicyEngine(Protocol):
    """The model being trained, with its optimizer. All calls block and come from one thread.

    Forward and backward are never exposed apart: with pipeline parallelism the engine's schedule owns backward.
    """

    rank: RankInfo

    @property
    def adapter_json(self) -> str:
        """PEFT's `adapter_config.json` where an adapter is trained and the model itself is frozen, else empty."""

    def load_hf(self, source: Path) -> None:
        """Load a Hugging Face model directory; the adapter, where there is one, and the optimizer start anew.

        Raises:
            ConfigError: the directory holds no causal language model that can be trained, or not with this adapter.

        """

    def logprobs(self, batches: Sequence[Sequence[Row]]) -> list[bytes]:
        """Return float32 columns of the completion tokens' log-probabilities, row after row, at the job's temperature.

        Gradients are neither used nor changed.
        """

    def reference_logprobs(self, batches: Sequence[Sequence[Row]]) -> list[bytes]:
        """Return the same under the weights that `load_hf` loaded, by an engine that was made to keep these."""

    def accumulate(self, batches: Sequence[Sequence[Row]], loss: LossFn) -> dict[str, float]:
        """Run forward and backward over micro-batches, adding unnormalised gradients; return the loss's numbers.

        `domain.sums.add` adds them up. An engine that was made to keep a reference gives its log-probabilities to the
        loss: those of the weights that `load_hf` loaded, or those that the rows have. A critic is trained along.

        Raises:
            NotFinite: a loss is NaN or infinite; nothing was added for that micro-batch.

        """

    def step(self, learning_rate: float) -> float:
        """Divide the accumulated gradients by the loss's accumulated `divisor`, clip, update, zero.

        With nothing accumulated the weights stay as they are.

        Returns:
            The gradient's norm before clipping, 0.0 with nothing accumulated.

        Raises:
            NotFinite: the gradients are NaN or infinite; the weights are unchanged.

        """

    def export_shards(self, what: Exported = "model") -> Iterator[Shard]:
        """Yield this process's parts of all tensors; tied tensors once, under the name that Hugging Face saves.

        An adapter's tensors are whole on the output rank, under PEFT's names.

        A shard's bytes are valid until the engine's next other call. It may be iterated in another thread.
        """

    def load_shards(self, shards: Iterable[Shard], what: Loaded = "base") -> None:
        """Overwrite the weights of one kind; the optimizer's state stays.

        Raises:
            Fatal: a tensor is unknown or missing, or its shape or dtype is another.

        """

    def snapshot(self) -> Snapshot:
        """Copy the weights that are trained, the optimizer's and the random state; return what writes the copy.

        There is one copy at a time: the one before must have been written, or given up.

        Raises:
            Fatal: there is no room for it.

        """

    def load(self, directory: Path) -> None:
        """Read what a snapshot wrote, and drop what was accumulated.

        Raises:
            Corrupt: it does not fit this model.

        """

    def rest(self) -> None:
        """Move to host memory what was told to rest there, until a call that computes with it.

        Nothing else is changed by it, not a bit. Called when others get the device.
        """

    def close(self) -> None:
        """Give the memory back."""


class Critic(Protocol):
    """What an engine with a critic can be asked beside."""

    def values(self, batches: Sequence[Sequence[Row]]) -> list[bytes]:
        """Return float32 columns of what is expected before each completion token is drawn, row after row."""


# --- data and rewards -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of the data."""

    given: str | list[dict[str, Any]]
    """As it stands in the file: text, or chat messages."""
    tokens: bytes
    """int32 column of token ids, as the model gets it."""
    columns: dict[str, Any]
    """The line's other keys."""
    completion: bytes = b""
    """int32 column of token ids, the end token last: what is to be imitated, where the job imitates."""


@dataclass(frozen=True, slots=True)
class Data:
    """The job's prompts, and the tokenizer's part in what is done with completions."""

    train: Sequence[Prompt]
    evaluation: Sequence[Prompt]
    stop_token_ids: tuple[int, ...]
    decode: Callable[[Sequence[int], bool], str]
    """(token ids, whether special tokens are left out) -> text."""
    n_too_long: int = 0
    """Training prompts that were left out for their length."""
    n_too_long_eval: int = 0
    speech: Speech | None = None
    """Where there is an environment."""


@dataclass(frozen=True, slots=True)
class RewardBatch:
    """What a reward function is asked: TRL's arguments, one entry a completion."""

    prompts: list[str | list[dict[str, Any]]]
    completions: list[str | list[dict[str, Any]]]
    completion_ids: list[list[int]]
    columns: dict[str, list[Any]] = field(default_factory=dict)
    solutions: list[str] = field(default_factory=list)
    """The completions' texts without special tokens, as verl gives them."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What became of one call of the reward function."""

    rewards: tuple[float, ...] | None
    """One finite number a completion; None when the group could not be scored."""
    reason: str = ""
    """Why not: `timeout`, `raised`, `crashed`, `wrong_length`, `not_a_number`, `missing`, `unsendable`."""
    detail: str = ""
    parts: dict[str, tuple[float | None, ...]] = field(default_factory=dict)
    """What each of several functions said of each completion, before weights; None: it does not apply."""


class RewardFunction(Protocol):
    """The user's reward functions. Whatever they do, `score` returns."""

    async def start(self) -> None:
        """Make ready.

        Raises:
            ConfigError: the function cannot be imported.

        """

    async def score(self, batch: RewardBatch) -> Scores:
        """Score the completions of one group."""

    async def close(self) -> None:
        """Stop what runs."""


# --- what outlives the process ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrainState:
    """Where a job stands, beside its weights: enough to go on as if nothing had happened."""

    step: int
    """The next step to train; the checkpoint's weights are of this version."""
    finished_cursor: str
    """Position in `rollouts.finished` before the first entry that this step or a later one needs."""
    train_rows: int
    """Number of training prompts: with the job's seed and the step it says which prompts come next."""
    read_cursor: str = START
    """How far it was read: between the two positions lie entries of the steps before, too."""
    data_digest: str = ""
    """Of the training prompts, see `domain.plan.data_digest`; empty in checkpoints of before there was one."""


class CheckpointStore(Protocol):
    """Checkpoints of one job. A checkpoint is there whole or not at all. All calls block, one at a time."""

    def save(self, state: TrainState, write: Snapshot) -> None:
        """Keep a checkpoint; `write` puts the engine's files into the directory it is given. Older ones are removed.

        Raises:
            Fatal: it cannot be written; those before it stay.

        """

    def newest(self) -> tuple[TrainState, Path] | None:
        """Return the newest checkpoint that verifies, None for none. Broken ones are passed over with a warning.

        Its files are in the directory until the next call of `save`.

        Raises:
            ConfigError: the place where they should be cannot be used.
            Corrupt: there are some, and none verifies.
            StoreUnavailable: it is away for too long.

        """

    def fallback(self) -> TrainState | None:
        """Return the oldest checkpoint kept, once there are as many as are kept: what lies before it is not needed."""


class WeightPublisher(Protocol):
    """One job's weights in the weight store.

    Every method goes on when the store is away for a while, and raises `Timeout` when it is for too long.
    """

    async def head(self) -> int:
        """Return the newest committed version, -1 before the first."""

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
        """Commit the shards as `version`, if the head is `expect`.

        Shards of an adapter come with the version of the model that they belong to, which is kept as long as this one,
        and with PEFT's `adapter_config.json`. `canary_json` is what workers must agree with: see `shared.canary`.

        Raises:
            Conflict: another version is the head.

        """

    async def equals(self, version: int, shards: Iterable[Shard]) -> bool | None:
        """Tell whether a committed version holds exactly these tensors; None when it is no longer kept."""

    async def fetch(self, version: int) -> Iterator[Shard]:
        """Bring a committed version here and return its tensors, which are read as they are iterated.

        Raises:
            NotFound: it is no longer kept.
            Corrupt: it does not verify.

        """

    async def close(self) -> None:
        """Release connections."""


class RunFolder(Protocol):
    """What people find of a job on disk. All calls block."""

    def begin(self, spec_json: str, step: int) -> None:
        """Write the resolved job file; forget metrics of `step` and later, which will be trained again."""

    def log_step(self, step: int, metrics: dict[str, float]) -> list[str]:
        """Add a row to the run log, and hand it to the loggers that the job asked for.

        Returns:
            What has gone wrong with these, each once.

        """

    def keep_batch(self, name: str, rows: Sequence[Row]) -> Path:
        """Write rows that could not be trained on into a file of this name, for people to look at, and return it."""

    def export(self, shards: Iterable[Shard]) -> Path:
        """Write the final model as a Hugging Face directory and return it."""

    def export_adapter(self, shards: Iterable[Shard], adapter_json: str) -> Path:
        """Write the final adapter as a PEFT directory and return it."""

    def close(self) -> list[str]:
        """Let the loggers finish, for some seconds at most; return what has gone wrong, as `log_step` does."""


@dataclass(frozen=True, slots=True)
class Workshop:
    """Everything outside that one job works with."""

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
    """The engine, where it has one."""
    environments: Environments | None = None
    """Where samples are conversations."""
    predecessor: Callable[[], tuple[TrainState, Path]] | None = None
    """Finds the checkpoint of another job that this one begins with (`trainer.resume` names it), and its files. Raises
    `ConfigError` where there is none."""
    machine: Machine = UNKNOWN_MACHINE
    judge: Judge | None = None
    """What `data.curriculum.function` says, where there is one."""
    probe: Probe | None = None
    """What each version is scored on before it is published; None: workers are given nothing to agree with."""


class WorkshopFactory(Protocol):
    """Builds a job's workshop."""

    def __call__(self, spec: JobSpec, job_id: str) -> Workshop:
        """Build it, blocking; nothing that the network or another process is needed for.

        Raises:
            ConfigError: a file that the job names is missing or wrong.

        """
