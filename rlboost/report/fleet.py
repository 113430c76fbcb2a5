"""The fleet figure: worker states, preemptions, migrations and throughput over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from rlboost.report.record import Record
from rlboost.report.style import BLUE, GREEN, INK, MUTED, ORANGE, PALE, PINK, RED, SKY, figure, say_empty
from rlboost.report.timeline import Migration, Row, migrations, rows

_COLOURS = {
    "joining": PALE,
    "pulling": SKY,
    "ready": GREEN,
    "suspended": PINK,
    "draining": ORANGE,
    "silent": "white",
}
_MEANINGS = {
    "joining": "starting, joining",
    "pulling": "pulling, loading weights",
    "ready": "ready: generating",
    "suspended": "suspended: the trainer has the device",
    "draining": "draining",
    "silent": "dead, not yet detected",
}
_HEIGHT = 0.66
_SOFT = 0.85


def fleet(record: Record) -> Figure:
    """Draw one row per worker, and the fleet's throughput below."""
    found = rows(record)
    drawn = figure(2.7 + 0.3 * max(2, len(found)))
    began_at = record.job_began_at
    if not found or began_at is None:
        say_empty(drawn.subplots(), "no worker was seen")
        return drawn
    upper, lower = drawn.subplots(2, 1, sharex=True, height_ratios=[0.3 * len(found), 1.1])
    _draw_rows(upper, found, began_at)
    _draw_migrations(upper, found, migrations(record), began_at)
    marks = _draw_marks(upper, found, began_at)
    _draw_speed(lower, record, began_at)
    end_s = (record.job_ended_at or record.observations[-1].at) - began_at
    upper.set_xlim(0, end_s)
    _draw_steps(upper, record, began_at)
    drawn.legend(handles=_legend(marks, found), loc="outside lower center", ncols=4)
    return drawn


def _draw_rows(axes: Axes, found: Sequence[Row], began_at: float) -> None:
    for place, row in enumerate(found):
        for state in _COLOURS:
            bars = [(s.began_at - began_at, s.ended_at - s.began_at) for s in row.spans if s.state == state]
            axes.broken_barh(bars, (place - _HEIGHT / 2, _HEIGHT), **_fill(state))
    axes.set_yticks(range(len(found)), [row.name for row in found])
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)


def _draw_marks(axes: Axes, found: Sequence[Row], began_at: float) -> list[PathCollection]:
    marks = []
    for label, marker, colour, times in (
        ("SIGKILL, no notice", "X", RED, [row.killed_at for row in found]),
        ("notice (SIGTERM)", "v", ORANGE, [row.noticed_at for row in found]),
        ("a new machine joins", ">", "white", [row.joined_at for row in found]),
    ):
        points = [(at - began_at, place) for place, at in enumerate(times) if at is not None]
        if not points:
            continue
        x, y = zip(*points, strict=True)
        mark = axes.scatter(x, y, marker=marker, s=52, color=colour, edgecolor=INK, lw=0.8, zorder=4, label=label)
        mark.set_clip_on(False)
        marks.append(mark)
    return marks


def _draw_migrations(axes: Axes, found: Sequence[Row], moves: Sequence[Migration], began_at: float) -> None:
    place = {row.name: number for number, row in enumerate(found)}
    for move in moves:
        if move.source not in place or move.target not in place:
            continue
        at, source, target = move.at - began_at, place[move.source], place[move.target]
        if move.cause == "suspended":
            # Migrations happen at every step: a tick at the edge is enough.
            axes.plot([at, at], [target + 0.22, target + _HEIGHT / 2], color=INK, lw=0.6, alpha=0.6)
        else:
            axes.plot([at, at], [source, target], color=INK, lw=0.9, zorder=3)
            axes.plot([at], [target], color=INK, marker="o", ms=3, zorder=3)


def _draw_speed(axes: Axes, record: Record, began_at: float) -> None:
    at = [observation.at - began_at for observation in record.observations]
    by_role = {
        role: [sum(w.tokens_per_s for w in seen.workers if w.role == role) for seen in record.observations]
        for role in ("reserved", "preemptible")
    }
    axes.stackplot(at, by_role["reserved"], by_role["preemptible"], colors=[PINK, BLUE], lw=0, alpha=_SOFT)
    axes.set_ylabel("tokens/s")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("seconds since the job was submitted")


def _draw_steps(axes: Axes, record: Record, began_at: float) -> None:
    """Label the steps along the top."""
    begins: dict[int, float] = {}
    for seen in record.observations:
        begins.setdefault(seen.step, seen.at - began_at)
    every = max(1, round(record.settings.steps / 12 / 5) * 5)
    shown = {step: at for step, at in begins.items() if step % every == 0}
    top = axes.secondary_xaxis("top")
    top.set_xticks(list(shown.values()), [str(step) for step in shown])
    top.set_xlabel("steps done", color=MUTED)
    top.spines["top"].set_visible(False)


def _legend(marks: Sequence[PathCollection], found: Sequence[Row]) -> list[Artist]:
    there = {span.state for row in found for span in row.spans}
    return [
        *(Patch(label=_MEANINGS[state], **_fill(state)) for state in _COLOURS if state in there),
        *marks,
        Patch(facecolor=BLUE, alpha=_SOFT, label="tokens/s of spot workers"),
        Patch(facecolor=PINK, alpha=_SOFT, label="tokens/s of the reserved engine"),
    ]


def _fill(state: str) -> dict[str, Any]:
    if state == "silent":
        return {"facecolor": _COLOURS[state], "hatch": "//////", "edgecolor": RED, "lw": 0.5}
    return {"facecolor": _COLOURS[state], "lw": 0}
