"""Answers a worker that joins: its identity, and the addresses and credentials of the other services."""

from __future__ import annotations

import time
from typing import Annotated
from urllib.parse import quote, urlsplit, urlunsplit

from pydantic import BaseModel, ConfigDict, Field

from rlboost.services.rollout_manager.access.identities import WorkerIdentities, Write
from rlboost.services.rollout_manager.adapters.manifest_key import manifest_public_key
from rlboost.services.rollout_manager.settings import Settings
from rlboost.shared.http.problem import Problem
from rlboost.shared.http.store_credential import issue_store_credential
from rlboost.shared.http.token_signature import peer_key
from rlboost.shared.messages import Role
from rlboost.shared.messages.protocol import PROTOCOL
from rlboost.shared.streams import names


class JoinRequest(BaseModel):
    """A worker that wants to join."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,100}$", description="prefix of the worker's id")]
    role: Role


class JoinAddresses(BaseModel):
    """The addresses of the other services."""

    model_config = ConfigDict(frozen=True)

    protocol: int
    redis_url: str = Field(description="for a worker that joined with its own user and password, where these exist")
    weight_store_url: str


class JoinAnswer(JoinAddresses):
    """What a worker needs; it never needs the system's token."""

    worker: str = Field(description="id of this incarnation")
    store_credential: str = Field(description="for the weight store; the manager sends new ones before it expires")
    manifest_key: str = Field(description="the public key under which manifests are signed")
    peer_key: str = Field(description="signs requests for weights to other workers")


def check_protocol(protocol: int) -> None:
    """Reject a worker with another protocol.

    Raises:
        Problem: it must be updated, or the manager.

    """
    if protocol != PROTOCOL:
        raise Problem(
            409,
            "Protocol mismatch",
            f"the worker speaks protocol {protocol} and this manager {PROTOCOL}: install the same version of "
            "rlboost on both",
        )


def join_addresses(settings: Settings) -> JoinAddresses:
    """Return what a worker that joins connects to, without credentials."""
    redis_url = _with_login(_redis_url(settings), "")
    return JoinAddresses(protocol=PROTOCOL, redis_url=redis_url, weight_store_url=settings.weight_store_url)


async def join(request: JoinRequest, identities: WorkerIdentities, settings: Settings, write: Write) -> JoinAnswer:
    """Create the worker's identity."""
    worker, secret = await identities.create(request.name, request.role, write)
    url, token = _redis_url(settings), settings.token.get_secret_value()
    login = f"{quote(names.worker_redis_user(worker), safe='')}:{quote(secret, safe='')}@"
    return JoinAnswer(
        protocol=PROTOCOL,
        worker=worker,
        redis_url=_with_login(url, login) if secret else url,
        weight_store_url=settings.weight_store_url,
        store_credential=issue_store_credential(token, worker, time.time()),
        manifest_key=manifest_public_key(token),
        peer_key=peer_key(token),
    )


def _redis_url(settings: Settings) -> str:
    return settings.advertised_redis_url or settings.redis_url


def _with_login(url: str, login: str) -> str:
    """Return the URL with another `user:password@`, or without any."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=login + parts.netloc.rpartition("@")[2]))
