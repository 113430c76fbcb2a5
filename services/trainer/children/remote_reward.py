"""A reward that another service gives: one POST a group.

The request is JSON, `{"rows": [{"prompt", "completion", "completion_ids", "solution", "columns": {...}}, ...]}`: one
row a completion; `solution` is its text without special tokens. The answer is `{"rewards": [...]}`, a number or null a
row.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Mapping
from typing import Any

from services.trainer.children.reward_styles import Caller, rows_of

_BUSY = {429, 502, 503, 504}
"""What passes."""
_FIRST_PAUSE_S = 0.1
_MOST_PAUSE_S = 2.0
_OF_THE_LIMIT = 0.9
"""So much of `reward.timeout_s` is for asking, again and again where it must be; then it is said what went wrong. At
the limit itself the process is killed."""
_SHOWN_CHARS = 200
TOKEN_VARIABLE = "REWARD_TOKEN"  # noqa: S105 - a name
"""Where it is set in the trainer's environment, its value goes along as a bearer token."""


class RemoteFailed(Exception):
    """The service gave no rewards."""


def remote(part: Mapping[str, Any]) -> Caller:
    """Return how to ask the service at `part["url"]`, within `part["timeout_s"]`.

    What is asked again, with growing pauses: a connection that fails or breaks, and answers 429, 502, 503 and 504.
    """
    import httpx  # noqa: PLC0415 - most reward processes ask nobody

    token = os.environ.get(TOKEN_VARIABLE)
    client = httpx.Client(headers={"authorization": f"Bearer {token}"} if token else {})
    return Caller(part["name"], lambda request: _ask(client, part["url"], request, part["timeout_s"]), float)


def _ask(client: Any, url: str, request: Mapping[str, Any], timeout_s: float) -> list[Any]:
    import httpx  # noqa: PLC0415 - as above

    body = json.dumps({"rows": _rows(request)}).encode()
    until = time.monotonic() + timeout_s * _OF_THE_LIMIT
    pause_s = _FIRST_PAUSE_S
    while True:
        left_s = until - time.monotonic()
        try:
            answer = client.post(
                url, content=body, headers={"content-type": "application/json"}, timeout=max(left_s, 1e-3)
            )
        except httpx.TransportError as error:
            wrong = f"{type(error).__name__}: {error}"
        else:
            if answer.status_code not in _BUSY:
                return _rewards(url, answer)
            wrong = _shown(answer)
        # Apart from each other, where many processes were refused at once.
        wait_s = pause_s * random.uniform(0.5, 1.0)  # noqa: S311 - nothing secret
        if time.monotonic() + wait_s >= until:
            raise RemoteFailed(f"{url} gave no rewards within {timeout_s:g} s; at last {wrong}")
        time.sleep(wait_s)
        pause_s = min(2 * pause_s, _MOST_PAUSE_S)


def _rewards(url: str, answer: Any) -> list[Any]:
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
            "solution": request["solutions"][i],
            "columns": row,
        }
        for i, row in enumerate(columns)
    ]
