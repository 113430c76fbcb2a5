"""The `rlboost` command: one module of `rlboost.commands` per group of verbs.

Those modules import their implementation only when a command runs, so that `--help` stays fast.
"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from rlboost.commands import (
    config,
    demo,
    doctor,
    export,
    follow,
    init,
    jobs,
    memory,
    page,
    plan,
    prices,
    ps,
    report,
    samples,
    scale,
    simulate,
    token,
    top,
    trace,
    trainer,
    up,
    worker,
)
from rlboost.commands import eval as evaluation
from rlboost.commands.common import new_app
from rlboost.shared.variables import ignored

app = new_app("Train language models with reinforcement learning, with rollouts on spot GPUs.", top=True)
init.register(app)
up.register(app)
demo.register(app)
report.register(app)
jobs.register(app)
follow.register(app)
top.register(app)
samples.register(app)
page.register(app)
evaluation.register(app)
export.register(app)
plan.register(app)
prices.register(app)
ps.register(app)
scale.register(app)
doctor.register(app)
trace.register(app)
simulate.register(app)
app.add_typer(worker.app, name="worker")
app.add_typer(trainer.app, name="trainer")
app.add_typer(token.app, name="token")
app.add_typer(config.app, name="config")
memory.register(app)


def _print_version(is_given: bool) -> None:
    if is_given:
        from importlib.metadata import version  # noqa: PLC0415 - keeps --help quick

        typer.echo(f"rlboost {version('rlboost')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Hold the options of the command itself."""
    del version  # its callback prints it
    for problem in ignored(os.environ):
        typer.echo(f"rlboost: warning: {problem}", err=True)


def main() -> None:
    """Run the command line and exit."""
    app()
