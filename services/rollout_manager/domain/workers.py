"""The workers of a system: who is present, in which state, with which load, and what is known of each kind."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlboost.services.rollout_manager.domain.effects import Effect, Now, Send, event
from rlboost.services.rollout_manager.domain.measurements import (
    MAX_TOKENS_PER_PASS,
    MIN_TOKENS_PER_PASS,
    PROBE_SAMPLES,
    CommandCheck,
    KvUsage,
    Profile,
    Trust,
    is_possible,
    speed_after,
)
from rlboost.services.rollout_manager.domain.tokens import Sample
from rlboost.shared.messages import Drain, Revoke, Wait, WorkerHeartbeat, WorkerJoined
from rlboost.shared.messages.codec import PROTOCOL
from rlboost.shared.messages.command_digest import command_digest
from rlboost.shared.wire import U32, U64, pack

# --- worker -----------------------------------------------------------------------------------------------------------
#
# One worker: its state, what it serves, and its load.


State = Literal["joining", "pulling", "ready", "suspended", "draining", "lost", "left"]
Serving = tuple[str, int]
"""What a worker serves: (job id, weight version)."""
DISTURBED_S = 2.0
"""How long the prefill of migrated samples shows in a worker's measured throughput."""


@dataclass(slots=True)
class Worker:
    """One incarnation of a worker."""

    joined: WorkerJoined
    id: str = field(init=False)
    """Id of this incarnation."""
    price_per_hour: float = field(init=False)
    """Its own setting in dollars, else what its kind costs: see `Fleet.prices`."""
    last_seen_at: float
    """When its last heartbeat was read (manager's clock)."""
    state: State = "joining"
    job_id: str = ""
    version: int = -1
    """The weight version that its engine has loaded, as it reports."""
    tokens_per_s: float = 0.0
    tokens_per_pass: float = 0.0
    uses_drafts: bool = False
    """This and the one before: see `WorkerHeartbeat`."""
    update_s: float = 0.0
    """How long its last weight update took; 0 before the first."""
    update_pause_s: float = 0.0
    """Part of `update_s` in which the engine could not generate."""
    last_heartbeat_at: float = 0.0
    """Worker's clock, Unix seconds."""
    resident_bytes: int = 0
    device_used_bytes: int = 0
    device_total_bytes: int = 0
    """Memory as of its last heartbeat: of its process, and of its device; 0 where it is not known."""
    has_reported: bool = False
    """False until this manager has read a heartbeat of it: until then its state is a guess."""
    assigned_version: Serving | None = None
    """The last (job, version) it was commanded to use."""
    assigned_alongside: dict[str, int] = field(default_factory=dict)
    """Job -> version that it was commanded to serve in addition, by an adapter of the same model."""
    alongside: dict[str, int] = field(default_factory=dict)
    """Job -> version that it serves in addition, as it reports."""
    max_adapters: int = 0
    """How many jobs it can serve at once: see `WorkerHeartbeat`."""
    unshared: dict[str, str | float | None] = field(default_factory=dict)
    """Job -> version that it can serve only alone, as it reports; None: all versions."""
    unavailable: Serving | None = None
    """The last assigned version that it could not pull, as it reports."""
    assigned_active: bool | None = None
    """A reserved worker: whether it was last commanded to generate; None before the first command."""
    noticed: bool = False
    """It has sent a preemption notice."""
    invalid_samples: set[int] = field(default_factory=set)
    """Samples of which it sent rows that no engine sends, and which are not delivered yet."""
    n_invalid_confirmed: int = 0
    """How many of these samples another worker completed, so that this worker is to blame and not the weights."""
    drain_commanded: bool = False
    """It was commanded to drain."""
    unbilled_startup_s: float = 0.0
    """Time before its join that no job was charged with yet."""
    samples: dict[int, Sample] = field(default_factory=dict)
    """By id; changed by `add`, `remove` and `set_samples`, which count the tokens in `kv`."""
    releasing: dict[int, float] = field(default_factory=dict)
    """Members of `samples` that it was asked to release -> when (manager's clock)."""
    profile: Profile = field(default_factory=Profile)
    """Throughput model shared by all workers of its kind."""
    speed: float = 1.0
    """Measured throughput divided by the profile's."""
    batch_cap: int = 0
    """Samples it should run at once: its slots, or the batching plateau where that is less."""
    headroom: int = 0
    """Samples it queues in addition, so that a free slot is filled without a round trip."""
    kv: KvUsage = field(default_factory=KvUsage)
    max_request_tokens: int = 0
    """Longest sample, prompt included, that its engine accepts; 0 where it accepts any."""
    seats: int = 0
    """How many samples it takes while its engine also serves others; 0: no such limit."""
    returns_routed_experts: bool = True
    """True if its engine accepts samples that ask for the experts of each token."""
    sampling_options: frozenset[str] = frozenset()
    """See `WorkerHeartbeat`."""
    disturbed_at: float = -math.inf
    """When it was last assigned samples that need a long prefill (manager's clock)."""
    waiting: Wait | None = None
    """What it waits for, as of its last heartbeat."""
    gone_reason: str = ""
    """Why it has departed; empty while it is present."""
    command_check: CommandCheck = field(default_factory=CommandCheck)
    """Whether the worker's digest of its commands agrees with the manager's."""
    trust: Trust = field(default_factory=Trust)
    """What it has shown, and how many samples it may hold by that."""
    draining_since: float | None = None
    """When it was first seen to drain (manager's clock)."""
    updating_since: float | None = None
    """When it was first seen to lack the version that it was commanded to use (manager's clock)."""
    starting: bool = False
    """True from its first heartbeat in state `joining` until it is first ready; its startup is measured in between."""
    _last_running: int = 0

    def __post_init__(self) -> None:
        """Take the id, the price and the capacity from the join message."""
        self.id, self.kv.capacity = self.joined.worker, self.joined.kv_tokens
        self.price_per_hour = max(0.0, self.joined.price_per_hour)

    @property
    def reserved(self) -> bool:
        """Return True if it shares its device with the trainer."""
        return self.joined.role == "reserved"

    @property
    def yields(self) -> bool:
        """Return True if its device is at present that of the serving engine beside it: it costs and gives nothing."""
        return self.state == "suspended" and not self.reserved

    @property
    def is_available(self) -> bool:
        """Return True unless it drains or yields; a reserved worker that is suspended is available."""
        return self.state != "draining" and not self.yields

    @property
    def load(self) -> int:
        """Return how many samples it holds and is not asked to release."""
        return len(self.samples) - len(self.releasing)

    @property
    def sample_limit(self) -> float:
        """Return how many samples it should hold: its batch and what it queues, or less until it has proven itself."""
        return min(self.batch_cap + self.headroom, self.admitted)

    @property
    def admitted(self) -> float:
        """Return how many samples it may hold: by its trust, and by what its engine leaves to rollouts."""
        return min(self.seats or math.inf, self.trust.allowance)

    @property
    def job(self) -> str:
        """Return the job that it was last commanded to serve; empty if none."""
        return self.assigned_version[0] if self.assigned_version else ""

    @property
    def jobs(self) -> tuple[str, ...]:
        """Return the jobs that it was last commanded to serve."""
        return (self.job, *self.assigned_alongside) if self.assigned_version else ()

    def serving_version(self, job_id: str) -> int | None:
        """Return the version for which it can take samples of a job now; None if it can take none."""
        if not self.generates:
            return None
        if job_id == self.job_id:
            return self.version
        version = self.alongside.get(job_id)
        return version if version is not None and self.assigned_alongside.get(job_id) == version else None

    def serving(self) -> tuple[Serving, ...]:
        """Return all jobs and versions for which it can take samples now."""
        versions = ((job_id, self.serving_version(job_id)) for job_id in sorted({self.job_id, *self.alongside}))
        return tuple((job_id, version) for job_id, version in versions if version is not None)

    def n_samples_of(self, job_id: str) -> int:
        """Return how many samples of a job it has."""
        if not self.assigned_alongside:
            return len(self.samples) if self.job == job_id else 0
        return sum(sample.request.job_id == job_id for sample in self.samples.values())

    @property
    def pending(self) -> int:
        """Return how many of its samples wait for a slot."""
        return max(0, len(self.samples) - self.joined.slots)

    @property
    def generates(self) -> bool:
        """Return True if it can take samples now, of the job and for the version that it serves, or of others."""
        settled = self.assigned_version is None or self.assigned_version == (self.job_id, self.version)
        return self.state == "ready" and self.has_reported and settled and self.assigned_active is not False

    def expected_tokens_per_s(self) -> float:
        """Return the throughput with a full batch, 0 while its kind is not profiled."""
        if not self.profile.known or not self.is_available:
            return 0.0
        return self.profile.tokens_per_s(self.batch_cap, self.batch_cap * self._tokens_each) * self.speed

    @property
    def _tokens_each(self) -> float:
        """Return how many tokens of its KV cache one of its samples takes on average."""
        return self.kv.held / len(self.samples) if self.samples else 0.0

    @property
    def age_s(self) -> float:
        """Return how long it has existed, by its own clock."""
        return max(0.0, self.last_heartbeat_at - self.joined.at)

    def batch_share(self) -> float:
        """Return the part of its decode time that grows with the batch, by the batch in its last heartbeat.

        The rest is the same for any batch: see `Profile.fixed_s`. While its kind is not profiled, a full batch counts
        as all of the time.
        """
        running = self._last_running
        if not self.profile.known:
            return min(1.0, running / max(1, self.batch_cap))
        return self.profile.batch_share(running, running * self._tokens_each)

    def add(self, sample: Sample) -> None:
        """Take a sample, and count its tokens."""
        self.kv.add(sample, has_sibling=self._has_sibling(sample))
        self.samples[sample.id] = sample

    def remove(self, sample: Sample) -> None:
        """Remove a sample that it has, and its tokens."""
        del self.samples[sample.id]
        self.releasing.pop(sample.id, None)
        self.kv.remove(sample, has_sibling=self._has_sibling(sample))

    def release(self, sample_ids: Iterable[int], now: float) -> None:
        """Record that the worker was asked to release these of its samples."""
        self.releasing.update(dict.fromkeys(sample_ids, now))

    def set_samples(self, samples: Iterable[Sample]) -> None:
        """Set the samples that it has, and count their tokens from scratch."""
        self.samples = {sample.id: sample for sample in samples}
        self.kv.recount(self.samples.values())

    def in_order(self) -> list[Sample]:
        """Return its samples by id."""
        return [self.samples[sample_id] for sample_id in sorted(self.samples)]

    def generating(self) -> list[Sample]:
        """Return, by id, the samples that it has, is not asked to release, and has not completed."""
        return [sample for sample in self.in_order() if sample.id not in self.releasing and not sample.finish]

    def command_digest(self) -> int:
        """Return the digest of what it has after all commands so far, less samples whose end is in the log.

        Releases, a suspension and another job's weights take samples from it before they are unassigned here.
        """
        suspended = self.assigned_active is False
        held = [] if suspended else [sample for sample in self.generating() if sample.request.job_id in self.jobs]
        ids, attempts = [sample.id for sample in held], [sample.attempt for sample in held]
        return command_digest(
            ids, attempts, self.assigned_version, suspended=suspended, alongside=self.assigned_alongside
        )

    def on_tokens(self, n_tokens: int) -> None:
        """Count tokens by which its samples have grown."""
        self.kv.held += n_tokens
        if not self.trust.is_full:
            self.trust.on_tokens(n_tokens, self.batch_cap + self.headroom)

    def _has_sibling(self, sample: Sample) -> bool:
        request = sample.request
        return bool(self.kv.block_tokens) and not self.samples.keys().isdisjoint(
            range(request.group, request.group + request.n)
        )

    def on_heartbeat(self, heartbeat: WorkerHeartbeat, now: float) -> State | None:
        """Apply a heartbeat; return the previous state if the heartbeat changed it."""
        before = self.state
        self.last_seen_at, self.has_reported, self.last_heartbeat_at = now, True, heartbeat.at
        self.job_id, self.version, self.tokens_per_s = heartbeat.job_id, heartbeat.version, heartbeat.tokens_per_s
        self.tokens_per_pass, self.uses_drafts = heartbeat.tokens_per_pass, heartbeat.uses_drafts
        self.update_s, self.update_pause_s = heartbeat.update_s, heartbeat.update_pause_s
        self.resident_bytes = heartbeat.resident_bytes
        self.device_used_bytes, self.device_total_bytes = heartbeat.device_used_bytes, heartbeat.device_total_bytes
        self.kv.capacity, self.kv.block_tokens = heartbeat.kv_tokens or self.joined.kv_tokens, heartbeat.kv_block_tokens
        self.max_request_tokens = heartbeat.max_request_tokens
        self.returns_routed_experts = heartbeat.returns_routed_experts
        self.sampling_options = frozenset(heartbeat.sampling_options)
        self.max_adapters, self.alongside = heartbeat.max_adapters, dict(heartbeat.alongside)
        self.waiting, self.seats = heartbeat.waiting, heartbeat.slots
        drains = self.noticed or self.drain_commanded
        self.state = "draining" if drains else heartbeat.state
        self._observe_throughput(heartbeat, now)
        return before if before != self.state else None

    def _observe_throughput(self, heartbeat: WorkerHeartbeat, now: float) -> None:
        self._last_running = heartbeat.running
        batch, step_s = heartbeat.batch, heartbeat.step_s
        is_settled = heartbeat.state == "ready" and now - self.disturbed_at > DISTURBED_S
        if is_settled and is_possible(batch, step_s, self.joined.slots):
            tokens_per_s, tokens = batch / step_s, batch * self._tokens_each
            per_pass = heartbeat.tokens_per_pass or 1.0
            if self.profile.known:
                expected = batch / self.profile.pass_s(batch, tokens, drafts=per_pass > MIN_TOKENS_PER_PASS)
                self.speed = speed_after(self.speed, expected, tokens_per_s)
            self.profile.observe(batch, tokens, tokens_per_s, min(per_pass, MAX_TOKENS_PER_PASS))

    def public(self) -> dict[str, Any]:
        """Return the fields of the REST API, times as Unix seconds."""
        return {
            "id": self.id,
            "role": self.joined.role,
            "kind": self.joined.kind,
            "state": self.state,
            "job_id": self.job_id or None,
            "weight_version": self.version if self.version >= 0 else None,
            "alongside": self.alongside,
            "slots": self.joined.slots,
            "running": min(len(self.samples), self.joined.slots),
            "pending": self.pending,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_pass": round(self.tokens_per_pass, 2) or None,
            "batch": self.batch_cap or self.joined.slots,
            "speed": round(self.speed, 3),
            "resident_bytes": self.resident_bytes or None,
            "device_used_bytes": self.device_used_bytes or None,
            "device_total_bytes": self.device_total_bytes or None,
            "price_per_hour": self.price_per_hour,
            "host": self.joined.host,
            "pid": self.joined.pid,
            "joined_at": self.joined.at,
            "last_heartbeat_at": self.last_heartbeat_at or self.joined.at,
            "waiting": self.waiting.public() if self.waiting else None,
            "gone_reason": self.gone_reason or None,
            "silent_s": round(self.trust.silent_s),
            "offenses": self.trust.offenses,
        }


# --- lifetimes --------------------------------------------------------------------------------------------------------
#
# How often workers of a kind are preempted, and how long a new one takes until it generates.


NEWEST_STARTUP_WEIGHT = 0.2
"""Weight of the newest worker in the mean time of a startup."""


@dataclass(slots=True)
class Lifetimes:
    """Preemptions and startups of the workers of one kind, since this manager leads."""

    departed_s: float = 0.0
    """Sum of the lifetimes of the workers that are gone."""
    preemptions: int = 0
    startup_s: float = 0.0
    """Recent mean time from a worker's join until it serves its first weight version; 0 before the first."""

    def on_startup(self, startup_s: float) -> None:
        """Learn from a worker that is ready for the first time."""
        self.startup_s += (startup_s - self.startup_s) * (NEWEST_STARTUP_WEIGHT if self.startup_s else 1.0)

    def preemptions_per_s(self, present_s: float) -> float:
        """Return the hazard of one worker; `present_s` is the sum of the lifetimes of the workers that are present."""
        lived_s = self.departed_s + present_s
        return self.preemptions / lived_s if lived_s > 0 else 0.0


def availability(preemptions_per_s: float, startup_s: float) -> float:
    """Return the part of its time in which a worker generates if it is replaced after each preemption."""
    return 1.0 / (1.0 + preemptions_per_s * startup_s)


# --- fleet ------------------------------------------------------------------------------------------------------------


MAX_INVALID = 3
"""A worker is drained after it sent invalid tokens for this many samples that another worker then completed."""
STALL_LIMIT_S = 90.0
"""More than a worker's own limit for its engine: it then reports which samples its engine hangs at."""
LONGEST_SILENCE_S = 70.0
"""The longest lease of a worker (60 s) and the longest interval of its heartbeats (10 s)."""
GONE_RETAINED = 200
"""How many departed workers stay in the list that the REST API shows."""


class Fleet:
    """All present workers, and the most recent of the departed ones."""

    def __init__(self, lease_s: float, prices: Mapping[str, float], stall_limit_s: float = STALL_LIMIT_S) -> None:
        """Start empty. A worker is a suspect after `lease_s` without a heartbeat; see `prices` and `stall_limit_s`."""
        self.lease_s = lease_s
        self.stall_limit_s = stall_limit_s
        """For how long a worker may always hold a sample without sending a token of it."""
        self.prices = prices
        """Kind -> dollars per hour of one worker that has no price of its own."""
        self.workers: dict[str, Worker] = {}
        self.gone: dict[str, Worker] = {}
        self.profiles: dict[str, Profile] = {}
        """Kind -> throughput of its workers, departed ones included."""
        self.fallback_profile = Profile()
        """Profile for workers of a kind without one: the most observed profile of another kind."""
        self._to_reject: list[Worker] = []
        self._incompatible: list[Worker] = []
        self.lifetimes: dict[str, Lifetimes] = defaultdict(Lifetimes)
        """Kind -> preemptions and startups of its workers."""
        self._silence_checked_at = -math.inf

    def join(self, joined: WorkerJoined, now: float) -> Worker | None:
        """Add a worker; None when it is known already."""
        if joined.worker in self.workers or joined.worker in self.gone:
            return None
        profile = self.profiles.setdefault(joined.kind, Profile())
        trust = Trust(allowance=PROBE_SAMPLES)
        worker = Worker(joined, now, profile=profile, batch_cap=joined.slots, trust=trust)
        worker.price_per_hour = worker.price_per_hour or self.prices.get(joined.kind, 0.0)
        self.workers[worker.id] = worker
        if joined.protocol != PROTOCOL:
            self._incompatible.append(worker)
        return worker

    def set_prices(self, prices: Mapping[str, float]) -> list[Effect]:
        """Set the price of each kind, and with it that of every worker without a price of its own."""
        self.prices = prices
        for worker in (*self.workers.values(), *self.gone.values()):
            if worker.joined.price_per_hour <= 0:
                worker.price_per_hour = prices.get(worker.joined.kind, 0.0)
        return []

    def on_heartbeat(self, worker: Worker, heartbeat: WorkerHeartbeat, now: float) -> State | None:
        """Apply a heartbeat; return the previous state if the heartbeat changed it."""
        before = worker.on_heartbeat(heartbeat, now)
        if worker.state == "joining":
            worker.starting = True
        elif worker.yields:
            worker.starting = False
        elif worker.starting and worker.state == "ready":
            worker.starting = False
            self.lifetimes[worker.joined.kind].on_startup(worker.age_s)
        if worker.profile.known and worker.profile.observed > self.fallback_profile.observed:
            self.fallback_profile = worker.profile
        return before

    def on_notice(self, worker: Worker) -> None:
        """Mark a worker as about to be preempted."""
        worker.noticed, worker.state = True, "draining"

    def on_preempted(self, worker: Worker) -> None:
        """Count a preemption."""
        self.lifetimes[worker.joined.kind].preemptions += 1

    def preemptions_per_s(self, kind: str) -> float:
        """Return how often a worker of this kind is preempted."""
        present_s = sum(worker.age_s for worker in self.workers.values() if worker.joined.kind == kind)
        return self.lifetimes[kind].preemptions_per_s(present_s)

    def availability_of(self, kind: str) -> float:
        """Return the part of its time in which a worker of this kind generates."""
        return availability(self.preemptions_per_s(kind), self.lifetimes[kind].startup_s)

    def drain(self, worker: Worker, now: Now, reason: str) -> list[Effect]:
        """Have a worker that works as it should hand off its samples and exit."""
        return [Send(worker.id, Drain(reason=reason)), *self.on_drain_commanded(worker, now, reason)]

    def on_drain_commanded(self, worker: Worker, now: Now, reason: str) -> list[Effect]:
        """Count a worker as draining: the command to drain is in its stream."""
        self._on_drain(worker)
        return [event("worker_drained", now, worker=worker.id, job_id=worker.job, reason=reason)]

    def reject(self, worker: Worker, now: Now, reason: str) -> list[Effect]:
        """Drain a worker that does not work as it should."""
        self._on_drain(worker)
        rejected = event("worker_rejected", now, worker=worker.id, job_id=worker.job, reason=reason)
        return [Send(worker.id, Drain(reason=reason)), rejected]

    def _on_drain(self, worker: Worker) -> None:
        worker.drain_commanded, worker.state = True, "draining"

    def revoke(self, *samples: Sample) -> list[Effect]:
        """Command the owner of samples, if they have one, to stop generating them."""
        if not samples or samples[0].worker not in self.workers:
            return []
        ids, attempts = pack([sample.id for sample in samples], U64), pack([sample.attempt for sample in samples], U32)
        return [Send(samples[0].worker, Revoke(samples=ids, attempts=attempts))]

    def take(self, sample: Sample) -> None:
        """Take a sample from its owner's samples, if it has an owner."""
        owner = self.workers.get(sample.worker)
        if owner is not None and sample.id in owner.samples:  # not while the log is replayed
            owner.remove(sample)

    def on_delivered(self, sample: Sample) -> None:
        """Blame the workers that sent invalid rows of a sample that another one completed."""
        for worker in self.workers.values():
            if sample.id in worker.invalid_samples:
                worker.invalid_samples.discard(sample.id)
                if sample.worker != worker.id:
                    worker.n_invalid_confirmed += 1
                    if worker.n_invalid_confirmed == MAX_INVALID:
                        self._to_reject.append(worker)

    def take_rejected(self) -> list[Worker]:
        """Return, once, the workers whose invalid samples others completed too often."""
        taken, self._to_reject = self._to_reject, []
        return taken

    def take_incompatible(self) -> list[Worker]:
        """Return, once, the workers with another protocol, which an earlier manager had."""
        taken, self._incompatible = self._incompatible, []
        return taken

    def remove(self, worker: Worker, state: Literal["lost", "left"], reason: str) -> None:
        """Move a worker to the departed ones."""
        worker.state, worker.tokens_per_s, worker.waiting, worker.gone_reason = state, 0.0, None, reason
        self.lifetimes[worker.joined.kind].departed_s += worker.age_s
        self.gone[worker.id] = self.workers.pop(worker.id)
        while len(self.gone) > GONE_RETAINED:
            self.gone.pop(next(iter(self.gone)))

    def silent_workers(self, now: float) -> list[str]:
        """Return the workers silent for a lease's time; each is lost if its lease has run out too.

        Looks at most twenty times per lease; a call in between returns an empty list.
        """
        if now - self._silence_checked_at < self.lease_s / 20:
            return []
        self._silence_checked_at = now
        return [worker.id for worker in self.workers.values() if now - worker.last_seen_at > self.lease_s]

    def vanished(self, silent: Iterable[str], now: float) -> set[str]:
        """Return the silent workers that are lost whatever their leases say: they write the leases themselves."""
        return {worker for worker in silent if now - self.workers[worker].last_seen_at > LONGEST_SILENCE_S}

    def mismatched(self) -> list[Worker]:
        """Return the workers that differ persistently from what they were assigned."""
        return [worker for worker in self.workers.values() if worker.command_check.is_mismatched(self.lease_s)]

    def restart_command_checks(self) -> None:
        """Forget the differences seen so far: messages that explain them are not read yet."""
        for worker in self.workers.values():
            worker.command_check.restart()

    def reset_liveness(self, now: float) -> None:
        """Give every worker a full lease from now on, after a time in which no heartbeat could be read."""
        for worker in self.workers.values():
            worker.last_seen_at = now


# --- departures -------------------------------------------------------------------------------------------------------
#
# Decides when a worker's identity is removed: some time after the worker has left, or was lost.


LEFT_RETENTION_S = 5.0
"""After its last message a worker still withdraws its entry in the peer directory."""
ABSENT_RETENTION_S = 900.0
"""A worker that joins, or returns after an outage, needs its identity. It exits after an outage of 600 s."""


class Departures:
    """Records since when each identity has no worker; a new leader counts from its start."""

    def __init__(self) -> None:
        self._absent_since: dict[str, float] = {}

    def due(self, workers: Collection[str], fleet: Fleet, now: float) -> list[str]:
        """Return the workers whose identities are to be removed.

        Args:
            workers: all that have an identity.
            fleet: the workers that are present.
            now: the manager's clock.

        """
        self._absent_since = {
            worker: self._absent_since.get(worker, now) for worker in workers if worker not in fleet.workers
        }
        return [worker for worker, since in self._absent_since.items() if now - since >= _retention_s(fleet, worker)]


def _retention_s(fleet: Fleet, worker: str) -> float:
    gone = fleet.gone.get(worker)
    return LEFT_RETENTION_S if gone is not None and gone.state == "left" else ABSENT_RETENTION_S
