"""`rlboost page`: the link to the web page, with a token."""

from __future__ import annotations

from typing import Annotated

import typer

from rlboost.commands.common import DEFAULT_STATE, JsonOption, StateOption, connect, endpoint, print_json

_READ_ONLY_S = 7 * 86_400.0
"""How long a read-only link works."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(page)


def page(
    state: StateOption = DEFAULT_STATE,
    show: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="A link to share: it shows everything, changes nothing, for 7 days.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print a link to the web page of the system.

    The link contains the token, with which everything can be changed: do not share it. --read-only creates one of
    scope read instead ('rlboost token revoke' ends it).
    """
    url, token = endpoint(state)
    link = f"{url}/#token={token}"
    if read_only:
        with connect(state) as client:
            created = client.tokens.create("read", name="read-only page", expires_s=_READ_ONLY_S)
        link = f"{url}/#token={created['secret']}&read-only"
    if as_json:
        print_json({"url": link, "read_only": read_only})
    else:
        typer.echo(link)
    if show:
        typer.launch(link)
