"""The sections of a job file about training: the optimizer, the processes that train, and an adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlboost.shared.data.vision import is_in_tower
from rlboost.shared.errors import ConfigError
from rlboost.shared.validation import FunctionPath, Section

Offload = Literal["none", "optimizer", "all"]
"""What is offloaded to host memory while reserved workers use the trainer's devices: nothing; the optimizer state and
gradients; or these and the weights."""


class OptimizerSpec(Section):
    """The optimizer."""

    name: Literal["adamw", "muon"] = "adamw"
    """`muon` updates matrices of hidden layers by Muon and everything else by AdamW, at the same `lr`."""
    lr: float = Field(1e-6, gt=0)
    """Learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moments."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises linearly from 0, in the first step, to `lr`, in the step after them."""
    decay: float = Field(0.0, ge=0, le=1)
    """Fraction by which the learning rate falls after the warm-up, until the end: 0 is constant, 1 falls to 0."""
    schedule: Literal["linear", "cosine"] | None = None
    """Form of that fall, by default `linear`; `cosine` is half a wave."""
    grad_clip: float = Field(1.0, gt=0)
    """Maximum norm of the gradient."""

    @model_validator(mode="after")
    def _falls(self) -> Self:
        if self.schedule is not None and not self.decay:
            raise ValueError(
                f"schedule: {self.schedule} is the form of the fall by decay, which is 0, so the learning rate stays "
                "constant: set decay (1 falls to 0), or remove schedule"
            )
        return self


RESUME_WORDS = ("auto", "never")
"""Values of `trainer.resume` other than the location of a checkpoint."""


class TrainerSpec(Section):
    """How the trainer runs."""

    backend: Literal["torch", "megatron"] = "torch"
    """`torch` trains in one process, or with FSDP2 in `data_parallel` x `context_parallel` processes; `megatron`
    (megatron-core) in the product of `tensor_parallel`, `pipeline_parallel`, `context_parallel` and `data_parallel`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the computation; master weights are float32, except those frozen by `elastic.weights: lora`."""
    checkpoint_every: int = Field(10, ge=1)
    """Steps between checkpoints."""
    checkpoints: str = ""
    """Folder or object-store URL of the job's checkpoints; if empty, the trainer's default."""
    resume: str = Field("auto", min_length=1)
    """`auto` continues from the job's newest checkpoint, `never` fails if there is one. With a path or URL of
    another job's run folder or checkpoint, the job starts with its weights, optimizer state and step."""
    micro_batch_tokens: int = Field(4096, ge=1)
    """Maximum tokens per micro-batch. Samples are packed without padding. A longer sample is a micro-batch of its
    own."""
    activation_checkpointing: bool = False
    """Store only the input of each layer for the backward pass, and recompute the rest."""
    freeze_vision_tower: bool = False
    """Of a model that sees images, train the language model alone: neither the vision tower nor the projection of its
    features. Only `torch`."""
    compile: bool = False
    """Compile the layers with `torch.compile`, during the first micro-batches after each start. Only `torch` and dense
    models, not with `elastic.weights: lora`."""
    router_aux_loss_coef: float = Field(0.0, ge=0)
    """Weight of the load-balancing loss of a mixture of experts (arXiv 2101.03961), at the scale of transformers."""
    router_replay: Literal["none", "R3"] = "none"
    """`R3`: train a mixture of experts with the experts that the engines selected (arXiv 2510.11370)."""
    seed: int = 0
    """Seed of the data's order and of every sample: the same job, data and seed draw the same samples in every run."""
    deterministic: bool = False
    """Fix the order of all sums: two runs of the job, with any faults, have the same tokens, log-probabilities, losses
    and weights, bit for bit. For CPUs, with torch in one process; slower."""
    offload: Offload = "none"
    """State that is moved to host memory while reserved workers use the trainer's device."""
    tensor_parallel: int = Field(1, ge=1)
    """Number of processes that each layer is split over. Only `megatron`."""
    pipeline_parallel: int = Field(1, ge=1)
    """Number of pipeline stages. Only `megatron`."""
    data_parallel: int = Field(1, ge=1)
    """Number of replicas that samples are split over; with `torch` also the number of FSDP2's shards of the model."""
    context_parallel: int = Field(1, ge=1)
    """Number of processes that the tokens of each micro-batch, and so of a long sample, are divided over (Ulysses,
    arXiv 2309.14509). Must divide the attention heads, with `megatron` those of each tensor-parallel process. With
    `torch` it also multiplies FSDP2's shards."""
    fsdp_size: int = Field(0, ge=0)
    """Number of consecutive processes that share one sharded copy of the model (HSDP). Must divide the number of
    processes; 0 shards over all. Only `torch`."""
    expert_parallel: int = Field(1, ge=1)
    """Number of consecutive replicas that share the experts of a mixture. Must divide `data_parallel` and the number of
    experts. Only `megatron`."""
    nodes: int = Field(1, ge=1)
    """Number of machines that the processes are divided over; each runs `rlboost trainer join`. 1 is the trainer's own
    machine."""
    min_nodes: int = Field(0, ge=0)
    """Number of machines that suffice when others are lost; the job then resumes with fewer replicas. 0 requires all
    `nodes`."""
    sequence_parallel: bool = False
    """With `tensor_parallel`: also split norms along the tokens (arXiv 2205.05198)."""
    distributed_optimizer: bool = False
    """With `data_parallel`: shard the optimizer state over replicas (ZeRO stage 1, arXiv 1910.02054)."""

    @property
    def starts_from_checkpoint(self) -> bool:
        """Return True if the job starts from another job's checkpoint."""
        return self.resume not in RESUME_WORDS

    @property
    def n_ranks(self) -> int:
        """Return how many processes train the model, with a device each."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel * self.data_parallel

    @property
    def n_shards(self) -> int:
        """Return over how many processes FSDP2 shards the model; of no meaning with megatron."""
        return self.fsdp_size or self.n_ranks

    @property
    def fewest_nodes(self) -> int:
        """Return on how many machines the job can train at least."""
        return self.min_nodes or self.nodes

    @property
    def in_one_process(self) -> bool:
        """Return True if the only rank is in the trainer's process."""
        return self.backend == "torch" and self.n_ranks == 1

    @model_validator(mode="after")
    def _applies(self) -> Self:
        degrees = ("tensor_parallel", "pipeline_parallel", "expert_parallel")
        parallel = [name for name in degrees if getattr(self, name) > 1]
        parallel += [name for name in ("sequence_parallel", "distributed_optimizer") if getattr(self, name)]
        if self.backend == "torch" and parallel:
            raise ValueError(
                f"{parallel[0]} needs trainer.backend: megatron; torch has data_parallel and context_parallel"
            )
        if self.backend == "megatron" and self.fsdp_size:
            raise ValueError("fsdp_size needs trainer.backend: torch; megatron has distributed_optimizer: remove it")
        if self.backend == "megatron" and self.compile:
            raise ValueError("compile needs trainer.backend: torch: set that, or remove compile")
        if self.deterministic and not self.in_one_process:
            raise ValueError(
                "deterministic needs trainer.backend: torch in one process, as the order of sums over several is not "
                "fixed: set data_parallel and context_parallel to 1, or remove deterministic"
            )
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError("sequence_parallel is for tensor_parallel above 1: raise that, or remove it")
        if self.distributed_optimizer and self.data_parallel == self.context_parallel == 1:
            raise ValueError(
                "distributed_optimizer is for data_parallel or context_parallel above 1: raise one, or remove it"
            )
        return self

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.data_parallel % self.expert_parallel:
            raise ValueError(
                f"expert_parallel is {self.expert_parallel}, which does not divide data_parallel, which is "
                f"{self.data_parallel}: experts are divided over replicas; change one of them"
            )
        if self.n_ranks % self.n_shards:
            raise ValueError(
                f"fsdp_size is {self.fsdp_size}, which does not divide the {self.n_ranks} processes of data_parallel x "
                "context_parallel: change one of them"
            )
        if self.n_ranks % self.nodes:
            raise ValueError(
                f"nodes is {self.nodes}, which does not divide the {self.n_ranks} processes of tensor_parallel x "
                "pipeline_parallel x context_parallel x data_parallel: change one of them"
            )
        if self.min_nodes > self.nodes:
            raise ValueError(f"min_nodes is {self.min_nodes}, more than nodes, which is {self.nodes}: lower it")
        if self.fewest_nodes < self.nodes and self.data_parallel % self.nodes:
            raise ValueError(
                f"min_nodes below nodes needs whole replicas on each machine, but nodes is {self.nodes} and "
                f"data_parallel {self.data_parallel}: make that a multiple of nodes, or remove min_nodes"
            )
        if self.fewest_nodes < self.nodes and self.fsdp_size and (n := self.n_ranks // self.nodes) % self.fsdp_size:
            raise ValueError(
                f"min_nodes below nodes needs a whole copy of the model on each machine, but fsdp_size is "
                f"{self.fsdp_size} and a machine has {n} processes: lower it to a divisor, or remove min_nodes"
            )
        if self.fewest_nodes < self.nodes and (n := self.data_parallel // self.nodes) % self.expert_parallel:
            raise ValueError(
                f"min_nodes below nodes needs all experts on each machine, but expert_parallel is "
                f"{self.expert_parallel} and a machine has {n} replicas: lower it to a divisor, or remove min_nodes"
            )
        return self


class LoraSpec(Section):
    """A low-rank adapter (LoRA, arXiv 2106.09685) on linear layers, with the defaults of PEFT."""

    rank: int = Field(8, ge=1)
    """Rank of the adapter's matrices."""
    alpha: float = Field(8.0, gt=0)
    """The adapter's product is scaled by `alpha / rank`."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on the adapter's input, in training only. Above 0, the distributions of training and sampling differ
    slightly."""
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """Names of the adapted layers, as in PEFT's `target_modules`; `all-linear`: all but the output head. Layers of a
    vision tower are never adapted."""
    base_model_name_or_path: str = ""
    """Name of the base model in the exported adapter's configuration; by default the job file's `model`, as given."""


# --- The section of a job file about skipping prompts because of the rewards of their earlier groups ------------------


class CurriculumSpec(Section):
    """Which prompts are skipped, by the mean rewards of their last groups."""

    skip_solved_above: float | None = None
    """Skip a prompt whose mean reward is at least this; with rewards of 0 and 1, 1.0 skips prompts that are always
    solved."""
    skip_failed_below: float | None = None
    """Skip a prompt whose mean reward is at most this; with rewards of 0 and 1, 0.0 skips prompts that are never
    solved."""
    window: int = Field(1, ge=1)
    """Number of last groups that count; the two limits never skip a prompt with fewer groups."""
    retry_steps: int | None = Field(None, ge=1)
    """A skipped prompt returns after this many steps without a group; by default never."""
    function: FunctionPath | None = None
    """`package.module:function`: gets the means of all earlier groups, oldest first, and returns True to skip."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        low, high = self.skip_failed_below, self.skip_solved_above
        if low is None and high is None and self.function is None:
            raise ValueError("give skip_solved_above, skip_failed_below or function, or remove curriculum")
        if low is not None and high is not None and low >= high:
            raise ValueError("skip_failed_below is not below skip_solved_above, so every prompt would be skipped")
        return self


# --- Limits on the logits of an update: with a large vocabulary they need more memory than everything else ------------


MAX_LOGITS = 1 << 27
"""Logits that exist at a time: 512 MiB in float32. Their gradient has the same size."""
CHUNK_LOGITS = 1 << 26
"""Logits that are converted to float32 at a time: 256 MiB."""


# --- Checks `lora.targets` against the names and shapes of a model's tensors ------------------------------------------


_WEIGHT = ".weight"


def check_targets(spec: LoraSpec, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that each target matches a layer as PEFT matches names: the whole name, or its last components.

    Layers of towers do not count.

    Args:
        spec: the adapter's section of the job file.
        shapes: the shapes of the model's tensors, by Hugging Face name.

    Raises:
        ConfigError: a target matches none; the text lists the layers.

    """
    if isinstance(spec.targets, str):
        return
    layers = [
        name.removesuffix(_WEIGHT)
        for name, shape in shapes.items()
        if name.endswith(_WEIGHT) and len(shape) == 2 and not is_in_tower(name)
    ]
    for target in spec.targets:
        if not any(layer == target or layer.endswith(f".{target}") for layer in layers):
            known = ", ".join(sorted({layer.rpartition(".")[2] for layer in layers}))
            raise ConfigError(
                f"lora.targets: the model has no layer {target!r}, but {known}: name some of these, or all-linear"
            )
