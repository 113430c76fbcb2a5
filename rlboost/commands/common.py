"""What all commands share: options, how errors are told, where the system is, how answers are printed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer
from typer.core import TyperGroup

from shared.errors import ConfigError, RLBoostError

if TYPE_CHECKING:
    from rlboost.client import Client

EXIT_FAILED = 1
EXIT_CONFIG = 2

StateOption = Annotated[Path, typer.Option("--state", help="Folder of the local system's state.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="The job's id, as 'rlboost ps' lists it.")]
DEFAULT_STATE = Path(".rlboost")


class _Commands(TyperGroup):
    """Tells expected errors in one line, `rlboost: ...`, and gives them their exit code."""

    def invoke(self, ctx: Any) -> Any:  # typer's releases disagree about the class of a context
        try:
            return super().invoke(ctx)
        except RLBoostError as error:
            typer.echo(f"rlboost: {error}", err=True)
            raise typer.Exit(EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED) from error


def new_app(text: str, *, top: bool = False) -> typer.Typer:
    """Return an empty group of commands; only the top one tells errors."""
    return typer.Typer(
        help=text,
        cls=_Commands if top else None,
        no_args_is_help=True,
        add_completion=top,
        pretty_exceptions_enable=False,
    )


def connect(state: Path, *, patience_s: float = 10.0) -> Client:
    """Return a client of the system that RLBOOST_URL and RLBOOST_TOKEN name, or else of the one in the state folder.

    Raises:
        ConfigError: neither says where a system is.

    """
    from rlboost.client import Client  # noqa: PLC0415 - keeps --help quick

    url, token = endpoint(state)
    return Client(url, token, patience_s=patience_s)


def endpoint(state: Path) -> tuple[str, str]:
    """Return URL and token, each from the environment or else from the state folder.

    Raises:
        ConfigError: neither says where a system is, or RLBOOST_URL is no URL or that of a system whose token is not
            known.

    """
    from rlboost.local.state import StateDir  # noqa: PLC0415 - keeps --help quick

    url, token = os.environ.get("RLBOOST_URL"), os.environ.get("RLBOOST_TOKEN")
    url = checked_url("RLBOOST_URL", url) if url else None
    if url and token:
        return url, token
    folder = StateDir(state)
    config = folder.config() if folder.running() else None
    if url and (config is None or config.url != url):
        raise ConfigError(f"RLBOOST_URL is {url}, but its token is not known: set RLBOOST_TOKEN")
    if config is None:
        why = "is still starting" if folder.running() else "does not run"
        raise ConfigError(f"the system in {state} {why}: start one with 'rlboost up', or set RLBOOST_URL and _TOKEN")
    return config.url, token or config.token


def checked_url(given_by: str, url: str) -> str:
    """Return a URL without a slash at its end.

    Raises:
        ConfigError: it is none, naming the option or variable that gave it.

    """
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # such as a port that is no number
        is_url = False
    if not is_url:
        raise ConfigError(f"{given_by} {url!r} is no URL: give one such as http://10.0.0.5:8700")
    return url.rstrip("/")


def print_json(data: object) -> None:
    """Print one line of JSON."""
    typer.echo(json.dumps(data))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table, without a header if all columns' names are empty; on no terminal it is as wide as need be."""
    from rich.console import Console  # noqa: PLC0415 - keeps --help quick
    from rich.table import Table  # noqa: PLC0415 - likewise

    table = Table(*columns, title=title, title_justify="left", box=None, pad_edge=False, show_header=any(columns))
    for row in rows:
        table.add_row(*("" if cell is None else str(cell) for cell in row))
    Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False).print(table)
