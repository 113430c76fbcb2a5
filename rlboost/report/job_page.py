"""The report of any job, from what the REST API retains of it: the demo's page with other parts."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from rlboost.report import curves, figures, tables
from rlboost.report.history import History
from rlboost.report.page import Section, draw, figure_sections, write_page
from rlboost.report.template import JOB, PAGE
from rlboost.shared.names import MAX_EVENTS

SECTIONS: tuple[Section[History], ...] = (
    Section(
        name="learning",
        title="What it learned",
        draw=curves.learning,
        caption="Means over the completions of each step; held-out values are those of the evaluations.",
    ),
    Section(
        name="throughput",
        title="Throughput and workers",
        draw=curves.throughput,
        caption="Completion tokens generated per second of each step (trained, for supervised jobs), and the workers "
        f"in the job's newest {MAX_EVENTS:,} events.",
    ),
    Section(
        name="steps",
        title="Where each step's time went",
        draw=lambda history: figures.step_times(history.training_rows, []),
        caption="The trainer's view: seeding by the reserved engine, waiting for samples, training, and publishing "
        "the new weights.",
    ),
)
_VERDICTS = {"completed": "good", "failed": "bad", "cancelled": "bad"}
_WARNINGS_SHOWN = 50


def write(history: History, out: Path) -> Path:
    """Write `index.html` and `figures/*.png` into a folder; return the page's path.

    Raises:
        ConfigError: the folder cannot be written.

    """
    return write_page(out, render(history, draw(SECTIONS, history, out)))


def render(history: History, drawings: dict[str, str]) -> str:
    """Return the page, given each figure as an SVG element by its name."""
    job = history.job
    metrics = sorted((job["latest"] or {}).items())
    return PAGE.substitute(
        name=escape(str(job["name"])),
        verdict=escape(str(job["state"])),
        verdict_class=_VERDICTS.get(job["state"], "open"),
        intro=escape(_intro(history)),
        warnings=tables.warnings(job),
        cards="".join(tables.card(*card) for card in _cards(history)),
        body=JOB.substitute(
            sections=figure_sections(SECTIONS, drawings),
            warnings=_warnings(history),
            metrics=tables.table((name, f"{value:.4g}") for name, value in metrics) if metrics else "<p>None yet.</p>",
            counters=tables.counters(history.audit),
            job_file=escape(history.job_file),
        ),
    )


def _intro(history: History) -> str:
    job = history.job
    seen = datetime.fromtimestamp(history.seen_at, UTC).strftime("%d %B %Y, %H:%M UTC")
    text = f"Job {job['id']}: {job['step']} of {job['steps']} steps, as of {seen}."
    return f"{text} {job['error']}" if job["error"] else text


def _cards(history: History) -> Iterator[tuple[str, str, str]]:
    for metric, name in (
        ("eval/reward_mean", "held-out reward"),
        ("reward/mean", "reward"),
        ("perplexity", "perplexity"),
    ):
        _, values = history.column(metric)
        if values:
            yield f"{values[-1]:.3g}", name, f"from {values[0]:.3g}"
    if history.began_at is not None:
        seconds = int(history.ended_at - history.began_at)
        yield (
            f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}",
            "since the start",
            "h:min:s, with pauses",
        )
    _, speeds = history.column("perf/tokens_per_s")
    if speeds:
        yield f"{speeds[-1]:,.0f}", "tokens/s", f"mean {sum(speeds) / len(speeds):,.0f}"
    if history.audit:
        counted = history.audit["preemptions"]
        yield str(sum(counted.values())), "preemptions", f"{counted.get('without_notice', 0)} without notice"
        yield f"{history.audit['migrations']:,}", "samples migrated", f"with {history.audit['tokens_saved']:,} tokens"


def _warnings(history: History) -> str:
    texts = [str(event.fields.get("text", "")) for event in history.events if event.kind == "warning"]
    shown = "".join(f"<article><pre>{escape(text)}</pre></article>" for text in texts[-_WARNINGS_SHOWN:])
    left_out = len(texts) - _WARNINGS_SHOWN
    return (f"<p>{left_out} earlier ones are not shown.</p>" if left_out > 0 else "") + (shown or "<p>None.</p>")
