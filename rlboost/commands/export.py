"""`rlboost export`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from rlboost.commands.common import DEFAULT_STATE, JobArgument, JsonOption, StateOption, connect, endpoint, print_json


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(export)


def export(  # noqa: PLR0913, PLR0917 - the command's options
    job: JobArgument,
    out: Annotated[Path, typer.Option("--out", help="Output folder.")],
    version: Annotated[int | None, typer.Option("--version", min=0, help="Version; the newest if not given.")] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="The adapter alone, as a PEFT folder.")] = False,
    model: Annotated[
        Path | None, typer.Option("--model", help="Folder with the tokenizer of the job's model, where it is not here.")
    ] = None,
    weight_store: Annotated[
        str, typer.Option("--weight-store", help="URL of the weight store, if not the one advertised to workers.")
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that is not empty.")] = False,
    state: StateOption = DEFAULT_STATE,
    as_json: JsonOption = False,
) -> None:
    """Write a job's model as a Hugging Face folder: the result of a finished run, or a stored version."""
    from rlboost import export as work  # noqa: PLC0415 - keeps --help quick
    from rlboost.export_folder import new_folder  # noqa: PLC0415 - likewise

    # The runs of a remote system are not on this machine.
    runs = None if os.environ.get("RLBOOST_URL") else state / "runs"
    request = work.ExportRequest(job, version, adapter)
    with new_folder(out, force=force, adapter=adapter) as to:
        left = work.finished(runs, request) if runs else None  # an id needs no running system
        if left is None:
            with connect(state) as client:
                request = request._replace(job_id=client.jobs.find(job)["id"])
            left = work.finished(runs, request) if runs else None
        if left is not None:
            done = work.copy(left, to)
        else:
            _, token = endpoint(state)
            with connect(state) as client:
                done = work.from_store(client, request, weight_store, token, model, to)
    if as_json:
        print_json({"job": request.job_id, "version": done.version, "path": str(out.absolute())})
    else:
        typer.echo(f"{done.source} is in {out}")
