"""The files of `rlboost up` and `rlboost worker join`: the same keys as their options, which override them."""

from __future__ import annotations

import importlib.util
import ipaddress
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import ConfigDict, Field, ValidationError, field_validator

from rlboost.shared import strict_yaml
from rlboost.shared.errors import ConfigError
from rlboost.shared.process.extras import pip_install
from rlboost.shared.validation import Section, describe

EngineName = Literal["torch", "vllm"]


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
    trainers: int = Field(1, ge=1)
    """Trainers; each runs one job at a time."""
    reserved: int | None = Field(None, ge=0)
    """Workers that share a trainer's device; by default 1, on GPUs one per `tensor_parallel` GPUs of the trainers."""
    workers: int | None = Field(None, ge=0)
    """Preemptible workers; by default 3, on GPUs none."""
    autoscale: int = Field(0, ge=0)
    """Most spot workers: their number follows the number worth having. 0: it stays as it is."""
    host: str = ""
    """Address of this machine that workers on other machines can reach; empty: this machine only."""
    port: int = Field(0, ge=0, le=65535)
    """Port of the REST API; 0 takes a free one, with `host` 8700."""
    weight_store_port: int = Field(0, ge=0, le=65535)
    """Port of the weight store; 0 takes a free one, with `host` 8701."""
    redis_port: int = Field(0, ge=0, le=65535)
    """Port of Redis; 0 takes a free one, with `host` 6379."""
    standby: bool = False
    """A second manager, which takes over from the first."""

    @field_validator("host")
    @classmethod
    def _is_one_address(cls, host: str) -> str:
        if host and ipaddress.IPv4Address(host).is_unspecified:
            raise ValueError("name one address that other machines can reach, such as 10.0.0.5, not all")
        return host


class NodeSpec(MachineSpec):
    """The workers of one machine: `rlboost worker join node.yaml`."""

    role: Literal["preemptible", "reserved"] = "preemptible"
    """`reserved` workers share their GPUs with the trainer."""


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
        raw = strict_yaml.read(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file}: {getattr(error, 'strerror', None) or error}: name a file that can be read"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} does not parse: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: it should be a mapping with keys such as gpus, reserved and engine")
    return raw


def require_engine(engine: str) -> None:
    """Check that an engine is installed.

    Raises:
        ConfigError: it is not; says how to install it.

    """
    if engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "--engine vllm needs vllm: 'make install-vllm' on a machine without a GPU, "
            f"{pip_install('vllm')} on one with"
        )
