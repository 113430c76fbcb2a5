"""Style of figures: a color-blind-safe palette (Okabe and Ito) and minimal axes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

BLUE, SKY, GREEN, ORANGE, RED, PINK = "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7"
INK, MUTED, PALE = "#1f2933", "#66727f", "#d5dbe1"
WIDTH_IN = 9.6
_PNG_DPI = 160

_RC: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": PALE,
    "axes.grid": True,
    "axes.labelcolor": MUTED,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "figure.constrained_layout.use": True,
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "grid.color": "#eef1f4",
    "hatch.linewidth": 0.6,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "savefig.facecolor": "white",
    "text.color": INK,
    "xtick.color": PALE,
    "xtick.labelcolor": MUTED,
    "ytick.color": PALE,
    "ytick.labelcolor": MUTED,
}


@contextmanager
def look() -> Iterator[None]:
    """Apply the style while drawing and saving."""
    with mpl.rc_context(_RC):
        yield


def figure(height_in: float) -> Figure:
    """Return an empty figure of the page's width."""
    return Figure(figsize=(WIDTH_IN, height_in))


def png(drawn: Figure) -> bytes:
    """Return the figure as a PNG file."""
    out = BytesIO()
    drawn.savefig(out, format="png", dpi=_PNG_DPI, metadata={"Software": None})
    return out.getvalue()
