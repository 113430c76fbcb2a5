"""Commands of a system: `rlboost up`, `down`, `scale`, `doctor`, `demo`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlboost.commands.common import (
    DEFAULT_STATE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    JsonOption,
    StateOption,
    command,
    connect,
    print_answer,
    print_json,
    requested_endpoint,
)
from rlboost.commands.job_files import progress
from rlboost.shared.errors import ConfigError
from rlboost.shared.process.modules import EngineName, is_installed, pip_install, require_engine
from rlboost.terminal import console, echo

if TYPE_CHECKING:
    from rlboost.local.chaos import ChaosEvent
    from rlboost.local.doctor import Finding
    from rlboost.local.processes import LocalOptions
    from rlboost.local.state import Config
    from rlboost.local.supervisor import ClusterEvent

# --- `rlboost up` and `rlboost down`: run a whole system on this machine ----------------------------------------------


SERVICE_PACKAGES = ("blake3", "fastapi", "safetensors", "torch", "transformers", "uvicorn")


GpusOption = Annotated[
    str | None, typer.Option(help="GPUs to use, as nvidia-smi numbers them: 0-3,6, or all; default: by settings.")
]
TensorParallelOption = Annotated[int | None, typer.Option(help="GPUs per engine, default 1; above 1 needs vllm.")]


def up(  # noqa: PLR0913, PLR0917 - the options of a command
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="YAML file with options as keys; options override it.")
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
    trainers: Annotated[
        int | None, typer.Option(help="Trainers, default 1; each runs one job at a time. 0: only trainers of your own.")
    ] = None,
    time_share: Annotated[
        bool, typer.Option("--time-share", help="Trainers use the same device in turns, instead of one each.")
    ] = False,
    engine: Annotated[EngineName | None, typer.Option(help="Inference engine; default torch, on GPUs vllm.")] = None,
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
    are shared. With --time-share, the trainers use one device in turns, without reserved workers.

    With --gpus, each process sees only its own GPUs: trainers divide --trainer-gpus, reserved workers share them,
    and each spot worker has its own.

    A process that dies is restarted; with --standby another manager takes over meanwhile. A spot worker that was
    drained or preempted is not restarted. Service settings in the environment
    (RLBOOST_WORKER_SLOTS, RLBOOST_TRAINER_DEVICE) are passed on; RLBOOST_TOKEN is the system's token; by
    default the last one of the state folder, at first a random one.
    """
    from rlboost.local import spec_file  # noqa: PLC0415 - keeps --help quick
    from rlboost.local.spec_file import local_options  # noqa: PLC0415 - likewise
    from rlboost.local.state import StateDir  # noqa: PLC0415 - likewise

    given = {
        "reserved": reserved,
        "workers": workers,
        "autoscale": autoscale,
        "trainers": trainers,
        "engine": engine,
        "gpus": gpus,
        "trainer_gpus": trainer_gpus,
        "tensor_parallel": tensor_parallel,
        "gpu_memory_utilization": gpu_memory_utilization,
        "host": host,
        "port": port,
    }
    flags = {"standby": standby or None, "time_share": time_share or None}
    if host is not None and not host.strip():
        raise ConfigError("--host is empty: give this machine's address, or leave it out if no other machine joins")
    StateDir(state).require_free()
    require_packages(*SERVICE_PACKAGES)
    options = local_options(spec_file.load(spec_file.SystemSpec, file, {**given, **flags}), state)
    schedule = _schedule(chaos, options) if chaos else []
    if not as_json:
        _warn_of_fleet(options)
    if detach:
        arguments = [str(file)] if file else []
        arguments += [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]
        arguments += [f"--{name.replace('_', '-')}" for name, value in flags.items() if value]
        arguments += [f"--chaos={chaos}"] if chaos else []
        _up_in_background(state, [*arguments, f"--state={state}"], as_json=as_json)
    else:
        _up_in_foreground(options, schedule, as_json=as_json)


def down(state: StateOption = DEFAULT_STATE, as_json: JsonOption = False) -> None:
    """Stop the system on this machine. Jobs, weights and logs stay in the state folder; 'rlboost up' continues."""
    from rlboost.local.detached import stop  # noqa: PLC0415 - keeps --help quick
    from rlboost.local.state import StateDir  # noqa: PLC0415 - likewise

    stopped = stop(StateDir(state))
    text = f"stopped the system in {state}" if stopped else f"no system ran in {state}"
    print_answer({"stopped": stopped}, text, as_json=as_json)


def require_packages(*packages: str, extra: str = "local") -> None:
    """Check for required packages before starting anything; `extra` has them.

    Raises:
        ConfigError: names the missing packages.

    """
    missing = [name for name in packages if not is_installed(name)]
    if missing:
        raise ConfigError(f"this needs {', '.join(missing)}: {pip_install(extra)}")


def _warn_of_fleet(options: LocalOptions) -> None:
    if options.reserved == options.workers == 0:
        echo("rlboost: warning: no workers: jobs wait until one joins ('rlboost worker join')", err=True)
    elif options.reserved == 0 < options.trainers:
        echo("rlboost: warning: no reserved worker: jobs wait whenever no spot worker is there", err=True)


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
    from rlboost.local.detached import serve  # noqa: PLC0415 - likewise

    def announce(config: Config) -> None:
        if as_json:
            print_json(config.public())
        else:
            _print_ready(config, options.state_dir)
            echo("stop it with Ctrl-C")

    cluster = LocalCluster(options)
    cluster.on_event(print_event)
    if not serve(cluster, schedule, announce):
        echo("rlboost: stopped before the system was ready", err=True)
        raise typer.Exit(EXIT_FAILED)


def _up_in_background(state: Path, arguments: list[str], *, as_json: bool) -> None:
    from rlboost.local.detached import start  # noqa: PLC0415 - keeps --help quick
    from rlboost.local.state import StateDir  # noqa: PLC0415 - likewise

    config = start(StateDir(state), arguments)
    if as_json:
        print_json(config.public())
    else:
        _print_ready(config, state)
        echo(f"stop it with: {command('down', state)}")


def _print_ready(config: Config, state: Path) -> None:
    is_given = "RLBOOST_TOKEN" in os.environ
    token = "RLBOOST_TOKEN" if is_given else f'"token" in {Path(config.state_dir) / "config.json"}'
    echo(
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
    echo(f"{at} {event.name} {event.kind}" + (f": {event.detail}" if event.detail else ""), err=True)


# --- `rlboost scale`: the number of spot workers ----------------------------------------------------------------------


def scale(
    workers: Annotated[str, typer.Argument(metavar="N|auto", help="Spot workers; auto = autoscale.")],
    state: StateOption = DEFAULT_STATE,
    as_json: JsonOption = False,
) -> None:
    """Set the number of spot workers, within the limits of the manager's pools and of dollars per hour.

    Needs a manager that can start workers: 'rlboost up --autoscale N', or RLBOOST_MANAGER_POOLS.
    """
    if workers != "auto" and not workers.isdecimal():
        raise ConfigError(f"{workers!r} is not a number of workers: give one, such as 4, or auto")
    with connect(state) as client:
        client.scale(None if workers == "auto" else int(workers))
        autoscaling = client.fleet()["autoscaling"]
    if as_json:
        print_json(autoscaling)
        return
    echo(f"spot workers: {'as many as are worth having' if workers == 'auto' else workers}")
    for pool in autoscaling["pools"]:
        echo(f"  {pool['kind']}: {pool['present']} present, at most {pool['max_workers']}")
        if pool["error"]:
            echo(f"rlboost: warning: {pool['kind']}: {pool['error']}", err=True)


# --- `rlboost doctor` -------------------------------------------------------------------------------------------------


def doctor(
    url: Annotated[str | None, typer.Option(help="URL of a system's REST API that this machine should join.")] = None,
    token: Annotated[str | None, typer.Option(help="Its token; better given as RLBOOST_TOKEN.")] = None,
    state: StateOption = DEFAULT_STATE,
    as_json: JsonOption = False,
) -> None:
    """Check this machine and its connection to a system; exit with code 1 if there is a problem.

    The machine: GPUs, torch's and vLLM's builds, Redis, disk, shared memory, ports. The system, if --url, RLBOOST_URL
    or the state folder names one: manager, token, weight store, Redis, clock.
    """
    found = list(_findings(url, token, state, as_json=as_json))
    is_sound = all(finding.status != "problem" for finding in found)
    if as_json:
        print_json({"ok": is_sound, "checks": [asdict(finding) for finding in found]})
    if not is_sound:
        raise typer.Exit(EXIT_FAILED)


def _findings(url: str | None, token: str | None, state: Path, *, as_json: bool) -> Iterator[Finding]:
    from rlboost.local.doctor import machine_findings, system_findings  # noqa: PLC0415 - keeps --help quick

    named = _named(url, token, state)
    with progress() as on_part:
        for finding in machine_findings(state, on_part):
            yield _shown(finding, as_json=as_json)
        if named is not None:
            on_part("connecting to the system")
            for finding in system_findings(*named, redis_url=_redis_url(state, named[0])):
                yield _shown(finding, as_json=as_json)


def _named(url: str | None, token: str | None, state: Path) -> tuple[str, str] | None:
    """Return URL and token of the system to check, None if there is none."""
    try:
        return requested_endpoint(url, token, state)
    except ConfigError:
        if url is not None:
            raise
        return None


def _redis_url(state: Path, url: str) -> str:
    """Return the URL of Redis with the system's own password, empty if it is not known on this machine."""
    from rlboost.local.state import StateDir  # noqa: PLC0415 - keeps --help quick

    folder = StateDir(state)
    config = folder.config() if folder.running() else None
    return config.redis_url if config and config.url == url else os.environ.get("RLBOOST_REDIS_URL", "")


def _shown(finding: Finding, *, as_json: bool) -> Finding:
    if not as_json:
        advice = f" -> {finding.advice}" if finding.advice else ""
        echo(f"{finding.status:8} {finding.name}: {finding.text}{advice}")
    return finding


# --- `rlboost demo`: the Countdown job on workers that join and are preempted -----------------------------------------

_DEMO_STATE = Path(".rlboost/demo")


def demo(  # noqa: PLR0913, PLR0917 - the options of a command
    steps: Annotated[int | None, typer.Option(min=3, help="Training steps; the job file's 60 if not given.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Spot workers at the start, with --trace at most; default 3.")
    ] = None,
    autoscale: Annotated[
        int,
        typer.Option(min=0, help="Autoscale spot workers up to this number: add one only if it shortens steps."),
    ] = 0,
    engine: Annotated[EngineName, typer.Option(help="Inference engine.")] = "torch",
    state: Annotated[
        Path, typer.Option(help="Folder for the run; data of an earlier demo in it is deleted.")
    ] = _DEMO_STATE,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the report; 'report' in the state folder if not given.")
    ] = None,
    chaos: Annotated[bool, typer.Option("--chaos/--no-chaos", help="Preempt workers and add others.")] = True,
    trace: Annotated[
        Path | None,
        typer.Option(help="Recorded spot trace: workers join and are killed as its instances were, hours in minutes."),
    ] = None,
    start: Annotated[float, typer.Option(min=0.0, help="With --trace: its hour at which the demo begins.")] = 0.0,
    hours: Annotated[float, typer.Option(min=0.1, help="With --trace: its hours that the demo replays.")] = 2.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the job and of the preemption schedule.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Train a small model on this machine while spot workers are killed, and account for every sample.

    Fails if the job fails, if accuracy does not rise, or if the audit does not balance. With --json it prints the
    result as JSON, and progress on standard error.
    """
    from rlboost.demo.run import DemoOptions, record_file, run  # noqa: PLC0415 - keeps --help quick
    from rlboost.demo.summary import summary  # noqa: PLC0415 - likewise
    from rlboost.local.spec_file import initial_workers  # noqa: PLC0415 - likewise
    from rlboost.report import checks, report_of, write  # noqa: PLC0415 - likewise
    from rlboost.simulation.traces import trace_segment  # noqa: PLC0415 - likewise

    require_packages(*SERVICE_PACKAGES)
    require_engine(engine)
    screen = console(stderr=as_json)
    first_workers = initial_workers(workers, autoscale)
    replayed = None
    if trace:
        if autoscale or not chaos:
            raise ConfigError("--trace says when workers join and are killed: leave --autoscale and --no-chaos out")
        replayed = trace_segment(trace, sample=1.0, start_h=start, hours=hours, limit=first_workers)
    record = run(DemoOptions(state, steps, first_workers, chaos, seed, engine, autoscale, replayed), screen)
    if record is None:
        echo("rlboost: the demo was stopped; nothing of it runs any more", err=True)
        raise typer.Exit(EXIT_INTERRUPTED)
    screen.print(summary(record))
    page, found = write(report_of(record), out or state / "report"), checks(record)
    files = {"report": str(page.absolute()), "record": str(record_file(state).absolute())}
    if as_json:
        guarantees = [asdict(check) for check in found]
        print_json({"job": record.job, "guarantees": guarantees, "audit": record.audit, "cost": record.cost, **files})
    else:
        echo("\n" + "\n".join(f"{name}: {path}" for name, path in files.items()))
    if not all(check.held for check in found):
        echo(f"rlboost: a guarantee was violated; the logs are in {state / 'logs'}", err=True)
        raise typer.Exit(EXIT_FAILED)


# --- Registration -----------------------------------------------------------------------------------------------------


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for verb in (up, down, scale, doctor, demo):
        app.command()(verb)
