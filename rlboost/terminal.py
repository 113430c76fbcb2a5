"""What is printed on a terminal: the only place that writes text, so that no text controls the terminal.

A model, a reward function or a worker writes names, errors and log lines that commands show. An escape sequence in them
could retitle the terminal, write its clipboard or hide lines.
"""

from __future__ import annotations

import io
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

STATE_STYLES = {
    "joining": "dim",
    "pulling": "cyan",
    "ready": "green",
    "suspended": "magenta",
    "draining": "yellow",
}
_BARS = "▁▂▃▄▅▆▇█"
_JOINERS = "\u200c\u200d"
"""Invisible, and part of words in some scripts and of emoji."""


def printable(text: str) -> str:
    """Return a text in which control characters are escaped, those that change the direction of text too."""
    if text.isprintable():
        return text
    return "".join(char if _is_shown(char) else repr(char)[1:-1] for char in text.replace("\t", "    "))


def _is_shown(char: str) -> bool:
    return char == "\n" or char.isprintable() or char in _JOINERS or unicodedata.category(char) == "Zs"


def echo(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print a text to standard output, or with `err` to standard error."""
    import typer  # noqa: PLC0415 - this module is imported before it is clear that something is printed

    typer.echo(printable(str(text)), err=err, nl=nl)


def console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a console that prints styled text and tables; what its terminal cannot show becomes `?`."""
    from rich.console import Console  # noqa: PLC0415 - slow to import
    from rich.segment import Segment  # noqa: PLC0415 - likewise

    class Safe(Console):
        def render(self, *arguments: Any, **options: Any) -> Iterable[Segment]:
            for segment in super().render(*arguments, **options):
                yield segment if segment.control else Segment(printable(segment.text), segment.style)

    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    return Safe(stderr=stderr, width=width, highlight=False, markup=False)


def chart(values: Sequence[float], low: float, high: float, width: int) -> Text:
    """Render the newest values as bars of the height between `low` and `high`."""
    from rich.text import Text  # noqa: PLC0415 - slow to import

    scale = (len(_BARS) - 1) / ((high - low) or 1)
    newest = values[-width:] if width > 0 else []
    bars = (_BARS[min(len(_BARS) - 1, max(0, round((value - low) * scale)))] for value in newest)
    return Text("".join(bars), style="blue")
