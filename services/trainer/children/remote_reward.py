"""A reward function served over HTTP: one POST per group.

The request is JSON, `{"rows": [{"prompt", "completion", "completion_ids", "completion_raw", "solution", "columns":
{...}}, ...]}`, one row per completion. Only `completion_raw` has special tokens; `solution` is the text that the model
generated. The answer is `{"rewards": [...]}`, a number or null per row.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Mapping
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any

from rlboost.services.trainer.children.reward_styles import Caller, rows_of

_BUSY = {429, 502, 503, 504}
"""Status codes that are retried."""
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_RETRY_FRACTION = 0.9
"""Part of `reward.timeout_s` for requests and retries, so that the error is reported before the process is killed."""
_SHOWN_CHARS = 200
TOKEN_VARIABLE = "REWARD_TOKEN"  # noqa: S105 - a name
"""Environment variable of the trainer with the bearer token, if the service needs one."""
_ORIGINS = "RLBOOST_TRAINER_REWARD_TOKEN_ORIGINS"
_UNAUTHORIZED = {401, 403}
_METADATA = tuple(
    map(
        ip_network,
        (
            "169.254.0.0/16",
            "fe80::/10",
            "fd00:ec2::/32",  # AWS
            "fd20:ce::/32",  # Google Cloud
            "168.63.129.16/32",  # Azure
            "100.100.100.200/32",  # Alibaba
        ),
    )
)
"""Addresses at which clouds give out a machine's credentials: link-local addresses, and their own."""
_NAT64 = ip_network("64:ff9b::/96")
"""IPv6 addresses that a gateway translates to the IPv4 address in the last 4 bytes."""


class RemoteFailed(Exception):
    """The service returned no rewards."""


def remote(part: Mapping[str, Any]) -> Caller:
    """Return a caller of the service at `part["url"]` with the limit `part["timeout_s"]`.

    A job file chooses the URL, so only where the trainer's operator allows it, `part["gets_token"]`, is the token sent,
    and a connection to a cloud's metadata service used.
    Retried with exponential backoff: connections that fail or break, and status 429, 502, 503 and 504.
    """
    import httpx  # noqa: PLC0415 - most reward processes need no HTTP client

    token = os.environ.get(TOKEN_VARIABLE) if part["gets_token"] else None
    client = httpx.Client(headers={"authorization": f"Bearer {token}"} if token else {})
    traced = {} if part["gets_token"] else {"trace": partial(_check_connection, part["url"])}
    post = partial(client.post, part["url"], extensions=traced)
    return Caller(part["name"], lambda request: _ask(post, part["url"], request, part["timeout_s"]), float)


def is_metadata(host: str) -> bool:
    """Return True if a connected address, as the socket names it, may be a cloud's metadata service."""
    address = ip_address(host.partition("%")[0])
    if isinstance(address, IPv6Address):
        translated = IPv4Address(int(address) & 0xFFFFFFFF) if address in _NAT64 else None
        address = address.ipv4_mapped or address.sixtofour or translated or address
    return any(address in network for network in _METADATA)


def _check_connection(url: str, event: str, info: Mapping[str, Any]) -> None:
    """Reject the address that was connected, whatever the name resolved to before, while nothing is sent yet."""
    if event != "connection.connect_tcp.complete":
        return
    stream = info["return_value"]
    host = stream.get_extra_info("server_addr")[0]
    if is_metadata(host):
        stream.close()
        raise RemoteFailed(
            f"{url} is at {host}, where clouds serve credentials: name another service, or add its origin to the "
            f"trainer's {_ORIGINS}"
        )


def _ask(post: Any, url: str, request: Mapping[str, Any], timeout_s: float) -> list[Any]:
    import httpx  # noqa: PLC0415 - as above

    body = json.dumps({"rows": _rows(request)}).encode()
    until = time.monotonic() + timeout_s * _RETRY_FRACTION
    pause_s = _FIRST_PAUSE_S
    while True:
        left_s = until - time.monotonic()
        try:
            answer = post(content=body, headers={"content-type": "application/json"}, timeout=max(left_s, 1e-3))
        except httpx.TransportError as error:
            wrong = f"{type(error).__name__}: {error}"
        else:
            if answer.status_code not in _BUSY:
                return _rewards(url, answer)
            wrong = _shown(answer)
        # Jitter, for many processes that were rejected at once.
        wait_s = pause_s * random.uniform(0.5, 1.0)  # noqa: S311 - nothing secret
        if time.monotonic() + wait_s >= until:
            raise RemoteFailed(f"{url} gave no rewards within {timeout_s:g} s; last error: {wrong}")
        time.sleep(wait_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _rewards(url: str, answer: Any) -> list[Any]:
    if answer.status_code in _UNAUTHORIZED and "authorization" not in answer.request.headers:
        hint = f"to send it {TOKEN_VARIABLE}, add its https://HOST:PORT to the trainer's {_ORIGINS}"
        raise RemoteFailed(f"{url} answered {_shown(answer)}: {hint}")
    if answer.status_code != 200:
        raise RemoteFailed(f"{url} answered {_shown(answer)}")
    try:
        rewards = answer.json()["rewards"]
    except (ValueError, TypeError, KeyError) as error:
        raise RemoteFailed(f'{url} answered no {{"rewards": [...]}} but {_shown(answer)}') from error
    if not isinstance(rewards, list):
        raise RemoteFailed(f"{url}: rewards is no list but {_shown(answer)}")
    return rewards


def _shown(answer: Any) -> str:
    return f"{answer.status_code} {answer.text[:_SHOWN_CHARS]}"


def _rows(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    columns = rows_of(request["columns"], len(request["completions"]))
    return [
        {
            "prompt": request["prompts"][i],
            "completion": request["completions"][i],
            "completion_ids": request["completion_ids"][i],
            "completion_raw": request["completions_raw"][i],
            "solution": request["solutions"][i],
            "columns": row,
        }
        for i, row in enumerate(columns)
    ]
