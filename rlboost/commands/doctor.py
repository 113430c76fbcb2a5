"""`rlboost doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlboost.commands.checking import progress
from rlboost.commands.common import DEFAULT_STATE, EXIT_FAILED, JsonOption, StateOption, print_json, requested_endpoint
from rlboost.shared.errors import ConfigError

if TYPE_CHECKING:
    from rlboost.doctor.rules import Finding


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(doctor)


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
    from rlboost.doctor import machine, system  # noqa: PLC0415 - keeps --help quick

    named = _named(url, token, state)
    with progress() as on_part:
        for finding in machine.findings(state, on_part):
            yield _shown(finding, as_json=as_json)
        if named is not None:
            on_part("connecting to the system")
            for finding in system.findings(*named):
                yield _shown(finding, as_json=as_json)


def _named(url: str | None, token: str | None, state: Path) -> tuple[str, str] | None:
    """Return URL and token of the system to check, None if there is none."""
    try:
        return requested_endpoint(url, token, state)
    except ConfigError:
        if url is not None:
            raise
        return None


def _shown(finding: Finding, *, as_json: bool) -> Finding:
    if not as_json:
        advice = f" -> {finding.advice}" if finding.advice else ""
        typer.echo(f"{finding.status:8} {finding.name}: {finding.text}{advice}")
    return finding
