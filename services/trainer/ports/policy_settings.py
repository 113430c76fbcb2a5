"""The settings of a policy engine. Importing this module imports neither torch nor transformers."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from rlboost.shared.job.algorithm import Aggregation, CriticSpec
from rlboost.shared.job.spec import JobSpec
from rlboost.shared.job.training import LoraSpec, Offload, OptimizerSpec
from rlboost.shared.model.logit_limits import MAX_LOGITS
from rlboost.shared.wire.routed_experts import RoutedShape


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
    critic: CriticSpec | None = None
    """The value model to train along with the policy, if any. Not with megatron."""
    reference: bool = False
    """Whether losses get the log-probabilities of the weights that `load_hf` loaded. It costs another copy of them on
    the device, unless an adapter is trained, and another forward pass, unless rows have the log-probabilities
    already."""
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
    replayed: RoutedShape | None = None
    """The shape of rows' routed experts, which replace those of the routers of policy and reference."""
    max_logits: int = MAX_LOGITS
    """Logits that a process has at a time. Not with megatron."""

    @classmethod
    def of(cls, spec: JobSpec, aggregation: Aggregation, replayed: RoutedShape | None) -> PolicySettings:
        """Return the settings of a job whose loss has this aggregation."""
        trainer = spec.trainer
        return cls(
            optimizer=spec.optimizer,
            temperature=spec.sampling.scored_temperature,
            dtype=trainer.dtype,
            seed=trainer.seed,
            lora=spec.adapter,
            critic=None if spec.kind == "sft" else spec.algorithm.critic,
            reference=spec.kind == "rl" and spec.algorithm.needs_reference,
            offload=trainer.offload,
            activation_checkpointing=trainer.activation_checkpointing,
            compile=trainer.compile,
            router_aux_loss_coef=trainer.router_aux_loss_coef,
            aggregation=aggregation,
            replayed=replayed,
        )
