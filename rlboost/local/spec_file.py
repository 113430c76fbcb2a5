"""The files of `rlboost up` and `rlboost worker join`: the same keys as their options, which override them."""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import yaml
from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from rlboost.local import layout
from rlboost.local.layout import Gpu, list_gpus, select
from rlboost.local.processes import LOOPBACK, LocalOptions, reserved_names, spot_names, trainer_names, trainer_of
from rlboost.shared.errors import ConfigError
from rlboost.shared.process.modules import EngineName, require_engine
from rlboost.shared.validation import Section, describe, read_yaml


class MachineSpec(Section):
    """What a system and a machine with workers have in common."""

    # A list of one GPU, and most values of settings, are numbers in YAML.
    model_config = ConfigDict(coerce_numbers_to_str=True)

    gpus: str = ""
    """GPUs to use, as nvidia-smi numbers them, such as 0-3,6; `all`; empty: settings select devices."""
    engine: EngineName | None = None
    """Inference engine; by default vllm on GPUs, torch otherwise."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs per engine."""
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """Fraction of a GPU's memory for the engines that share it with a trainer; for `worker join`, of every engine."""
    env: dict[str, str] = Field(default_factory=dict)
    """Settings of services, such as RLBOOST_WORKER_SLOTS: 256."""

    vllm_args: dict[str, Any] = Field(default_factory=dict)
    """More engine arguments of vLLM, such as max_num_batched_tokens: 8192."""

    @property
    def settings(self) -> dict[str, str]:
        """Return `env` with the settings that other keys stand for."""
        return self.env | ({"RLBOOST_WORKER_VLLM_ARGS": json.dumps(self.vllm_args)} if self.vllm_args else {})

    @property
    def engine_name(self) -> EngineName:
        """Return the selected engine."""
        return self.engine or ("vllm" if self.gpus else "torch")

    def require_engine(self) -> None:
        """Check that the engine can run as requested.

        Raises:
            ConfigError: it is not installed, or cannot be split over GPUs.

        """
        self.require_vllm_for_its_options()
        require_engine(self.engine_name)

    def require_vllm_for_its_options(self) -> None:
        """Check that options which only vLLM has are for vLLM, and that an engine over several GPUs has them.

        Raises:
            ConfigError: one is not.

        """
        if self.tensor_parallel > 1 and not self.gpus:
            raise ConfigError(f"--tensor-parallel {self.tensor_parallel} needs GPUs: name them with --gpus")
        if self.vllm_args and self.engine_name == "torch":
            raise ConfigError("vllm_args needs the vllm engine: set engine to vllm, or remove it")
        if self.tensor_parallel > 1 and self.engine_name == "torch":
            raise ConfigError(f"--tensor-parallel {self.tensor_parallel} needs --engine vllm: torch uses one GPU")


class SystemSpec(MachineSpec):
    """A system on one machine: `rlboost up cluster.yaml`."""

    trainer_gpus: str = ""
    """GPUs of the trainers; empty: those that no spot worker uses."""
    trainers: int = Field(1, ge=0)
    """Trainers; each runs one job at a time. 0: the jobs have trainers of your own, outside of this system."""
    time_share: bool = False
    """All trainers use all of the trainers' GPUs, in turns: one trains while samples of the others are generated."""
    reserved: int | None = Field(None, ge=0)
    """Workers that share a trainer's device; by default 1, on GPUs one per `tensor_parallel` GPUs of the trainers."""
    workers: int | None = Field(None, ge=0)
    """Preemptible workers; by default 3, on GPUs none, or as many as fit if there is no trainer."""
    autoscale: int = Field(0, ge=0)
    """Most spot workers: their number follows the number worth having. 0: it stays as it is."""
    host: str = ""
    """Address or name of this machine that workers on other machines can reach; empty: this machine only."""
    port: int = Field(0, ge=0, le=65535)
    """Port of the REST API; 0 takes a free one, with `host` 8700."""
    weight_store_port: int = Field(0, ge=0, le=65535)
    """Port of the weight store; 0 takes a free one, with `host` 8701."""
    redis_port: int = Field(0, ge=0, le=65535)
    """Port of Redis; 0 takes a free one, with `host` 6379."""
    standby: bool = False
    """A second manager, which takes over from the first."""

    @model_validator(mode="after")
    def _uses_trainers_that_it_has(self) -> Self:
        for name, given in (("reserved", self.reserved), ("trainer_gpus", self.trainer_gpus)):
            if self.trainers == 0 and given:
                raise ValueError(f"{name}: with trainers 0 there is no trainer whose device is shared: remove it")
        return self

    @model_validator(mode="after")
    def _shares_time_among_trainers(self) -> Self:
        if self.time_share and self.trainers < 2:
            raise ValueError(
                f"time_share: the only trainer has its device alone: set trainers to 2 or more, not {self.trainers}"
            )
        if self.time_share and self.reserved:
            raise ValueError(
                "reserved: a reserved worker of one job would generate on the device while another job trains on it: "
                "with time_share set it to 0, and give the jobs spot workers (workers)"
            )
        return self

    @field_validator("host")
    @classmethod
    def _is_one_address(cls, host: str) -> str:
        """Return one address of this machine: the given one, or that of the given name."""
        if not host:
            return host
        address = _address(host.strip().removeprefix("[").removesuffix("]"))
        if ipaddress.ip_address(address).is_unspecified:
            raise ValueError("name one address that other machines can reach, such as 10.0.0.5, not all")
        return address


def _address(host: str) -> str:
    """Return the address of a host; of a name with several, one of IPv4 where there is one.

    Raises:
        ValueError: the name has none.

    """
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"{host!r} is no name with an address ({why}): give an address of this machine") from error
    addresses = [str(one[4][0]) for one in sorted(found, key=lambda one: one[0] != socket.AF_INET)]
    reachable = [address for address in addresses if not ipaddress.ip_address(address.partition("%")[0]).is_loopback]
    if not reachable and host != "localhost":
        raise ValueError(f"{host!r} is {addresses[0]} here, which no other machine can reach: give an address")
    return (reachable or addresses)[0]


class NodeSpec(MachineSpec):
    """The workers of one machine: `rlboost worker join node.yaml`."""

    role: Literal["preemptible", "reserved"] = "preemptible"
    """`reserved` workers share their GPUs with the trainer."""
    beside: str = ""
    """URL of a vLLM server on the same GPUs: the workers generate only while it serves nothing."""

    @property
    def settings(self) -> dict[str, str]:
        """Return `env` with the settings that other keys stand for."""
        return super().settings | ({"RLBOOST_WORKER_BESIDE_URL": self.beside} if self.beside else {})


S = TypeVar("S", bound=MachineSpec)


def load(cls: type[S], file: Path | None, options: Mapping[str, Any]) -> S:
    """Return a specification from a file and from command-line options that are not None, which override it.

    Raises:
        ConfigError: the file cannot be read, or a value is invalid.

    """
    given = {name: value for name, value in options.items() if value is not None}
    try:
        return cls.model_validate({**(_read(file) if file else {}), **given})
    except ValidationError as error:
        raise ConfigError("; ".join(_located(line, given, file) for line in describe(error, cls))) from error


def _located(line: str, options: Mapping[str, Any], file: Path | None) -> str:
    """Return an error about a key with the name of its option, or with the file that has it."""
    key, _, text = line.partition(": ")
    return f"--{key.replace('_', '-')}: {text}" if key in options else f"{file}: {line}"


def _read(file: Path) -> dict[str, Any]:
    try:
        raw = read_yaml(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        if file.parts[:1] in {("http:",), ("https:",)}:
            raise ConfigError(f"{file} is a URL, not a file: give it with --url") from error
        raise ConfigError(
            f"{file}: {getattr(error, 'strerror', None) or error}: name a file that can be read"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} does not parse: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: it should be a mapping with keys such as gpus, reserved and engine")
    return raw


# --- From a system's specification to the options of a local system, GPUs included ------------------------------------


_DEFAULT_WORKERS = 3
_PORT, _WEIGHT_STORE_PORT, _REDIS_PORT = 8700, 8701, 6379
"""Where other machines find a system; deploy/README.md names them for firewalls."""


def local_options(spec: SystemSpec, state: Path) -> LocalOptions:
    """Return the options of a local system; lists this machine's GPUs only if the specification names some.

    Raises:
        ConfigError: the engine is not installed, there are no GPUs, or the processes do not fit on them.

    """
    spec.require_engine()
    if not spec.gpus and spec.trainer_gpus:
        raise ConfigError(f"--trainer-gpus {spec.trainer_gpus} needs --gpus: name all GPUs of the system with it")
    return placed(spec, state, list_gpus() if spec.gpus else [])


def initial_workers(workers: int | None, autoscale: int) -> int:
    """Return the number of spot workers to start with.

    Args:
        workers: the number that was requested, if any.
        autoscale: the most that autoscaling may run; 0: there is no autoscaling.

    Raises:
        ConfigError: more were requested than autoscaling may run.

    """
    if workers is None:
        return min(_DEFAULT_WORKERS, autoscale or _DEFAULT_WORKERS)
    if autoscale and workers > autoscale:
        raise ConfigError(f"--workers {workers} is more than --autoscale {autoscale}, the most: change one of them")
    return workers


def placed(spec: SystemSpec, state: Path, gpus: Sequence[Gpu]) -> LocalOptions:
    """Return the options of a local system on a machine with these GPUs.

    Raises:
        ConfigError: a GPU does not exist, the processes do not fit on the GPUs, or options exclude each other.

    """
    options = LocalOptions(
        state_dir=state,
        reserved=_reserved(spec, min(1, spec.trainers)),
        workers=initial_workers(spec.workers, spec.autoscale),
        engine=spec.engine_name,
        host=spec.host or LOOPBACK,
        port=spec.port or (_PORT if spec.host else 0),
        weight_store_port=spec.weight_store_port or (_WEIGHT_STORE_PORT if spec.host else 0),
        redis_port=spec.redis_port or (_REDIS_PORT if spec.host else 0),
        env=spec.settings,
        standby=spec.standby,
        trainers=spec.trainers,
        time_share=spec.time_share,
        autoscale=spec.autoscale,
    )
    if spec.autoscale and "RLBOOST_MANAGER_POOLS" in spec.env:
        raise ConfigError(
            "--autoscale sets RLBOOST_MANAGER_POOLS to the workers of this machine: remove it from env, or do without "
            "--autoscale"
        )
    if not spec.gpus:
        return options
    usable = select(spec.gpus, list(gpus), "--gpus")
    workers = spec.workers or 0
    if spec.workers is None and not (spec.trainers or spec.autoscale):
        workers = len(usable) // spec.tensor_parallel
    if spec.trainers == 0:
        trainer_gpus = []
    elif spec.trainer_gpus:
        trainer_gpus = select(spec.trainer_gpus, usable, "--trainer-gpus")
    else:
        trainer_gpus = usable[: max(len(usable) - max(workers, spec.autoscale) * spec.tensor_parallel, 0)]
    n_groups = len(trainer_gpus) // max(1, spec.trainers) // spec.tensor_parallel * spec.trainers
    options = replace(options, workers=workers, reserved=_reserved(spec, n_groups))
    planned = layout.plan(
        usable,
        trainer_gpus,
        trainer_names(options),
        {name: trainer_of(options, name) for name in reserved_names(options)},
        spot_names(options),
        tensor_parallel=spec.tensor_parallel,
        memory_fraction=spec.gpu_memory_utilization or layout.SHARED_MEMORY_FRACTION,
        time_share=spec.time_share,
    )
    if spec.autoscale > len(planned.worker_groups):
        raise ConfigError(
            f"--autoscale {spec.autoscale} does not fit on the GPUs that the trainer does not use, which have room for "
            f"{len(planned.worker_groups)} workers: lower it, or give fewer --trainer-gpus"
        )
    return replace(options, layout=planned)


def _reserved(spec: SystemSpec, default: int) -> int:
    if spec.reserved is not None:
        return spec.reserved
    return 0 if spec.time_share else default
