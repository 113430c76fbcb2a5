"""Builds torch engines; imports torch and transformers on first use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

from rlboost.services.rollout_worker.domain.speculation import Drafter
from rlboost.shared.process.system import gc_paused

if TYPE_CHECKING:
    from rlboost.services.rollout_worker.ports import Engine


@dataclass(frozen=True, kw_only=True)
class TorchFactory:
    """`ports.EngineFactory` of `TorchEngine`s with these parameters."""

    slots: int
    device: str
    dtype: Literal["float32", "bfloat16"]
    kv_cache_bytes: int = 0
    gpu_memory_utilization: float = 0.0
    speculation: bool = False
    max_adapters: int = 8
    max_adapter_rank: int = 64

    def prepare(self) -> None:
        """See `EngineFactory`."""
        with gc_paused():
            import rlboost.services.rollout_worker.adapters.torch.engine  # noqa: F401, PLC0415 - it imports torch
        from rlboost.shared.process.torch_device import require_device  # noqa: PLC0415 - it imports torch

        require_device(self.device, "RLBOOST_WORKER_DEVICE")

    def build(self, config_json: str, tokenizer_json: str = "") -> Engine:
        """See `EngineFactory`."""
        from rlboost.services.rollout_worker.adapters.tokenizer import tokenizer_for_grammars  # noqa: PLC0415 - slow
        from rlboost.services.rollout_worker.adapters.torch.engine import TorchEngine  # noqa: PLC0415 - it imports torch

        with TemporaryDirectory(prefix="rlboost-model-") as directory:
            Path(directory, "config.json").write_text(config_json, encoding="utf-8")
            return TorchEngine(
                Path(directory),
                slots=self.slots,
                device=self.device,
                dtype=self.dtype,
                kv_cache_bytes=self.kv_cache_bytes,
                gpu_memory_utilization=self.gpu_memory_utilization,
                tokenizer_json=tokenizer_for_grammars(tokenizer_json),
                drafter=Drafter(self.slots) if self.speculation else None,
                max_adapters=self.max_adapters,
                max_adapter_rank=self.max_adapter_rank,
            )
