"""Commands that show jobs in other ways: `rlboost page`, `report`, `samples`, `verify-run`, `top`, `trace`."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlboost.commands.common import (
    DEFAULT_STATE,
    EXIT_FAILED,
    JobArgument,
    JsonOption,
    StateOption,
    connect,
    endpoint,
    output_width,
    print_answer,
    print_json,
)
from rlboost.commands.system import require_packages
from rlboost.shared.errors import ConfigError
from rlboost.shared.secrets import clean_secret
from rlboost.terminal import console, echo

if TYPE_CHECKING:
    from rich.console import Console

    from rlboost.top import Snapshot, SnapshotReader


# --- `rlboost page`: the link to the web page, with a token -----------------------------------------------------------


_READ_ONLY_S = 7 * 86_400.0
"""How long a read-only link works."""


def page(
    state: StateOption = DEFAULT_STATE,
    show: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="A link to share: it shows everything, changes nothing, for 7 days.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print a link to the web page of the system.

    The link contains the token, with which everything can be changed: do not share it. --read-only creates one of
    scope read instead ('rlboost token revoke' ends it).
    """
    url, token = endpoint(state)
    link = f"{url}/#token={token}"
    if read_only:
        with connect(state) as client:
            created = client.tokens.create("read", name="read-only page", expires_s=_READ_ONLY_S)
        link = f"{url}/#token={created['secret']}&read-only"
    print_answer({"url": link, "read_only": read_only}, link, as_json=as_json)
    if show:
        typer.launch(link)


# --- `rlboost report`: generate the report of a job, or of a recorded demo --------------------------------------------


def report(
    source: Annotated[
        str,
        typer.Argument(metavar="JOB|RECORD.json", help="A job's id or name, or the record that 'rlboost demo' wrote."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the page.")] = Path("report"),
    state: StateOption = DEFAULT_STATE,
) -> None:
    """Generate a report: the job's web page with all that it shows in it, as one file.

    A job may be running: its report shows what there is so far.
    """
    from rlboost.report import load, read, report_of, write  # noqa: PLC0415 - keeps --help quick

    if Path(source).suffix == ".json":
        found = report_of(load(Path(source)))
    else:
        with connect(state) as client:
            found = read(client, client.jobs.find(source))
    echo(write(found, out).absolute())


# --- `rlboost samples`: completions of a job with their rewards -------------------------------------------------------


_WIDEST = 100
"""Columns."""


def samples(
    job: JobArgument,
    step: Annotated[int | None, typer.Option(help="Step, from 1; the newest one if omitted.", min=1)] = None,
    best: Annotated[bool, typer.Option("--best", help="Highest rewards first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Lowest rewards first.")] = False,
    number: Annotated[int, typer.Option("-n", help="Number of samples.", min=1)] = 4,
    evaluation: Annotated[bool, typer.Option("--eval", help="Samples of the step's evaluation.")] = False,
    state: StateOption = DEFAULT_STATE,
    as_json: JsonOption = False,
) -> None:
    """Show completions of a job with their rewards. Without --best or --worst, one completion per prompt."""
    from rlboost.samples import lines, of_step, select  # noqa: PLC0415 - keeps --help quick

    if best and worst:
        raise typer.BadParameter("give --best or --worst, not both")
    with connect(state) as client:
        record = client.jobs.find(job)
        found = of_step(client, record, None if step is None else step - 1, evaluation=evaluation)
    shown = select(found, number, best=best, worst=worst)
    if as_json:
        print_json(shown)
        return
    width = min(_WIDEST, shutil.get_terminal_size().columns)
    kind = "evaluation samples" if found[0]["is_eval"] else "samples"
    order = ", highest reward first" if best else ", lowest reward first" if worst else ""
    echo(f"{record['id']} step {found[0]['step'] + 1}: {len(shown)} of {len(found)} {kind}{order}")
    for sample in shown:
        echo("")
        for line in lines(sample, width):
            echo(line)


# --- `rlboost verify-run`: check the record of a run, or compare two --------------------------------------------------


RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's folder, or the id or name of a job of this system.")
]


def verify_run(
    run: RunArgument,
    other: Annotated[
        str | None, typer.Argument(metavar="OTHER", help="A run of the same job to compare it with.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="Show which worker and version made each sample of a step, from 1.", min=1)
    ] = None,
    key: Annotated[str, typer.Option(help="The public key that the record must be signed with.")] = "",
    state: StateOption = DEFAULT_STATE,
    as_json: JsonOption = False,
) -> None:
    """Check the record of a run against its files, or compare two runs bit by bit. It needs no running system.

    Exits with 1 if something does not match. Without --key the record must be signed with the key of RLBOOST_TOKEN or
    of the system in the state folder, if there is one.
    """
    require_packages("blake3", "cryptography", extra="manager")
    from rlboost.verify import check, compare, lines_of  # noqa: PLC0415 - keeps --help quick

    folders = [_run_folder(name, state) for name in (run, other) if name is not None]
    records = [check(folder, key or _known_key(state)) for folder in folders]
    sound = not any(record.problems for record in records)
    found = compare(*records) if sound and len(records) > 1 else None
    if as_json:
        checked = [
            {"run": str(one.folder), "certificate": one.head, "key": one.key, "problems": one.problems}
            for one in records
        ]
        print_json({"runs": checked, "differences": found and found.differences})
    else:
        for record in records:
            for line in record.summary():
                echo(line)
        for line in found.summary() if found else ():
            echo(line)
        if step is not None and sound:
            for line in lines_of(records[0], step - 1):
                echo(line)
    if not sound or (found and found.differences):
        raise typer.Exit(EXIT_FAILED)


def _run_folder(name: str, state: Path) -> Path:
    runs = state / "runs"
    for folder in (Path(name), runs / name):
        if folder.is_dir():
            return folder
    found = sorted(file.parent.name for file in runs.glob("*/job.json") if _name_of(file) == name)
    if len(found) > 1:
        raise ConfigError(f"{len(found)} jobs have the name {name}: give an id: {', '.join(found)}")
    return runs / found[0] if found else Path(name)


def _name_of(job_file: Path) -> object:
    try:
        return json.loads(job_file.read_bytes()).get("name")
    except (OSError, ValueError, AttributeError):
        return None  # the check of that run says so


def _known_key(state: Path) -> str:
    """Return the key of the system that is named here, empty if none is."""
    from rlboost.shared.weights.access import RecordKey  # noqa: PLC0415 - keeps --help quick

    file = state / "token"
    token = clean_secret("RLBOOST_TOKEN", os.environ.get("RLBOOST_TOKEN", ""))
    token = token or (file.read_text(encoding="utf-8").strip() if file.is_file() else "")
    return RecordKey(token).public if token else ""


# --- `rlboost top`: jobs and workers, redrawn while it runs -----------------------------------------------------------


_READ_TIMEOUT_S = 5.0
"""A manager that does not answer for this time counts as lost."""


def top(
    once: Annotated[bool, typer.Option("--once", help="Print once, then exit.")] = False,
    every_s: Annotated[float, typer.Option("--every", min=0.2, help="Seconds between two redraws.")] = 2.0,
    state: StateOption = DEFAULT_STATE,
    as_json: JsonOption = False,
) -> None:
    """Show jobs, what they do and wait for, rewards, workers and cost until Ctrl-C.

    With --json, or where the output is no terminal, it prints once. While the manager does not answer, it tries again
    for 10 minutes.
    """
    from rlboost.top import SnapshotReader, View  # noqa: PLC0415 - keeps --help quick

    screen = console()
    reader = SnapshotReader()
    if as_json or once or not screen.is_terminal:
        with connect(state) as client:
            snapshot = reader.read(client)
        if as_json:
            print_json(snapshot.public())
        else:
            screen.width = output_width() or 200
            screen.print(View(snapshot, time.time()))
        return
    try:
        _redraw(screen, reader, state, every_s)
    except KeyboardInterrupt:
        raise typer.Exit from None


def _redraw(screen: Console, reader: SnapshotReader, state: Path, every_s: float) -> None:
    """Redraw the screen until Ctrl-C.

    Raises:
        ClientError, ConfigError: there was no answer at the start, or for `OUTAGE_LIMIT_S`.

    """
    from rich.live import Live  # noqa: PLC0415 - keeps --help quick

    from rlboost.client import ClientError  # noqa: PLC0415 - likewise
    from rlboost.follow import OUTAGE_LIMIT_S, is_outage, outage_reason  # noqa: PLC0415 - likewise
    from rlboost.top import View  # noqa: PLC0415 - likewise

    def read() -> Snapshot:
        # A new client each time: a restarted system may have another address and token.
        with connect(state, retry_for_s=0.0, read_timeout_s=_READ_TIMEOUT_S) as client:
            return reader.read(client)

    snapshot, problem = read(), ""
    with Live(console=screen, screen=True, auto_refresh=False) as live:
        while True:
            live.update(View(snapshot, time.time(), screen.size.height, problem), refresh=True)
            time.sleep(every_s)
            try:
                snapshot, problem = read(), ""
            except (ClientError, ConfigError) as error:
                if not is_outage(error) or time.time() - snapshot.at > OUTAGE_LIMIT_S:
                    raise
                problem = outage_reason(error)


# --- `rlboost trace`: send a trace of each sample to an OpenTelemetry collector ---------------------------------------


_REDIS_VARIABLE = "RLBOOST_REDIS_URL"


def trace(state: StateOption = DEFAULT_STATE) -> None:
    """Send a trace of each sample to an OpenTelemetry collector, over OTLP/HTTP, until Ctrl-C.

    A trace has the sample's request, its attempts on workers with migrations and losses, its reward, and the step that
    trained on it. It is read from the Redis of the local system, or of RLBOOST_REDIS_URL; nothing else changes.
    OTEL_EXPORTER_OTLP_ENDPOINT names the collector, by default http://localhost:4318; OTEL_TRACES_SAMPLER selects
    samples. Needs the extra otel.
    """
    import asyncio  # noqa: PLC0415 - keeps --help quick

    require_packages("opentelemetry.exporter.otlp.proto.http", extra="otel")
    from rlboost.shared.process.lifecycle import on_stop_signals  # noqa: PLC0415 - likewise
    from rlboost.shared.redis.bus import connect  # noqa: PLC0415 - likewise
    from rlboost.tracing import OtlpTraces, follow  # noqa: PLC0415 - keeps --help quick

    redis_url = _redis_url(state)

    async def run() -> None:
        stop = asyncio.Event()
        bus = await connect(redis_url, "trace")
        on_stop_signals(lambda _: stop.set())
        echo("rlboost: sending traces; stop with Ctrl-C", err=True)
        try:
            await follow(bus, OtlpTraces(stop).send, stop)
        finally:
            await bus.close()

    asyncio.run(run())


def _redis_url(state: Path) -> str:
    from rlboost.local.state import StateDir  # noqa: PLC0415 - keeps --help quick

    config = StateDir(state).config() if StateDir(state).running() else None
    url = os.environ.get(_REDIS_VARIABLE) or (config and config.redis_url)
    if not url:
        raise ConfigError(f"no system runs in {state}: start one with 'rlboost up', or set {_REDIS_VARIABLE}")
    return url


# --- Registration -----------------------------------------------------------------------------------------------------


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for verb in (page, report, samples, verify_run, top, trace):
        app.command()(verb)
