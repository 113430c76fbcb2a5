"""The model being trained: the interface that every training backend implements.

Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict

from rlboost.services.trainer.domain.loss.function import LossFn
from rlboost.services.trainer.domain.plan import SequenceRow, TrainingRow
from rlboost.shared.errors import Fatal
from rlboost.shared.job.algorithm import Aggregation, CriticSpec
from rlboost.shared.job.offline import OfflineJob
from rlboost.shared.job.spec import JobSpec
from rlboost.shared.job.training import MAX_LOGITS, LoraSpec, Offload, OptimizerSpec
from rlboost.shared.weights.manifest import Shard
from rlboost.shared.wire import RoutedShape

# --- The settings of a policy engine. Importing this module imports neither torch nor transformers --------------------


class PolicySettings(BaseModel):
    """What a job decides about its policy, for any backend; sent to ranks as a mapping."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    optimizer: OptimizerSpec = OptimizerSpec()
    temperature: float = 1.0
    """The sampling temperature, which divides the logits."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0
    """Seeds the adapter's initial values and its dropout."""
    lora: LoraSpec | None = None
    """The adapter to train; None to train the model itself. Not with megatron."""
    scores: bool = False
    """Whether the model is a reward model: columns have the score at each row's last token, as its only loss token, in
    place of log-probabilities. Not with megatron."""
    critic: CriticSpec | None = None
    """The value model to train along with the policy, if any. Not with megatron."""
    reference: bool = False
    """Whether losses get log-probabilities of the teacher, or of the weights that `load_hf` loaded. It costs another
    model on the device, unless an adapter is trained without a teacher, and another forward pass, unless rows have the
    log-probabilities already."""
    teacher: str = ""
    """Directory of the Hugging Face model that is the reference in place of the weights that `load_hf` loaded."""
    offload: Offload = "none"
    """What `PolicyEngine.offload` moves to host memory."""
    activation_checkpointing: bool = False
    """Whether the layers of policy and critic are recomputed in the backward pass."""
    compile: bool = False
    """Whether the layers of policy and critic are compiled. Not with megatron."""
    router_aux_loss_coef: float = 0.0
    """Weight of the load-balancing loss of a mixture of experts."""
    aggregation: Aggregation = "token_mean"
    """The loss's, by which the load-balancing loss is weighted on ranks."""
    entropies: bool = False
    """Whether losses get the entropy of each trained token's distribution."""
    replayed: RoutedShape | None = None
    """The shape of rows' routed experts, which replace those of the routers of policy and reference."""
    images: str = ""
    """Folder of the images of rows; empty if they have none."""
    freeze_vision_tower: bool = False
    """Whether a model that sees images keeps its vision tower. Not with megatron."""
    max_logits: int = MAX_LOGITS
    """Logits that a process has at a time. Not with megatron."""

    @classmethod
    def of(
        cls,
        spec: JobSpec,
        aggregation: Aggregation,
        replayed: RoutedShape | None,
        teacher: str = "",
        images: str = "",
    ) -> PolicySettings:
        """Return the settings of a job whose loss has this aggregation, with the directories of teacher and images."""
        trainer = spec.trainer
        return cls(
            optimizer=spec.optimizer,
            temperature=spec.sampling.scored_temperature,
            dtype=trainer.dtype,
            seed=trainer.seed,
            lora=spec.adapter,
            scores=spec.kind == "reward",
            critic=None if isinstance(spec, OfflineJob) else spec.algorithm.critic,
            reference=spec.needs_reference,
            teacher=teacher,
            offload=trainer.offload,
            activation_checkpointing=trainer.activation_checkpointing,
            compile=trainer.compile,
            router_aux_loss_coef=trainer.router_aux_loss_coef,
            aggregation=aggregation,
            entropies=spec.kind == "rl" and spec.algorithm.entropy_coef > 0,
            replayed=replayed,
            images=images,
            freeze_vision_tower=trainer.freeze_vision_tower,
        )


# --- The interface of training backends -------------------------------------------------------------------------------


Exported = Literal["model", "base", "adapter"]
"""`model`: the model with its adapter merged in; `base`: the model below the adapter; `adapter`: the adapter alone.
Without an adapter, `model` and `base` are the same and `adapter` is not available."""
Loaded = Literal["base", "adapter"]
Snapshot = Callable[[Path], None]
"""Writes a captured state into an existing directory, from any thread; may be called again after an error, until
`drop_snapshot` or the next `snapshot`. Later engine calls do not affect it. Raises `OSError` if the directory cannot be
written."""


PROFILED_BATCHES = 64
"""Micro-batches of a profile: each is some ten thousand events of every rank, which are in its memory until the end."""
MAX_TRACE_BYTES = 512 << 20
"""A larger trace is deleted: no viewer opens it."""


class NotFinite(Fatal):
    """A loss or its gradients are NaN or infinite; the weights are unchanged."""


class PolicyEngine(Protocol):
    """The model being trained, with its optimizer. All calls block and come from one thread.

    Forward and backward are one call: with pipeline parallelism the engine's schedule owns the backward pass.
    """

    @property
    def adapter_json(self) -> str:
        """PEFT's `adapter_config.json` if an adapter is trained on a frozen model, otherwise empty."""

    def load_hf(self, source: Path) -> None:
        """Load a Hugging Face model directory; reset the adapter, if there is one, and the optimizer.

        Raises:
            ConfigError: the directory holds no trainable causal language model, or does not support this adapter.

        """

    def logprobs(self, batches: Sequence[Sequence[SequenceRow]]) -> list[bytes]:
        """Return one float32 column per row, in order: log-probabilities of its loss tokens at the job's temperature.

        Gradients are neither used nor changed.
        """

    def reference_logprobs(self, batches: Sequence[Sequence[SequenceRow]]) -> list[bytes]:
        """Return the same columns under the reference; needs an engine built with one."""

    def accumulate(self, batches: Sequence[Sequence[TrainingRow]], loss: LossFn) -> dict[str, float]:
        """Run forward and backward over micro-batches, adding unnormalized gradients; return the loss's sums.

        `add_sums` adds up the returned sums. An engine built with a reference passes its log-probabilities to the
        loss, computed or carried by the rows. A critic trains along.

        Raises:
            NotFinite: a loss is NaN or infinite; nothing was added for that micro-batch.

        """

    def step(self, learning_rate: float) -> float:
        """Divide the accumulated gradients by the loss's accumulated `divisor`, clip, update, zero.

        Without accumulated gradients the weights stay unchanged.

        Returns:
            The gradient norm before clipping, 0.0 without accumulated gradients.

        Raises:
            NotFinite: the gradients are NaN or infinite; the weights are unchanged.

        """

    def export_shards(self, what: Exported = "model") -> Iterator[Shard]:
        """Yield this process's shards of all tensors; tied tensors once, under the name that Hugging Face saves.

        Adapter tensors are whole on the output rank, under PEFT's names.

        A shard's bytes are valid until the next other call of the engine. Another thread may iterate.
        """

    def load_shards(self, shards: Iterable[Shard], what: Loaded = "base") -> None:
        """Overwrite the weights of one kind; keep the optimizer state.

        Raises:
            Fatal: a tensor is unknown or missing, or has another shape or dtype.

        """

    def snapshot(self) -> Snapshot:
        """Copy the trained weights and the optimizer state; return a function that writes the copy.

        Only one copy exists at a time: `snapshot` replaces the previous one.

        Raises:
            DiskFull: there is no space for a copy on disk; the same call may be repeated.
            Fatal: not enough memory for the copy.

        """

    def drop_snapshot(self) -> None:
        """Remove what the copy occupies on disk. Any thread may call it."""

    def load(self, directory: Path) -> None:
        """Read what a snapshot wrote, and drop accumulated gradients.

        Raises:
            Corrupt: it does not fit this model.

        """

    def offload(self) -> None:
        """Move to host memory what `trainer.offload` names, until the next call that computes with it.

        Changes no value. Called when the reserved inference engines get the device.
        """

    def start_profile(self, folder: Path) -> list[str]:
        """Record what each rank computes, at most `PROFILED_BATCHES` micro-batches; return what went wrong."""

    def stop_profile(self) -> list[str]:
        """Write a Chrome trace of each rank, `rank-N.json.gz`, into the folder; return what went wrong."""

    def close(self) -> None:
        """Release memory."""


class Critic(Protocol):
    """The additional interface of an engine with a critic."""

    def values(self, batches: Sequence[Sequence[SequenceRow]]) -> list[bytes]:
        """Return one float32 column per row: the expected return before each loss token is generated."""
