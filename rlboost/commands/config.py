"""`rlboost config check`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlboost.commands.checking import print_findings, progress
from rlboost.commands.common import DEFAULT_STATE, JobFileArgument, JsonOption, OverridesArgument, new_app, print_json

if TYPE_CHECKING:
    from rlboost.local.layout import DeviceSummary

app = new_app("Job files.")


@app.callback()
def _group() -> None:
    """Keep `check` a subcommand although it is the only one."""


@app.command()
def check(
    job_file: JobFileArgument,
    overrides: OverridesArgument = None,
    cluster: Annotated[
        Path | None, typer.Option(help="File of 'rlboost up': also check that the job fits on this machine's GPUs.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check a job file: its fields, the model and data, and the functions it names.

    The functions are the reward, environment, loss and curriculum. Missing libraries that training needs are warnings.
    """
    from rlboost.jobs import check as jobcheck  # noqa: PLC0415 - only this command needs it

    devices = _devices(cluster) if cluster else None
    with progress() as on_part:
        found = jobcheck.check(job_file, overrides or [], on_part, devices)
    if as_json:
        print_json({"ok": not found.problems, **found._asdict()})
    print_findings(str(job_file), found)
    if not as_json:
        typer.echo(f"{job_file}: no problem found")


def _devices(cluster: Path) -> DeviceSummary | None:
    from rlboost.local import spec_file  # noqa: PLC0415 - only this command needs it
    from rlboost.local.system_layout import local_options  # noqa: PLC0415 - likewise

    return local_options(spec_file.load(spec_file.SystemSpec, cluster, {}), DEFAULT_STATE).layout.summary()
