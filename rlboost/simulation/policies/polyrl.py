"""The rule of the paper's released code (PolyRL, commit 836120a), as read from it.

- Whole groups are assigned round robin to the instances whose queue was empty when it was last polled, about once a
  second; at most four groups start per second.
- A group is delivered whole and migrates whole: every sample, finished ones too, is cut to the length of the shortest
  and decoded again from there.
- A worker that joins gets what is assigned after that; nothing is balanced.
- The seeding window adapts as in the paper, with an exponential mean as its memory, in whole seconds, at least 5. It is
  waited for to its end even when everything is generated.

The released code gives a group up after five attempts and ignores errors of streams, so that the trainer gets fewer
samples: neither is reproduced here.
"""

from __future__ import annotations

from collections.abc import Iterable

from rlboost.shared.messages import FINISH_NONE, StepReport
from rlboost.simulation.policies import Policy
from rlboost.simulation.policies.baseline import Baseline, Tracked
from rlboost.simulation.policies.paper import ETA
from rlboost.simulation.scenario import Machine, SimulatedJob

POLL_S = 1.0
GROUPS_PER_S = 4.0
LEAST_WINDOW_S = 5.0
_STEADY, _CHANGED = 0.8, 0.2
"""Weight of the new window in the memory: in a step without more throughput; in one whose fleet changed."""


class PolyRLManager(Baseline):
    """Round robin, quota, whole groups."""

    ends_early = False
    """It sleeps for the whole window."""

    def __init__(self, job: SimulatedJob, machine: Machine, policy: Policy) -> None:
        super().__init__(job, machine, policy)
        self.memory: dict[int, float] = {}
        self._rate = 0.0
        self._turn = 0
        self._quota = 0.0
        self._quota_at = 0.0
        self._polled: dict[str, int] = {}
        self._polled_at = -1.0

    def learn(self, report: StepReport, remote_wait_s: float) -> None:
        """Adapt the window."""
        window_s = self.window_s + (report.wait_s - remote_wait_s) / ETA
        window_s = max(LEAST_WINDOW_S, round(window_s))
        n, rate = self.fleet.last, 1.0 / max(1e-9, self.now - self.fleet.since)
        known = self.memory.setdefault(n, window_s)
        if self.fleet.changed:
            self.memory[n] = (1 - _CHANGED) * known + _CHANGED * window_s
        elif rate <= self._rate:
            self.memory[n] = (1 - _STEADY) * known + _STEADY * window_s
        else:
            self.memory[n] = window_s
        self._rate = rate
        self.window_s = self.memory[n]

    def requeue(self, samples: Iterable[Tracked]) -> None:
        """Queue whole groups, cut to their shortest sample."""
        groups = dict.fromkeys(sample.request.group for sample in samples)
        again: dict[int, Tracked] = {}
        for group in groups:
            members = [self.samples[group + i] for i in range(self.job.group_size)]
            kept = min(member.tokens for member in members)
            for member in members:
                self.unassign(member)
                member.tokens, member.finish = kept, FINISH_NONE
                again[member.id] = member
        self.queued = {**again, **{i: sample for i, sample in self.queued.items() if i not in again}}

    def finished(self, sample: Tracked) -> None:
        """Deliver a group once all its samples are complete."""
        members = [self.samples[sample.request.group + i] for i in range(self.job.group_size)]
        if all(member.finish for member in members):
            for member in members:
                self.deliver(member)

    def schedule(self) -> None:
        """Assign groups round robin, as the quota allows."""
        if self.now - self._polled_at >= POLL_S:
            self._polled_at = self.now
            self._polled = {worker.id: worker.queue for worker in self.workers.values()}
        earned = (self.now - self._quota_at) * GROUPS_PER_S
        self._quota_at = self.now
        self._quota = min(GROUPS_PER_S, self._quota + earned)
        free = [worker for worker in self.serving() if self._polled.get(worker.id, 1) == 0]
        while self._quota >= 1.0 and free and self.queued:
            group = next(iter(self.queued.values())).request.group
            members = [self.queued[group + i] for i in range(self.job.group_size)]
            self.assign(free[self._turn % len(free)], members)
            self._turn += 1
            self._quota -= 1.0
