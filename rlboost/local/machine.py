"""The CPUs and GPUs of this machine, and the CPU time of a session of processes."""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from rlboost.shared.errors import ConfigError

# --- The CPUs of this machine -----------------------------------------------------------------------------------------


def n_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# --- CPU time of a session of processes -------------------------------------------------------------------------------


_PROC = Path("/proc")


def session_cpu_s(leader: int) -> float:
    """Return user and system seconds of all living processes in a session and of the children they waited for."""
    ticks = 0
    for stat in _PROC.glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:  # it has exited
            continue
        # proc(5), counted after the name: session is field 6, utime, stime, cutime and cstime are 14 to 17.
        if int(fields[3]) == leader:
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


# --- The GPUs of this machine, as `nvidia-smi` lists them -------------------------------------------------------------


_FIELDS = ("index", "uuid", "name", "memory.total", "pci.bus_id", "driver_version")
_LIMIT_S = 30.0
"""Without its persistence daemon, the driver initializes every GPU first."""
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class Gpu:
    """One GPU. `index` is that of `nvidia-smi`, which counts in the order of PCI addresses."""

    index: int
    uuid: str = ""
    name: str = ""
    memory_bytes: int = 0
    driver: str = ""
    cpus: str = ""
    """CPUs of its NUMA node, such as `0-31,64-95`; empty if unknown."""


def list_gpus() -> list[Gpu]:
    """Return the GPUs of this machine, or those of them that CUDA_VISIBLE_DEVICES names.

    Raises:
        ConfigError: `nvidia-smi` is not installed, fails, or lists no GPU.

    """
    program = shutil.which("nvidia-smi")
    if program is None:
        raise ConfigError("no GPU was found: nvidia-smi is not on PATH; install NVIDIA's driver, or leave --gpus out")
    command = [program, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)  # noqa: S603 - a fixed command
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"nvidia-smi failed: {error}; check NVIDIA's driver") from error
    if done.returncode:
        why = (done.stdout + done.stderr).strip().partition("\n")[0]
        raise ConfigError(f"nvidia-smi failed with exit code {done.returncode}: {why}; check NVIDIA's driver")
    gpus = visible(parse_list(done.stdout), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not gpus:
        raise ConfigError("nvidia-smi lists no GPU that this process may use: check CUDA_VISIBLE_DEVICES")
    return gpus


def parse_list(text: str) -> list[Gpu]:
    """Return the GPUs in the output of `nvidia-smi`.

    Raises:
        ConfigError: a line has another form.

    """
    gpus = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        try:
            index, uuid, name, mib, bus_id, driver = row
            gpus.append(Gpu(int(index), uuid, name, _bytes(mib), driver, _local_cpus(bus_id)))
        except ValueError as error:
            raise ConfigError(f"nvidia-smi wrote a line of an unknown form, {', '.join(row)!r}: check it") from error
    return gpus


def _bytes(mib: str) -> int:
    # A GPU with unified memory reports none of its own: "[N/A]".
    return int(mib) << 20 if mib.isdigit() else 0


def _local_cpus(bus_id: str) -> str:
    """Return the CPUs next to a PCI device; nvidia-smi gives its domain 8 digits, the kernel 4."""
    try:
        return (_PCI_DEVICES / bus_id.lower()[-12:] / "local_cpulist").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def visible(gpus: list[Gpu], variable: str | None) -> list[Gpu]:
    """Return the GPUs that a value of CUDA_VISIBLE_DEVICES names, in its order; all if it is None."""
    if variable is None:
        return gpus
    found = []
    for name in filter(None, map(str.strip, variable.split(","))):
        matching = [gpu for gpu in gpus if name == str(gpu.index) or (not name.isdigit() and gpu.uuid.startswith(name))]
        if not matching:
            break  # as CUDA does
        found += matching[:1]
    return found


def select(given: str, gpus: list[Gpu], option: str) -> list[Gpu]:
    """Return the GPUs that a list such as `0-3,6` names; `all` names every one.

    Args:
        given: the list.
        gpus: the GPUs to select from.
        option: the option that gave the list, for messages.

    Raises:
        ConfigError: it is not such a list, or names a GPU twice or one that does not exist.

    """
    if given == "all":
        return gpus
    by_index = {gpu.index: gpu for gpu in gpus}
    selected: list[Gpu] = []
    for part in given.split(","):
        found = _RANGE.fullmatch(part.strip())
        if found is None:
            raise ConfigError(f"{option} {given!r} is not a list of GPUs: use the form 0-3,6, or all")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise ConfigError(f"{option} {given!r}: the range {part.strip()} is empty: give the lower number first")
        for index in range(first, last + 1):
            if index not in by_index:
                there = ", ".join(map(str, by_index))
                raise ConfigError(f"{option} {given!r}: there is no GPU {index} to use; there are: {there}")
            if by_index[index] in selected:
                raise ConfigError(f"{option} {given!r} names GPU {index} twice: name it once")
            selected.append(by_index[index])
    return selected
