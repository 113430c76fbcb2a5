"""A policy that is trained with FSDP2: each rank keeps a part of all tensors and has samples of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.trainer.adapters.ranks.policy import RanksPolicy
from shared.training import OptimizerSpec, TrainerSpec


class FsdpPolicy(RanksPolicy):
    """See `RanksPolicy`. With `bfloat16` weights and optimizer stay in float32, as in the torch backend of one rank."""

    def __init__(self, spec: TrainerSpec, optimizer: OptimizerSpec, **settings: Any) -> None:
        """See `RanksPolicy`."""
        super().__init__("fsdp", spec, optimizer, **settings)

    def _described(self, source: Path, config: Any) -> dict[str, Any]:
        del config
        return {"source": str(source)}
