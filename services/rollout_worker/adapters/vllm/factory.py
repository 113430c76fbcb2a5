"""Builds vLLM engines; imports vLLM on first use."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from rlboost.services.rollout_worker.adapters.vllm import plugin
from rlboost.services.rollout_worker.adapters.vllm.options import LOGITS_PROCESSOR_PLUGINS, VllmOptions
from rlboost.shared.errors import ConfigError
from rlboost.shared.process.modules import require_engine
from rlboost.shared.process.system import gc_paused
from rlboost.shared.settings import environment_without_settings
from rlboost.shared.tls import CA_VARIABLE

if TYPE_CHECKING:
    from rlboost.services.rollout_worker.adapters.vllm.front import Front
    from rlboost.services.rollout_worker.ports import Engine

_QUANTIZING_ARGS = ("quantization", "quantization_config", "kv_cache_dtype")
"""vLLM's engine arguments with which it may compute in less than its dtype."""
_DEFAULTS = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would have this process's secrets, sockets and locks
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",  # models come from config.json and pulled weights
}
_CPU_DEFAULTS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the one rank runs in the engine core's process, not in a third one
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several workers share the cores
    "TORCHDYNAMO_DISABLE": "1",  # compilation takes seconds and saves little
    "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings concern settings that are required here
}


def is_quantized(vllm_args: Mapping[str, Any], dtype: str) -> bool:
    """Return True if vLLM computes in less than `dtype` with these engine arguments."""
    values = (vllm_args.get(name) for name in _QUANTIZING_ARGS)
    return any(value and value not in ("auto", dtype) for value in values)


class VllmFactory:
    """`ports.EngineFactory` of `VllmEngine`s with these options.

    Raises:
        ConfigError: vLLM is not installed.

    """

    def __init__(self, options: VllmOptions) -> None:
        require_engine("vllm")
        self._options = options

    def prepare(self) -> None:
        if plugin.NAME not in entry_points(group="vllm.general_plugins").names:
            raise ConfigError(
                "vllm does not find RLBoost's plugin, since the installed rlboost is older than its source: run 'make "
                "install', or install the package again"
            )
        if plugins := entry_points(group=LOGITS_PROCESSOR_PLUGINS):
            raise ConfigError(
                f"vllm would apply the logits processors of {', '.join(sorted(one.value for one in plugins))} to every "
                "request, which changes the distribution that tokens are drawn from: uninstall the package on workers"
            )
        for name, value in {**_DEFAULTS, **(_CPU_DEFAULTS if self._options.device == "cpu" else {})}.items():
            os.environ.setdefault(name, value)
        with gc_paused():
            from rlboost.services.rollout_worker.adapters.vllm import arguments, engine  # noqa: F401, PLC0415 - they import vllm

        arguments.check_device(self._options.device)
        arguments.check_arguments(self._options.vllm_args)

    def serve(self) -> Front:
        """Start the engine that serves `VllmOptions.served_model` to others, too; blocks for long.

        Raises:
            ConfigError: vLLM cannot, or its server lacks a module.

        """
        self.prepare()
        try:
            from rlboost.services.rollout_worker.adapters.vllm.front import Front, start  # noqa: PLC0415 - it imports vllm
        except ModuleNotFoundError as error:
            raise ConfigError(f"vllm's server needs the module {error.name}: install it") from error
        with engine_core_environment(unpacked=self._is_unpacked):
            llm = start(self._options)
        return Front(llm, self._options)

    @property
    def _is_unpacked(self) -> bool:
        # Some quantized layers cannot do without packing.
        return not self._options.pack_weights and not is_quantized(self._options.vllm_args, self._options.dtype)

    def build(self, config_json: str, tokenizer_json: str = "") -> Engine:
        from rlboost.services.rollout_worker.adapters.tokenizer import tokenizer_for_grammars  # noqa: PLC0415 - likewise
        from rlboost.services.rollout_worker.adapters.vllm.engine import VllmEngine, start  # noqa: PLC0415 - it imports vllm

        options = self._options
        with engine_core_environment(unpacked=self._is_unpacked):
            llm = start(config_json, options, tokenizer_for_grammars(tokenizer_json))
        return VllmEngine(llm, options)


@contextmanager
def engine_core_environment(*, unpacked: bool = False) -> Iterator[None]:
    """Give processes that are started within the context the worker's id, and none of its settings: some are secrets.

    The trusted authority stays, since connections that this process opens meanwhile need it.
    """
    hidden = {name: os.environ.pop(name) for name in os.environ.keys() - environment_without_settings(CA_VARIABLE)}
    os.environ[plugin.PARENT_VARIABLE] = str(os.getpid())
    if unpacked:
        os.environ[plugin.UNPACKED_VARIABLE] = "1"
    try:
        yield
    finally:
        for name in (plugin.PARENT_VARIABLE, plugin.UNPACKED_VARIABLE):
            os.environ.pop(name, None)
        os.environ.update(hidden)
