"""What a rollout worker is told: where the manager is, and what this machine can do. All else it is told on joining."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from shared.messages import Role
from shared.settings import ServiceSettings

_CACHE = Path("~/.cache/rlboost/weights")


class Settings(ServiceSettings):
    """Environment prefix `RLBOOST_WORKER_`. Where Redis and the weight store are, the manager tells."""

    model_config = SettingsConfigDict(env_prefix="RLBOOST_WORKER_")
    prefix: ClassVar[str] = "RLBOOST_WORKER_"

    url: str = Field("http://127.0.0.1:8700", description="where the rollout manager is")
    role: Role = Field("preemptible", description="reserved = shares its device with the trainer")
    trainer: str = Field("", description="reserved: name of that trainer; may be empty where there is one trainer only")
    name: str = Field("", pattern=r"^[A-Za-z0-9._-]*$", description="begins the worker's id; the host's name if empty")
    kind: str = Field("", description="what sort of machine, for profiles of speed; engine and device if empty")
    price_per_hour: float = Field(0.0, ge=0, description="what this machine costs")

    engine: Literal["torch", "vllm"] = Field("torch", description="what generates")
    device: str = Field("cpu", description="the engine's device, as torch names it")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of the engine's weights")
    canary_tolerance: float = Field(
        0.0, ge=0, description="how far from the trainer's log-probabilities on average, in nats; 0 = by dtype"
    )
    slots: int = Field(64, ge=1, description="how many samples run at once")
    kv_cache_bytes: int = Field(
        0,
        ge=0,
        description="of the KV cache; 0 = most of what a GPU has free; on a CPU 1 GiB (torch) or 256 MiB (vllm)",
    )
    tensor_parallel: int = Field(1, ge=1, description="vllm: over how many GPUs the model is split")
    cache_dir: Path = Field(_CACHE, description="keeps pulled weights, in a folder a worker name")

    base_model: Path | None = Field(
        None, description="Hugging Face folder with the model that jobs begin with, such as one in the machine's image"
    )

    flush_interval_s: float = Field(0.05, gt=0, le=5, description="how often new tokens are sent")
    beat_interval_s: float = Field(0.5, gt=0, le=10, description="how often the worker says that it is alive")
    lease_s: float = Field(2.0, gt=0, le=60, description="silence after which it counts as lost")
    stall_limit_s: float = Field(
        60.0, gt=0, description="no token from an engine with samples for so long: it hangs, and the process ends"
    )
    grace_s: float = Field(10.0, gt=0, description="time from SIGTERM until it must be gone")

    notices: Literal["auto", "aws", "gcp", "azure", "off"] = Field(
        "auto", description="whose metadata service is asked for spot notices; auto = the one that answers"
    )
    metadata_url: str = Field(
        "http://169.254.169.254", pattern=r"^https?://[^\s/?#]+/?$", description="where that service is"
    )
    rebalance: Literal["tell", "drain"] = Field(
        "tell", description="AWS's rebalance recommendation: an event, or also leave"
    )
    notice_file: Path | None = Field(None, description="a local file: when it appears the machine will be taken away")

    host: str = Field("127.0.0.1", description="where health, metrics and weights for other workers are served")
    port: int = Field(0, ge=0, le=65535, description="0 = any free port")
    peer_url: str = Field(
        "",
        pattern=r"^(off|https?://[^\s/?#]+/?)?$",
        description="where other workers reach that; empty = at host and port; off = they get no weights here",
    )

    @property
    def worker_name(self) -> str:
        """Return the name, or the host's."""
        return self.name or socket.gethostname()

    @property
    def worker_kind(self) -> str:
        """Return the kind, or engine and device."""
        return self.kind or f"{self.engine}-{self.device.partition(':')[0]}"
