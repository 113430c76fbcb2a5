"""The fleet: who is there, in what state, with which samples. Death is a lease that ran out and beats that stopped."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from shared.messages import WorkerBeat, WorkerJoined

State = Literal["joining", "pulling", "ready", "suspended", "draining", "lost", "left"]

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
    known: bool = False
    """False until it has said something since this manager began: its state is a guess."""
    told_version: tuple[str, int] | None = None
    """The last (job, version) it was told to use."""
    told_active: bool | None = None
    """A reserved worker: whether it was last told to generate; None before the first word."""
    noticed: bool = False
    samples: set[int] = field(default_factory=set)

    @property
    def id(self) -> str:
        """Return the incarnation's id."""
        return self.joined.worker

    @property
    def reserved(self) -> bool:
        """Tell whether it shares its device with the trainer."""
        return self.joined.role == "reserved"

    @property
    def pending(self) -> int:
        """Return how many of its samples cannot run yet for want of a slot."""
        return max(0, len(self.samples) - self.joined.slots)

    def serves(self, job_id: str, version: int) -> bool:
        """Tell whether it can generate for this job with this version now."""
        return self.state == "ready" and self.known and self.job_id == job_id and self.version == version

    def hear(self, beat: WorkerBeat, now: float) -> State | None:
        """Take a beat; return the state it left when the beat changed it."""
        before = self.state
        self.heard_at, self.known, self.last_beat_at = now, True, beat.at
        self.job_id, self.version, self.tokens_per_s = beat.job_id, beat.version, beat.tokens_per_s
        self.state = "draining" if self.noticed else beat.state
        return before if before != self.state else None

    def public(self) -> dict[str, Any]:
        """Return the fields of the REST API, times as Unix seconds."""
        running = min(len(self.samples), self.joined.slots)
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

    def join(self, joined: WorkerJoined, now: float) -> Worker | None:
        """Add a worker; None when it is known already."""
        if joined.worker in self.workers or joined.worker in self.gone:
            return None
        worker = self.workers[joined.worker] = Worker(joined, now)
        return worker

    def remove(self, worker: Worker, state: Literal["lost", "left"]) -> None:
        """Move a worker to those that are gone."""
        worker.state, worker.tokens_per_s = state, 0.0
        self.gone[worker.id] = self.workers.pop(worker.id)
        while len(self.gone) > GONE_KEPT:
            self.gone.pop(next(iter(self.gone)))

    def suspects(self, now: float) -> list[str]:
        """Return the workers not heard for a lease's time; each is lost if its lease has run out too."""
        return [worker.id for worker in self.workers.values() if now - worker.heard_at > self.lease_s]

    def present(self, *, reserved: bool) -> list[Worker]:
        """Return the workers of one role that are there and not on their way out."""
        return [w for w in self.workers.values() if w.reserved is reserved and w.state != "draining"]

    def give_everyone_time(self, now: float) -> None:
        """Forget the silence so far, after a time in which nobody could be heard."""
        for worker in self.workers.values():
            worker.heard_at = now
