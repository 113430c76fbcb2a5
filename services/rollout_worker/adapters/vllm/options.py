"""The options of a vLLM engine. Importing this imports no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class VllmOptions:
    """How to start vLLM."""

    slots: int
    """Maximum number of running requests."""
    device: str = "cpu"
    """The device that the installed vLLM was built for: "cpu" or "cuda"."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of weights, activations and cache; sampling is in float32."""
    kv_cache_bytes: int = 0
    """0 = on a GPU vLLM's default, most of the free memory; on a CPU 256 MiB."""
    gpu_memory_utilization: float = 0.0
    """Fraction of each GPU's memory for weights, activations and KV cache; 0 = vLLM's default. Unused on a CPU."""
    tensor_parallel: int = 1
    """Number of devices over which the model is split."""
    enable_sleep: bool = False
    """True if a suspended engine frees device memory, including weights, where vLLM supports it."""
    vllm_args: Mapping[str, Any] = field(default_factory=dict)
    """More of vLLM's `AsyncEngineArgs`; see `arguments.check_arguments`."""
