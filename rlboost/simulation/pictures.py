"""Pictures of simulations: throughput over the trace with the fleet under it, and one step's timeline.

Needs matplotlib, which comes with `rlboost[local]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from io import BytesIO
from itertools import cycle, product
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rlboost.simulation.result import SimulationResult, StepResult

# --- Style of figures: a color-blind-safe palette (Okabe and Ito) and minimal axes ------------------------------------


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


# --- Pictures ---------------------------------------------------------------------------------------------------------


_COLORS = (MUTED, ORANGE, BLUE, GREEN, PINK, RED, SKY, INK)
_LINES = ("-", "--", ":")
"""After the last color, the colors begin again with the next line style."""
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Simulation</title>
<style>body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto }}
img {{ width: 100% }}</style>
<h1>Simulation: {policies}</h1>
{figures}
</html>
"""


def draw(folder: Path, results: Sequence[SimulationResult]) -> list[Path]:
    """Write `throughput.png`, a timeline of one step for each policy, and `index.html`; return their paths.

    Args:
        folder: is created.
        results: one for each policy, over the same trace.

    """
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {"throughput": "Generated and trained tokens per second, and the instances in use"}
    with look():
        (folder / "throughput.png").write_bytes(png(throughput(results)))
        for result in results:
            name = f"step-{result.policy}"
            drawn[name] = f"{result.policy}: the step in the middle of the run"
            (folder / f"{name}.png").write_bytes(png(timeline(result, result.steps[len(result.steps) // 2])))
    figures = "\n".join(f'<h2>{escape(text)}</h2>\n<img src="{name}.png" alt="">' for name, text in drawn.items())
    page = folder / "index.html"
    policies = escape(", ".join(result.policy for result in results))
    page.write_text(_PAGE.format(policies=policies, figures=figures), encoding="utf-8")
    return [*(folder / f"{name}.png" for name in drawn), page]


def throughput(results: Sequence[SimulationResult]) -> Figure:
    """Draw each policy's throughput by step, and under it the fleet."""
    drawn = figure(4.6)
    above, below = drawn.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for result, (line, color) in zip(results, cycle(product(_LINES, _COLORS)), strict=False):
        moments = [step.start_s / 3600 for step in result.steps] + [result.duration_s / 3600]
        rates = [(step.generated_tokens + step.trained_tokens) / step.duration_s / 1000 for step in result.steps]
        above.stairs(rates, moments, color=color, ls=line, lw=1.6, label=result.policy, baseline=None)
    above.set_ylabel("thousand tokens/s")
    above.set_ylim(bottom=0)
    above.legend(loc="lower right", ncols=min(4, len(results)))
    longest = max(results, key=lambda result: (len(result.instances), result.duration_s))
    fleet = longest.fleet()
    hours = [moment / 3600 for moment, _ in fleet] + [longest.duration_s / 3600]
    below.stairs([count for _, count in fleet], hours, fill=True, color=PALE)
    below.set_ylabel("instances")
    below.set_xlabel("hours")
    return drawn


def timeline(result: SimulationResult, step: StepResult) -> Figure:
    """Draw who works when in one step."""
    drawn = figure(1.9)
    axes: Axes = drawn.subplots()
    start_s = step.start_s
    _bar(axes, 2, [(0.0, min(step.seeding_s, step.last_sample_s or step.seeding_s))], SKY)
    if result.instances:
        _bar(axes, 1, [(0.0, step.last_sample_s)], GREEN)
    _bar(axes, 0, [(begin - start_s, end - start_s) for begin, end in step.training], BLUE)
    axes.set_yticks([0, 1, 2], ["training", "instances generate", "reserved engines generate"])
    axes.set_xlim(0, step.duration_s)
    axes.set_xlabel(f"seconds of step {step.step}; the trainer waits {step.train_wait_s:.0f} s for samples")
    return drawn


def _bar(axes: Axes, row: int, spans: Sequence[tuple[float, float]], color: str) -> None:
    axes.broken_barh([(start, end - start) for start, end in spans], (row - 0.35, 0.7), color=color)
