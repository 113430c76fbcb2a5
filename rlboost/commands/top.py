"""`rlboost top`: jobs and workers, redrawn while it runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlboost.commands.common import DEFAULT_STATE, JsonOption, StateOption, connect, output_width, print_json

if TYPE_CHECKING:
    from rich.console import Console

    from rlboost.top.snapshot import Snapshot, SnapshotReader

_READ_TIMEOUT_S = 5.0
"""A manager that does not answer for this time counts as lost."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(top)


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
    from rich.console import Console  # noqa: PLC0415 - keeps --help quick

    from rlboost.top.snapshot import SnapshotReader  # noqa: PLC0415 - likewise
    from rlboost.top.view import View  # noqa: PLC0415 - likewise

    console = Console(highlight=False, markup=False)
    reader = SnapshotReader()
    if as_json or once or not console.is_terminal:
        with connect(state) as client:
            snapshot = reader.read(client)
        if as_json:
            print_json(snapshot.public())
        else:
            console.width = output_width() or 200
            console.print(View(snapshot, time.time()))
        return
    try:
        _redraw(console, reader, state, every_s)
    except KeyboardInterrupt:
        raise typer.Exit from None


def _redraw(console: Console, reader: SnapshotReader, state: Path, every_s: float) -> None:
    """Redraw the screen until Ctrl-C.

    Raises:
        ClientError, ConfigError: there was no answer at the start, or for `OUTAGE_LIMIT_S`.

    """
    from rich.live import Live  # noqa: PLC0415 - keeps --help quick

    from rlboost.client import ClientError  # noqa: PLC0415 - likewise
    from rlboost.follow import OUTAGE_LIMIT_S, is_outage, outage_reason  # noqa: PLC0415 - likewise
    from rlboost.shared.errors import ConfigError  # noqa: PLC0415 - likewise
    from rlboost.top.view import View  # noqa: PLC0415 - likewise

    def read() -> Snapshot:
        # A new client each time: a restarted system may have another address and token.
        with connect(state, retry_for_s=0.0, read_timeout_s=_READ_TIMEOUT_S) as client:
            return reader.read(client)

    snapshot, problem = read(), ""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(View(snapshot, time.time(), console.size.height, problem), refresh=True)
            time.sleep(every_s)
            try:
                snapshot, problem = read(), ""
            except (ClientError, ConfigError) as error:
                if not is_outage(error) or time.time() - snapshot.at > OUTAGE_LIMIT_S:
                    raise
                problem = outage_reason(error)
