"""The paper's policy as printed: algorithm 1 (adaptive offload) and algorithm 2 (placement and balancing).

Where the paper leaves something open, this favors its policy: the plateau B is known from the first step on instead of
measured, and Theta is the best of those tried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rlboost.shared.messages import StepReport
from rlboost.simulation.policies import Policy
from rlboost.simulation.policies.baseline import Baseline, Instance, Tracked
from rlboost.simulation.scenario import Machine, SimulatedJob, typical_kv

ETA = 3.0
"""Not printed; the released code divides by this."""
PLATEAU = 0.7
"""B is the smallest batch with this share of the best throughput: of 0.7, 0.8 and 0.9 the best for this policy."""
THETA = 64
"""Not printed; of 4, 16 and 64 the best for this policy, or nearly so."""


def select(pending: Mapping[str, int], theta: int) -> str | None:
    """SelectInstance: return the worker with the fewest pending samples, None if none has fewer than `theta`."""
    below = [worker for worker, n in pending.items() if n < theta]
    return min(below, key=lambda worker: pending[worker], default=None)


def balance(pending: Mapping[str, int], executing: Mapping[str, int], plateau: int) -> tuple[str, str, int] | None:
    """ContinuousBalancing: select what to migrate.

    Args:
        pending: worker -> samples that wait for a slot.
        executing: worker -> samples that it runs.
        plateau: B, the batch beyond which throughput does not grow.

    Returns:
        (from, to, number of samples), or None.

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


class PaperManager(Baseline):
    """Algorithms 1 and 2."""

    def __init__(self, job: SimulatedJob, machine: Machine, policy: Policy) -> None:
        super().__init__(job, machine, policy)
        self.memory: dict[int, float] = {}
        kv = typical_kv(job.mean_prompt_tokens, job.lengths.quantile(0.5))
        self.plateau = machine.engine.plateau(kv, PLATEAU)
        # A co-located trainer splits a step evenly among its engines at once.
        self.theta = THETA if policy.fleet != "none" else job.samples
        self._to: dict[int, str] = {}
        """Released sample -> the worker that gets it."""

    def learn(self, report: StepReport, remote_wait_s: float) -> None:
        """Algorithm 1."""
        self.window_s = max(0.0, self.window_s + (report.wait_s - remote_wait_s) / ETA)
        n = self.fleet.last
        if not self.fleet.changed and self.policy.memory:
            self.memory[n] = self.window_s
        self.window_s = self.memory.get(n, self.window_s)

    def schedule(self) -> None:
        """Algorithm 2."""
        serving = {worker.id: worker for worker in self.serving()}
        self._place(serving)
        if self.policy.balancing:
            self._balance(serving)

    def _place(self, serving: dict[str, Instance]) -> None:
        pending = {worker.id: worker.pending + worker.assigned for worker in serving.values()}
        chosen: dict[str, list[Tracked]] = {}
        for sample in list(self.queued.values()):
            to = self._to.pop(sample.id, None)
            if to not in serving:
                to = select(pending, self.theta)
            if to is None:
                break
            pending[to] += 1
            chosen.setdefault(to, []).append(sample)
        for worker, samples in chosen.items():
            self.assign(serving[worker], samples)

    def _balance(self, serving: dict[str, Instance]) -> None:
        coming = Counter(to for sample, to in self._to.items() if sample in self.samples)
        while True:
            # What was assigned to a worker since its last heartbeat may run or wait.
            settled = [w for w in serving.values() if w.pending or not (w.assigned or coming[w.id])]
            pending = {worker.id: worker.pending for worker in settled}
            executing = {worker.id: len(worker.held) - worker.releasing - worker.pending for worker in settled}
            move = balance(pending, executing, self.plateau)
            if move is None:
                return
            source, target, n = move
            # Engines run samples in the order of assignment, so the last ones are pending.
            chosen = [s for s in serving[source].held.values() if not s.releasing][-n:]
            if not chosen:
                return
            self.release(serving[source], chosen)
            self._to |= {sample.id: target for sample in chosen}
            coming[target] += len(chosen)
