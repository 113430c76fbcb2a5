"""Summarize a run in a few lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlboost.demo.picture import clock
from rlboost.report.checks import checks
from rlboost.report.record import Record


def summary(record: Record) -> RenderableType:
    """Return the result, the checked guarantees, and the CPU cost."""
    return Group(Text(), _table("", _facts(record)), Text(), _guarantees(record), Text(), _processors(record))


def _facts(record: Record) -> Iterator[tuple[str, str]]:
    if accuracy := record.accuracy:
        yield (
            "held-out accuracy",
            " -> ".join(f"{value:.1%} (step {step})" for step, value in (accuracy[0], accuracy[-1])),
        )
    if (rows := record.training_rows) and "completions/mean_length" in rows[-1]:
        first, last = rows[0]["completions/mean_length"], rows[-1]["completions/mean_length"]
        yield "mean length", f"{first:.0f} -> {last:.0f} tokens"
    if record.job_began_at and record.job_ended_at:
        job_s, total_s = record.job_ended_at - record.job_began_at, record.job_ended_at - record.began_at
        yield "time", f"{clock(job_s)} for {len(rows)} steps; {clock(total_s)} with starting the system"
    audit = record.audit
    if audit:
        yield (
            "migrations",
            f"{audit['migrations']:,} samples migrated with {audit['tokens_saved']:,} tokens",
        )
        yield "tokens regenerated", _regenerated(audit["tokens_regenerated"], audit["tokens_generated"])


def _regenerated(by_cause: dict[str, int], generated: int) -> str:
    total = sum(by_cause.values())
    if not total:
        return "none"
    causes = ", ".join(f"{cause} {n:,}" for cause, n in sorted(by_cause.items()) if n)
    return f"{total:,} of {generated:,} ({total / max(1, generated):.2%}): {causes}"


def _guarantees(record: Record) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for check in checks(record):
        mark = Text("✓", style="bold green") if check.held else Text("✗", style="bold red")
        table.add_row(mark, Text(check.guarantee), Text(check.detail, style="dim"))
    return table


def _processors(record: Record) -> RenderableType:
    total_s = sum(record.cpu_s.values())
    head = (
        f"processor time {total_s:.0f} s on {record.machine.cores} cores; {record.cpu_to_start_s:.0f} s of it to start"
    )
    rows = ((kind, f"{seconds:.1f} s") for kind, seconds in record.cpu_s.items())
    return _table(head, rows)


def _table(title: str, rows: Iterator[tuple[str, str]]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(*row)
    return Group(Text(title), table) if title else table
