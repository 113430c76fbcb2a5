"""Shared by all commands: options, error reporting, locating the system, printing."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from rlboost.shared.errors import ConfigError, RLBoostError
from rlboost.shared.http.server_url import manager_url
from rlboost.shared.secrets import clean_secret
from rlboost.terminal import console, echo

if TYPE_CHECKING:
    from rlboost.client import Client

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_INTERRUPTED = 130

StateOption = Annotated[Path, typer.Option("--state", help="Folder of the local system's state.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JobArgument = Annotated[
    str, typer.Argument(metavar="JOB", help="The job's id or name; of several jobs of a name, the newest.")
]
JobFileArgument = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file: YAML, TOML or JSON.")]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="a.b=v", help="Values that override the file's.")
]
DEFAULT_STATE = Path(".rlboost")


VERBS: Mapping[str, str] = {
    **dict.fromkeys(("stop", "kill"), "'rlboost cancel JOB' ends a job, 'rlboost down' stops the system"),
    **dict.fromkeys(("jobs", "list", "ls"), "use 'rlboost ps'"),
    **dict.fromkeys(("submit", "train"), "use 'rlboost run JOB.yaml'"),
    "start": "'rlboost up' starts a system, 'rlboost run JOB.yaml' a job",
}
"""Verbs of other tools -> ours."""


class _Commands(TyperGroup):
    """Prints expected errors as one line, `rlboost: ...`, and exits with their exit code."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Answer another tool's verb with ours, not with the most similar one."""
        if args and args[0] in VERBS:
            ctx.fail(f"No such command {args[0]!r}: {VERBS[args[0]]}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:  # the class of a context differs between typer releases
        if not {"--help", "-h"} & {*ctx.args, *getattr(ctx, "_protected_args", ())}:
            from rlboost.shared.process import logs  # noqa: PLC0415 - keeps --help quick

            logs.to_standard_error()
        try:
            return super().invoke(ctx)
        except RLBoostError as error:
            echo(f"rlboost: {error}", err=True)
            raise typer.Exit(EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED) from error
        except RuntimeError as error:
            if "home directory" not in str(error):  # what Path.expanduser says
                raise
            echo(f"rlboost: a path begins with ~ and the home folder is unknown ({error}): set HOME", err=True)
            raise typer.Exit(EXIT_CONFIG) from error


def new_app(text: str, *, top: bool = False) -> typer.Typer:
    """Return an empty group of commands; only the top group reports errors."""
    return typer.Typer(
        help=text,
        cls=_Commands if top else None,
        no_args_is_help=True,
        add_completion=top,
        pretty_exceptions_enable=False,
    )


def command(text: str, state: Path) -> str:
    """Return a command line for the user to type, with the state folder if it is not the default."""
    return f"rlboost {text}" + ("" if state == DEFAULT_STATE else f" --state {shlex.quote(str(state))}")


def output_width() -> int | None:
    """Return the width of the terminal or of COLUMNS, None if standard output is neither."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit():
        return shutil.get_terminal_size().columns
    return None


def connect(state: Path, *, retry_for_s: float = 10.0, read_timeout_s: float = 30.0) -> Client:
    """Return a client of the system named by RLBOOST_URL and RLBOOST_TOKEN, or of the one in the state folder.

    Raises:
        ConfigError: neither names a running system.

    """
    from rlboost.client import Client  # noqa: PLC0415 - keeps --help quick

    url, token = endpoint(state)
    return Client(url, token, retry_for_s=retry_for_s, read_timeout_s=read_timeout_s)


def endpoint(state: Path) -> tuple[str, str]:
    """Return URL and token, each from the environment or the state folder.

    Raises:
        ConfigError: neither names a running system, RLBOOST_URL is not a URL, or its token is unknown.

    """
    from rlboost.local.state import StateDir  # noqa: PLC0415 - keeps --help quick

    url, token = os.environ.get("RLBOOST_URL"), clean_secret("RLBOOST_TOKEN", os.environ.get("RLBOOST_TOKEN", ""))
    url = manager_url("RLBOOST_URL", url) if url else None
    if url and token:
        return url, token
    folder = StateDir(state)
    config = folder.config() if folder.running() else None
    if url and (config is None or config.url != url):
        raise ConfigError(f"RLBOOST_URL is {url}, but its token is not known: set RLBOOST_TOKEN")
    if config is None:
        end = folder.end()
        why = "is still starting" if folder.running() else end if end and not end.reason else "does not run"
        last = f" (the last one {end})" if end and end.reason else ""
        start = command("up", state)
        raise ConfigError(
            f"the system in {state} {why}: start one with '{start}', or set RLBOOST_URL and RLBOOST_TOKEN{last}"
        )
    return config.url, token or config.token


def requested_endpoint(url: str | None, token: str | None, state: Path) -> tuple[str, str]:
    """Return URL and token of the system that options, the environment or the state folder name.

    Raises:
        ConfigError: none names one, or its token is unknown.

    """
    from rlboost.local.state import StateDir  # noqa: PLC0415 - keeps --help quick

    token = clean_secret("--token", token or "") or clean_secret("RLBOOST_TOKEN", os.environ.get("RLBOOST_TOKEN", ""))
    if url is None:
        found_url, _ = endpoint(state)
        return found_url, token or StateDir(state).join_token()
    if not token:
        raise ConfigError(f"the token of {url} is unknown: pass --token, or set RLBOOST_TOKEN")
    return manager_url("--url", url), token


def print_json(data: object) -> None:
    """Print one line of JSON."""
    echo(json.dumps(data))


def print_answer(answer: object, text: object, *, as_json: bool) -> None:
    """Print an answer as one line of JSON, or as a text for people."""
    echo(json.dumps(answer) if as_json else text)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table, without a header if all column names are empty; 200 columns wide if the width is unknown."""
    from rich.table import Table  # noqa: PLC0415 - keeps --help quick

    table = Table(*columns, title=title, title_justify="left", box=None, pad_edge=False, show_header=any(columns))
    for row in rows:
        table.add_row(*("" if cell is None else str(cell) for cell in row))
    console(width=output_width() or 200).print(table)
