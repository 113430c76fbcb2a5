"""A policy trained with FSDP2: each rank has a shard of every tensor, and its own samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlboost.services.trainer.adapters.ranks.layout import require_divisible_heads
from rlboost.services.trainer.adapters.ranks.policy import RanksPolicy
from rlboost.services.trainer.adapters.torch.attention_choice import attention_of, require_packed
from rlboost.services.trainer.adapters.torch.packing import PACKED


class FsdpPolicy(RanksPolicy):
    """`RanksPolicy` on FSDP2. With `bfloat16` weights and optimizer stay in float32, as in `TorchPolicy`."""

    kind = "fsdp"

    def _model_arguments(self, source: Path, config: Any) -> dict[str, Any]:
        attention = attention_of(config)
        self._packs_rows = attention == PACKED
        if self._layout.context > 1:
            require_packed(config, attention)
            require_divisible_heads(config.get_text_config().num_attention_heads, self._layout.context)
        return {"source": str(source), "attention": attention}
