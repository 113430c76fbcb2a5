"""Joins the manager: the worker's only HTTP request to it."""

from __future__ import annotations

import httpx
import stamina
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlboost.shared.errors import ConfigError, Conflict, Retryable
from rlboost.shared.http.redirect import MAX_REDIRECTS, redirected_origin
from rlboost.shared.protocol import PROTOCOL, PROTOCOL_HEADER, UNNUMBERED
from rlboost.shared.tls import client_context

JOIN_LIMIT_S = 300.0
"""How long a worker retries while the manager does not answer."""
_TIMEOUT_S = 5.0


class Joined(BaseModel):
    """The manager's answer: how to connect to the other services."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    redis_url: str
    weight_store_url: str
    store_credential: str = Field(repr=False)
    """For the weight store; the manager sends new ones."""
    manifest_key: str
    """The public key under which manifests are signed."""
    protocol: int = UNNUMBERED


class _ManagerUnavailable(Retryable):
    pass


async def join(url: str, token: str, limit_s: float = JOIN_LIMIT_S) -> Joined:
    """Get the URLs of Redis and of the weight store from the manager at `url`; retry while it is unavailable.

    Raises:
        ConfigError: the token is wrong, the manager did not answer within the limit, its answer is not a manager's, or
            its protocol differs.

    """
    address = f"{url.rstrip('/')}/v1/join"
    headers = {"Authorization": f"Bearer {token}", PROTOCOL_HEADER: str(PROTOCOL)}
    try:
        async with httpx.AsyncClient(timeout=_TIMEOUT_S, headers=headers, verify=client_context() or True) as client:
            async for attempt in stamina.retry_context(
                on=_ManagerUnavailable, attempts=None, timeout=limit_s, wait_max=2.0
            ):
                with attempt:
                    response = await _get(client, address)
    except _ManagerUnavailable as error:
        raise ConfigError(
            f"{error}; no answer for {limit_s:.0f} s: start the manager, or correct RLBOOST_WORKER_URL"
        ) from error
    except httpx.InvalidURL as error:
        raise ConfigError(f"manager URL {url!r}: {error}; give http://host:port") from error
    try:
        joined = Joined.model_validate_json(response.content)
    except ValidationError as error:
        raise ConfigError(f"{address} is not a rollout manager's; set RLBOOST_WORKER_URL to its URL") from error
    if joined.protocol != PROTOCOL:
        raise ConfigError(
            f"manager at {address}: it has protocol {joined.protocol} and this worker {PROTOCOL}: install the same "
            f"version of rlboost on both"
        )
    return joined


async def _get(client: httpx.AsyncClient, address: str) -> httpx.Response:
    try:
        response = await _get_from_leader(client, address)
    except httpx.UnsupportedProtocol as error:
        raise ConfigError(f"manager URL: {error}; give http://host:port") from error
    except httpx.TransportError as error:
        raise _ManagerUnavailable(f"manager at {address}: {str(error) or type(error).__name__}") from error
    if response.status_code in {401, 403}:
        raise ConfigError(f"wrong token for the manager at {address}: set RLBOOST_TOKEN to the manager's token")
    if response.status_code == httpx.codes.CONFLICT:
        raise ConfigError(f"manager at {address}: {_detail(response)}")
    if response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR or response.status_code == httpx.codes.NOT_FOUND:
        raise _ManagerUnavailable(f"manager at {address}: status {response.status_code}")
    if response.is_error:
        raise ConfigError(f"manager at {address}: status {response.status_code}; is RLBOOST_WORKER_URL right?")
    return response


def _detail(response: httpx.Response) -> str:
    """Return the error of an untrusted answer."""
    try:
        return str(response.json()["detail"])
    except (ValueError, TypeError, KeyError):
        return f"status {response.status_code}; is RLBOOST_WORKER_URL right?"


async def _get_from_leader(client: httpx.AsyncClient, address: str) -> httpx.Response:
    target = address
    for _ in range(1 + MAX_REDIRECTS):
        response = await client.get(target)
        try:
            origin = redirected_origin(target, response.status_code, response.headers.get("location", ""))
        except Conflict as error:
            raise ConfigError(f"{error}: set RLBOOST_WORKER_URL to it") from error
        if origin is None:
            return response
        target = f"{origin}{httpx.URL(address).path}"
    raise _ManagerUnavailable(f"manager at {address}: the managers redirect to each other")
