"""Real vLLM for tests: starting it takes seconds, so the tests of a model share one. Imports nothing heavy itself."""

from __future__ import annotations

import copy
import gc
import importlib.util
import json
import multiprocessing
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rlboost.services.rollout_worker.adapters.vllm.factory import VllmFactory, engine_core_environment
from rlboost.services.rollout_worker.adapters.vllm.options import VllmOptions
from rlboost.shared.process.system import run_in_thread

if TYPE_CHECKING:
    from rlboost.services.rollout_worker.adapters.vllm.engine import VllmEngine
    from rlboost.services.rollout_worker.ports import Engine

MARKS = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),  # vLLM leaves its own open
]
"""Of a module whose tests share a vLLM, which belongs to an event loop and takes long to start on a busy machine."""
_KV_CACHE_BYTES = 8 << 20
_shared: dict[str, Any] = {}
"""vLLM's `AsyncLLM` by options and configuration; at most one."""
_forks: dict[str, Any] = {}
"""The environment of the process that engine cores are forked from, once there is one."""


def config(*, tied: bool = True) -> Any:
    """Return the configuration of a small model of which vLLM runs on a CPU: its heads must not be smaller."""
    from tests.support import tiny_models  # noqa: PLC0415 - imports torch

    changed = copy.deepcopy(tiny_models.CONFIGS["qwen3-tied"])
    changed.head_dim = 32
    changed.tie_word_embeddings = tied
    return changed


def copy_renderable(model: Path, to: Path) -> Path:
    """Copy a model's folder, with a tokenizer that takes texts which vLLM renders at its start; return the copy."""
    shutil.copytree(model, to)
    tokenizer = json.loads((to / "tokenizer.json").read_text())
    tokenizer["model"]["unk_token"] = next(iter(tokenizer["model"]["vocab"]))
    (to / "tokenizer.json").write_text(json.dumps(tokenizer))
    return to


def require_installed(module: str = "vllm") -> None:
    """Skip where vLLM, or a module that it needs, is not installed; fail in CI."""
    if importlib.util.find_spec(module) is None:
        why = f"{module} is not installed: make install-vllm"
        if os.environ.get("CI") == "true":
            pytest.fail(why)
        pytest.skip(why)


def require(device: str = "cpu") -> None:
    """Prepare this process for vLLM; skip, or fail in CI, where it is not installed."""
    require_installed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what vLLM's own imports warn of is not ours to mend
        VllmFactory(VllmOptions(slots=1, device=device)).prepare()
        if device == "cpu":
            _fork_engine_cores()


def _fork_engine_cores() -> None:
    """Fork the engine cores that this process starts, from a process that has imported what they need.

    One whose environment differs from the first one's is started as elsewhere, with its imports.
    """
    from vllm.v1.engine import utils  # noqa: PLC0415 - see require

    if "environment" in _forks:
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"])
    _forks["environment"] = None
    spawning = utils.get_mp_context

    def get_mp_context() -> Any:
        spawned = spawning()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        _forks["environment"] = _forks["environment"] or environment
        return context if _forks["environment"] == environment else spawned

    utils.get_mp_context = get_mp_context


async def start(config: Any, *, slots: int, tokenizer_json: str = "", **settings: Any) -> VllmEngine:
    """Return an engine without weights over the vLLM that runs this model; one of another model is ended first.

    The tests that share it must share an event loop: `pytest.mark.asyncio(loop_scope="module")`.
    """
    from rlboost.services.rollout_worker.adapters.vllm.engine import VllmEngine  # noqa: PLC0415 - see require

    options = VllmOptions(slots=slots, kv_cache_bytes=_KV_CACHE_BYTES, enable_sleep=True, **settings)
    key = f"{options} {config.to_json_string()} {tokenizer_json}"
    if key not in _shared or _shared[key].errored:
        end_shared()
        _shared[key] = await run_in_thread(
            "vllm-start", lambda: _started(config.to_json_string(), options, tokenizer_json)
        )
    llm = _shared[key]
    await llm.pause_generation(mode="abort", clear_cache=True)
    await llm.wake_up()  # which also lets it decode again
    return VllmEngine(llm, options)


def _started(config_json: str, options: Any, tokenizer_json: str) -> Any:
    """Return a vLLM that outlives its engines."""
    from rlboost.services.rollout_worker.adapters.vllm import engine  # noqa: PLC0415 - see require

    with warnings.catch_warnings(), engine_core_environment():
        warnings.simplefilter("ignore")  # see require
        llm = engine.start(config_json, options, tokenizer_json)
    llm.shutdown = lambda: None
    return llm


def build(config: Any, *, slots: int, **settings: Any) -> Engine:
    """Return an engine with a vLLM of its own, as a worker gets it."""
    config_json = json.dumps(config) if isinstance(config, dict) else config.to_json_string()
    settings = {"device": "cpu", "dtype": "float32", "kv_cache_bytes": _KV_CACHE_BYTES, **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # see require
        return VllmFactory(VllmOptions(slots=slots, **settings)).build(config_json)


def end_shared() -> None:
    """End the vLLM that tests have shared."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what vLLM leaves open
        while _shared:
            _, llm = _shared.popitem()
            type(llm).shutdown(llm)
            del llm
        gc.collect()


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


def kill_engine_core() -> None:
    """Kill vLLM's process."""
    (core,) = [child for child in multiprocessing.active_children() if child.name == "EngineCore"]
    core.kill()
