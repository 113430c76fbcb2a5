"""Which jobs support models that see images, and rows with images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlboost.shared.data.vision import FAMILIES, vision_of
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.spec import JobSpec


def require_supported(spec: JobSpec, config: Mapping[str, Any]) -> None:
    """Check that a job supports its model, if that sees images.

    Args:
        spec: the job file.
        config: the model's `config.json`.

    Raises:
        ConfigError: names the key of the job file.

    """
    trainer = spec.trainer
    if vision_of(config) is None:
        if trainer.freeze_vision_tower:
            raise ConfigError(
                f"trainer.freeze_vision_tower: {config.get('model_type')} is not a model whose images are supported "
                f"({', '.join(FAMILIES)}): remove it"
            )
        return
    refused = {
        "kind: reward": spec.kind == "reward",
        "trainer.backend: megatron": trainer.backend == "megatron",
        "trainer.context_parallel above 1": trainer.context_parallel > 1,
        "trainer.compile": trainer.compile,
        "algorithm.critic": spec.kind == "rl" and spec.algorithm.critic is not None,
        "algorithm.teacher": spec.teacher is not None,
    }
    for what, is_used in refused.items():
        if is_used:
            raise ConfigError(
                f"{what} is not supported with models that see images ({config['model_type']}): remove it, or use a "
                "text model"
            )


def require_images(spec: JobSpec) -> None:
    """Check that the rows of a job may have images.

    Raises:
        ConfigError: names the key of the job file.

    """
    if spec.kind not in ("rl", "eval", "sft"):
        raise ConfigError(f"kind: {spec.kind} does not train on images, which the row has: leave out the row")
    for section in ("environment", "agent"):
        if getattr(spec, section) is not None:
            raise ConfigError(f"{section}: its prompts cannot have images, which the row has: leave out the row")
    for part in spec.reward_parts:
        if part.judge is not None or part.model is not None:
            section = "reward.judge" if part.judge is not None else "reward.model"
            raise ConfigError(f"{section}: it does not see images, which the row has: use a function")
