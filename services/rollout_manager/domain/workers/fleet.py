"""The workers of a system: who joined, left or stopped sending heartbeats, and what is known of each kind."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Literal

from rlboost.services.rollout_manager.domain.token_log.sample import Sample
from rlboost.services.rollout_manager.domain.workers.lifetimes import Lifetimes, availability
from rlboost.services.rollout_manager.domain.workers.throughput_model import Profile
from rlboost.services.rollout_manager.domain.workers.worker import Serving, State, Worker
from rlboost.shared.messages import WorkerHeartbeat, WorkerJoined
from rlboost.shared.messages.protocol import PROTOCOL

MAX_INVALID = 3
"""A worker is drained after it sent invalid tokens for this many samples that another worker then completed."""
GONE_RETAINED = 200
"""How many departed workers stay in the list that the REST API shows."""


class Fleet:
    """All present workers, and the most recent of the departed ones."""

    def __init__(self, lease_s: float, prices: Mapping[str, float]) -> None:
        """Start empty. A worker is a suspect after `lease_s` without a heartbeat; see `prices`."""
        self.lease_s = lease_s
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
        self.revision = 0
        """Rises with every change of who is present, in which state, serving what."""
        self._changed: dict[str, None] = {}
        self._silence_checked_at = -math.inf

    def join(self, joined: WorkerJoined, now: float) -> Worker | None:
        """Add a worker; None when it is known already."""
        if joined.worker in self.workers or joined.worker in self.gone:
            return None
        profile = self.profiles.setdefault(joined.kind, Profile())
        worker = Worker(joined, now, profile=profile, batch_cap=joined.slots, _changed=self._changed)
        worker.price_per_hour = worker.price_per_hour or self.prices.get(joined.kind, 0.0)
        self.workers[worker.id] = worker
        self.revision += 1
        if joined.protocol != PROTOCOL:
            self._incompatible.append(worker)
        return worker

    def on_heartbeat(self, worker: Worker, heartbeat: WorkerHeartbeat, now: float) -> State | None:
        """Apply a heartbeat; return the previous state if the heartbeat changed it."""
        serving = worker.job_id, worker.version, worker.has_reported
        before = worker.on_heartbeat(heartbeat, now)
        if before is not None or serving != (worker.job_id, worker.version, worker.has_reported):
            self.revision += 1
        if worker.state == "joining":
            worker.starting = True
        elif worker.starting and worker.state == "ready":
            worker.starting = False
            self.lifetimes[worker.joined.kind].on_startup(worker.age_s)
        if worker.profile.known and worker.profile.observed > self.fallback_profile.observed:
            self.fallback_profile = worker.profile
        return before

    def on_notice(self, worker: Worker) -> None:
        """Mark a worker as about to be preempted."""
        worker.noticed, worker.state = True, "draining"
        self._on_change(worker)

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

    def on_drain(self, worker: Worker) -> None:
        """Mark a worker as commanded to drain."""
        worker.drain_commanded, worker.state = True, "draining"
        self._on_change(worker)

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

    def assign(self, worker: Worker, serving: Serving) -> None:
        """Record that a worker was commanded to use a version."""
        worker.assigned_version = serving
        self._on_change(worker)

    def remove(self, worker: Worker, state: Literal["lost", "left"], reason: str) -> None:
        """Move a worker to the departed ones."""
        worker.state, worker.tokens_per_s, worker.waiting, worker.gone_reason = state, 0.0, None, reason
        self.lifetimes[worker.joined.kind].departed_s += worker.age_s
        self.gone[worker.id] = self.workers.pop(worker.id)
        self._on_change(worker)
        while len(self.gone) > GONE_RETAINED:
            self.gone.pop(next(iter(self.gone)))

    def take_changed(self) -> list[str]:
        """Return, once, the workers whose load, capacity, state or version may have changed, or that departed."""
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def _on_change(self, worker: Worker) -> None:
        self.revision += 1
        worker.mark_changed()

    def silent_workers(self, now: float) -> list[str]:
        """Return the workers silent for a lease's time; each is lost if its lease has run out too.

        Looks at most twenty times per lease; a call in between returns an empty list.
        """
        if now - self._silence_checked_at < self.lease_s / 20:
            return []
        self._silence_checked_at = now
        return [worker.id for worker in self.workers.values() if now - worker.last_seen_at > self.lease_s]

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
