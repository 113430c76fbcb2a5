"""What `rlboost top` shows at one moment, read from the REST API."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx

from rlboost.client import Client, ClientError, Json, Rows
from rlboost.shared.messages import ENDED
from rlboost.top.step_time import STEPS_BEFORE, StepTime, last_step_time
from rlboost.worker_states import GONE

JOBS_SHOWN = 8
"""Maximum number of jobs in a snapshot: active ones first, then the newest."""
_CURVES = ("reward/mean", "perplexity", "loss")
"""The first of these metrics that a job reports is its curve."""
_EVALUATIONS = ("eval/pass@1", "eval/reward_mean", "eval/perplexity", "eval/loss")
"""The first of these metrics that a job reports is its evaluation."""
_RECENT_ROWS = STEPS_BEFORE + 2
"""The last step, those before it, and the evaluation after it."""


@dataclass(slots=True)
class JobSnapshot:
    """One job."""

    record: Json
    """The answer of `GET /v1/jobs/{job_id}`."""
    curve_name: str = ""
    curve: list[float] = field(default_factory=list)
    """One value per step, from the first."""
    recent: Rows = field(default_factory=list)
    """Metrics of the last steps."""
    dollars: float = 0.0
    dollars_per_step: float | None = None
    preemptions: int = 0
    """Preemptions of workers that served the job."""
    evaluation_name: str = ""
    evaluation: list[float] = field(default_factory=list)
    """One value per evaluation, from the first."""
    last_step: StepTime | None = None
    reserved_only: Json | None = None
    """What the reserved workers alone would have taken and cost, as `GET /v1/jobs/{job_id}/cost` has it."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Jobs, fleet and present workers."""

    at: float
    """Unix seconds."""
    url: str
    fleet: Json
    jobs: list[JobSnapshot]
    hidden_jobs: int
    """Jobs beyond `JOBS_SHOWN`."""
    workers: Rows

    def public(self) -> Json:
        """Return the snapshot for `--json`."""
        return asdict(self)


class SnapshotReader:
    """Reads snapshots; of each job's metrics, only the rows since the last snapshot."""

    def __init__(self) -> None:
        self._jobs: dict[str, JobSnapshot] = {}
        self._next_step: dict[str, int] = {}

    def read(self, client: Client) -> Snapshot:
        """Return a new snapshot; raises `ClientError`."""
        records, workers, fleet = client.jobs.list(), client.workers.list(), client.fleet()
        newest_first = records[::-1]
        records = sorted(newest_first, key=lambda record: record["state"] in ENDED)
        present = [worker for worker in workers if worker["state"] not in GONE]
        shown = [self._read_job(client, record) for record in records[:JOBS_SHOWN]]
        return Snapshot(time.time(), client.url, fleet, shown, len(records) - len(shown), present)

    def _read_job(self, client: Client, record: Json) -> JobSnapshot:
        job_id = record["id"]
        was_ended = job_id in self._jobs and self._jobs[job_id].record["state"] in ENDED
        job = self._jobs.setdefault(job_id, JobSnapshot(record))
        job.record = record
        if was_ended or record["state"] == "pending":
            return job
        for row in client.jobs.metrics(job_id, self._next_step.get(job_id, 0)):
            self._next_step[job_id] = row["step"] + 1
            _add_row(job, row)
        job.last_step = last_step_time(job.recent, record["steps"])
        try:
            cost, audit = client.jobs.cost(job_id), client.jobs.audit(job_id)
        except ClientError as error:
            if error.status != httpx.codes.CONFLICT:  # those of a quarantined job are not known
                raise
        else:
            job.dollars, job.dollars_per_step = cost["dollars"], cost["dollars_per_step"]
            job.reserved_only = cost["reserved_only"]
            job.preemptions = sum(audit["preemptions"].values())
        return job


def _add_row(job: JobSnapshot, row: Mapping[str, Any]) -> None:
    job.curve_name = job.curve_name or next((name for name in _CURVES if name in row), "")
    if job.curve_name in row:
        job.curve.append(row[job.curve_name])
    job.evaluation_name = job.evaluation_name or next((name for name in _EVALUATIONS if name in row), "")
    if job.evaluation_name in row:
        job.evaluation.append(row[job.evaluation_name])
    job.recent = [*job.recent, dict(row)][-_RECENT_ROWS:]
