"""`rlboost scale`: the number of spot workers."""

from __future__ import annotations

from typing import Annotated

import typer

from rlboost.commands.common import DEFAULT_STATE, JsonOption, StateOption, connect, print_json
from rlboost.shared.errors import ConfigError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(scale)


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
    typer.echo(f"spot workers: {'as many as are worth having' if workers == 'auto' else workers}")
    for pool in autoscaling["pools"]:
        typer.echo(f"  {pool['kind']}: {pool['present']} present, at most {pool['max_workers']}")
        if pool["error"]:
            typer.echo(f"rlboost: warning: {pool['error']}", err=True)
