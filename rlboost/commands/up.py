"""`rlboost up` and `rlboost down`: run a whole system on this machine."""

from __future__ import annotations

import os
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlboost.commands.common import DEFAULT_STATE, EXIT_FAILED, JsonOption, StateOption, command, print_json
from rlboost.shared.errors import ConfigError
from rlboost.shared.process.extras import is_installed, pip_install

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


GpusOption = Annotated[
    str | None, typer.Option(help="GPUs to use, as nvidia-smi numbers them: 0-3,6, or all; default: by settings.")
]
TensorParallelOption = Annotated[int | None, typer.Option(help="GPUs per engine, default 1; above 1 needs vllm.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(up)
    app.command()(down)


def up(  # noqa: PLR0913, PLR0917 - the options of a command
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="YAML file with options as keys; options override it.")
    ] = None,
    reserved: Annotated[
        int | None,
        typer.Option(help="Workers that share a trainer's device; default 1, on GPUs as many as fit."),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Spot workers; default 3, on GPUs none.")] = None,
    autoscale: Annotated[
        int | None,
        typer.Option(help="Autoscale spot workers up to this number: add one only if it shortens steps."),
    ] = None,
    trainers: Annotated[int | None, typer.Option(help="Trainers, default 1; each runs one job at a time.")] = None,
    engine: Annotated[Engine | None, typer.Option(help="Inference engine; default torch, on GPUs vllm.")] = None,
    gpus: GpusOption = None,
    trainer_gpus: Annotated[
        str | None, typer.Option(help="GPUs of the trainers; default: those that no spot worker uses.")
    ] = None,
    tensor_parallel: TensorParallelOption = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(help="Fraction of a trainer's GPU for the reserved workers on it; default 0.4.")
    ] = None,
    state: StateOption = DEFAULT_STATE,
    host: Annotated[
        str | None, typer.Option(help="This machine's address for workers on other machines; default: none can join.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port of the REST API; default: a free one, with --host 8700.")
    ] = None,
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

    With --trainers 2, two jobs run at once: reserved workers are divided among the trainers, spot workers
    are shared.

    With --gpus, each process sees only its own GPUs: trainers divide --trainer-gpus, reserved workers share them,
    and each spot worker has its own.

    A process that dies is restarted; with --standby another manager takes over meanwhile. A spot worker that was
    drained or preempted is not restarted. Service settings in the environment
    (RLBOOST_WORKER_SLOTS, RLBOOST_TRAINER_DEVICE) are passed on; RLBOOST_TOKEN is the system's token; by
    default the last one of the state folder, at first a random one.
    """
    from rlboost.local import spec_file  # noqa: PLC0415 - keeps --help quick
    from rlboost.local.state import StateDir  # noqa: PLC0415 - likewise
    from rlboost.local.system_layout import local_options  # noqa: PLC0415 - likewise

    given = {
        "reserved": reserved,
        "workers": workers,
        "autoscale": autoscale,
        "trainers": trainers,
        "engine": engine and engine.value,
        "gpus": gpus,
        "trainer_gpus": trainer_gpus,
        "tensor_parallel": tensor_parallel,
        "gpu_memory_utilization": gpu_memory_utilization,
        "host": host,
        "port": port,
    }
    StateDir(state).require_free()
    require_packages(*SERVICE_PACKAGES)
    options = local_options(spec_file.load(spec_file.SystemSpec, file, {**given, "standby": standby or None}), state)
    schedule = _schedule(chaos, options) if chaos else []
    if not as_json:
        _warn_of_fleet(options.reserved, options.workers)
    if detach:
        arguments = [str(file)] if file else []
        arguments += [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]
        arguments += ["--standby"] if standby else []
        arguments += [f"--chaos={chaos}"] if chaos else []
        _up_in_background(state, [*arguments, f"--state={state}"], as_json=as_json)
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


def require_packages(*packages: str, extra: str = "local") -> None:
    """Check for required packages before starting anything; `extra` has them.

    Raises:
        ConfigError: names the missing packages.

    """
    missing = [name for name in packages if not is_installed(name)]
    if missing:
        raise ConfigError(f"this needs {', '.join(missing)}: {pip_install(extra)}")


def _warn_of_fleet(reserved: int, workers: int) -> None:
    if reserved == workers == 0:
        typer.echo("rlboost: warning: no workers: jobs wait until one joins ('rlboost worker join')", err=True)
    elif reserved == 0:
        typer.echo("rlboost: warning: no reserved worker: jobs wait whenever no spot worker is there", err=True)


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
    cluster.on_event(print_event)
    if not serve(cluster, schedule, announce):
        typer.echo("rlboost: stopped before the system was ready", err=True)
        raise typer.Exit(EXIT_FAILED)


def _up_in_background(state: Path, arguments: list[str], *, as_json: bool) -> None:
    from rlboost.local.detached import start  # noqa: PLC0415 - keeps --help quick
    from rlboost.local.state import StateDir  # noqa: PLC0415 - likewise

    config = start(StateDir(state), arguments)
    if as_json:
        print_json(config.public())
    else:
        _print_ready(config, state)
        typer.echo(f"stop it with: {command('down', state)}")


def _print_ready(config: Config, state: Path) -> None:
    is_given = "RLBOOST_TOKEN" in os.environ
    token = "RLBOOST_TOKEN" if is_given else f'"token" in {Path(config.state_dir) / "config.json"}'
    typer.echo(
        f"ready: {config.url}\n"
        f"token: {token}\n"
        f"watch it: '{command('page', state)}' prints a link to its web page\n"
        f"state and logs: {config.state_dir}\n"
        f"run a job with: {command('run JOB.yaml --follow', state)}\n"
        f'use its model with: OpenAI(base_url="{config.url}/v1", api_key=TOKEN)'
    )


def print_event(event: ClusterEvent) -> None:
    """Print a process event to standard error."""
    at = time.strftime("%H:%M:%S", time.localtime(event.at))
    typer.echo(f"{at} {event.name} {event.kind}" + (f": {event.detail}" if event.detail else ""), err=True)
