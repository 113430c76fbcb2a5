"""`rlboost prices`: look up list prices of clouds' machines."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from rlboost.commands.common import JsonOption, print_json
from rlboost.shared.errors import ConfigError

_LIMIT_S = 30.0


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(prices)


def prices(
    worker: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND=MACHINE[/N]", help="A kind of spot worker, N of them on a machine; repeatable."),
    ] = None,
    reserved: Annotated[
        list[str] | None,
        typer.Option(metavar="MACHINE", help="A machine of the reserved cluster, at its on-demand price; repeatable."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The file to write or replace; printed if not given.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Look up list prices of machines and write them as a price file for the manager and 'rlboost plan --prices'.

    A MACHINE is CLOUD/REGION/TYPE, such as aws/us-east-1/p5.48xlarge; on Google Cloud it names its GPUs too:
    gcp/us-central1/a3-highgpu-8g+H100:8. A zone may stand for the region, whose cheapest zone counts.
    """
    import httpx  # noqa: PLC0415 - keeps --help quick
    import yaml  # noqa: PLC0415 - likewise

    from rlboost.planning.list_prices import ListPrices, MachineType, SpotKind  # noqa: PLC0415 - likewise
    from rlboost.shared.tls import client_verification  # noqa: PLC0415 - likewise

    if not worker and not reserved:
        raise ConfigError("prices of what? Name machines with --worker h100=aws/us-east-1/p5.48xlarge/8 or --reserved")
    spot = [SpotKind.parse(text) for text in worker or ()]
    machines = [MachineType.parse(text) for text in reserved or ()]
    with httpx.Client(timeout=_LIMIT_S, verify=client_verification()) as http:
        found = ListPrices(http).prices(machines, spot, datetime.now(UTC).date())
    text = "# Dollars per hour, by 'rlboost prices': list prices, without taxes, discounts, disks and traffic.\n"
    text += yaml.safe_dump(found.model_dump(exclude_none=True), sort_keys=False, width=1000)
    if as_json:
        print_json(found.model_dump(exclude_none=True))
    if out is None:
        if not as_json:
            typer.echo(text, nl=False)
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}") from error
