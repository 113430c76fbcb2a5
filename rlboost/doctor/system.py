"""Facts about a system that this machine may join: what it can reach, and whether the clocks agree."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import httpx

from rlboost.doctor import rules
from rlboost.doctor.rules import Finding
from rlboost.local import redis_server
from rlboost.shared.errors import Conflict
from rlboost.shared.http.redirect import MAX_REDIRECTS, redirected_origin
from rlboost.shared.messages.protocol import PROTOCOL, PROTOCOL_HEADER
from rlboost.shared.tls import client_verification

_TIMEOUT_S = 5.0


def findings(url: str, token: str, transport: httpx.BaseTransport | None = None) -> Iterator[Finding]:
    """Yield what a worker on this machine would find at a manager's URL; tests give a transport."""
    headers = {"Authorization": f"Bearer {token}", PROTOCOL_HEADER: str(PROTOCOL)}
    verify = client_verification()
    with httpx.Client(timeout=_TIMEOUT_S, headers=headers, transport=transport, verify=verify) as client:
        began = time.time()
        try:
            response = _get_from_leader(client, f"{url}/v1/join")
        except (httpx.HTTPError, httpx.InvalidURL, Conflict) as error:
            why = str(error) or type(error).__name__
            advice = "check the URL, the firewall, and that the manager runs"
            yield Finding("manager", "problem", f"{url} does not answer: {why}", advice)
            return
        joined, finding = _joined(url, response)
        yield finding
        if date := response.headers.get("date"):
            yield rules.clock(_skew_s(date, (began + time.time()) / 2))
        if joined:
            yield _weight_store(client, str(joined.get("weight_store_url", "")))
            yield _redis(str(joined.get("redis_url", "")))


def _get_from_leader(client: httpx.Client, address: str) -> httpx.Response:
    """Follow the redirects of a standby manager, with the token; the last one is returned as it is."""
    target = address
    for _ in range(1 + MAX_REDIRECTS):
        response = client.get(target)
        origin = redirected_origin(target, response.status_code, response.headers.get("location", ""))
        if origin is None:
            break
        target = f"{origin}{httpx.URL(address).path}"
    return response


def _joined(url: str, response: httpx.Response) -> tuple[dict[str, Any], Finding]:
    if response.status_code in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN}:
        advice = "set RLBOOST_TOKEN to one that 'rlboost token create --scope worker' has printed"
        return {}, Finding("manager", "problem", f"{url} rejects the token", advice)
    if response.status_code == httpx.codes.CONFLICT:
        advice = "install the same version of rlboost here and there"
        return {}, Finding("manager", "problem", f"{url} has another protocol than {PROTOCOL}", advice)
    try:
        body = response.json() if response.is_success else None
    except ValueError:
        body = None
    if not isinstance(body, dict) or "redis_url" not in body:
        text = f"{url} answers with status {response.status_code}, not as a rollout manager"
        return {}, Finding("manager", "problem", text, "give the URL of the REST API")
    return body, Finding("manager", "ok", f"{url} accepts the token, protocol {PROTOCOL}")


def _skew_s(date: str, at: float) -> float:
    """Return how far this clock, which was `at`, is ahead of the one that wrote a Date header in whole seconds."""
    return at - (parsedate_to_datetime(date).timestamp() + 0.5)


def _weight_store(client: httpx.Client, url: str) -> Finding:
    try:
        status = client.get(f"{url}/healthz").status_code
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = str(error) or type(error).__name__
        return Finding("weight store", "problem", f"{url} does not answer: {why}", _advertised("WEIGHT_STORE_URL"))
    if status != httpx.codes.OK:
        return Finding("weight store", "problem", f"{url} answers with status {status}", "check its log")
    return Finding("weight store", "ok", url)


def _redis(url: str) -> Finding:
    parts = urlsplit(url)
    shown = f"{parts.hostname}:{parts.port or 6379}"
    if reason := asyncio.run(redis_server.not_ready_reason(url)):
        return Finding("redis", "problem", f"{shown}: {reason}", _advertised("ADVERTISED_REDIS_URL"))
    return Finding("redis", "ok", shown)


def _advertised(setting: str) -> str:
    return f"open the port to this machine, or set RLBOOST_MANAGER_{setting} to a URL that it can reach"
