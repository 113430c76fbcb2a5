"""`rlboost token create|list|revoke`."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated

import typer

from rlboost.commands.common import (
    DEFAULT_STATE,
    JsonOption,
    StateOption,
    connect,
    new_app,
    print_json,
    print_table,
)
from rlboost.shared.errors import ConfigError
from rlboost.terminal import echo

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class TokenScope(StrEnum):
    """Scope of a token."""

    ADMIN = "admin"
    AGENT = "agent"
    JOB = "job"
    READ = "read"
    TRAINER = "trainer"
    WORKER = "worker"


app = new_app("Access tokens of limited scope.")


@app.command()
def create(
    scope: Annotated[
        TokenScope,
        typer.Option(
            help="worker = join the fleet; agent = run agents of jobs; read = see everything; job = also run jobs; "
            "trainer = train one external job; admin = everything."
        ),
    ],
    job: Annotated[str, typer.Option(help="With --scope trainer: id of the job.")] = "",
    name: Annotated[str, typer.Option(help="What it is for, shown by 'token list'.")] = "",
    expires: Annotated[str, typer.Option(help="When it expires, such as 30d, 12h or 45m; never if not given.")] = "",
    state: StateOption = DEFAULT_STATE,
    as_json: JsonOption = False,
) -> None:
    """Create an access token and print its secret, once: the system stores only a digest of it."""
    expires_s = _seconds(expires) if expires else None
    with connect(state) as client:
        created = client.tokens.create(scope.value, job=job, name=name, expires_s=expires_s)
    if as_json:
        print_json(created)
        return
    echo(created["secret"])
    expiry = _expiry(created["expires_at"])
    echo(f"token {created['id']}, scope {created['scope']}, expires: {expiry}; it is not shown again", err=True)


@app.command("list")
def list_tokens(state: StateOption = DEFAULT_STATE, as_json: JsonOption = False) -> None:
    """List the access tokens, without their secrets; the system's own token is not among them."""
    with connect(state) as client:
        tokens = client.tokens.list()
    if as_json:
        print_json(tokens)
        return
    rows = [
        (token["id"], token["scope"], token["name"], _time(token["created_at"]), _expiry(token["expires_at"]))
        for token in tokens
    ]
    print_table("tokens", ("id", "scope", "name", "created", "expires"), rows)


@app.command()
def revoke(
    token: Annotated[str, typer.Argument(metavar="ID", help="Its id, as 'token list' shows it.")],
    state: StateOption = DEFAULT_STATE,
    as_json: JsonOption = False,
) -> None:
    """Revoke an access token: it is rejected after at most 2 seconds."""
    with connect(state) as client:
        client.tokens.revoke(token)
    if as_json:
        print_json({"id": token, "revoked": True})
    else:
        echo(f"token {token} is revoked")


def _seconds(text: str) -> float:
    """Return a duration such as `30d` in seconds.

    Raises:
        ConfigError: it is not a duration.

    """
    found = re.fullmatch(r"([1-9]\d{0,8})([smhd])", text)
    if found is None:
        raise ConfigError(f"--expires {text!r} is not a duration: give a number and a unit, such as 30d, 12h or 45m")
    return float(found[1]) * _UNITS_S[found[2]]


def _expiry(expires_at: float | None) -> str:
    if expires_at is None:
        return "never"
    return _time(expires_at) + (" (expired)" if expires_at <= time.time() else "")


def _time(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"
