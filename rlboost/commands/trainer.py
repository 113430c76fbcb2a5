"""`rlboost trainer join`."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from rlboost.commands.common import new_app

app = new_app("Machines that train.")


@app.callback()
def _group() -> None:
    """Keep `join` a command of the group."""


@app.command()
def join(
    url: Annotated[
        str | None, typer.Option(help="tcp://HOST:PORT of the trainer's machines port, tls:// with a certificate.")
    ] = None,
    token: Annotated[str | None, typer.Option(help="The system's token; better given as RLBOOST_TOKEN.")] = None,
    name: Annotated[str | None, typer.Option(help="Orders the ranks; this machine's name if not given.")] = None,
    address: Annotated[
        str | None, typer.Option(help="Where the other machines reach this one; as the trainer sees it if not given.")
    ] = None,
) -> None:
    """Run ranks of a job with trainer.nodes above 1 on this machine, in the foreground.

    It waits for a job, starts the ranks with torchrun, and waits for the next job; when a machine of the job is lost,
    it joins again and the job resumes from its newest checkpoint. Ctrl-C or SIGTERM ends it.

    The trainer needs RLBOOST_TRAINER_MACHINES_PORT, and its folder on a file system that all machines share. Other
    settings: RLBOOST_MACHINE_* in the environment.
    """
    given = {
        "RLBOOST_MACHINE_URL": url,
        "RLBOOST_TOKEN": token,
        "RLBOOST_MACHINE_NAME": name,
        "RLBOOST_MACHINE_ADDRESS": address,
    }
    environment = os.environ | {variable: value for variable, value in given.items() if value is not None}
    arguments = [sys.executable, "-m", "rlboost.services.trainer.adapters.machines"]
    os.execve(sys.executable, arguments, environment)  # noqa: S606 - it takes this process's place, and its signals
