"""Settings of the rollout manager."""

from __future__ import annotations

import math
from pathlib import Path
from typing import ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from rlboost.services.rollout_manager.domain.offers import Pool, ProviderName
from rlboost.shared.errors import ConfigError
from rlboost.shared.prices import read_prices
from rlboost.shared.settings import ServiceSettings


class Settings(ServiceSettings):
    """Environment prefix `RLBOOST_MANAGER_`."""

    model_config = SettingsConfigDict(env_prefix="RLBOOST_MANAGER_")
    prefix: ClassVar[str] = "RLBOOST_MANAGER_"

    host: str = Field("127.0.0.1", description="address of the REST API")
    port: int = Field(8700, ge=0, le=65535, description="port of the REST API; 0 takes a free one")
    join_token: SecretStr = Field(
        SecretStr(""), description="a token that workers may join with, in addition to those of `rlboost token create`"
    )
    weight_store_url: str = Field("http://127.0.0.1:8701", description="URL of the weight store for workers that join")
    advertised_redis_url: str = Field("", description="URL of Redis for workers that join; if empty, the manager's own")
    worker_redis_users: Literal["on", "off"] = Field(
        "on",
        description="on: each worker gets a Redis user that can access only its own keys; off: workers get the "
        "manager's Redis URL",
    )
    redis_durability: Literal["required", "off"] = Field(
        "required",
        description="required: exit if Redis evicts keys, or does not write what it acknowledges to a disk; off: "
        "start, and log it",
    )
    lease_s: float = Field(
        2.0, gt=0, description="lease of a worker that reports no `RLBOOST_WORKER_LEASE_S` of its own"
    )
    stall_limit_s: float = Field(
        90.0,
        gt=0,
        description="time for which a worker may hold a sample without sending a token of it while others generate; "
        "longer if the fleet is slow, a third of it for a worker that has sent no token yet, and for a drain. "
        "Keep it above the workers' `RLBOOST_WORKER_STALL_LIMIT_S`",
    )
    leader_lease_s: float = Field(
        3.0,
        ge=0.2,
        description="duration of the leader's lease; a standby takes over when it expires or the leader's process dies",
    )
    public_url: str = Field(
        "",
        pattern=r"^(https?://\S+)?$",
        description="URL to which a standby sends clients of this manager; if empty, http(s)://HOST:PORT",
    )
    serve_limit_s: float = Field(600.0, gt=0, description="time limit of a completion requested over REST")
    pools: list[Pool] = Field(
        [],
        description="offers of spot workers that autoscaling may start, preferred first where they cost the same, as "
        'JSON, such as `[{"kind": "h100", "max_workers": 8, "price_per_hour": 2.5}]`; if empty, there is no '
        "autoscaling",
    )
    price_file: str = Field(
        "",
        description="file of `rlboost prices`: dollars per hour of workers by kind, for those without a price of their "
        "own; read at the start and whenever it changes",
    )
    provider: ProviderName = Field(
        "none",
        description="what starts and stops the spot workers of pools that name no provider: Kubernetes, "
        "`RLBOOST_MANAGER_PROVIDER_COMMAND`, AWS EC2, or with none a program of yours that follows `GET /v1/fleet`",
    )
    provider_command: str = Field(
        "",
        description="with provider command: shell command that sets the number of workers of kind `$RLBOOST_KIND` to "
        "`$RLBOOST_WORKERS`",
    )
    kubernetes_namespace: str = Field(
        "",
        description="with provider kubernetes: namespace of the Deployments, whose names are the kinds; if empty, the "
        "pod's own",
    )
    aws_system: str = Field(
        "",
        pattern=r"^[A-Za-z0-9._-]*$",
        description="with provider aws: name of this system, by which it finds its machines; no other system of the "
        "AWS account may have it",
    )
    aws_user_data: Path | None = Field(
        None,
        description="with provider aws: file that machines get as user data, such as "
        "`deploy/cloud-init/spot-worker.yaml`; the kind of their pool replaces that after `RLBOOST_WORKER_KIND=`, and "
        "its price one after `RLBOOST_WORKER_PRICE_PER_HOUR=`. If not given, that of the launch template",
    )
    max_dollars_per_hour: float | None = Field(
        None,
        ge=0,
        description="maximum dollars per hour of all workers together; spot workers beyond it are drained",
    )
    max_share: float = Field(
        1.0, gt=0, le=1, description="largest part of the spot workers that may be of one pool, rounded up to a worker"
    )
    scale_in_delay_s: float = Field(
        300.0, ge=0, description="how long fewer workers must be enough before autoscaling shrinks the fleet"
    )
    redis_limit_s: float = Field(300.0, gt=0, description="exit after Redis has not answered for this time")

    @property
    def prices(self) -> dict[str, float]:
        """Return dollars per hour of one worker by kind: the price file's, else its pool's.

        It has no pool of AWS without either, which follows the spot price.

        Raises:
            ConfigError: the price file cannot be read, or is not one; or some pools have a price and some have none.

        """
        found = {pool.kind: pool.price_per_hour for pool in self.pools if pool.price_per_hour is not None}
        if self.price_file:
            try:
                found |= read_prices(Path(self.price_file)).workers
            except ConfigError as error:
                raise ConfigError(f"RLBOOST_MANAGER_PRICE_FILE: {error}") from error
        missing = [pool.kind for pool in self.pools if pool.kind not in found and self.provider_of(pool) != "aws"]
        if 0 < len(missing) < len(self.pools):
            raise ConfigError(
                f"RLBOOST_MANAGER_POOLS: {', '.join(missing)} cannot be compared with the other pools, which have a "
                "price: set its price_per_hour (0: it is free), or add its kind to RLBOOST_MANAGER_PRICE_FILE"
            )
        return found

    @property
    def prices_modified_at(self) -> float:
        """Return when the price file was written last, in Unix seconds; 0 without one."""
        try:
            return Path(self.price_file).stat().st_mtime if self.price_file else 0.0
        except OSError:
            return 0.0

    def provider_of(self, pool: Pool) -> ProviderName:
        """Return what starts the workers of a pool."""
        return pool.provider or ("command" if pool.command else "aws" if pool.aws else self.provider)

    @field_validator("advertised_redis_url")
    @classmethod
    def _check_host(cls, url: str) -> str:
        if url and not urlsplit(url).hostname:  # else workers would take their own machine for it
            raise ValueError("it names no host: give redis://[:PASSWORD@]HOST:PORT/DB, HOST as workers reach it")
        return url

    @model_validator(mode="after")
    def _check_autoscaling(self) -> Self:
        kinds = [pool.kind for pool in self.pools]
        if repeated := sorted({kind for kind in kinds if kinds.count(kind) > 1}):
            raise ValueError(f"several pools are of kind {', '.join(repeated)}: give each pool its own kind")
        if self.provider != "none" and not self.pools:
            raise ValueError(f"provider {self.provider} has no kind of worker to start: set RLBOOST_MANAGER_POOLS")
        unset = [pool.kind for pool in self.pools if self.provider_of(pool) == "command" and not pool.command]
        if unset and not self.provider_command:
            raise ValueError(
                f"provider command needs a shell command for {', '.join(unset)}: set RLBOOST_MANAGER_PROVIDER_COMMAND, "
                "or command of the pool"
            )
        of_aws = [pool for pool in self.pools if self.provider_of(pool) == "aws"]
        if undescribed := [pool.kind for pool in of_aws if pool.aws is None]:
            raise ValueError(
                f"provider aws needs the key aws of {', '.join(undescribed)}: its instance_type, zone and "
                "launch_template"
            )
        if of_aws and not self.aws_system:
            raise ValueError(
                "provider aws needs a name that no other system of the AWS account has: set RLBOOST_MANAGER_AWS_SYSTEM"
            )
        if self.pools and self.max_share * len(self.pools) < 1:
            raise ValueError(
                f"RLBOOST_MANAGER_MAX_SHARE of {self.max_share:g} needs {math.ceil(1 / self.max_share)} pools, and "
                f"there are {len(self.pools)}: add pools, or raise it"
            )
        return self
