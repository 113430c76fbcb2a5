"""The fleet: who is there, in what state, with which samples. Death is a lease that ran out and beats that stopped."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from services.rollout_manager.domain.profile import Profile, speed_after
from shared.kv_rows import rows_in
from shared.messages import WorkerBeat, WorkerJoined

State = Literal["joining", "pulling", "ready", "suspended", "draining", "lost", "left"]

DISTURBED_S = 2.0
"""How long moved samples show in a worker's speed: reading them in takes time, and speeds are of the last second."""
GONE_KEPT = 200
"""How many workers that are gone stay in the list for people."""


@dataclass(slots=True)
class Worker:
    """One incarnation of a worker."""

    joined: WorkerJoined
    heard_at: float
    """Manager's clock: when its last beat was read."""
    state: State = "joining"
    job_id: str = ""
    version: int = -1
    """What its engine serves, as it says itself."""
    tokens_per_s: float = 0.0
    last_beat_at: float = 0.0
    """Worker's clock, Unix seconds."""
    resident_bytes: int = 0
    device_used_bytes: int = 0
    device_total_bytes: int = 0
    """Memory as of its last beat: of its process, and of its device; 0 where it is not known."""
    known: bool = False
    """False until it has said something since this manager began: its state is a guess."""
    told_version: tuple[str, int] | None = None
    """The last (job, version) it was told to use."""
    told_active: bool | None = None
    """A reserved worker: whether it was last told to generate; None before the first word."""
    noticed: bool = False
    samples: set[int] = field(default_factory=set)
    releasing: dict[int, float] = field(default_factory=dict)
    """Those of `samples` that it was asked to hand back -> when (manager's clock)."""
    profile: Profile = field(default_factory=Profile)
    """Of its kind."""
    speed: float = 1.0
    """Relative to its kind."""
    batch: int = 0
    """How many samples it should run at once: its slots, or the batching plateau where that is less."""
    spare: int = 0
    """How many more it holds, so that a slot that becomes free is filled without a round trip."""
    kv_held: int = 0
    """Tokens that its samples keep in the KV cache, as of its last beat, with those placed since."""
    kv_common: int = 0
    """How many of them its engine keeps only once, because a sample of the same group has them too, likewise."""
    longest: int = 0
    """Length at which the longest of its samples ends at the latest, likewise."""
    kv_tokens: int = 0
    kv_row_tokens: int = 0
    kv_page_tokens: int = 0
    """As of its last beat: see `WorkerBeat`."""
    disturbed_at: float = -math.inf
    """When it last got samples with tokens to read in (manager's clock): for a while its speed is not that of
    generating alone."""
    _ran: int = 0

    def __post_init__(self) -> None:
        """Know what it said when it joined."""
        self.kv_tokens = self.joined.kv_tokens

    @property
    def id(self) -> str:
        """Return the incarnation's id."""
        return self.joined.worker

    @property
    def reserved(self) -> bool:
        """Tell whether it shares its device with the trainer."""
        return self.joined.role == "reserved"

    @property
    def load(self) -> int:
        """Return how many samples it has and keeps."""
        return len(self.samples) - len(self.releasing)

    @property
    def job(self) -> str:
        """Return the job that it was last told to serve."""
        return self.told_version[0] if self.told_version else ""

    @property
    def pending(self) -> int:
        """Return how many of its samples cannot run yet for want of a slot, or of a row in the KV cache."""
        return max(0, len(self.samples) - self.slots())

    def slots(self, limit: int = 0) -> int:
        """Return how many samples can run at once, with one more that ends at this length at the latest."""
        longest = min(max(self.longest, limit), self.kv_row_tokens)
        return min(self.joined.slots, rows_in(self.kv_tokens, longest)) if longest else self.joined.slots

    def at_once(self, limit: int = 0) -> int:
        """Return how many of them should: no more than the batch, either."""
        return min(self.batch, self.slots(limit))

    @property
    def generates(self) -> bool:
        """Tell whether it can take samples now, of the job and for the version that it serves."""
        wanted = self.told_version is None or self.told_version == (self.job_id, self.version)
        return self.state == "ready" and self.known and wanted and self.told_active is not False

    def could_make_per_s(self) -> float:
        """Return the tokens a second that it would make with a full batch, as far as its kind is known."""
        if not self.profile.known or self.state == "draining":
            return 0.0
        tokens_each = self.kv_held / len(self.samples) if self.samples else 0.0
        return self.profile.tokens_per_s(self.at_once(), self.at_once() * tokens_each) * self.speed

    def serves(self, job_id: str, oldest: int, newest: int) -> bool:
        """Tell whether it can generate for this job with one of these versions now."""
        return self.generates and self.job_id == job_id and oldest <= self.version <= newest

    def hear(self, beat: WorkerBeat, now: float) -> State | None:
        """Take a beat; return the state it left when the beat changed it."""
        before = self.state
        self.heard_at, self.known, self.last_beat_at = now, True, beat.at
        self.job_id, self.version, self.tokens_per_s = beat.job_id, beat.version, beat.tokens_per_s
        self.resident_bytes = beat.resident_bytes
        self.device_used_bytes, self.device_total_bytes = beat.device_used_bytes, beat.device_total_bytes
        self.kv_tokens, self.kv_row_tokens = beat.kv_tokens or self.joined.kv_tokens, beat.kv_row_tokens
        self.kv_page_tokens = beat.kv_page_tokens
        self.state = "draining" if self.noticed else beat.state
        self._learn(beat, now)
        return before if before != self.state else None

    def _learn(self, beat: WorkerBeat, now: float) -> None:
        # The speed is of the last moments: only a batch that has hardly changed says what made it.
        undisturbed = now - self.disturbed_at > DISTURBED_S
        steady = undisturbed and beat.running and abs(beat.running - self._ran) <= max(1, self._ran // 10)
        self._ran = beat.running
        if steady and beat.tokens_per_s > 0 and beat.state == "ready":
            if self.profile.known:
                expected = self.profile.tokens_per_s(beat.running, self.kv_held)
                self.speed = speed_after(self.speed, expected, beat.tokens_per_s)
            self.profile.observe(beat.running, self.kv_held, beat.tokens_per_s)

    def public(self) -> dict[str, Any]:
        """Return the fields of the REST API, times as Unix seconds."""
        running = min(len(self.samples), self.slots())
        return {
            "id": self.id,
            "role": self.joined.role,
            "kind": self.joined.kind,
            "state": self.state,
            "job_id": self.job_id or None,
            "weight_version": self.version if self.version >= 0 else None,
            "slots": self.joined.slots,
            "running": running,
            "pending": self.pending,
            "tokens_per_s": self.tokens_per_s,
            "batch": self.batch or self.joined.slots,
            "speed": round(self.speed, 3),
            "resident_bytes": self.resident_bytes or None,
            "device_used_bytes": self.device_used_bytes or None,
            "device_total_bytes": self.device_total_bytes or None,
            "price_per_hour": self.joined.price_per_hour,
            "host": self.joined.host,
            "pid": self.joined.pid,
            "joined_at": self.joined.at,
            "last_beat_at": self.last_beat_at or self.joined.at,
        }


class Fleet:
    """All workers that are there, and the last that are gone."""

    def __init__(self, lease_s: float) -> None:
        """Start empty. A worker is a suspect when it was not heard for `lease_s`."""
        self.lease_s = lease_s
        self.workers: dict[str, Worker] = {}
        self.gone: dict[str, Worker] = {}
        self.profiles: dict[str, Profile] = {}
        """Kind -> what its workers have shown, those that are gone too."""
        self.borrowed = Profile()
        """For workers of a kind of which nothing is known: the best known profile of another kind."""
        self._suspects_at = -math.inf

    def join(self, joined: WorkerJoined, now: float) -> Worker | None:
        """Add a worker; None when it is known already."""
        if joined.worker in self.workers or joined.worker in self.gone:
            return None
        profile = self.profiles.setdefault(joined.kind, Profile())
        worker = self.workers[joined.worker] = Worker(joined, now, profile=profile, batch=joined.slots)
        return worker

    def hear(self, worker: Worker, beat: WorkerBeat, now: float) -> State | None:
        """Take a beat; return the state that the worker left when the beat changed it."""
        before = worker.hear(beat, now)
        if worker.profile.known and worker.profile.observed > self.borrowed.observed:
            self.borrowed = worker.profile
        return before

    def remove(self, worker: Worker, state: Literal["lost", "left"]) -> None:
        """Move a worker to those that are gone."""
        worker.state, worker.tokens_per_s = state, 0.0
        self.gone[worker.id] = self.workers.pop(worker.id)
        while len(self.gone) > GONE_KEPT:
            self.gone.pop(next(iter(self.gone)))

    def suspects(self, now: float) -> list[str]:
        """Return the workers not heard for a lease's time; each is lost if its lease has run out too.

        Looks once in a while only: the answer to a call soon after another is empty.
        """
        if now - self._suspects_at < self.lease_s / 20:
            return []
        self._suspects_at = now
        return [worker.id for worker in self.workers.values() if now - worker.heard_at > self.lease_s]

    def give_everyone_time(self, now: float) -> None:
        """Forget the silence so far, after a time in which nobody could be heard."""
        for worker in self.workers.values():
            worker.heard_at = now
