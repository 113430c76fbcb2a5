"""Settings of the rollout manager."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict

from rlboost.shared.settings import ServiceSettings


class Settings(ServiceSettings):
    """Environment prefix `RLBOOST_MANAGER_`."""

    model_config = SettingsConfigDict(env_prefix="RLBOOST_MANAGER_")
    prefix: ClassVar[str] = "RLBOOST_MANAGER_"

    host: str = Field("127.0.0.1", description="address of the REST API")
    port: int = Field(8700, ge=0, le=65535, description="port of the REST API; 0 takes a free one")
    join_token: SecretStr = Field(
        SecretStr(""), description="a token that workers may join with, besides those of `rlboost token create`"
    )
    weight_store_url: str = Field("http://127.0.0.1:8701", description="where joining workers find the weight store")
    advertised_redis_url: str = Field("", description="where joining workers find Redis; the manager's own when empty")
    worker_redis_users: Literal["on", "off"] = Field(
        "on",
        description="each worker gets a Redis user that can access only its own keys; off = workers get the manager's "
        "Redis URL",
    )
    lease_s: float = Field(
        2.0, gt=0, description="a worker without a lease is lost after this time without a heartbeat"
    )
    leader_lease_s: float = Field(
        3.0,
        ge=0.2,
        description="duration of the leader's lease; a standby takes over when it expires or the leader's process dies",
    )
    public_url: str = Field(
        "",
        pattern=r"^(https?://\S+)?$",
        description="where a standby sends clients of this manager; http(s)://HOST:PORT when empty",
    )
    serve_limit_s: float = Field(600.0, gt=0, description="time limit of a completion requested over REST")
    redis_limit_s: float = Field(300.0, gt=0, description="exit after Redis has not answered for this time")
