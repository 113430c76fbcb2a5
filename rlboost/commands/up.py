"""`rlboost up` and `rlboost down`: run a whole system on this machine."""

from __future__ import annotations

import importlib.util
import os
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlboost.commands.common import DEFAULT_STATE, EXIT_FAILED, JsonOption, StateOption, command, print_json
from rlboost.shared.errors import ConfigError

if TYPE_CHECKING:
    from rlboost.local.chaos import ChaosEvent
    from rlboost.local.processes import LocalOptions
    from rlboost.local.state import Config
    from rlboost.local.supervisor import ClusterEvent

SERVICE_PACKAGES = ("blake3", "fastapi", "safetensors", "torch", "transformers", "uvicorn")


class Engine(StrEnum):
    """Inference engine of the workers."""

    TORCH = "torch"
    VLLM = "vllm"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(up)
    app.command()(down)


def up(  # noqa: PLR0913, PLR0917 - the options of a command
    reserved: Annotated[int, typer.Option(min=0, help="Workers that share a trainer's device.")] = 1,
    workers: Annotated[int, typer.Option(min=0, help="Preemptible workers.")] = 3,
    trainers: Annotated[int, typer.Option(min=1, help="Trainers; each runs one job at a time.")] = 1,
    engine: Annotated[Engine, typer.Option(help="Inference engine.")] = Engine.TORCH,
    state: StateOption = DEFAULT_STATE,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the REST API; 0 takes a free one.")] = 0,
    detach: Annotated[bool, typer.Option("--detach", help="Return when ready; the system stays.")] = False,
    as_json: JsonOption = False,
    standby: Annotated[
        bool, typer.Option("--standby", help="A second manager, which takes over from the first.")
    ] = False,
    chaos: Annotated[
        Path | None,
        typer.Option(help="CSV of time_ms,add|remove|notice|kill,node: preempts and adds spot workers on schedule."),
    ] = None,
) -> None:
    """Start everything on this machine: Redis, weight store, manager, trainer and workers.

    With --trainers 2, two jobs run at once: reserved workers are divided among the trainers, preemptible workers
    are shared.

    A process that dies is restarted; with --standby another manager takes over meanwhile. A spot worker that the chaos
    schedule or 'rlboost worker drain' removes is not restarted. Service settings in the environment
    (RLBOOST_WORKER_SLOTS, RLBOOST_TRAINER_DEVICE) are passed on; RLBOOST_TOKEN is the system's token; by
    default the last one of the state folder, at first a random one.
    """
    from rlboost.local.processes import LocalOptions  # noqa: PLC0415 - keeps --help quick
    from rlboost.local.state import StateDir  # noqa: PLC0415 - likewise

    StateDir(state).require_free()
    require_packages(*SERVICE_PACKAGES)
    require_engine(engine)
    options = LocalOptions(state, reserved, workers, engine.value, port, standby=standby, trainers=trainers)
    schedule = _schedule(chaos, options) if chaos else []
    if not as_json:
        _warn_of_fleet(reserved, workers)
    if detach:
        _up_in_background(options, chaos, as_json=as_json)
    else:
        _up_in_foreground(options, schedule, as_json=as_json)


def down(state: StateOption = DEFAULT_STATE, as_json: JsonOption = False) -> None:
    """Stop the system on this machine. Jobs, weights and logs stay in the state folder; 'rlboost up' continues."""
    from rlboost.local.detached import stop  # noqa: PLC0415 - keeps --help quick
    from rlboost.local.state import StateDir  # noqa: PLC0415 - likewise

    stopped = stop(StateDir(state))
    if as_json:
        print_json({"stopped": stopped})
    else:
        typer.echo(f"stopped the system in {state}" if stopped else f"no system ran in {state}")


def require_packages(*packages: str) -> None:
    """Check for required packages before starting anything.

    Raises:
        ConfigError: names the missing packages.

    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"this needs {', '.join(missing)}: pip install 'rlboost[local]'")


def require_engine(engine: Engine) -> None:
    """Check that an engine is installed.

    Raises:
        ConfigError: it is not; says how to install it.

    """
    if engine is Engine.VLLM and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "--engine vllm needs vllm: 'make install-vllm' on a machine without a GPU, "
            "pip install 'rlboost[vllm]' on one with"
        )


def _warn_of_fleet(reserved: int, workers: int) -> None:
    if reserved == workers == 0:
        typer.echo("rlboost: warning: no workers: jobs wait until one joins ('rlboost worker join')", err=True)
    elif reserved == 0:
        typer.echo("rlboost: warning: no reserved worker: jobs wait whenever no preemptible worker is there", err=True)


def _schedule(file: Path, options: LocalOptions) -> list[ChaosEvent]:
    from rlboost.local import chaos  # noqa: PLC0415 - keeps --help quick
    from rlboost.local.processes import spot_names  # noqa: PLC0415 - likewise

    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--chaos {file}: {error.strerror}: name a file that can be read") from error
    return chaos.parse(text, spot_names(options))


def _up_in_foreground(options: LocalOptions, schedule: list[ChaosEvent], *, as_json: bool) -> None:
    from rlboost.local.cluster import LocalCluster  # noqa: PLC0415 - keeps --help quick
    from rlboost.local.foreground import serve  # noqa: PLC0415 - likewise

    def announce(config: Config) -> None:
        if as_json:
            print_json(config.public())
        else:
            _print_ready(config, options.state_dir)
            typer.echo("stop it with Ctrl-C")

    cluster = LocalCluster(options)
    cluster.on_event(_print_event)
    if not serve(cluster, schedule, announce):
        typer.echo("rlboost: stopped before the system was ready", err=True)
        raise typer.Exit(EXIT_FAILED)


def _up_in_background(options: LocalOptions, chaos: Path | None, *, as_json: bool) -> None:
    from rlboost.local.detached import start  # noqa: PLC0415 - keeps --help quick
    from rlboost.local.state import StateDir  # noqa: PLC0415 - likewise

    arguments = [
        f"--reserved={options.reserved}",
        f"--workers={options.workers}",
        f"--trainers={options.trainers}",
        f"--engine={options.engine}",
        f"--state={options.state_dir}",
        f"--port={options.port}",
    ]
    arguments += ["--standby"] if options.standby else []
    arguments += [f"--chaos={chaos}"] if chaos else []
    config = start(StateDir(options.state_dir), arguments)
    if as_json:
        print_json(config.public())
    else:
        _print_ready(config, options.state_dir)
        typer.echo(f"stop it with: {command('down', options.state_dir)}")


def _print_ready(config: Config, state: Path) -> None:
    is_given = "RLBOOST_TOKEN" in os.environ
    token = "RLBOOST_TOKEN" if is_given else f'"token" in {Path(config.state_dir) / "config.json"}'
    typer.echo(
        f"ready: {config.url}\n"
        f"token: {token}\n"
        f"state and logs: {config.state_dir}\n"
        f"run a job with: {command('run JOB.yaml --follow', state)}\n"
        f'use its model with: OpenAI(base_url="{config.url}/v1", api_key=TOKEN)'
    )


def _print_event(event: ClusterEvent) -> None:
    at = time.strftime("%H:%M:%S", time.localtime(event.at))
    typer.echo(f"{at} {event.name} {event.kind}" + (f": {event.detail}" if event.detail else ""), err=True)
