"""What terminal views share: charts of one line, and the colors of workers' states."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

STATE_STYLES = {
    "joining": "dim",
    "pulling": "cyan",
    "ready": "green",
    "suspended": "magenta",
    "draining": "yellow",
}
_BARS = "▁▂▃▄▅▆▇█"


def chart(values: Sequence[float], low: float, high: float, width: int) -> Text:
    """Render the newest values as bars of the height between `low` and `high`."""
    scale = (len(_BARS) - 1) / ((high - low) or 1)
    newest = values[-width:] if width > 0 else []
    bars = (_BARS[min(len(_BARS) - 1, max(0, round((value - low) * scale)))] for value in newest)
    return Text("".join(bars), style="blue")
