"""Joins the manager: the worker's only HTTP request to it, repeated when it must become a new incarnation."""

from __future__ import annotations

import httpx
import stamina
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlboost.services.rollout_worker.ports import Membership
from rlboost.shared.errors import ConfigError, Conflict, Fatal, Retryable
from rlboost.shared.http.redirect import MAX_REDIRECTS, redirected_origin
from rlboost.shared.messages import Role
from rlboost.shared.messages.protocol import PROTOCOL, PROTOCOL_HEADER, UNNUMBERED
from rlboost.shared.redis.bus import connect
from rlboost.shared.streams import names
from rlboost.shared.tls import client_verification

JOIN_LIMIT_S = 300.0
"""How long a worker retries while the manager does not answer."""
_TIMEOUT_S = 5.0


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    worker: str
    redis_url: str
    weight_store_url: str
    store_credential: str = Field(repr=False)
    """Credential for the weight store; the manager sends new ones."""
    manifest_key: str
    """The public key under which manifests are signed."""
    peer_key: str = Field(repr=False)


class _Protocol(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    protocol: int = UNNUMBERED


class _ManagerUnavailable(Retryable):
    pass


async def join(url: str, token: str, name: str, role: Role, limit_s: float = JOIN_LIMIT_S) -> Membership:
    """Become a worker of the manager at `url`, and connect to Redis; retry while one of them is unavailable.

    Raises:
        ConfigError: the token is wrong, the answer is not a manager's, or its protocol differs.
        Fatal: the manager or Redis did not answer within the limit.

    """
    answer = await _request(url, token, {"name": name, "role": role}, limit_s)
    reports = names.worker_reports(answer.worker)
    bus = await connect(answer.redis_url, answer.worker, dead_letters=reports)
    return Membership(
        worker=answer.worker,
        bus=bus,
        weight_store_url=answer.weight_store_url,
        store_credential=answer.store_credential,
        manifest_key=answer.manifest_key,
        peer_key=answer.peer_key,
    )


async def _request(url: str, token: str, body: dict[str, str], limit_s: float) -> _Answer:
    address = f"{url.rstrip('/')}/v1/join"
    headers = {"Authorization": f"Bearer {token}", PROTOCOL_HEADER: str(PROTOCOL)}
    try:
        async with httpx.AsyncClient(timeout=_TIMEOUT_S, headers=headers, verify=client_verification()) as client:
            async for attempt in stamina.retry_context(
                on=_ManagerUnavailable, attempts=None, timeout=limit_s, wait_max=2.0
            ):
                with attempt:
                    response = await _post(client, address, body)
    except _ManagerUnavailable as error:
        raise Fatal(
            f"{error}; no answer for {limit_s:.0f} s: start the manager, or correct RLBOOST_WORKER_URL"
        ) from error
    except httpx.InvalidURL as error:
        raise ConfigError(f"manager URL {url!r}: {error}; give http://host:port") from error
    try:
        protocol = _Protocol.model_validate_json(response.content).protocol
        if response.status_code == httpx.codes.METHOD_NOT_ALLOWED or protocol != PROTOCOL:
            raise ConfigError(
                f"manager at {address}: it has protocol {protocol} and this worker {PROTOCOL}: install the same "
                f"version of rlboost on both"
            )
        return _Answer.model_validate_json(response.content)
    except ValidationError as error:
        raise ConfigError(f"{address} is not a rollout manager's; set RLBOOST_WORKER_URL to its URL") from error


async def _post(client: httpx.AsyncClient, address: str, body: dict[str, str]) -> httpx.Response:
    try:
        response = await _post_to_leader(client, address, body)
    except httpx.UnsupportedProtocol as error:
        raise ConfigError(f"manager URL: {error}; give http://host:port") from error
    except httpx.TransportError as error:
        raise _ManagerUnavailable(f"manager at {address}: {str(error) or type(error).__name__}") from error
    if response.status_code in {401, 403}:
        advice = "set RLBOOST_TOKEN to one that 'rlboost token create --scope worker' has printed"
        raise ConfigError(f"wrong token for the manager at {address}: {advice}")
    if response.status_code in {httpx.codes.CONFLICT, httpx.codes.UNPROCESSABLE_ENTITY}:
        raise ConfigError(f"manager at {address}: {_detail(response)}")
    waiting = {httpx.codes.NOT_FOUND, httpx.codes.TOO_MANY_REQUESTS}
    if response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR or response.status_code in waiting:
        raise _ManagerUnavailable(f"manager at {address}: status {response.status_code}")
    # 405 means another protocol, which `_request` reports.
    if response.is_error and response.status_code != httpx.codes.METHOD_NOT_ALLOWED:
        raise ConfigError(f"manager at {address}: status {response.status_code}; is RLBOOST_WORKER_URL right?")
    return response


def _detail(response: httpx.Response) -> str:
    """Return the error of an untrusted answer."""
    try:
        return str(response.json()["detail"])
    except (ValueError, TypeError, KeyError):
        return f"status {response.status_code}; is RLBOOST_WORKER_URL right?"


async def _post_to_leader(client: httpx.AsyncClient, address: str, body: dict[str, str]) -> httpx.Response:
    target = address
    for _ in range(1 + MAX_REDIRECTS):
        response = await client.post(target, json=body)
        try:
            origin = redirected_origin(target, response.status_code, response.headers.get("location", ""))
        except Conflict as error:
            raise ConfigError(f"{error}: set RLBOOST_WORKER_URL to it") from error
        if origin is None:
            return response
        target = f"{origin}{httpx.URL(address).path}"
    raise _ManagerUnavailable(f"manager at {address}: the managers redirect to each other")
