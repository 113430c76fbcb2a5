"""What the facts about a machine and a system mean. Pure: facts are arguments, findings are returned."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlboost.local.gpus import Gpu
from rlboost.shared.process.extras import pip_install

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
_SAFE_REDIS = 7
"""Major version from which Redis tells reading a key from writing it."""


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


def redis_server(program: str, version_line: str) -> Finding:
    """Judge Redis by what `redis-server --version` prints, such as `Redis server v=7.2.4 sha=...`."""
    version = re.search(r"\bv=((\d+)[\d.]*)", version_line)
    if version is None:
        return Finding("redis-server", "warning", f"{program}, of an unknown version", "install Redis 7 or newer")
    text = f"{version[1]}, {program}"
    if int(version[2]) < _SAFE_REDIS:
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
