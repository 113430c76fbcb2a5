"""`rlboost page`: the link to the web page, with the token."""

from __future__ import annotations

from typing import Annotated

import typer

from rlboost.commands.common import DEFAULT_STATE, StateOption, endpoint


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(page)


def page(
    state: StateOption = DEFAULT_STATE,
    show: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Print a link to the web page of the system. The link contains the token: do not share it."""
    url, token = endpoint(state)
    link = f"{url}/#token={token}"
    typer.echo(link)
    if show:
        typer.launch(link)
