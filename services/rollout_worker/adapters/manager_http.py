"""Joining: the one thing that a worker asks the rollout manager over HTTP."""

from __future__ import annotations

import httpx
import stamina
from pydantic import BaseModel, ConfigDict, ValidationError

from shared.errors import ConfigError, Conflict, Retryable
from shared.protocol import PROTOCOL, PROTOCOL_HEADER, UNNUMBERED
from shared.redirect import MAX_REDIRECTS, redirected

JOIN_LIMIT_S = 300.0
"""How long a worker looks for a manager that does not answer."""
_TIMEOUT_S = 5.0


class Joined(BaseModel):
    """The manager's answer: where everything else is."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    redis_url: str
    weight_store_url: str
    protocol: int = UNNUMBERED


class _ManagerAway(Retryable):
    pass


async def join(url: str, token: str, limit_s: float = JOIN_LIMIT_S) -> Joined:
    """Ask the manager at `url` where Redis and the weight store are, for as long as it is away.

    Raises:
        ConfigError: the token is wrong, nothing answered within the limit, what answered is not a manager, or it speaks
            another protocol.

    """
    address = f"{url.rstrip('/')}/v1/join"
    headers = {"Authorization": f"Bearer {token}", PROTOCOL_HEADER: str(PROTOCOL)}
    try:
        async with httpx.AsyncClient(timeout=_TIMEOUT_S, headers=headers) as client:
            async for attempt in stamina.retry_context(on=_ManagerAway, attempts=None, timeout=limit_s, wait_max=2.0):
                with attempt:
                    response = await _get(client, address)
    except _ManagerAway as error:
        raise ConfigError(
            f"{error}; no answer for {limit_s:.0f} s: is the manager running, and is RLBOOST_WORKER_URL right?"
        ) from error
    except httpx.InvalidURL as error:
        raise ConfigError(f"manager URL {url!r}: {error}; give http://host:port") from error
    try:
        joined = Joined.model_validate_json(response.content)
    except ValidationError as error:
        raise ConfigError(f"{address} is not a rollout manager's; set RLBOOST_WORKER_URL to its URL") from error
    if joined.protocol != PROTOCOL:
        raise ConfigError(
            f"manager at {address}: it speaks protocol {joined.protocol} and this worker {PROTOCOL}: install the same "
            f"version of rlboost on both"
        )
    return joined


async def _get(client: httpx.AsyncClient, address: str) -> httpx.Response:
    try:
        response = await _get_from_leader(client, address)
    except httpx.UnsupportedProtocol as error:
        raise ConfigError(f"manager URL: {error}; give http://host:port") from error
    except httpx.TransportError as error:
        raise _ManagerAway(f"manager at {address}: {str(error) or type(error).__name__}") from error
    if response.status_code in {401, 403}:
        raise ConfigError(f"wrong token for the manager at {address}: set RLBOOST_TOKEN to the manager's token")
    if response.status_code == httpx.codes.CONFLICT:
        raise ConfigError(f"manager at {address}: {_detail(response)}")
    if response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR or response.status_code == httpx.codes.NOT_FOUND:
        raise _ManagerAway(f"manager at {address}: status {response.status_code}")
    if response.is_error:
        raise ConfigError(f"manager at {address}: status {response.status_code}; is RLBOOST_WORKER_URL right?")
    return response


def _detail(response: httpx.Response) -> str:
    """Return what the manager says is wrong; it comes from elsewhere, so it may be anything."""
    try:
        return str(response.json()["detail"])
    except (ValueError, TypeError, KeyError):
        return f"status {response.status_code}; is RLBOOST_WORKER_URL right?"


async def _get_from_leader(client: httpx.AsyncClient, address: str) -> httpx.Response:
    asked = address
    for _ in range(1 + MAX_REDIRECTS):
        response = await client.get(asked)
        try:
            origin = redirected(asked, response.status_code, response.headers.get("location", ""))
        except Conflict as error:
            raise ConfigError(f"{error}: set RLBOOST_WORKER_URL to it") from error
        if origin is None:
            return response
        asked = f"{origin}{httpx.URL(address).path}"
    raise _ManagerAway(f"manager at {address}: the managers send requests to each other")
