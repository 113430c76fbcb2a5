"""Jobs that change the model, and those that learn from completions in the data."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlboost.shared.ids import MAX_STEPS
from rlboost.shared.job.algorithm import PairsSpec, ScoresSpec
from rlboost.shared.job.base import ServiceJob
from rlboost.shared.job.data import DpoDataSpec, OfflineDataSpec, RewardDataSpec, SftDataSpec, TrainDataSpec
from rlboost.shared.job.fleet import OfflineElasticSpec, OfflineEvalSpec, SamplingSpec, VersionsSpec
from rlboost.shared.job.reward import RewardPart
from rlboost.shared.job.training import LoraSpec, OptimizerSpec


class TrainingJob(ServiceJob):
    """A job that changes the model."""

    data: TrainDataSpec
    """Source of prompts."""
    elastic: VersionsSpec = VersionsSpec()
    """How the job uses workers."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """The optimizer of the model."""
    lora: LoraSpec | None = None
    """The adapter, with `elastic.weights: lora`."""
    steps: int = Field(ge=1, lt=MAX_STEPS)
    """Training steps in all."""

    @property
    def adapter(self) -> LoraSpec | None:
        """Return the adapter that is trained, None if the whole model is."""
        if self.elastic.weights != "lora":
            return None
        lora = self.lora or LoraSpec()
        base = lora.base_model_name_or_path or self.model
        return lora.model_copy(update={"base_model_name_or_path": base})

    @model_validator(mode="after")
    def _adapter_matches_weights(self) -> Self:
        if self.lora is not None and self.elastic.weights != "lora":
            raise ValueError(
                f"elastic.weights: {self.elastic.weights} trains the whole model, but there is a section lora: set "
                "elastic.weights to lora to train an adapter, or remove the section"
            )
        if self.elastic.weights == "lora" and self.trainer.backend == "megatron":
            raise ValueError(
                "elastic.weights: lora needs trainer.backend: torch, which has data_parallel and context_parallel for "
                "several processes; megatron trains whole models"
            )
        if self.elastic.weights == "lora" and self.trainer.compile:
            raise ValueError("trainer.compile is for whole models, and elastic.weights is lora: remove compile")
        return self

    @model_validator(mode="after")
    def _optimizer_supports_the_parameters(self) -> Self:
        if self.optimizer.name == "muon" and not self.trainer.in_one_process:
            raise ValueError(
                "optimizer.name: muon needs trainer.backend: torch in one process, as it takes whole matrices; with "
                "several set adamw"
            )
        if self.optimizer.name == "muon" and self.adapter is not None:
            raise ValueError(
                "optimizer.name: muon is for whole matrices, and elastic.weights: lora trains two thin factors of each "
                "change: set adamw, or elastic.weights: full"
            )
        return self


class OfflineJob(TrainingJob):
    """A job that learns from completions in the data, without workers and rewards."""

    purpose: ClassVar[str] = "generates nothing"
    environment: ClassVar[None] = None
    agent: ClassVar[None] = None
    conversation: ClassVar[None] = None
    reward: ClassVar[None] = None
    reward_parts: ClassVar[tuple[RewardPart, ...]] = ()
    held_reward_models: ClassVar[tuple[str, ...]] = ()
    sampling: ClassVar[SamplingSpec] = SamplingSpec()
    """How the served result is sampled."""

    data: OfflineDataSpec
    elastic: OfflineElasticSpec = OfflineElasticSpec()
    eval: OfflineEvalSpec | None = None
    """Evaluation on held-out rows; needs `data.eval` or `eval.sets`."""

    @model_validator(mode="after")
    def _logs_no_samples(self) -> Self:
        if self.log.samples:
            raise ValueError(f"log.samples: a job of kind {self.kind} {self.purpose}: remove it")
        return self


class SftJob(OfflineJob):
    """Supervised fine-tuning."""

    kind: Literal["sft"] = "sft"
    data: SftDataSpec


class _PairsJob(OfflineJob):
    """A job that learns from pairs in the data."""

    @model_validator(mode="after")
    def _trains_without_dropout(self) -> Self:
        if self.adapter is not None and self.adapter.dropout:
            raise ValueError(
                "lora.dropout: pairs are compared without dropout, as with TRL's disable_dropout: set it to 0"
            )
        return self


class DpoJob(_PairsJob):
    """Direct preference optimization on pairs in the data."""

    kind: Literal["dpo"] = "dpo"
    data: DpoDataSpec
    algorithm: PairsSpec = PairsSpec()

    @property
    def needs_reference(self) -> bool:
        return True


class RewardJob(_PairsJob):
    """A reward model: a linear head of one score on a language model, trained on pairs in the data."""

    kind: Literal["reward"] = "reward"
    data: RewardDataSpec
    algorithm: ScoresSpec = ScoresSpec()

    @model_validator(mode="after")
    def _supports_a_head(self) -> Self:
        if self.trainer.backend == "megatron":
            raise ValueError("trainer.backend: megatron has no head for scores: set it to torch")
        if self.trainer.router_aux_loss_coef:
            raise ValueError("trainer.router_aux_loss_coef: experts of a reward model are not balanced: remove it")
        return self
