"""Builds vLLM engines; imports vLLM on first use."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from rlboost.services.rollout_worker.adapters.engine.thread import EngineThread
from rlboost.shared.errors import ConfigError
from rlboost.shared.importing import gc_paused

if TYPE_CHECKING:
    from rlboost.services.rollout_worker.ports import Engine

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the core runs in this process: see `core`
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # its interface for logits processors differs: see `seeded_sampling`
}
_DEFAULTS = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",  # models come from config.json and pulled weights
}
_CPU_DEFAULTS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several workers share the cores
    "TORCHDYNAMO_DISABLE": "1",  # compilation takes seconds and saves little
    "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings concern settings that are required here
}


class VllmFactory:
    """`ports.EngineFactory` of `VllmEngine`s; for the parameters see `arguments.VllmOptions`.

    Raises:
        ConfigError: vLLM is not installed.

    """

    def __init__(
        self,
        *,
        slots: int,
        device: str,
        dtype: Literal["float32", "bfloat16"],
        kv_cache_bytes: int = 0,
        gpu_memory_utilization: float = 0.0,
        tensor_parallel: int = 1,
        enable_sleep: bool = False,
        vllm_args: Mapping[str, Any] | None = None,
    ) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError(
                "the vllm engine needs vllm: 'make install-vllm' on a machine without a GPU, "
                "pip install 'rlboost[vllm]' on one with"
            )
        self._slots = slots
        self._device = device
        self._dtype = dtype
        self._kv_cache_bytes = kv_cache_bytes
        self._gpu_memory_utilization = gpu_memory_utilization
        self._tensor_parallel = tensor_parallel
        self._enable_sleep = enable_sleep
        self._vllm_args = vllm_args or {}

    def prepare(self) -> None:
        """See `EngineFactory`."""
        os.environ.update(_ENVIRONMENT)
        for name, value in {**_DEFAULTS, **(_CPU_DEFAULTS if self._device == "cpu" else {})}.items():
            os.environ.setdefault(name, value)
        with gc_paused():
            from rlboost.services.rollout_worker.adapters.vllm import arguments, core  # noqa: F401, PLC0415 - they import vllm

        arguments.check_device(self._device)
        arguments.check_arguments(self._vllm_args)

    def build(self, config_json: str) -> Engine:
        """See `EngineFactory`."""
        from rlboost.services.rollout_worker.adapters.vllm.arguments import VllmOptions  # noqa: PLC0415 - it imports vllm
        from rlboost.services.rollout_worker.adapters.vllm.core import VllmCore  # noqa: PLC0415 - it imports vllm
        from rlboost.services.rollout_worker.adapters.vllm.engine import VllmEngine  # noqa: PLC0415 - it imports vllm

        options = VllmOptions(
            slots=self._slots,
            device=self._device,
            dtype=self._dtype,
            kv_cache_bytes=self._kv_cache_bytes,
            gpu_memory_utilization=self._gpu_memory_utilization,
            tensor_parallel=self._tensor_parallel,
            enable_sleep=self._enable_sleep,
            vllm_args=self._vllm_args,
        )
        thread = EngineThread("vllm-engine")
        try:
            core = thread.call(lambda: VllmCore(config_json, options)).result()
        except BaseException:
            thread.stop()
            raise
        return VllmEngine(core, thread, slots=self._slots)
