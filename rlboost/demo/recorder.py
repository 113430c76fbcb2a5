"""Gathers the record of a run while it runs."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from rlboost.client import ServerEvent
from rlboost.local.state import ProcessRecord
from rlboost.local.supervisor import ClusterEvent
from rlboost.report.record import (
    Action,
    Change,
    JobEvent,
    Journey,
    Machine,
    Observation,
    ProcessEvent,
    Record,
    SeenWorker,
    process_of,
)

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
    """Return what is worth knowing of this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    system = f"{platform.system()} {platform.machine()}"
    return Machine(cores=cores, load=os.getloadavg()[0], platform=system, python=platform.python_version())


def observation(at: float, job: Mapping[str, Any], workers: Iterable[Mapping[str, Any]]) -> Observation:
    """Return what the API's answers say about one moment; workers that are gone are left out."""
    waiting = job["waiting"] or {"for": "", "because": ""}
    return Observation(
        at=at,
        step=job["step"],
        job_state=job["state"],
        waiting_for=waiting["for"],
        waiting_because=waiting["because"],
        workers=[_seen(worker) for worker in workers if worker["state"] not in ("lost", "left")],
    )


def _seen(worker: Mapping[str, Any]) -> SeenWorker:
    return SeenWorker(
        id=worker["id"],
        role=worker["role"],
        state=worker["state"],
        joined_at=datetime.fromisoformat(worker["joined_at"]).timestamp(),
        version=worker["weight_version"],
        running=worker["running"],
        tokens_per_s=round(worker["tokens_per_s"], 1),
    )


class Recorder:
    """Fills a record; every method is called in the event loop's thread."""

    def __init__(self, record: Record) -> None:
        """Fill this record."""
        self.record = record

    def process_event(self, event: ClusterEvent) -> None:
        """Take what happened to a process."""
        told = ProcessEvent(at=event.at, kind=event.kind, name=event.name, detail=event.detail)
        self.record.process_events.append(told)

    def job_event(self, event: ServerEvent) -> None:
        """Take what a service told about the job."""
        told = JobEvent(
            at=event.data["at"],
            kind=event.kind,
            source=event.data["source"],
            fields=event.data["fields"],
        )
        self.record.job_events.append(told)

    def observe(self, job: dict[str, Any], seen: Observation) -> None:
        """Take what the API shows now."""
        self.record.job = job
        self.record.observations.append(seen)

    def changed(self, at: float, step: int, action: Action, worker: str) -> None:
        """Take a change of the fleet that was just made."""
        self.record.changes.append(Change(at=at, step=step, action=action, worker=worker))

    def steps(self, rows: list[dict[str, Any]]) -> None:
        """Take all rows of metrics so far."""
        self.record.steps = rows

    def journey(self, worker: str, samples: Iterable[Mapping[str, Any]]) -> None:
        """Keep the best of the samples that a preempted worker had begun and another one finished."""
        moved = [sample for sample in samples if _went_on_from(worker, sample["spans"])]
        best = max(moved, key=_worth_showing, default=None)
        if best is not None:
            self.record.journeys.append(Journey(**{name: best[name] for name in Journey.model_fields}))

    def cpu(self, processes: Iterable[ProcessRecord], seconds: Mapping[str, float], own_s: float) -> None:
        """Take the processor seconds by process, and this process's own."""
        by_kind = dict.fromkeys(_KINDS.values(), 0.0)
        for process in processes:
            by_kind[_KINDS[process.role]] += seconds[process.name]
        self.record.cpu_s = {**by_kind, "this view": own_s}

    def save(self, path: Path) -> None:
        """Write the record."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.record.model_dump_json(indent=1) + "\n", encoding="utf-8")


def _went_on_from(worker: str, spans: Iterable[tuple[str, int, int]]) -> bool:
    makers = [process_of(span[0]) for span in spans]
    return worker in makers[:-1]


def _worth_showing(sample: Mapping[str, Any]) -> tuple[float, int, int]:
    return sample["reward"] or 0.0, len(sample["spans"]), sample["n_tokens"]
