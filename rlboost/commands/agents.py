"""`rlboost agents`: run the agents of a job on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rlboost.commands.common import DEFAULT_STATE, StateOption, requested_endpoint
from rlboost.shared.errors import ConfigError
from rlboost.terminal import echo

CONCURRENCY = 64


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(agents)


def agents(
    job: Annotated[str, typer.Argument(metavar="JOB", help="The job's id or name; its agent has remote: true.")],
    function: Annotated[
        str, typer.Argument(metavar="MODULE:FUNCTION", help="As agent.function in a job file; in this folder.")
    ],
    url: Annotated[str | None, typer.Option(help="The manager's URL; that of the local system if not given.")] = None,
    token: Annotated[
        str | None, typer.Option(help="A token of scope agent; better given as RLBOOST_TOKEN.", show_default=False)
    ] = None,
    concurrency: Annotated[
        int, typer.Option(min=1, max=1 << 16, help="Sessions that run at the same time.")
    ] = CONCURRENCY,
    state: StateOption = DEFAULT_STATE,
) -> None:
    """Run agents of a job in this process, until the job has ended or Ctrl-C.

    Several hosts share a job's sessions. One that vanishes loses its sessions after half a minute; they begin again on
    other hosts, where calls that are repeated get the same answers.
    """
    import asyncio  # noqa: PLC0415 - keeps --help quick

    from rlboost.agents.host import Host  # noqa: PLC0415 - likewise
    from rlboost.shared.process.lifecycle import loop_factory, on_stop_signals  # noqa: PLC0415 - likewise
    from rlboost.shared.user_code import describe_import_error, load  # noqa: PLC0415 - likewise

    endpoint = requested_endpoint(url, token, state)
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, folder)
    try:
        load(function, "agent")
    except Exception as error:
        raise ConfigError(describe_import_error(function, "agent", error)) from error
    host = Host(*endpoint, job, function, concurrency)

    async def run() -> None:
        stop = asyncio.Event()
        on_stop_signals(lambda _: stop.set())
        async with host:
            await host.run(stop)

    echo(f"runs agents of job {job}, {concurrency} at the same time; Ctrl-C stops", err=True)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run())
    echo(f"{host.n_ended} sessions ended here, {host.n_failed} of them without a reward", err=True)
