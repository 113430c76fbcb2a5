"""`rlboost samples`: completions of a job with their rewards."""

from __future__ import annotations

import shutil
from typing import Annotated

import typer

from rlboost.commands.common import DEFAULT_STATE, JobArgument, JsonOption, StateOption, connect, print_json

_WIDEST = 100
"""Columns."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(samples)


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
    typer.echo(f"{record['id']} step {found[0]['step'] + 1}: {len(shown)} of {len(found)} {kind}{order}")
    for sample in shown:
        typer.echo("")
        for line in lines(sample, width):
            typer.echo(line)
