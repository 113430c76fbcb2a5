"""The names of all streams, consumer groups and keys in Redis; no other module spells one."""

from __future__ import annotations

PREFIX = "rlboost:"

# Streams.
JOB_COMMANDS = PREFIX + "jobs.commands"
"""The commands that create jobs: the work queue of the trainers."""
JOB_CONTROLS = PREFIX + "jobs.controls"
"""All other commands on jobs."""
JOB_REPORTS = PREFIX + "jobs.reports"
TOKEN_LOG = PREFIX + "rollouts.tokens"
WORKER_HEARTBEATS = PREFIX + "workers.heartbeats"
WEIGHTS_COMMITTED = PREFIX + "weights.committed"
DEAD_LETTERS = PREFIX + "dead.letters"
FLEET_EVENTS = PREFIX + "fleet.events"

MAX_EVENTS = 20_000
"""The newest events of a job that are retained."""
MAX_FLEET_EVENTS = 100_000
"""The newest events of the fleet that are retained."""

# Consumer groups.
TRAINER_GROUP = "trainer"

# Keys.
JOBS = PREFIX + "jobs"
"""Hash: job id -> the job's record (JSON)."""
JOB_TRAINERS = PREFIX + "jobs.trainers"
"""Hash: job id -> name of the trainer that runs the job."""
JOB_ATTEMPTS = PREFIX + "jobs.attempts"
"""Hash: job id -> deaths of the job's trainers since its last new step (JSON)."""
JOB_COUNTER = PREFIX + "jobs.counter"
MANAGER_CURSORS = PREFIX + "manager.cursors"
"""Hash: stream -> the manager's read position, written in one transaction with the effects of the entries."""
MANAGER_LEASE = PREFIX + "manager.lease"
"""Lease: the record of the leading manager (JSON)."""
MANAGER_EPOCH = PREFIX + "manager.epoch"
"""Counter: incremented by each acquisition of the lease; fences every transaction of a leader."""
WEIGHT_PEERS = PREFIX + "weights.peers"
"""Hash: worker -> empty; the workers that may hold a lease `weight_peer`. Written only by the manager."""
WORKER_IDENTITIES = PREFIX + "workers.identities"
"""Hash: worker id -> its identity (JSON), from its join until its reports are relayed and its Redis user is removed."""
FLEET = PREFIX + "fleet"
"""Hash: worker id -> its last record (JSON), from which a restarted manager recovers the fleet."""
FLEET_SCALE = PREFIX + "fleet.scale"
"""Hash: `workers` -> the number of spot workers that the operator set, or `auto`."""
PROTOCOL = PREFIX + "protocol"
"""Hash: `number` -> the protocol of the manager that led last."""

TOKENS = PREFIX + "tokens"
"""Hash: id of an access token -> its record (JSON), with the SHA-256 of its secret."""


def rollouts_requested(job_id: str) -> str:
    """Stream, trainer -> manager: groups to generate for one job."""
    return f"{PREFIX}job:{job_id}:rollouts.requested"


def rollouts_finished(job_id: str) -> str:
    """Stream, manager -> trainer: finished samples of one job; retained until a checkpoint covers them."""
    return f"{PREFIX}job:{job_id}:rollouts.finished"


def job_created(key: str) -> str:
    """Lease: the job that a `POST /v1/jobs` with this Idempotency-Key created, until the key expires."""
    return f"{PREFIX}jobs.created:{key}"


def job_events(job_id: str) -> str:
    """Stream, all -> users: events of one job; capped."""
    return f"{PREFIX}job:{job_id}:events"


def job_logs(job_id: str) -> str:
    """Stream, all -> users: log lines of all processes that concern one job; capped."""
    return f"{PREFIX}job:{job_id}:logs"


def job_samples(job_id: str) -> str:
    """Stream, trainer -> users: scored samples; capped."""
    return f"{PREFIX}job:{job_id}:samples"


def job_metrics(job_id: str) -> str:
    """Hash: step -> metrics of the step (JSON)."""
    return f"{PREFIX}job:{job_id}:metrics"


def job_lengths(job_id: str) -> str:
    """Hash: prompt (digest) -> mean over epochs of the length of its groups' longest samples."""
    return f"{PREFIX}job:{job_id}:lengths"


def job_curriculum(job_id: str) -> str:
    """Hash: step -> the prompts that a curriculum selected, and their scores (JSON)."""
    return f"{PREFIX}job:{job_id}:curriculum"


def job_profile(job_id: str) -> str:
    """Hash: `steps` -> of how many steps the trainer is asked for traces; it deletes the hash when it begins."""
    return f"{PREFIX}job:{job_id}:profile"


def job_resampled(job_id: str) -> str:
    """Hash: packed id of a group that was resampled -> the row of the new prompt."""
    return f"{PREFIX}job:{job_id}:resampled"


def job_paid_calls(job_id: str) -> str:
    """Hash: conversation and digest of a call of a priced model -> its budget, cost and answer (JSON).

    `total:` and a budget -> the cost of the calls whose records are trimmed.
    """
    return f"{PREFIX}job:{job_id}:paid.calls"


def job_refused(job_id: str) -> str:
    """Hash: weight version that a worker could not load -> why."""
    return f"{PREFIX}job:{job_id}:refused"


def job_audit(job_id: str) -> str:
    """Hash: `counters` -> the job's audit (JSON). `MANAGER_CURSORS` has the position in the log that it covers."""
    return f"{PREFIX}job:{job_id}:audit"


def serving_session(session: str) -> str:
    """Hash: a client's conversation as tokens (JSON); expires when it is not continued."""
    return f"{PREFIX}serving:session:{session}"


def session(job_id: str, sample: int) -> str:
    """Hash: a trainable session of an agent (`shared.job.agent`); expires some time after its step."""
    return f"{PREFIX}job:{job_id}:session:{sample:x}"


def job_offers(job_id: str) -> str:
    """Hash: session of a remote agent -> the host that runs it, and until when (JSON), as long as hosts may take it."""
    return f"{PREFIX}job:{job_id}:session.offers"


def session_opened(turn: int) -> str:
    """Field of a session: a turn as its call asked for it."""
    return f"opened:{turn:x}"


def session_finished(turn: int) -> str:
    """Field of a session: the end of a turn."""
    return f"finished:{turn:x}"


def session_limited(start: str) -> str:
    """Field of a session: a start of its agent called beyond the limit of turns."""
    return f"limited:{start}"


def session_answer(turn: int) -> str:
    """Field of a session: the answer of a turn, as its agent has received it."""
    return f"answer:{turn:x}"


def trainer_lease(job_id: str) -> str:
    """Lease: the trainer that runs the job, with its status (JSON)."""
    return f"{PREFIX}job:{job_id}:trainer"


def trainer_epoch(job_id: str) -> str:
    """Counter: incremented by each acquisition of the job's lease; fences renewals and the last report."""
    return f"{PREFIX}job:{job_id}:trainer.epoch"


def device_lease(device: str) -> str:
    """Lease: the trainer that computes on a device which several use in turns, and for which job (JSON)."""
    return f"{PREFIX}device:{device}"


def device_epoch(device: str) -> str:
    """Counter: incremented by each acquisition of the device's lease."""
    return f"{PREFIX}device:{device}:epoch"


def device_claims(device: str) -> str:
    """Hash: job -> how much of the device it has used, and since when it waits (JSON)."""
    return f"{PREFIX}device:{device}:claims"


def external_trainer(job_id: str) -> str:
    """Hash: of a job of kind `external`, its trainer (JSON), and its newest checkpoint."""
    return f"{PREFIX}job:{job_id}:external"


def external_groups(job_id: str) -> str:
    """Hash: of a job of kind `external`, step and number of each requested group -> digest of what it asked for."""
    return f"{PREFIX}job:{job_id}:external.groups"


def weight_peer(peer: str) -> str:
    """Lease: a worker that serves weights to others, where, and which (JSON)."""
    return f"{PREFIX}weights:peer:{peer}"


def weight_claim(digest: str, site: str = "") -> str:
    """Lease: the peer that fetches this blob from the weight store, from which the others of its site fetch it."""
    return f"{PREFIX}weights:claim:{site}:{digest}" if site else f"{PREFIX}weights:claim:{digest}"


def worker_commands(worker: str) -> str:
    """Stream, manager -> one worker incarnation."""
    return f"{PREFIX}worker:{worker}:commands"


def worker_reports(worker: str) -> str:
    """Stream, one worker incarnation -> manager: all that it reports, in order; the manager relays and removes it."""
    return f"{PREFIX}worker:{worker}:reports"


def worker_key_type(key: str) -> str:
    """Return the type that a key has which Redis may let a worker write; empty for all others.

    Before Redis 7 a worker may replace such a key by one of another type.
    """
    if key == WEIGHT_PEERS:
        return "hash"
    is_stream = key.startswith(f"{PREFIX}worker:") and key.endswith((":commands", ":reports"))
    return "stream" if is_stream else ""


def worker_redis_user(worker: str) -> str:
    """Return the name of the Redis user of one worker incarnation."""
    return f"rlboost-worker-{worker}"


def worker_lease(worker: str) -> str:
    """Lease: the worker is alive."""
    return f"{PREFIX}worker:{worker}:lease"
