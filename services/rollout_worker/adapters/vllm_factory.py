"""Makes vLLM engines, importing vLLM when it is first told to."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Literal

from services.rollout_worker.adapters.engine_thread import EngineThread
from shared.errors import ConfigError
from shared.importing import without_collector

if TYPE_CHECKING:
    from services.rollout_worker.ports import Engine

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the core in this process: see `vllm_core`
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # it has another interface for `vllm_draw`
}
_DEFAULTS = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",  # a model is its config.json and the weights that are pulled
}
_CPU_DEFAULTS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several workers share the cores
    "TORCHDYNAMO_DISABLE": "1",  # it would compile for seconds what is used once a step
    "VLLM_LOGGING_LEVEL": "ERROR",  # it warns of what cannot be otherwise here
}


class VllmFactory:
    """`ports.EngineFactory` of `VllmEngine`s; the parameters are those of `vllm_core.VllmOptions`.

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
        tensor_parallel: int = 1,
        sleeps: bool = False,
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
        self._tensor_parallel = tensor_parallel
        self._sleeps = sleeps

    def prepare(self) -> None:
        """See `EngineFactory`."""
        os.environ.update(_ENVIRONMENT)
        for name, value in {**_DEFAULTS, **(_CPU_DEFAULTS if self._device == "cpu" else {})}.items():
            os.environ.setdefault(name, value)
        with without_collector():
            from services.rollout_worker.adapters.vllm_core import check_device  # noqa: PLC0415 - it imports vllm

        check_device(self._device)

    def build(self, config_json: str) -> Engine:
        """See `EngineFactory`."""
        from services.rollout_worker.adapters.vllm_core import Core, VllmOptions  # noqa: PLC0415 - they import vllm
        from services.rollout_worker.adapters.vllm_engine import VllmEngine  # noqa: PLC0415 - likewise

        options = VllmOptions(
            slots=self._slots,
            device=self._device,
            dtype=self._dtype,
            kv_cache_bytes=self._kv_cache_bytes,
            tensor_parallel=self._tensor_parallel,
            sleeps=self._sleeps,
        )
        thread = EngineThread("vllm-engine")
        try:
            core = thread.ask(lambda: Core(config_json, options)).result()
        except BaseException:
            thread.stop()
            raise
        return VllmEngine(core, thread, slots=self._slots)
