"""The CPUs and GPUs of a machine, which of them each process uses, and the environment that says so.

A *group* is the GPUs of one engine: `tensor_parallel` consecutive ones. Trainers divide their GPUs evenly. Reserved
engines take groups of their trainer's GPUs in turn, so several may share a group. Preemptible engines have groups of
their own.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlboost.shared.errors import ConfigError, Conflict

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


SHARED_MEMORY_FRACTION = 0.4
"""Default part of a GPU for the engines that share it with a trainer; the trainer has the rest."""
_VLLM_MEMORY_FRACTION = 0.92
"""vLLM's own default."""
_MAX_THREADS = 16
"""More threads of one process seldom help work that runs on a GPU."""


@dataclass(frozen=True)
class Placement:
    """The devices of one process."""

    gpus: tuple[Gpu, ...]
    memory_fraction: float = 0.0
    """Part of each GPU's memory for an engine; 0 = the engine's own default. A trainer has none."""

    @property
    def shown(self) -> str:
        """Return the indexes, such as `0,1`."""
        return ",".join(str(gpu.index) for gpu in self.gpus)

    @property
    def memory_bytes(self) -> int:
        """Return the bytes that an engine may use on its smallest GPU."""
        return int(min(gpu.memory_bytes for gpu in self.gpus) * (self.memory_fraction or _VLLM_MEMORY_FRACTION))

    @property
    def cpus(self) -> str:
        """Return the CPUs next to these GPUs, empty if those of one of them are unknown."""
        lists = dict.fromkeys(gpu.cpus for gpu in self.gpus)
        return "" if "" in lists else ",".join(lists)


@dataclass(frozen=True)
class DeviceSummary:
    """What a job must know of the GPUs of a system; sizes are 0 if unknown."""

    trainer_gpus: int
    trainer_memory_bytes: int
    """Memory of the trainer's smallest GPU."""
    tensor_parallel: int
    """GPUs per engine; 0 = no engine is on the system's own GPUs."""
    engine_memory_bytes: int
    """Memory that the engine with the least may use on each of its GPUs."""
    shared_memory_bytes: int
    """Memory that all engines on one GPU of the trainer may use together."""
    n_time_sharing: int = 1
    """Trainers that use the trainer's GPUs in turns."""


@dataclass(frozen=True)
class Layout:
    """The placement of every initial process of a machine that uses GPUs; empty without GPUs."""

    placements: Mapping[str, Placement] = field(default_factory=dict)
    """Process name -> its devices."""
    worker_groups: tuple[Placement, ...] = ()
    """The groups of spot workers, including those that no initial worker uses."""
    trainers: tuple[str, ...] = ()
    """Names of the processes that train."""

    def summary(self) -> DeviceSummary | None:
        """Return what a job must know of the GPUs, None without GPUs."""
        if not self.trainers:
            return None
        trainer = self.placements[self.trainers[0]]
        engines = [placement for name, placement in self.placements.items() if name not in self.trainers]
        shares = [
            sum(one.memory_fraction for one in engines if gpu in one.gpus) * gpu.memory_bytes for gpu in trainer.gpus
        ]
        return DeviceSummary(
            trainer_gpus=len(trainer.gpus),
            trainer_memory_bytes=min(gpu.memory_bytes for gpu in trainer.gpus),
            tensor_parallel=len(engines[0].gpus) if engines else 0,
            engine_memory_bytes=min((one.memory_bytes for one in engines), default=0),
            shared_memory_bytes=int(max(shares)),
            n_time_sharing=sum(self.placements[name] == trainer for name in self.trainers),
        )

    def threads(self, n_cpus: int) -> int:
        """Return the CPU threads per process if each use of a GPU gets an equal part of the CPUs."""
        n_uses = sum(len(placement.gpus) for placement in self.placements.values())
        return min(max(n_cpus // max(n_uses, 1), 1), _MAX_THREADS)

    def free_group(self, in_use: Collection[Placement]) -> Placement:
        """Return a spot worker's group that is not in use.

        Raises:
            Conflict: there is none.

        """
        free = next((group for group in self.worker_groups if group not in in_use), None)
        if free is None:
            raise Conflict("no GPU is free for another spot worker: give the system more --gpus")
        return free


def plan(
    gpus: Sequence[Gpu],
    trainer_gpus: Sequence[Gpu],
    trainers: Sequence[str],
    reserved: Mapping[str, str],
    workers: Sequence[str],
    *,
    tensor_parallel: int = 1,
    memory_fraction: float = SHARED_MEMORY_FRACTION,
    time_share: bool = False,
) -> Layout:
    """Place the processes of a system.

    Args:
        gpus: all GPUs of the system.
        trainer_gpus: those of the trainers.
        trainers: the trainers' names.
        reserved: name of each reserved worker -> name of its trainer.
        workers: names of the spot workers.
        tensor_parallel: number of GPUs per engine.
        memory_fraction: part of a trainer's GPU for all reserved engines on it together.
        time_share: whether each trainer has all of `trainer_gpus`, in turns.

    Raises:
        ConfigError: there are too few GPUs, or they cannot be divided evenly.

    """
    placements = _trainers(trainer_gpus, trainers, time_share=time_share)
    placements |= _reserved(placements, reserved, tensor_parallel, memory_fraction)
    others = [gpu for gpu in gpus if gpu not in trainer_gpus]
    groups = groups_of(others, tensor_parallel)
    if len(workers) > len(groups):
        raise ConfigError(
            f"{len(workers)} spot workers with {n_gpus(tensor_parallel)} each do not fit on the "
            f"{n_gpus(len(others))} that the trainer does not use: lower --workers, or give fewer --trainer-gpus"
        )
    placements |= dict(zip(workers, groups, strict=False))
    return Layout(placements, tuple(groups), tuple(trainers))


def plan_workers(gpus: Sequence[Gpu], name: str, *, tensor_parallel: int = 1, memory_fraction: float = 0.0) -> Layout:
    """Place one worker per group of a machine, named `name-1`, `name-2`, ...; `name` if there is only one.

    Raises:
        ConfigError: the GPUs cannot be divided into groups.

    """
    if len(gpus) % tensor_parallel:
        raise ConfigError(
            f"--tensor-parallel {tensor_parallel} does not divide {n_gpus(len(gpus))}: give a divisor, or other --gpus"
        )
    groups = groups_of(gpus, tensor_parallel, memory_fraction)
    names = [name] if len(groups) == 1 else [f"{name}-{i + 1}" for i in range(len(groups))]
    return Layout(dict(zip(names, groups, strict=True)), tuple(groups))


def groups_of(gpus: Sequence[Gpu], tensor_parallel: int, memory_fraction: float = 0.0) -> list[Placement]:
    """Return the complete groups of consecutive GPUs."""
    starts = range(0, len(gpus) - tensor_parallel + 1, tensor_parallel)
    return [Placement(tuple(gpus[i : i + tensor_parallel]), memory_fraction) for i in starts]


def _trainers(gpus: Sequence[Gpu], trainers: Sequence[str], *, time_share: bool) -> dict[str, Placement]:
    if not trainers:
        return {}
    if not gpus:
        raise ConfigError("the spot workers leave no GPU to the trainer: lower --workers, or give more --gpus")
    if time_share:
        return dict.fromkeys(trainers, Placement(tuple(gpus)))
    each, left = divmod(len(gpus), len(trainers))
    if left:
        raise ConfigError(
            f"{len(trainers)} trainers cannot divide {n_gpus(len(gpus))} evenly: give other --trainer-gpus or "
            "--trainers, or --time-share, so that they use them in turns"
        )
    return {name: Placement(tuple(gpus[i * each : (i + 1) * each])) for i, name in enumerate(trainers)}


def _reserved(
    trainers: Mapping[str, Placement], reserved: Mapping[str, str], tensor_parallel: int, memory_fraction: float
) -> dict[str, Placement]:
    placements = {}
    for trainer, placement in trainers.items():
        names = [name for name, its_trainer in reserved.items() if its_trainer == trainer]
        groups = groups_of(placement.gpus, tensor_parallel)
        if names and not groups:
            raise ConfigError(
                f"--tensor-parallel {tensor_parallel} is more than the {n_gpus(len(placement.gpus))} of {trainer}: "
                "lower it, give more --trainer-gpus, or set --reserved 0"
            )
        for i, name in enumerate(names):
            group = i % len(groups)
            n_sharing = len(range(group, len(names), len(groups)))
            placements[name] = Placement(groups[group].gpus, memory_fraction / n_sharing)
    return placements


def environment(placement: Placement, prefix: str, n_threads: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a placed process.

    Args:
        placement: the process's devices.
        prefix: prefix of the process's settings: `RLBOOST_TRAINER_` or `RLBOOST_WORKER_`.
        n_threads: number of CPU threads.
        inherited: the user's own environment, whose settings win, except for which GPUs the process has.

    """
    # nvidia-smi counts GPUs in the order of their PCI addresses; CUDA's own default is the fastest first.
    fixed = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": placement.shown}
    defaults = {"OMP_NUM_THREADS": str(n_threads), f"{prefix}DEVICE": "cuda"}
    if placement.cpus:
        defaults[f"{prefix}CPUS"] = placement.cpus
    if prefix == "RLBOOST_WORKER_":
        fixed[f"{prefix}TENSOR_PARALLEL"] = str(len(placement.gpus))
        defaults[f"{prefix}DTYPE"] = "bfloat16"
        if placement.memory_fraction:
            defaults[f"{prefix}GPU_MEMORY_UTILIZATION"] = f"{placement.memory_fraction:g}"
    return fixed | {name: value for name, value in defaults.items() if name not in inherited}


def n_gpus(n: int) -> str:
    """Return a number of GPUs in words."""
    return "1 GPU" if n == 1 else f"{n} GPUs"
