"""Builds messages for tests of the manager, with defaults for every field that a test does not care about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlboost.services.rollout_manager.domain.tokens import Sample
from rlboost.shared.ids import SampleId
from rlboost.shared.job.spec import JobSpec, RlJob, to_json
from rlboost.shared.messages import (
    EngineProfile,
    GroupRequested,
    JobCommand,
    JobReport,
    Message,
    Placed,
    Sampling,
    TokenFrame,
    TrainerStatus,
    WeightsCommitted,
    WorkerHeartbeat,
    WorkerJoined,
)
from rlboost.shared.messages.codec import PROTOCOL
from rlboost.shared.wire import F32, I32, U8, U32, U64, pack
from tests.support.jobs import parse_rl

Row = tuple[int, int, int, int, int, int]
"""Sample, attempt, offset, number of tokens, version, finish."""


def job_spec(**changes: Any) -> RlJob:
    """Return the smallest job, with changes."""
    spec = {"model": "m", "data": {"train": "t"}, "reward": {"function": "a:b"}, "steps": 9}
    return parse_rl({**spec, **changes})


def job_created(job_id: str = "j", no: int = 1, spec: JobSpec | None = None) -> JobCommand:
    spec_json = to_json(spec or job_spec())
    return JobCommand(command_id=f"create-{job_id}", action="create", job_id=job_id, job_no=no, spec_json=spec_json)


def trainer_status(**fields: Any) -> TrainerStatus:
    known = {"trainer": "t-1", "phase": "training", "step": 0, "phase_since": 990.0}
    return TrainerStatus(**{**known, "price_per_hour": 0.0, "waiting": None, "at": 1.0, **fields})


def samples_of(n: int) -> dict[int, Sample]:
    """Return samples for a worker; only their number counts."""
    sample = Sample(group_id(), group_requested(), "1-0", 0)
    return dict.fromkeys(range(n), sample)


def weights_committed(job_id: str = "j", version: int = 0, base: str = "") -> WeightsCommitted:
    return WeightsCommitted(job_id=job_id, version=version, manifest_digest="", n_bytes=0, at=0.0, base=base)


def job_running(job_id: str = "j", no: int = 1, spec: JobSpec | None = None) -> list[Message]:
    """Return the messages after which a job runs with version 0 committed."""
    running = JobReport(job_id=job_id, state="running", step=0)
    return [job_created(job_id, no, spec), running, weights_committed(job_id)]


def group_id(number: int = 0, *, job_no: int = 1, step: int = 0) -> int:
    return SampleId(job_no, False, step, number, 0).pack()


def group_requested(
    number: int = 0,
    *,
    job_id: str = "j",
    job_no: int = 1,
    step: int = 0,
    n: int = 1,
    prompt: Sequence[int] = (1, 2),
    max_tokens: int = 8,
    **fields: Any,
) -> GroupRequested:
    """Return the request of group `number` of a step."""
    return GroupRequested(
        **{
            "job_id": job_id,
            "group": group_id(number, job_no=job_no, step=step),
            "n": n,
            "prompt": pack(prompt, I32),
            "sampling": Sampling(max_tokens=max_tokens),
            "version": step,
            "seed": 7,
            **fields,
        }
    )


def placed(*samples: int, worker: str = "w", attempt: int = 1, offset: int = 0) -> Placed:
    n = len(samples)
    attempts, offsets = pack([attempt] * n, U32), pack([offset] * n, U32)
    return Placed(worker=worker, samples=pack(samples, U64), attempts=attempts, offsets=offsets)


def token_frame(rows: Sequence[Row], *, worker: str = "w", tokens: Sequence[int] | None = None) -> TokenFrame:
    """Return a frame; its tokens are 0, 1, ... if none are given, and the log-probability of token t is -t."""
    samples, attempts, offsets, counts, versions, finish = zip(*rows, strict=True) if rows else ((),) * 6
    tokens = range(sum(counts)) if tokens is None else tokens
    return TokenFrame(
        worker=worker,
        seq=0,
        samples=pack(samples, U64),
        attempts=pack(attempts, U32),
        offsets=pack(offsets, U32),
        counts=pack(counts, U32),
        versions=pack(versions, U32),
        finish=pack(finish, U8),
        tokens=pack(tokens, I32),
        logprobs=pack([-float(token) for token in tokens], F32),
    )


def worker_joined(worker: str = "w", **fields: Any) -> WorkerJoined:
    defaults = {"role": "preemptible", "kind": "k", "slots": 4, "host": "h", "pid": 1, "price_per_hour": 0.0, "at": 0.0}
    return WorkerJoined(**{"worker": worker, "protocol": PROTOCOL, **defaults, **fields})


def engine_profile(kind: str = "k", **fields: Any) -> EngineProfile:
    """Return the profile of a kind of preemptible worker."""
    counts = {"role": "preemptible", "workers": 1, "slots": 8, "kv_tokens": 0, "price_per_hour": 1.0, "update_s": 0.1}
    step = {"step_s": 0.02, "per_sample_s": 0.004, "per_kv_token_s": 0.0}
    return EngineProfile(**{"kind": kind, **counts, **step, **fields})


def heartbeat(worker: str = "w", **fields: Any) -> WorkerHeartbeat:
    """Return a heartbeat of an idle worker that is ready with version 0 of job `j`."""
    idle = {"running": 0, "pending": 0, "tokens_per_s": 0.0, "at": 0.0}
    return WorkerHeartbeat(**{"worker": worker, "state": "ready", "job_id": "j", "version": 0, **idle, **fields})
