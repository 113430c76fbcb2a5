"""Settings of a rollout worker: where the manager is, and what this machine offers."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import SettingsConfigDict

from rlboost.shared.http.server_url import manager_url
from rlboost.shared.messages import Role
from rlboost.shared.messages.codec import HourlyPrice
from rlboost.shared.process.modules import EngineName
from rlboost.shared.settings import ServiceSettings

_MAX_PORT = 65535
_CACHE = Path("~/.cache/rlboost/weights")


class Settings(ServiceSettings):
    """Environment prefix `RLBOOST_WORKER_`. The URLs of Redis and of the weight store come from the manager."""

    model_config = SettingsConfigDict(env_prefix="RLBOOST_WORKER_")
    prefix: ClassVar[str] = "RLBOOST_WORKER_"

    url: str = Field("http://127.0.0.1:8700", description="URL of the rollout manager")
    role: Role = Field(
        "preemptible", description="reserved: shares its device with the trainer; preemptible: spot worker"
    )
    trainer: str = Field(
        "", description="name of a reserved worker's trainer; may be empty if there is only one trainer"
    )
    name: str = Field(
        "", pattern=r"^[A-Za-z0-9._-]*$", description="prefix of the worker's id; if empty, the host name"
    )
    kind: str = Field(
        "", description="kind of machine, for prices and throughput profiles; if empty, engine and device"
    )
    price_per_hour: HourlyPrice = Field(
        0.0,
        description="dollars per hour of this worker: the price of its machine divided by the machine's workers",
    )

    engine: EngineName = Field("torch", description="inference engine")
    device: str = Field("cpu", description="the engine's device, in torch's notation")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="dtype of the engine's weights; use the jobs' `trainer.dtype`"
    )
    parity_tolerance: float = Field(
        0.0,
        ge=0,
        description="allowed mean difference from the trainer's log-probabilities, in nats; 0: set by the precision",
    )
    slots: int = Field(64, ge=1, description="maximum number of running samples")
    kv_cache_bytes: int = Field(
        0,
        ge=0,
        description="size of the KV cache; 0: most of a GPU's free memory, or on a CPU 1 GiB (torch) or 256 MiB (vllm)",
    )
    speculation: Literal["auto", "off"] = Field(
        "auto",
        description="auto: the torch engine verifies drafts from samples of the same prompt where that saves time; "
        "off: one token per pass. vllm has `speculative_config` in `RLBOOST_WORKER_VLLM_ARGS`",
    )
    max_adapters: int = Field(
        0,
        ge=0,
        description="jobs that train LoRA adapters of the same model which the engine serves at once; 1: it merges the "
        "adapter of one job into the weights; 0: 8 with torch, and 1 with vllm, which reserves memory for all at its "
        "start",
    )
    max_adapter_rank: int = Field(
        64, ge=1, description="maximum rank of these adapters; one of a higher rank is merged, and served alone"
    )
    gpu_memory_utilization: float = Field(
        0.0,
        ge=0,
        le=1,
        description="fraction of each GPU's memory for the engine; 0: vllm's default, 0.92, or the free memory (torch)",
    )
    tensor_parallel: int = Field(1, ge=1, description="number of GPUs that vllm splits the model over")
    pack_weights: bool = Field(
        True,
        description="vllm on a CPU: pack weights, to generate faster; false: new versions are written in place, which "
        "shortens pauses",
    )
    vllm_args: dict[str, Any] = Field(
        default_factory=dict,
        description='more engine arguments of vllm as JSON, such as {"max_num_batched_tokens": 8192}',
    )
    cpus: str = Field("", description="CPUs to use, such as 0-15,32-47; if empty, all")
    cache_dir: Path = Field(_CACHE, description="cache of pulled weights, with one folder per worker")

    base_model: Path | None = Field(
        None, description="Hugging Face folder with the initial model of jobs, such as one in the machine's image"
    )

    flush_interval_s: float = Field(0.05, gt=0, le=5, description="how often new tokens are sent")
    heartbeat_interval_s: float = Field(0.5, gt=0, le=10, description="how often heartbeats are sent")
    lease_s: float = Field(2.0, gt=0, le=60, description="time without a heartbeat until the worker is lost")
    stall_limit_s: float = Field(
        60.0, gt=0, description="time without a token from a busy engine until it counts as hung and the process exits"
    )
    grace_s: float = Field(10.0, gt=0, description="time from SIGTERM until the process must have exited")

    notices: Literal["auto", "aws", "gcp", "azure", "off"] = Field(
        "auto", description="cloud whose metadata service is polled for preemption notices; auto: the one that answers"
    )
    metadata_url: str = Field(
        "http://169.254.169.254", pattern=r"^https?://[^\s/?#]+/?$", description="URL of the metadata service"
    )
    rebalance: Literal["report", "drain"] = Field(
        "report", description="reaction to a rebalance recommendation of AWS: an event, or an event and a drain"
    )
    notice_file: Path | None = Field(None, description="local file whose appearance is a preemption notice")

    beside_url: str = Field(
        "",
        pattern=r"^(https?://[^\s?#@]+)?$",
        description="URL of a vLLM server on the same device: the worker generates only while that serves nothing; "
        "if empty, the device is the worker's own",
    )
    beside_max_running: int = Field(
        0, ge=0, description="requests that may run in that server while the worker generates"
    )
    beside_ttft_ms: float = Field(
        0.0,
        ge=0,
        description="the worker yields while more than 5 % of that server's requests wait longer for a first token; "
        "0: no limit",
    )

    serve: str = Field(
        "",
        pattern=r"^(\S+:\d+)?$",
        description="address, HOST:PORT, at which vllm also serves the model in `base_model` by the OpenAI API, "
        "without tokens of the system; samples get what its requests leave. If empty, the engine is the jobs' own",
    )
    serve_args: dict[str, Any] = Field(
        default_factory=dict,
        description="arguments of vllm's server as JSON, such as "
        '{"served_model_name": "prod", "enable_auto_tool_choice": true, "tool_call_parser": "hermes"}',
    )
    serve_ttft_ms: float = Field(
        500.0,
        gt=0,
        description="fewer samples run while more than 5 % of these requests wait longer for a first token",
    )

    site: str = Field(
        "",
        pattern=r"^[A-Za-z0-9._-]*$",
        description="where this machine is, such as a region or an office, if it is far from the weight store: "
        "workers of one site fetch each chunk from there once; auto: the cloud's region; if empty, where the store is",
    )
    host: str = Field(
        "",
        description="address that serves health, metrics and weights for other workers; "
        "if empty, the one from which the worker reaches the manager",
    )
    port: int = Field(
        0, ge=0, le=65535, description="port of health, metrics and weights for other workers; 0 takes a free one"
    )
    peer_url: str = Field(
        "",
        pattern=r"^(off|https?://[^\s/?#@]+/?)?$",
        description="URL for other workers; if empty, host and port; off: no weights for other workers",
    )

    @field_validator("url")
    @classmethod
    def _is_of_a_manager(cls, url: str) -> str:
        return manager_url("RLBOOST_WORKER_URL", url)

    @field_validator("beside_url")
    @classmethod
    def _is_of_a_spot_worker(cls, url: str, info: ValidationInfo) -> str:
        if url and info.data.get("role") == "reserved":
            raise ValueError("a reserved worker shares the trainer's device: use role preemptible")
        return url

    @field_validator("beside_max_running", "beside_ttft_ms")
    @classmethod
    def _needs_a_server(cls, limit: float, info: ValidationInfo) -> float:
        if limit and info.data.get("beside_url") == "":
            raise ValueError("this is a limit for a server: name that with beside_url, or --beside")
        return limit

    @field_validator("serve")
    @classmethod
    def _can_serve(cls, serve: str, info: ValidationInfo) -> str:
        given = info.data
        if serve and given.get("engine") == "torch":
            raise ValueError("the torch engine serves no requests: use engine vllm")
        if serve and given.get("role") == "reserved":
            raise ValueError("a reserved worker shares the trainer's device: use role preemptible")
        if serve and given.get("beside_url"):
            raise ValueError("one engine serves and generates, or two do: give serve, or beside_url (--beside)")
        if serve and int(serve.rpartition(":")[2]) > _MAX_PORT:
            raise ValueError(f"ports are at most {_MAX_PORT}: choose another one")
        if serve and given.get("base_model") is None:
            raise ValueError("set base_model to the folder of the model to serve")
        return serve

    @field_validator("serve_args")
    @classmethod
    def _needs_an_address(cls, serve_args: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if serve_args and info.data.get("serve") == "":
            raise ValueError("these are arguments of a server: give its address with serve, or --serve")
        return serve_args

    @property
    def held_adapters(self) -> int:
        """Return how many adapters the engine holds next to its weights; 0: it merges them."""
        count = self.max_adapters or (8 if self.engine == "torch" else 1)
        return count if count > 1 or self.serve else 0

    @property
    def worker_name(self) -> str:
        """Return the configured name, or the host's."""
        return self.name or socket.gethostname()

    @property
    def worker_kind(self) -> str:
        """Return the configured kind, or engine and device."""
        return self.kind or f"{self.engine}-{self.device.partition(':')[0]}"
