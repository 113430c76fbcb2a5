"""The figures of a report, drawn from the record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from rlboost.report.record import Change, Record
from rlboost.report.style import BLUE, GREEN, INK, MUTED, ORANGE, PALE, PINK, RED, SKY, figure, say_empty

PARTS = (
    ("time/seeding_s", "seeding: the reserved engine generates", PINK),
    ("time/wait_s", "waiting for samples", SKY),
    ("time/train_s", "training", BLUE),
    ("time/publish_s", "publishing weights", ORANGE),
)
CAUSES = {
    "late": "regenerated: arrived after the sample had migrated",
    "sample_over": "discarded: arrived after the sample was complete",
    "gap": "regenerated: arrived after lost tokens",
    "dropped": "thrown away with a dropped sample",
}


def learning(record: Record) -> Figure:
    """Draw accuracy and length over steps."""
    drawn = figure(3.3)
    left, right = drawn.subplots(1, 2)
    if not record.steps:
        say_empty(left, "no step was finished")
        right.set_axis_off()
        return drawn
    _accuracy(left, record)
    _lengths(right, record)
    for axes in (left, right):
        axes.set_xlabel("steps of training")
        axes.set_xlim(-0.01 * record.settings.steps, 1.01 * record.settings.steps)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True, steps=[1, 2, 5, 10]))
    return drawn


def _accuracy(axes: Axes, record: Record) -> None:
    rows = [row for row in record.training_rows if "reward/mean" in row]
    axes.plot(_column(rows, "step"), _column(rows, "reward/mean"), color=PALE, lw=1.5, label="training reward")
    if points := record.accuracy:
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, color=GREEN, lw=2, marker="o", ms=5, label="held-out accuracy, T = 1")
        for (step, value), (right, up), side in ((points[0], (7, -11), "left"), (points[-1], (0, 8), "right")):
            axes.annotate(f"{value:.0%}", (step, value), (right, up), textcoords="offset points", ha=side, color=INK)
    if record.settings.goal is not None:
        axes.axhline(record.settings.goal, color=MUTED, lw=1, ls=(0, (4, 3)))
        axes.text(0, record.settings.goal + 0.015, f"goal {record.settings.goal:.0%}", color=MUTED, fontsize=8)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_title("Accuracy")
    axes.legend(loc="lower right")


def _lengths(axes: Axes, record: Record) -> None:
    rows = [row for row in record.training_rows if "completions/mean_length" in row]
    axes.plot(
        _column(rows, "step"), _column(rows, "completions/mean_length"), color=BLUE, lw=1.8, label="training samples"
    )
    held_out = [row for row in record.steps if "eval/mean_length" in row]
    axes.plot(
        _column(held_out, "step"),
        _column(held_out, "eval/mean_length"),
        color=ORANGE,
        lw=0,
        marker="o",
        ms=5,
        label="held-out",
    )
    axes.set_ylim(bottom=0)
    axes.set_title("Mean length of a sample, tokens")
    axes.legend(loc="lower right")


def steps(record: Record) -> Figure:
    """Draw the time breakdown of each step, with its preemptions."""
    return step_times(record.training_rows, record.changes)


def step_times(rows: Sequence[Mapping[str, float]], changes: Sequence[Change]) -> Figure:
    """Draw the time breakdown of each step, given its row of metrics; parts that it does not report are zero."""
    drawn = figure(3.2)
    axes = drawn.subplots()
    rows = [row for row in rows if "time/step_s" in row]
    if not rows:
        say_empty(axes, "no step was finished")
        return drawn
    numbers = _column(rows, "step")
    bottom = [0.0] * len(rows)
    for name, label, colour in PARTS:
        bottom = _stack(axes, numbers, bottom, [row.get(name, 0.0) for row in rows], label, colour)
    rest = [max(0.0, row["time/step_s"] - below) for row, below in zip(rows, bottom, strict=True)]
    tops = _stack(axes, numbers, bottom, rest, "everything else", PALE)
    _mark_preemptions(axes, changes, dict(zip(numbers, tops, strict=True)), lift=0.05 * max(tops))
    axes.set_xlim(-0.8, max(numbers) + 0.8)
    axes.set_ylim(0, 1.12 * max(tops))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True, steps=[1, 2, 5, 10]))
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("step")
    axes.set_ylabel("seconds")
    drawn.legend(loc="outside lower center", ncols=4)
    return drawn


def _stack(
    axes: Axes, at: Sequence[float], bottom: Sequence[float], heights: Sequence[float], label: str, colour: str
) -> list[float]:
    axes.bar(at, heights, bottom=bottom, width=0.82, color=colour, label=label)
    return [low + height for low, height in zip(bottom, heights, strict=True)]


def _mark_preemptions(axes: Axes, changes: Sequence[Change], tops: dict[float, float], lift: float) -> None:
    for action, label, marker, colour in (
        ("kill", "preemption without notice", "X", RED),
        ("notice", "with notice", "v", ORANGE),
    ):
        marked = sorted({change.step for change in changes if change.action == action} & set(tops))
        heights = [tops[step] + lift for step in marked]
        tops = {step: top + lift if step in marked else top for step, top in tops.items()}
        axes.scatter(marked, heights, marker=marker, s=42, color=colour, edgecolor=INK, lw=0.6, label=label, zorder=3)


def tokens(record: Record) -> Figure:
    """Draw migrated and regenerated tokens by cause."""
    generated = max(1, record.audit.get("tokens_generated", 0))
    bars = [*_migrated(record), *_regenerated(record)]
    most = max(n for _, n, _ in bars) or 1
    drawn = figure(0.7 + 0.34 * len(bars))
    axes = drawn.subplots()
    for place, (_, n, colour) in enumerate(bars):
        axes.barh(place, n, height=0.62, color=colour)
        share = f"{n:,}  ({n / generated:.2%} of all generated)" if n else "none"
        axes.text(n + 0.01 * most, place, share, va="center", color=INK)
    axes.set_yticks(range(len(bars)), [label for label, _, _ in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.45 * most)
    axes.set_xlabel("tokens")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.grid(visible=False, axis="y")
    return drawn


def _migrated(record: Record) -> list[tuple[str, int, str]]:
    at_preemptions = at_handovers = 0
    for event in record.job_events:
        if event.kind == "samples_unassigned" and event.fields["cause"] == "suspended":
            at_handovers += event.fields["tokens"]
        elif event.kind == "samples_unassigned":
            at_preemptions += event.fields["tokens"]
    return [
        ("migrated: the worker was preempted", at_preemptions, GREEN),
        ("migrated: the reserved engine handed over", at_handovers, PINK),
    ]


def _regenerated(record: Record) -> list[tuple[str, int, str]]:
    again = {cause: n for cause, n in record.audit.get("tokens_regenerated", {}).items() if n}
    return [(CAUSES.get(cause, cause), n, RED) for cause, n in sorted(again.items())] or [("regenerated", 0, RED)]


def _column(rows: Sequence[Mapping[str, float]], name: str) -> list[float]:
    return [row[name] for row in rows]
