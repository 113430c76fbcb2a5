"""`rlboost worker list|drain|join`."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from rlboost.commands.common import (
    DEFAULT_STATE,
    JsonOption,
    StateOption,
    connect,
    endpoint,
    new_app,
    print_json,
    print_table,
)
from rlboost.commands.up import Engine
from shared.errors import ConfigError


class Role(StrEnum):
    """What a worker is to the system."""

    PREEMPTIBLE = "preemptible"
    RESERVED = "reserved"


app = new_app("The workers that generate.")


@app.command("list")
def list_workers(state: StateOption = DEFAULT_STATE, as_json: JsonOption = False) -> None:
    """List the workers that are here, and those that left lately."""
    with connect(state) as client:
        workers = client.workers.list()
    if as_json:
        print_json(workers)
    else:
        print_workers(workers)


@app.command()
def drain(
    worker: Annotated[str, typer.Argument(metavar="ID", help="The worker's id, as 'worker list' shows it.")],
    state: StateOption = DEFAULT_STATE,
    as_json: JsonOption = False,
) -> None:
    """Send a worker away: it hands off what it holds and leaves. A local one is not started again."""
    from rlboost.client import ClientError  # noqa: PLC0415 - keeps --help quick
    from rlboost.local.state import StateDir  # noqa: PLC0415 - likewise

    folder = StateDir(state)
    with connect(state) as client:
        config = folder.config() if folder.running() else None
        process = _local_name(worker) if config and config.url == client.url else None
        if process:
            folder.set_drained(process, True)  # before it can have left
        try:
            answer = client.workers.drain(worker)
        except ClientError:
            if process:
                folder.set_drained(process, False)
            raise
    if as_json:
        print_json(answer)
    else:
        typer.echo(f"{worker} hands off what it holds and leaves")


@app.command()
def join(
    url: Annotated[str | None, typer.Option(help="URL of the system's REST API.")] = None,
    token: Annotated[str | None, typer.Option(help="The system's token; better given as RLBOOST_TOKEN.")] = None,
    role: Annotated[Role, typer.Option(help="reserved = shares its device with the trainer.")] = Role.PREEMPTIBLE,
    name: Annotated[str | None, typer.Option(help="Begins the worker's id; this machine's name if not given.")] = None,
    engine: Annotated[Engine, typer.Option(help="What generates.")] = Engine.TORCH,
    device: Annotated[str | None, typer.Option(help="The engine's device, such as cpu or cuda:0.")] = None,
    state: StateOption = DEFAULT_STATE,
) -> None:
    """Make this machine a worker of a system, in the foreground; Ctrl-C hands off what it holds and leaves.

    Without --url and --token it joins the system that RLBOOST_URL and RLBOOST_TOKEN name, or else the local one. All
    connections go out from here, so a machine behind NAT can join. Other settings: RLBOOST_WORKER_* in the environment.
    """
    where, secret = _endpoint(url, token, state)
    settings = {"URL": _checked_url(where), "ROLE": role.value, "ENGINE": engine.value, "NAME": name, "DEVICE": device}
    environment = {f"RLBOOST_WORKER_{key}": value for key, value in settings.items() if value is not None}
    arguments = [sys.executable, "-m", "services.rollout_worker"]
    os.execve(sys.executable, arguments, {**os.environ, **environment, "RLBOOST_TOKEN": secret})  # noqa: S606 - the worker takes this process's place, and its signals


def _endpoint(url: str | None, token: str | None, state: Path) -> tuple[str, str]:
    if url is None:
        found_url, found_token = endpoint(state)
        return found_url, token or found_token
    token = token or os.environ.get("RLBOOST_TOKEN")
    if not token:
        raise ConfigError(f"the token of {url} is not known: give --token, or set RLBOOST_TOKEN")
    return url, token


def _checked_url(url: str) -> str:
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise ConfigError(f"--url {url!r} is no URL: give one such as http://10.0.0.5:8700")
    return url.rstrip("/")


def _local_name(worker_id: str) -> str:
    """Return the process's name in the id of a worker, which is that name and a random suffix."""
    return worker_id.rpartition("-")[0]


def print_workers(workers: list[dict[str, Any]]) -> None:
    """Print workers as a table."""
    columns = ("id", "role", "state", "version", "running", "pending", "tokens/s")
    keys = ("id", "role", "state", "weight_version", "running", "pending")
    rows = [[worker.get(key) for key in keys] + [f"{worker.get('tokens_per_s') or 0:.0f}"] for worker in workers]
    print_table("workers", columns, rows)
