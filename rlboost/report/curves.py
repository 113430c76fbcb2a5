"""The curves of a job's report: reward, evaluation, lengths, throughput, workers."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from rlboost.report.history import History, workers_over_time
from rlboost.report.style import BLUE, GREEN, ORANGE, PINK, figure, say_empty

_GOALS = (
    ("reward/mean", "eval/reward_mean", "Reward"),
    ("perplexity", "eval/perplexity", "Perplexity"),
    ("dpo/accuracy", "eval/reward_mean", "Accuracy of preferences"),
)
"""(metric of training, metric of evaluations, title): a job's main curve is the first that it reports."""
_LENGTHS = ("completions/mean_length", "eval/mean_length", "Mean length of a sample, tokens")
_LOSS = ("loss", "eval/loss", "Loss")


def learning(history: History) -> Figure:
    """Draw the job's main metric and the sample lengths (the loss, if there are none) over steps."""
    drawn = figure(3.3)
    left, right = drawn.subplots(1, 2)
    main = next((goal for goal in _GOALS if _has(history, goal)), _LOSS)
    second = _LENGTHS if _has(history, _LENGTHS) else _LOSS
    _over_steps(left, history, main)
    if second == main:
        right.set_axis_off()
    else:
        _over_steps(right, history, second)
    return drawn


def throughput(history: History) -> Figure:
    """Draw tokens per second over steps, and the number of workers over time."""
    drawn = figure(3.0)
    left, right = drawn.subplots(1, 2)
    _over_steps(left, history, ("perf/tokens_per_s", "", "Tokens per second"))
    left.set_ylim(bottom=0)
    _workers(right, history)
    return drawn


def _has(history: History, names: tuple[str, str, str]) -> bool:
    return any(history.column(name)[0] for name in names[:2])


def _over_steps(axes: Axes, history: History, names: tuple[str, str, str]) -> None:
    trained, evaluated, title = names
    if not _has(history, names):
        say_empty(axes, f"no step has reported {trained}")
        return
    steps, values = history.column(trained)
    axes.plot(steps, values, color=BLUE, lw=1.6, marker="." if len(steps) < 3 else "", label="training samples")
    steps, values = history.column(evaluated)
    if steps:
        axes.plot(steps, values, color=GREEN, lw=1.6, marker="o", ms=4, label="held-out")
        axes.legend(loc="best")
    axes.set_title(title)
    axes.set_xlabel("steps of training")
    axes.set_xlim(-0.5, max(1, history.job["step"]))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))


def _workers(axes: Axes, history: History) -> None:
    counted = workers_over_time(history.events)
    if not counted or history.began_at is None:
        say_empty(axes, "no event of a worker is retained")
        return
    last = (max(history.ended_at, counted[-1][0]), *counted[-1][1:])
    times, reserved, spot = zip(*counted, last, strict=True)
    minutes = [(at - history.began_at) / 60 for at in times]
    together = [one + other for one, other in zip(reserved, spot, strict=True)]
    axes.fill_between(minutes, reserved, step="post", color=PINK, lw=0, label="reserved")
    axes.fill_between(minutes, reserved, together, step="post", color=ORANGE, lw=0, label="spot")
    axes.set_title("Workers")
    axes.set_xlabel("minutes since the start")
    axes.set_ylim(0, max(together) * 1.25)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.legend(loc="upper right", ncols=2)
