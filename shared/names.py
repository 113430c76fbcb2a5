"""The name of every stream, consumer group and key in Redis. Nothing else in the project spells one."""

from __future__ import annotations

PREFIX = "rlboost:"

# Streams.
JOB_COMMANDS = PREFIX + "jobs.commands"
JOB_REPORTS = PREFIX + "jobs.reports"
TOKEN_LOG = PREFIX + "rollouts.tokens"
WORKER_BEATS = PREFIX + "workers.beats"
WEIGHTS_COMMITTED = PREFIX + "weights.committed"
DEAD_LETTERS = PREFIX + "dead.letters"

# Consumer groups.
TRAINER_GROUP = "trainer"

# Keys.
JOBS = PREFIX + "jobs"
"""Hash: job id -> the job's record (JSON)."""
JOB_TRAINERS = PREFIX + "jobs.trainers"
"""Hash: job id -> name of the trainer that has taken the job and not ended it."""
JOB_COUNTER = PREFIX + "jobs.counter"
MANAGER_CURSORS = PREFIX + "manager.cursors"
"""Hash: stream -> how far the manager has got; written in the same transaction as what it did about the entries."""
MANAGER_LEASE = PREFIX + "manager.lease"
"""Lease: the manager that leads, and where (JSON)."""
MANAGER_EPOCH = PREFIX + "manager.epoch"
"""Counter: raised by each taking of the lease; a leader's every transaction is fenced by it."""
WEIGHT_PEERS = PREFIX + "weights.peers"
"""Hash: peer -> nothing; who may hold a lease `weight_peer`."""
FLEET = PREFIX + "fleet"
"""Hash: worker id -> its last known record (JSON), so that a restarted manager knows whom to expect."""


def rollouts_requested(job_id: str) -> str:
    """Stream, trainer -> manager: groups to generate for one job."""
    return f"{PREFIX}job:{job_id}:rollouts.requested"


def rollouts_finished(job_id: str) -> str:
    """Stream, manager -> trainer: finished samples of one job; kept until a checkpoint covers them."""
    return f"{PREFIX}job:{job_id}:rollouts.finished"


def job_created(key: str) -> str:
    """Lease: the job that a `POST /v1/jobs` with this Idempotency-Key made, for as long as the key counts."""
    return f"{PREFIX}jobs.created:{key}"


def job_kept(job_id: str) -> str:
    """Stream, manager -> one that can read the job: what was said of it while it was set aside."""
    return f"{PREFIX}job:{job_id}:kept"


def job_events(job_id: str) -> str:
    """Stream, all -> people: what happened in one job; capped."""
    return f"{PREFIX}job:{job_id}:events"


def job_samples(job_id: str) -> str:
    """Stream, trainer -> people: scored samples; capped."""
    return f"{PREFIX}job:{job_id}:samples"


def job_metrics(job_id: str) -> str:
    """Hash: step -> metrics of the step (JSON)."""
    return f"{PREFIX}job:{job_id}:metrics"


def job_lengths(job_id: str) -> str:
    """Hash: prompt (digest) -> mean length of its groups' longest samples over epochs."""
    return f"{PREFIX}job:{job_id}:lengths"


def job_curriculum(job_id: str) -> str:
    """Hash: step -> the prompts that a curriculum chose for it, and how they were scored (JSON)."""
    return f"{PREFIX}job:{job_id}:curriculum"


def job_resampled(job_id: str) -> str:
    """Hash: group that was replaced by one of another prompt (packed id) -> that prompt's row."""
    return f"{PREFIX}job:{job_id}:resampled"


def job_audit(job_id: str) -> str:
    """Hash: the audit's counters, with the log position that they cover."""
    return f"{PREFIX}job:{job_id}:audit"


def serving_session(session: str) -> str:
    """Hash: a client's conversation as the tokens that it was made of (JSON); vanishes when it is not gone on with."""
    return f"{PREFIX}serving:session:{session}"


def trainer_lease(job_id: str) -> str:
    """Lease: the trainer that runs the job, and what it waits for (JSON)."""
    return f"{PREFIX}job:{job_id}:trainer"


def trainer_epoch(job_id: str) -> str:
    """Counter: raised by each taking of the job's lease; renewals and the last report are fenced by it."""
    return f"{PREFIX}job:{job_id}:trainer.epoch"


def weight_peer(peer: str) -> str:
    """Lease: a worker that serves weights to others, where, and which (JSON)."""
    return f"{PREFIX}weights:peer:{peer}"


def weight_claim(digest: str) -> str:
    """Lease: the peer that fetches this blob from the weight store, so that the others can have it from there."""
    return f"{PREFIX}weights:claim:{digest}"


def worker_commands(worker: str) -> str:
    """Stream, manager -> one worker incarnation."""
    return f"{PREFIX}worker:{worker}:commands"


def worker_lease(worker: str) -> str:
    """Lease: the worker is alive."""
    return f"{PREFIX}worker:{worker}:lease"
