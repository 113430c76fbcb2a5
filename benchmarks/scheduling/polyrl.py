"""The rule of the authors' released code (PolyRL, commit 836120a), as read from it.

- Whole groups go round robin to the instances whose queue was empty when it was last polled, about once a second; four
  groups a second at most leave in all.
- A group stays together: it is delivered whole, and moved whole. A move cuts every member, finished ones too, to the
  length of its shortest, and they are decoded again.
- A worker that joins gets what is handed out after that; nothing is balanced.
- The seeding window adapts as in the paper, with an exponential mean as its memory, in whole seconds, at least 5. It is
  waited for to its end even when everything is generated.

It gives a group up after five attempts, which here would be fewer samples for the trainer: that is left out. So are its
two ways of losing samples without saying so.
"""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.scheduling.cases import Case
from benchmarks.scheduling.paper import ETA
from benchmarks.scheduling.rules import Rules, Tracked
from rlboost.shared.messages import FINISH_NONE, StepReport

POLL_S = 1.0
GROUPS_PER_S = 4.0
LEAST_WINDOW_S = 5.0
_STEADY, _CHANGED = 0.8, 0.2
"""Weight of the new window in the memory: in a step without more throughput; in one whose fleet changed."""


def cut(tokens: Iterable[int]) -> int:
    """Return how many tokens each member of a group keeps when the group is moved."""
    return min(tokens)


class PolyRL(Rules):
    """Round robin, quota, whole groups."""

    def __init__(self, case: Case) -> None:
        """Begin with a window and no memory."""
        super().__init__(case)
        self.unit_s = case.polyrl_second_s
        self.memory: dict[int, float] = {}
        self._rate = 0.0
        self._turn = 0
        self._quota = 0.0
        self._quota_at = 0.0
        self._polled: dict[str, int] = {}
        self._polled_at = -1.0

    @property
    def ends_early(self) -> bool:
        """It sleeps for the whole window."""
        return False

    def learn(self, report: StepReport, remote_wait_s: float) -> None:
        """Adapt the window."""
        unit_s = self.unit_s
        window_s = self.window_s + (report.wait_s - remote_wait_s) / ETA
        window_s = max(LEAST_WINDOW_S, round(window_s / unit_s)) * unit_s
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

    def orphaned(self, samples: Iterable[Tracked]) -> None:
        """Let whole groups wait, cut to their shortest member."""
        groups = dict.fromkeys(sample.request.group for sample in samples)
        again: dict[int, Tracked] = {}
        for group in groups:
            members = [self.samples[group + i] for i in range(self.case.group_size)]
            kept = cut(member.tokens for member in members)
            for member in members:
                self._let_go(member)
                member.tokens, member.finish = kept, FINISH_NONE
                again[member.id] = member
        self.waiting = {**again, **{i: sample for i, sample in self.waiting.items() if i not in again}}

    def finished(self, sample: Tracked) -> None:
        """Deliver a group when all its members are complete."""
        members = [self.samples[sample.request.group + i] for i in range(self.case.group_size)]
        if all(member.finish for member in members):
            for member in members:
                self.deliver(member)

    def schedule(self) -> None:
        """Hand out groups: round robin, as the quota allows."""
        if self.now - self._polled_at >= POLL_S * self.unit_s:
            self._polled_at = self.now
            self._polled = {worker.id: worker.queue for worker in self.workers.values()}
        earned = (self.now - self._quota_at) * GROUPS_PER_S / self.unit_s
        self._quota_at = self.now
        self._quota = min(GROUPS_PER_S, self._quota + earned)
        free = [worker for worker in self.serving() if self._polled.get(worker.id, 1) == 0]
        while self._quota >= 1.0 and free and self.waiting:
            group = next(iter(self.waiting.values())).request.group
            members = [self.waiting[group + i] for i in range(self.case.group_size)]
            self.assign(free[self._turn % len(free)], members)
            self._turn += 1
            self._quota -= 1.0
