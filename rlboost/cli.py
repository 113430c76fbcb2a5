"""The `rlboost` command: each module of `rlboost.commands` has a few of its verbs.

Those modules import their implementation only when a command runs, so that `--help` stays fast.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from rlboost.commands import agents, job_files, jobs, machines, models, plan, system, views
from rlboost.commands.common import EXIT_INTERRUPTED, new_app
from rlboost.shared.secrets import clean_environment
from rlboost.shared.variables import ignored
from rlboost.terminal import echo

app = new_app("Train language models with reinforcement learning, with rollouts on spot GPUs.", top=True)
for group in (job_files, system, jobs, views, models, plan, machines, agents):
    group.register(app)


def _print_version(is_given: bool) -> None:
    if is_given:
        from importlib.metadata import version  # noqa: PLC0415 - keeps --help quick

        echo(f"rlboost {version('rlboost')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Hold the options of the command itself."""
    del version  # its callback prints it
    clean_environment()
    for problem in ignored(os.environ):
        echo(f"rlboost: warning: {problem}", err=True)


def main() -> None:
    """Run the command line and exit."""
    try:
        app()
    except KeyboardInterrupt:  # while a command imports what it needs
        sys.exit(EXIT_INTERRUPTED)
