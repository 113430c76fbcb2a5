"""The worker's HTTP requests to the manager: to join, also as a new incarnation, and for the tokenizer of a model."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Set

import httpx
import stamina
import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlboost.services.rollout_worker.ports import Membership
from rlboost.shared.errors import ConfigError, Conflict, Fatal, Retryable
from rlboost.shared.http.clients import async_http_client
from rlboost.shared.http.server_url import MAX_REDIRECTS, redirected_origin
from rlboost.shared.messages import Role
from rlboost.shared.messages.codec import PROTOCOL, PROTOCOL_HEADER, UNNUMBERED
from rlboost.shared.proxies import internal
from rlboost.shared.redis.bus import connect
from rlboost.shared.secrets import bearer
from rlboost.shared.streams import names

log = structlog.get_logger(__name__)

JOIN_LIMIT_S = 300.0
"""How long a worker retries while the manager does not answer."""
TOKENIZER_LIMIT_S = 30.0
"""How long the tokenizer of a job's model may take, some MiB."""
_TIMEOUT_S = 5.0
_PASSING = frozenset({408, 429, 500, 502, 503, 504})
"""Status codes that are retried."""


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


async def join(
    url: str, token: str, name: str, role: Role, limit_s: float = JOIN_LIMIT_S, *, again: bool = False
) -> Membership:
    """Become a worker of the manager at `url`, and connect to Redis; retry while one of them is unavailable.

    With `again`, a manager was there before: status 404 then comes from a proxy whose manager restarts.

    Raises:
        ConfigError: the token is wrong, the answer is not a manager's, or its protocol differs.
        Fatal: the manager or Redis did not answer within the limit.

    """
    answer = await _request(
        url, token, {"name": name, "role": role}, limit_s, passing=_PASSING | {404} if again else _PASSING
    )
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


async def fetch_tokenizer(url: str, token: str, job_id: str, limit_s: float = TOKENIZER_LIMIT_S) -> str:
    """Return the tokenizer of a job's model; empty if the manager has none, or does not answer within the limit.

    The engine then supports no structured outputs, which is no reason not to train.
    """
    address = f"{url.rstrip('/')}/v1/jobs/{job_id}/tokenizer"
    headers = {"Authorization": bearer("RLBOOST_TOKEN", token)}
    try:
        async with asyncio.timeout(limit_s), async_http_client(internal, timeout=limit_s, headers=headers) as client:
            async for attempt in stamina.retry_context(
                on=(httpx.TransportError, _ManagerUnavailable), attempts=None, timeout=limit_s, wait_max=2.0
            ):
                with attempt:
                    response = await _get(client, address)
        if response.status_code == httpx.codes.NOT_FOUND:  # it has none, or is of an older release
            return ""
        response.raise_for_status()
    except (httpx.HTTPError, ConfigError, _ManagerUnavailable, TimeoutError) as error:
        log.warning("tokenizer_unavailable", job=job_id, reason=str(error) or type(error).__name__)
        return ""
    return response.text


async def _request(url: str, token: str, body: dict[str, str], limit_s: float, passing: Set[int]) -> _Answer:
    address = f"{url.rstrip('/')}/v1/join"
    headers = {"Authorization": bearer("RLBOOST_TOKEN", token), PROTOCOL_HEADER: str(PROTOCOL)}
    try:
        async with async_http_client(internal, timeout=_TIMEOUT_S, headers=headers) as client:
            async for attempt in stamina.retry_context(
                on=_ManagerUnavailable, attempts=None, timeout=limit_s, wait_max=2.0
            ):
                with attempt:
                    response = await _post(client, address, body, passing)
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


async def _get(client: httpx.AsyncClient, address: str) -> httpx.Response:
    response = await _to_leader(client, "GET", address)
    if response.status_code in _PASSING:
        raise _ManagerUnavailable(f"manager at {address}: status {response.status_code}")
    return response


async def _post(client: httpx.AsyncClient, address: str, body: dict[str, str], passing: Set[int]) -> httpx.Response:
    try:
        response = await _to_leader(client, "POST", address, body)
    except httpx.UnsupportedProtocol as error:
        raise ConfigError(f"manager URL: {error}; give http://host:port") from error
    except httpx.TransportError as error:
        text = f"manager at {address}: {str(error) or type(error).__name__}"
        if advice := _wrong_url_advice(error):
            raise ConfigError(f"{text}; {advice}") from error
        raise _ManagerUnavailable(text) from error
    if response.status_code in {401, 403}:
        advice = "set RLBOOST_TOKEN to one that 'rlboost token create --scope worker' has printed"
        wrong = "wrong token" if client.headers["Authorization"].strip() != "Bearer" else "no token given"
        raise ConfigError(f"{wrong} for the manager at {address}: {advice}")
    if response.status_code in {httpx.codes.CONFLICT, httpx.codes.UNPROCESSABLE_ENTITY}:
        raise ConfigError(f"manager at {address}: {_detail(response)}")
    if response.status_code in passing:
        raise _ManagerUnavailable(f"manager at {address}: status {response.status_code}")
    if response.status_code == httpx.codes.NOT_FOUND:
        raise ConfigError(
            f"{address} answers with status 404, so no rollout manager is there: give the URL of the REST API, such as "
            "http://10.0.0.5:8700, with --url or RLBOOST_WORKER_URL"
        )
    # 405 means another protocol, which `_request` reports.
    if response.is_error and response.status_code != httpx.codes.METHOD_NOT_ALLOWED:
        raise ConfigError(f"manager at {address}: status {response.status_code}; is RLBOOST_WORKER_URL right?")
    return response


def _wrong_url_advice(error: httpx.TransportError) -> str:
    """Return what to correct in the URL if the server at it is none that a worker could ever join, else empty."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return "set RLBOOST_TLS_CA to the authority of its certificate, and give a URL whose host it names"
        if isinstance(cause, ssl.SSLError) and "EOF" not in str(cause):
            return "does this port speak HTTPS? If it does not, give the URL as http://"
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, httpx.RemoteProtocolError) and "disconnected" not in str(error):
        return "this port does not speak HTTP: give the URL of the REST API"
    return ""


def _detail(response: httpx.Response) -> str:
    """Return the error of an untrusted answer."""
    try:
        return str(response.json()["detail"])
    except (ValueError, TypeError, KeyError):
        return f"status {response.status_code}; is RLBOOST_WORKER_URL right?"


async def _to_leader(
    client: httpx.AsyncClient, method: str, address: str, body: dict[str, str] | None = None
) -> httpx.Response:
    target = address
    for _ in range(1 + MAX_REDIRECTS):
        response = await client.request(method, target, json=body)
        try:
            origin = redirected_origin(target, response.status_code, response.headers.get("location", ""))
        except Conflict as error:
            raise ConfigError(f"{error}: set RLBOOST_WORKER_URL to it") from error
        if origin is None:
            return response
        target = f"{origin}{httpx.URL(address).path}"
    raise _ManagerUnavailable(f"manager at {address}: the managers redirect to each other")
