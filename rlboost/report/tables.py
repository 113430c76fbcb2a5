"""The text parts of the page: each function returns HTML with all inputs escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any

from rlboost.report.checks import checks
from rlboost.report.record import Journey, Record
from rlboost.shared.ids import worker_name

_TEXT_CHARS = 600


def intro(record: Record) -> str:
    """Return one sentence that describes the run."""
    settings = record.settings
    preempted = record.applied("kill") + record.applied("notice")
    began = datetime.fromtimestamp(record.began_at, UTC).strftime("%d %B %Y, %H:%M UTC")
    text = (
        f"{settings.steps} steps of GRPO on {settings.reserved} reserved and {settings.workers} preemptible workers, "
        f"with {preempted} preemptions ({record.applied('kill')} by SIGKILL without notice) and "
        f"{record.applied('join')} joins. {began}, {record.machine.cores} cores."
    )
    return escape(text)


def card(value: str, name: str, more: str) -> str:
    """Return one headline number."""
    return f'<div class="card"><b>{escape(value)}</b><span>{escape(name)}</span><small>{escape(more)}</small></div>'


def warnings(job: Mapping[str, Any]) -> str:
    """Return the warnings about a job's learning that hold at present, nothing if there are none."""
    return "".join(f'<p class="bad">Warning: {escape(text)}</p>' for text in job.get("warnings", ()))


def cards(record: Record) -> str:
    """Return the headline numbers."""
    audit = record.audit
    found: list[tuple[str, str, str]] = []
    if accuracy := record.accuracy:
        found.append((f"{accuracy[-1][1]:.0%}", "held-out accuracy", f"from {accuracy[0][1]:.0%}"))
    if record.job_began_at and record.job_ended_at:
        seconds = record.job_ended_at - record.job_began_at
        each = seconds / max(1, len(record.training_rows))
        found.append((f"{int(seconds) // 60}:{int(seconds) % 60:02d}", "minutes", f"{each:.1f} s a step"))
    counted = audit.get("preemptions", {})
    kills = f"{counted.get('without_notice', 0)} without notice"
    found.append((str(sum(counted.values())), "preemptions", kills))
    lost = audit.get("requested", 0) - audit.get("delivered", 0)
    found.append((f"{lost:,}", "samples lost", f"of {audit.get('requested', 0):,}"))
    found.append(
        (f"{audit.get('migrations', 0):,}", "samples migrated", f"with {audit.get('tokens_saved', 0):,} tokens")
    )
    found.append((f"{sum(record.cpu_s.values()):.0f} s", "processor time", "all processes"))
    return "".join(card(*one) for one in found)


def guarantees(record: Record) -> str:
    """Return the guarantees and whether each held."""
    rows = []
    for check in checks(record):
        kind, word = ("good", "✓ held") if check.held else ("bad", "✗ violated")
        rows.append(
            f'<tr><td class="{kind}">{word}</td><td>{escape(check.guarantee)}</td><td>{escape(check.detail)}</td></tr>'
        )
    return f"<table>{''.join(rows)}</table>"


def journeys(record: Record) -> str:
    """Return samples that a preempted worker started and other workers finished."""
    if not record.journeys:
        return "<p>No retained sample had more than one worker.</p>"
    return "".join(_journey(journey) for journey in record.journeys)


def _journey(journey: Journey) -> str:
    spans = " → ".join(
        f"<b>{escape(worker_name(worker))}</b> {n} token{'' if n == 1 else 's'}" for worker, _, n in journey.spans
    )
    reward = "not scored" if journey.reward is None else f"reward {journey.reward:g}"
    version = journey.spans[0][1]
    return (
        f"<article><p>{spans} <small>sample {escape(journey.sample)}, weight version {version}, {reward}</small></p>"
        f"<pre>{escape(journey.prompt)}<wbr>{escape(journey.completion[:_TEXT_CHARS])}</pre></article>"
    )


def counters(audit: Mapping[str, Any]) -> str:
    """Return the manager's audit."""
    if not audit:
        return "<p>There is no audit: the job did not complete.</p>"
    rows: list[tuple[str, object]] = [
        ("samples requested", audit["requested"]),
        ("samples delivered", audit["delivered"]),
        *((f"samples dropped: {reason}", n) for reason, n in audit["dropped"].items()),
        ("samples in flight at the end", audit["in_flight"]),
        ("tokens generated", audit["tokens_generated"]),
        ("tokens delivered", audit["tokens_delivered"]),
        *((f"tokens regenerated: {cause}", n) for cause, n in audit["tokens_regenerated"].items()),
        ("tokens kept by migrated samples", audit["tokens_saved"]),
        ("frames sent twice, cut", audit["duplicates"]),
        ("migrations", audit["migrations"]),
        ("preemptions with notice", audit["preemptions"].get("with_notice", 0)),
        ("preemptions without notice", audit["preemptions"].get("without_notice", 0)),
    ]
    return table((name, f"{n:,}") for name, n in rows)


def cpu_time(record: Record) -> str:
    """Return CPU seconds by kind of process."""
    if not record.cpu_s:
        return "<p>CPU time is recorded only for completed runs.</p>"
    total = sum(record.cpu_s.values())
    rows = [(kind, f"{seconds:.1f} s", f"{seconds / total:.0%}") for kind, seconds in record.cpu_s.items()]
    rows.append(("all", f"{total:.1f} s", ""))
    rows.append(("of it, before the job", f"{record.cpu_to_start_s:.1f} s", ""))
    return table(rows)


def settings(record: Record) -> str:
    """Return the settings needed to repeat the run."""
    settings, machine = record.settings, record.machine
    return table(
        [
            ("job", str(record.job.get("id", "none"))),
            ("steps", str(settings.steps)),
            ("workers at the start", f"{settings.reserved} reserved, {settings.workers} preemptible"),
            ("seed", str(settings.seed)),
            ("cores", str(machine.cores)),
            ("load before the start", f"{machine.load:.1f}"),
            ("system", f"{machine.platform}, Python {machine.python}"),
        ]
    )


def table(rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose cells after the first are numbers."""
    return f"<table>{''.join(map(_row, rows))}</table>"


def _row(cells: Sequence[str]) -> str:
    numbers = "".join(f'<td class="n">{escape(cell)}</td>' for cell in cells[1:])
    return f"<tr><td>{escape(cells[0])}</td>{numbers}</tr>"
