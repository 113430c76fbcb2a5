"""Commands of machines that join a system, and of the tokens they join with: `rlboost worker`, `trainer`, `token`."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlboost.commands.common import (
    DEFAULT_STATE,
    JsonOption,
    StateOption,
    connect,
    new_app,
    print_answer,
    print_json,
    print_table,
    requested_endpoint,
)
from rlboost.commands.system import GpusOption, TensorParallelOption, print_event
from rlboost.job_lines import GONE
from rlboost.shared.errors import ConfigError, Conflict
from rlboost.shared.ids import worker_name
from rlboost.shared.process.modules import EngineName
from rlboost.terminal import echo

if TYPE_CHECKING:
    from rlboost.local.spec_file import NodeSpec

# --- `rlboost worker list|drain|join` ---------------------------------------------------------------------------------


_SILENT_S = 10
"""A worker that has samples and has sent no token for this time has a note."""


class Role(StrEnum):
    """Role of a worker."""

    PREEMPTIBLE = "preemptible"
    RESERVED = "reserved"


workers = new_app("Rollout workers.")


@workers.command("list")
def list_workers(state: StateOption = DEFAULT_STATE, as_json: JsonOption = False) -> None:
    """List the workers of the fleet and those that exited recently."""
    with connect(state) as client:
        workers = client.workers.list()
    if as_json:
        print_json(workers)
    else:
        print_workers(workers)


@workers.command()
def drain(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Its id as 'worker list' shows it, or its name.")],
    state: StateOption = DEFAULT_STATE,
    as_json: JsonOption = False,
) -> None:
    """Drain a worker: it hands off its samples and exits. A local worker is not restarted."""
    from rlboost.client import ClientError  # noqa: PLC0415 - keeps --help quick
    from rlboost.local.state import StateDir  # noqa: PLC0415 - likewise

    folder = StateDir(state)
    with connect(state) as client:
        config = folder.config() if folder.running() else None
        workers = client.workers.list()
        worker_id = _named(worker, workers)
        process = worker_name(worker_id) if config and config.url == client.url else None
        if process:
            folder.set_drained(process, True)  # before it can exit
        try:
            answer = client.workers.drain(worker_id)
        except ClientError:
            if process:
                folder.set_drained(process, False)
            raise
    print_answer(answer, f"{worker_id} is draining: it hands off its samples and exits", as_json=as_json)
    if warning := _drain_warning(worker_id, workers):
        echo(f"rlboost: warning: {warning}", err=True)


def _drain_warning(worker_id: str, workers: Sequence[Mapping[str, Any]]) -> str:
    """Return what the fleet lacks without a worker, empty if nothing; `workers` are those before it is drained."""
    roles = {w["id"]: w.get("role") for w in workers if w["state"] not in GONE | {"draining"}}
    role = roles.pop(worker_id, None)
    if not roles:
        return f"{worker_id} was the last worker: jobs wait until another joins ('rlboost worker join')"
    if role == "reserved" and "reserved" not in roles.values():
        return (
            f"{worker_id} was the last reserved worker: jobs now wait whenever no spot worker is there; "
            "'rlboost worker join --role reserved' adds one, and a restart of the local system brings it back"
        )
    return ""


@workers.command()
def join(  # noqa: PLR0913, PLR0917 - the options of a command
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="YAML file with options as keys; options override it.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="URL of the system's REST API.")] = None,
    token: Annotated[str | None, typer.Option(help="A token of scope worker; better given as RLBOOST_TOKEN.")] = None,
    role: Annotated[
        Role | None, typer.Option(help="Default preemptible; reserved = shares its device with the trainer.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Begins the worker's id; this machine's name if not given.")] = None,
    engine: Annotated[EngineName | None, typer.Option(help="Inference engine; default torch, on GPUs vllm.")] = None,
    device: Annotated[str | None, typer.Option(help="The engine's device, such as cpu or cuda:0.")] = None,
    gpus: GpusOption = None,
    tensor_parallel: TensorParallelOption = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="Fraction of each GPU for its engine; default: the engine's own, reserved 0.4.")
    ] = None,
    beside: Annotated[
        str | None, typer.Option(help="URL of a vLLM server on the same device: generate only while it serves nothing.")
    ] = None,
    serve: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Serve RLBOOST_WORKER_BASE_MODEL there, by the same vLLM engine.",
        ),
    ] = None,
    state: StateOption = DEFAULT_STATE,
) -> None:
    """Run a worker on this machine in the foreground; Ctrl-C hands off its samples and exits.

    With --gpus it runs one worker per --tensor-parallel GPUs and restarts those that die; Ctrl-C or SIGTERM drains
    all. It exits when all workers have exited.

    Without --url and --token it joins the system named by RLBOOST_URL and RLBOOST_TOKEN, or the local one. Create a
    token for it with 'rlboost token create --scope worker'. All connections are outbound, so a machine behind NAT can
    join. Several workers may run on one machine. Other settings: RLBOOST_WORKER_* in the environment.
    """
    from rlboost.local import spec_file  # noqa: PLC0415 - keeps --help quick

    given = {
        "role": role and role.value,
        "engine": engine,
        "gpus": gpus,
        "tensor_parallel": tensor_parallel,
        "gpu_memory_utilization": gpu_memory_utilization,
        "beside": beside,
    }
    spec = spec_file.load(spec_file.NodeSpec, file, given)
    if spec.gpus and serve is not None:
        raise ConfigError(f"--serve {serve} is the address of one worker: give --device cuda instead of --gpus")
    if spec.gpus and device is not None:
        raise ConfigError(f"--device {device} and --gpus {spec.gpus} exclude each other: give one of them")
    where, secret = requested_endpoint(url, token, state)
    connection = {"RLBOOST_WORKER_URL": where, "RLBOOST_TOKEN": secret}
    if spec.gpus:
        _run_node(spec, name or socket.gethostname(), connection, state)
        return
    fraction = spec.gpu_memory_utilization
    settings = {
        "ROLE": spec.role,
        "ENGINE": spec.engine_name,
        "NAME": name,
        "DEVICE": device,
        "SERVE": serve,
        "GPU_MEMORY_UTILIZATION": None if fraction is None else f"{fraction:g}",
    }
    spec.require_vllm_for_its_options()
    own = {f"RLBOOST_WORKER_{key}": value for key, value in settings.items() if value is not None}
    arguments = [sys.executable, "-m", "rlboost.services.rollout_worker"]
    os.execve(sys.executable, arguments, {**os.environ, **spec.settings, **own, **connection})  # noqa: S606 - the worker takes this process's place, and its signals


def _run_node(spec: NodeSpec, name: str, connection: Mapping[str, str], state: Path) -> None:
    from rlboost.local import node  # noqa: PLC0415 - keeps --help quick
    from rlboost.local.layout import list_gpus, n_cpus  # noqa: PLC0415 - likewise

    spec.require_engine()
    layout = node.place(spec, list_gpus(), name)
    folder = node.state_of(state, name)
    specs = node.worker_specs(spec, layout, folder, connection, os.environ, n_cpus())
    for worker in specs:
        echo(f"rlboost: {worker.name}: GPU {worker.gpus}, log {worker.log}", err=True)
    node.serve(specs, folder, node.grace_s({**os.environ, **spec.settings}), print_event)


def _named(given: str, workers: Sequence[Mapping[str, Any]]) -> str:
    """Return the id of a worker given by id or name.

    Raises:
        Conflict: several present workers have the name.

    """
    if any(worker["id"] == given for worker in workers):
        return given
    found = [worker["id"] for worker in workers if worker["state"] not in GONE and worker_name(worker["id"]) == given]
    if len(found) > 1:
        raise Conflict(f"several workers are named {given}: give the id of one: {', '.join(found)}")
    return found[0] if found else given


def print_workers(workers: list[dict[str, Any]]) -> None:
    """Print workers as a table."""
    columns = ("id", "role", "state", "version", "running", "pending", "tokens/s", "note")
    keys = ("id", "role", "state", "weight_version", "running", "pending")
    rows = [
        [*(worker.get(key) for key in keys), f"{worker.get('tokens_per_s') or 0:.0f}", _note(worker)]
        for worker in workers
    ]
    print_table("workers", columns, rows)


def _note(worker: dict[str, Any]) -> str:
    silent_s, offenses = worker.get("silent_s") or 0, worker.get("offenses") or 0
    notes = [f"no token for {silent_s} s"] if silent_s >= _SILENT_S else []
    return ", ".join([*notes, *([f"held samples without generating: {offenses} times"] if offenses else [])])


# --- `rlboost trainer join` -------------------------------------------------------------------------------------------


trainers = new_app("Machines that train.")


@trainers.callback()
def _group() -> None:
    """Keep `join` a command of the group."""


@trainers.command("join")
def join_as_trainer(
    url: Annotated[
        str | None, typer.Option(help="tcp://HOST:PORT of the trainer's machines port, tls:// with a certificate.")
    ] = None,
    token: Annotated[str | None, typer.Option(help="The system's token; better given as RLBOOST_TOKEN.")] = None,
    name: Annotated[str | None, typer.Option(help="Orders the ranks; this machine's name if not given.")] = None,
    address: Annotated[
        str | None, typer.Option(help="Where the other machines reach this one; as the trainer sees it if not given.")
    ] = None,
) -> None:
    """Run ranks of a job with trainer.nodes above 1 on this machine, in the foreground.

    It waits for a job, starts the ranks with torchrun, and waits for the next job; when a machine of the job is lost,
    it joins again and the job resumes from its newest checkpoint. Ctrl-C or SIGTERM ends it.

    The trainer needs RLBOOST_TRAINER_MACHINES_PORT, and its folder on a file system that all machines share. Other
    settings: RLBOOST_MACHINE_* in the environment.
    """
    given = {
        "RLBOOST_MACHINE_URL": url,
        "RLBOOST_TOKEN": token,
        "RLBOOST_MACHINE_NAME": name,
        "RLBOOST_MACHINE_ADDRESS": address,
    }
    environment = os.environ | {variable: value for variable, value in given.items() if value is not None}
    arguments = [sys.executable, "-m", "rlboost.services.trainer.adapters.machines.agent"]
    os.execve(sys.executable, arguments, environment)  # noqa: S606 - it takes this process's place, and its signals


# --- `rlboost token create|list|revoke` -------------------------------------------------------------------------------

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class TokenScope(StrEnum):
    """Scope of a token."""

    ADMIN = "admin"
    AGENT = "agent"
    JOB = "job"
    READ = "read"
    TRAINER = "trainer"
    WORKER = "worker"


tokens = new_app("Access tokens of limited scope.")


@tokens.command()
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


@tokens.command("list")
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


@tokens.command()
def revoke(
    token: Annotated[str, typer.Argument(metavar="ID", help="Its id, as 'token list' shows it.")],
    state: StateOption = DEFAULT_STATE,
    as_json: JsonOption = False,
) -> None:
    """Revoke an access token: it is rejected after at most 2 seconds."""
    with connect(state) as client:
        client.tokens.revoke(token)
    print_answer({"id": token, "revoked": True}, f"token {token} is revoked", as_json=as_json)


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


# --- Registration -----------------------------------------------------------------------------------------------------


def register(app: typer.Typer) -> None:
    """Add the groups."""
    app.add_typer(workers, name="worker")
    app.add_typer(trainers, name="trainer")
    app.add_typer(tokens, name="token")
