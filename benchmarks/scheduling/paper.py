"""The paper's policy as printed: algorithm 1 (adaptive offload) and algorithm 2 (placement and balancing).

Where the paper leaves something out, the baseline gets the better of it: the plateau B is known from the first step on
instead of measured, the first window is tuned by hand, and so is Theta (`Case.theta`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from benchmarks.scheduling.cases import Case
from benchmarks.scheduling.oracle import typical_kv
from benchmarks.scheduling.rules import Instance, Rules, Tracked
from rlboost.shared.messages import StepReport

ETA = 3.0
"""Not printed; the released code divides by this."""
PLATEAU = 0.7
"""B is the smallest batch with this part of the best speed: of 0.7, 0.8 and 0.9 the best for this policy."""


def select(pending: Mapping[str, int], theta: int) -> str | None:
    """SelectInstance: of the workers with fewer than `theta` pending, the one with the fewest; None: wait."""
    below = [worker for worker, n in pending.items() if n < theta]
    return min(below, key=lambda worker: pending[worker], default=None)


def balance(pending: Mapping[str, int], executing: Mapping[str, int], plateau: int) -> tuple[str, str, int] | None:
    """ContinuousBalancing: what to move now.

    Args:
        pending: worker -> samples that wait at it.
        executing: worker -> samples that it runs.
        plateau: B, the batch beyond which a worker gets no faster.

    Returns:
        (from, to, how many), or None when nothing is to be moved.

    """
    idle = next((worker for worker, n in pending.items() if n == 0), None)
    most = max(pending, key=lambda worker: pending[worker], default=None)
    if idle is not None and most is not None and pending[most] > 0:
        return most, idle, 1
    empty = next((worker for worker, n in executing.items() if n == 0), None)
    fullest = max(executing, key=lambda worker: executing[worker], default=None)
    if empty is not None and fullest is not None and executing[fullest] > plateau:
        return fullest, empty, executing[fullest] - plateau
    return None


class Paper(Rules):
    """Algorithms 1 and 2."""

    def __init__(self, case: Case) -> None:
        """Begin with a window and no memory."""
        super().__init__(case)
        self.memory: dict[int, float] = {}
        self.plateau = case.engine.plateau(typical_kv(case), PLATEAU)
        self._to: dict[int, str] = {}
        """Samples on the move -> where to."""

    def learn(self, report: StepReport, remote_wait_s: float) -> None:
        """Algorithm 1."""
        self.window_s = max(0.0, self.window_s + (report.wait_s - remote_wait_s) / ETA)
        n = self.fleet.last
        if not self.fleet.changed:
            self.memory[n] = self.window_s
        self.window_s = self.memory.get(n, self.window_s)

    def schedule(self) -> None:
        """Algorithm 2."""
        serving = {worker.id: worker for worker in self.serving()}
        self._place(serving)
        self._balance(serving)

    def _place(self, serving: dict[str, Instance]) -> None:
        pending = {worker.id: worker.queued + worker.fresh for worker in serving.values()}
        chosen: dict[str, list[Tracked]] = {}
        for sample in list(self.waiting.values()):
            to = self._to.pop(sample.id, None)
            if to not in serving:
                to = select(pending, self.case.theta)
            if to is None:
                break
            pending[to] += 1
            chosen.setdefault(to, []).append(sample)
        for worker, samples in chosen.items():
            self.assign(serving[worker], samples)

    def _balance(self, serving: dict[str, Instance]) -> None:
        coming = Counter(to for sample, to in self._to.items() if sample in self.samples)
        while True:
            # Of a worker that was given something since its last beat it is not known whether that runs or waits.
            settled = [w for w in serving.values() if w.queued or not (w.fresh or coming[w.id])]
            pending = {worker.id: worker.queued for worker in settled}
            executing = {worker.id: len(worker.held) - worker.asked_back - worker.queued for worker in settled}
            move = balance(pending, executing, self.plateau)
            if move is None:
                return
            source, target, n = move
            # The youngest wait, if any does: engines run in the order in which they were given.
            chosen = [s for s in serving[source].held.values() if not s.released][-n:]
            if not chosen:
                return
            self.release(serving[source], chosen)
            self._to |= {sample.id: target for sample in chosen}
            coming[target] += len(chosen)
