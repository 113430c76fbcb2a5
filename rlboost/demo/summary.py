"""Summarize a run in a few lines of text."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlboost.client import ServerEvent
from rlboost.demo.live import clock
from rlboost.job_lines import GONE, unix_s
from rlboost.local.layout import n_cpus
from rlboost.local.state import ProcessRecord
from rlboost.local.supervisor import ClusterEvent
from rlboost.report import (
    Action,
    Change,
    JobEvent,
    Machine,
    Observation,
    ProcessEvent,
    Record,
    SeenWorker,
    checks,
    shown_samples,
)

# --- Collect the record of a run while it runs ------------------------------------------------------------------------


_KINDS = {
    "trainer": "trainer",
    "reserved": "reserved engine",
    "preemptible": "spot engines",
    "manager": "manager",
    "standby": "manager",
    "weight_store": "weight store",
    "redis": "redis",
}


def this_machine() -> Machine:
    """Describe this machine."""
    system = f"{platform.system()} {platform.machine()}"
    return Machine(cores=n_cpus(), load=os.getloadavg()[0], platform=system, python=platform.python_version())


def observation(at: float, job: Mapping[str, Any], workers: Iterable[Mapping[str, Any]]) -> Observation:
    """Convert the API's responses to an observation, without lost and left workers."""
    waiting = job["waiting"] or {"for": "", "because": ""}
    return Observation(
        at=at,
        step=job["step"],
        job_state=job["state"],
        waiting_for=waiting["for"],
        waiting_because=waiting["because"],
        workers=[_seen(worker) for worker in workers if worker["state"] not in GONE],
    )


def _seen(worker: Mapping[str, Any]) -> SeenWorker:
    return SeenWorker(
        id=worker["id"],
        role=worker["role"],
        state=worker["state"],
        joined_at=unix_s(worker["joined_at"]),
        version=worker["weight_version"],
        running=worker["running"],
        tokens_per_s=round(worker["tokens_per_s"], 1),
    )


class Recorder:
    """Fills a record; call every method in the event loop's thread."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def process_event(self, event: ClusterEvent) -> None:
        """Add a process event."""
        recorded = ProcessEvent(at=event.at, kind=event.kind, name=event.name, detail=event.detail)
        self.record.process_events.append(recorded)

    def job_event(self, event: ServerEvent) -> None:
        """Add a job event."""
        recorded = JobEvent(
            at=event.data["at"],
            kind=event.kind,
            source=event.data["source"],
            fields=event.data["fields"],
        )
        self.record.job_events.append(recorded)

    def observe(self, job: dict[str, Any], seen: Observation) -> None:
        """Add an observation of the API."""
        self.record.job = job
        self.record.observations.append(seen)

    def changed(self, at: float, step: int, action: Action, worker: str) -> None:
        """Add a change that was just applied to the fleet."""
        self.record.changes.append(Change(at=at, step=step, action=action, worker=worker))

    def steps(self, rows: list[dict[str, Any]]) -> None:
        """Replace the metrics rows."""
        self.record.steps = rows

    def samples(self, step: int, samples: Iterable[Mapping[str, Any]]) -> None:
        """Retain the most instructive samples of a step, counted from 1."""
        if shown := shown_samples(samples):
            self.record.samples[step] = [dict(sample) for sample in shown]

    def cpu(self, processes: Iterable[ProcessRecord], seconds: Mapping[str, float], own_s: float) -> None:
        """Set the CPU seconds by process, and this process's own."""
        by_kind = dict.fromkeys(_KINDS.values(), 0.0)
        for process in processes:
            by_kind[_KINDS[process.role]] += seconds[process.name]
        self.record.cpu_s = {**by_kind, "demo": own_s}

    def save(self, path: Path) -> None:
        """Write the record."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.record.model_dump_json(indent=1) + "\n", encoding="utf-8")


# --- The summary of a run ---------------------------------------------------------------------------------------------


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
