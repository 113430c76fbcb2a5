"""The sections of a job file about training: the optimizer, the processes that train, and an adapter."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from shared.validation import Section

Offload = Literal["none", "optimizer", "all"]
"""What rests in host memory while the reserved engines have the trainer's devices: nothing; what the optimizer keeps,
and gradients; or these and the weights."""


class OptimizerSpec(Section):
    """What updates the weights."""

    name: Literal["adamw", "muon"] = "adamw"
    """`muon` updates the hidden layers' matrices by Muon, and all else by AdamW at the same `lr`."""
    lr: float = Field(1e-6, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    warmup_steps: int = Field(0, ge=0)
    decay: float = Field(0.0, ge=0, le=1)
    """The learning rate falls linearly by this fraction from the first to the last step."""
    grad_clip: float = Field(1.0, gt=0)


RESUME_WORDS = ("auto", "never")
"""What `trainer.resume` may be besides a place where another job's checkpoint is."""


class TrainerSpec(Section):
    """How the trainer runs."""

    backend: Literal["torch", "megatron"] = "torch"
    """`torch` trains in one process, or with FSDP2 in `data_parallel` of them; `megatron` (megatron-core) in as many as
    the three numbers below make together."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    checkpoint_every: int = Field(10, ge=1)
    checkpoints: str = ""
    """A folder, or a URL of an object store, under which the job's checkpoints lie; where the trainer says if empty."""
    resume: str = Field("auto", min_length=1)
    """What a trainer does that finds the job begun: go on (`auto`) or fail (`never`); or with what the job begins.

    That is a checkpoint of another job: its folder, its checkpoints or one of them, as a path or URL. The job goes on
    with its weights, optimizer and step, and with samples of its own.
    """
    micro_batch_tokens: int = Field(4096, ge=1)
    activation_checkpointing: bool = False
    """Whether of each layer no more than its input is kept for its gradient, and all else computed once more then."""
    seed: int = 0
    offload: Offload = "none"
    """For a GPU that reserved engines share with the trainer, see `Offload`."""
    tensor_parallel: int = Field(1, ge=1)
    """Processes that share each layer."""
    pipeline_parallel: int = Field(1, ge=1)
    """Processes that share the layers, one after the other."""
    data_parallel: int = Field(1, ge=1)
    """Copies of all that, which share the samples; with `torch`, parts of the model, which share them, too."""
    sequence_parallel: bool = False
    """With `tensor_parallel`: norms, too, are shared out, along the tokens (arXiv 2205.05198)."""
    distributed_optimizer: bool = False
    """With `data_parallel`: each copy keeps a part of the optimizer's state (ZeRO stage 1, arXiv 1910.02054)."""

    @property
    def begins_elsewhere(self) -> bool:
        """Tell whether the job begins with another job's checkpoint."""
        return self.resume not in RESUME_WORDS

    @property
    def in_one_process(self) -> bool:
        """Tell whether the trainer's own process trains, and no ranks are started."""
        return self.backend == "torch" and self.data_parallel == 1

    @model_validator(mode="after")
    def _applies(self) -> Self:
        asked = [name for name in ("tensor_parallel", "pipeline_parallel") if getattr(self, name) > 1]
        asked += [name for name in ("sequence_parallel", "distributed_optimizer") if getattr(self, name)]
        if self.backend == "torch" and asked:
            raise ValueError(f"{asked[0]} needs trainer.backend: megatron; torch has data_parallel alone")
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError("sequence_parallel is for tensor_parallel above 1: raise that, or remove it")
        if self.distributed_optimizer and self.data_parallel == 1:
            raise ValueError("distributed_optimizer is for data_parallel above 1: raise that, or remove it")
        return self


class LoraSpec(Section):
    """A low-rank adapter (LoRA, arXiv 2106.09685) on linear layers, with the defaults of PEFT."""

    rank: int = Field(8, ge=1)
    alpha: float = Field(8.0, gt=0, allow_inf_nan=False)
    """The adapter's product is scaled by `alpha / rank`."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Of the adapter's input, while training only: above 0 the trained distribution is not quite the sampled one."""
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """Names of the layers that get one, as in PEFT's `target_modules`; `all-linear`: all but the output head."""
