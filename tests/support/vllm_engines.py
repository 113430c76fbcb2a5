"""Real vLLM for tests: starting it takes seconds, so the tests of a model share one. Imports nothing heavy itself."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rlboost.services.rollout_worker.adapters.vllm.factory import VllmFactory

if TYPE_CHECKING:
    from rlboost.services.rollout_worker.adapters.vllm.core import VllmCore
    from rlboost.services.rollout_worker.adapters.vllm.engine import VllmEngine
    from rlboost.services.rollout_worker.ports import Engine

_KV_CACHE_BYTES = 8 << 20
_shared: dict[str, VllmCore] = {}


def config(*, tied: bool = True) -> Any:
    """Return the configuration of a small model of which vLLM runs on a CPU: its heads must not be smaller."""
    from tests.support import tiny_models  # noqa: PLC0415 - imports torch

    changed = copy.deepcopy(tiny_models.CONFIGS["qwen3-tied"])
    changed.head_dim = 32
    changed.tie_word_embeddings = tied
    return changed


def require_installed() -> None:
    """Skip where vLLM is not installed; fail in CI."""
    if importlib.util.find_spec("vllm") is None:
        why = "vllm is not installed: make install-vllm"
        if os.environ.get("CI") == "true":
            pytest.fail(why)
        pytest.skip(why)


def require(device: str = "cpu") -> None:
    """Prepare this process for vLLM; skip, or fail in CI, where it is not installed."""
    require_installed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what vLLM's own imports warn of is not ours to mend
        VllmFactory(slots=1, device=device, dtype="float32").prepare()


def start(config: Any, *, slots: int) -> VllmEngine:
    """Return an engine without weights over the vLLM that runs this model; one of another model is ended first."""
    from rlboost.services.rollout_worker.adapters.engine.thread import EngineThread  # noqa: PLC0415 - see require
    from rlboost.services.rollout_worker.adapters.vllm.engine import VllmEngine  # noqa: PLC0415 - see require

    config_json = config.to_json_string()
    thread = EngineThread("vllm-engine")
    core = thread.call(lambda: _core(config_json, slots)).result(60)
    return VllmEngine(core, thread, slots=slots)


def build(config: Any, *, slots: int, **settings: Any) -> Engine:
    """Return an engine with a vLLM of its own, as a worker gets it. No other one may be there: see `end_shared`."""
    config_json = json.dumps(config) if isinstance(config, dict) else config.to_json_string()
    settings = {"device": "cpu", "dtype": "float32", "kv_cache_bytes": _KV_CACHE_BYTES, **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # see require
        return VllmFactory(slots=slots, **settings).build(config_json)


def _core(config_json: str, slots: int) -> VllmCore:
    key = f"{slots} {config_json}"
    if key not in _shared:
        end_shared()  # two at once would share vLLM's global state
        _shared[key] = _make(config_json, slots)
    return _shared[key]


def _make(config_json: str, slots: int) -> VllmCore:
    from rlboost.services.rollout_worker.adapters.vllm.arguments import VllmOptions  # noqa: PLC0415 - see require
    from rlboost.services.rollout_worker.adapters.vllm.core import VllmCore  # noqa: PLC0415 - see require

    class Shared(VllmCore):
        """Outlives its engine."""

        def add(self, *args: Any) -> str:
            ids.append(super().add(*args))
            return ids[-1]

        def close(self) -> None:
            self.abort(ids)
            ids.clear()
            self.wake()
            self.clear()

        def end(self) -> None:
            super().close()

    ids: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # see require
        return Shared(config_json, VllmOptions(slots=slots, kv_cache_bytes=_KV_CACHE_BYTES, enable_sleep=True))


def end_shared() -> None:
    """End the vLLM that tests have shared."""
    while _shared:
        _, core = _shared.popitem()
        core.end()  # type: ignore[attr-defined]


@contextmanager
def offline(folder: Path, *, slots: int) -> Iterator[Any]:
    """vLLM as people load a model's folder with it; `require` must have been called."""
    from vllm import LLM  # noqa: PLC0415 - see require

    end_shared()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # see require
        options = {"max_num_seqs": slots, "kv_cache_memory_bytes": _KV_CACHE_BYTES}
        engine = LLM(str(folder), dtype="float32", enforce_eager=True, **options)
    try:
        yield engine
    finally:
        engine.llm_engine.engine_core.shutdown()
