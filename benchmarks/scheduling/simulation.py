"""Virtual time: events in order, messages with their latency, a manager that takes turns, a cloud that takes workers.

The manager under test sees what the real one sees, and nothing else: messages of `shared.messages`, and which leases
are held. `turn` is one turn of `services/rollout_manager/app.py`: read, decide, write.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from benchmarks.scheduling.oracle import best_tokens_per_s, typical_kv
from benchmarks.scheduling.trainer import SimTrainer
from benchmarks.scheduling.worker import SimWorker
from benchmarks.scheduling.workload import Going, Joining, SpotEvent, Workload
from rlboost.shared.messages import Assign, Message

LIMIT_STEPS = 40.0
"""A run that takes longer than so many times the bound of all its steps hangs."""
TAIL_PART = 0.5
"""The tail begins when the samples left cannot bring the engines to this part of their best speed."""


@dataclass(slots=True)
class Turn:
    """What a manager wants done, in order."""

    commands: list[tuple[str, Message]] = field(default_factory=list)
    """(worker, command)"""
    deliveries: list[Message] = field(default_factory=list)


class Manager(Protocol):
    """A policy, in the manager's place."""

    def turn(self, messages: Collection[Message], now: float, leases: Callable[[str], bool]) -> Turn:
        """Take what has come, and decide.

        Args:
            messages: in the order in which they came.
            now: virtual time, seconds.
            leases: returns True if a worker's lease is held.

        """


@dataclass(slots=True)
class Tail:
    """How long fewer samples were left than engines could use, while nothing was trained; by step."""

    s: dict[int, float] = field(default_factory=dict)
    lost_s: dict[int, float] = field(default_factory=dict)
    """The same seconds, each weighted by the part of the engines' best speed that was not reached."""


class Simulation:
    """One run of one policy on one workload."""

    def __init__(self, work: Workload, manager: Manager, limit_s: float) -> None:
        """Prepare.

        Args:
            work: what happens from outside.
            manager: the policy.
            limit_s: virtual time after which the run has failed.

        """
        self.work, self.case = work, work.case
        self.lengths = work.length_of()
        self.now = 0.0
        self.trainer = SimTrainer(self)
        self.workers: dict[str, SimWorker] = {}
        self.tail = Tail()
        self.host_s = 0.0
        """Processor time that the manager took."""
        self.turns = 0
        self.placements = 0
        self.moves = 0
        """Placements of samples that had been placed before."""
        self.manager = manager
        self._limit_s = limit_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._n_events = 0
        self._inbox: list[Message] = []
        self._turn_at = 0.0
        self._last_turn = -1.0
        self._enough = self.case.engine.plateau(typical_kv(self.case), TAIL_PART)
        self._best_tokens_per_s = best_tokens_per_s(self.case)
        self._watched: dict[str, float] = {}

    def run(self) -> None:
        """Run to the last step's end.

        Raises:
            RuntimeError: the run does not end.

        """
        for i in range(self.case.reserved):
            self._join(SimWorker(self, f"reserved-{i}", "reserved", 1.0))
        for joining in self.work.fleet:
            self._join(SimWorker(self, joining.worker, "preemptible", joining.speed))
        self.trainer.start()
        self.at(self.case.report_s, self._watch)
        while not self.trainer.done:
            self.now, _, call = heapq.heappop(self._events)
            call()
            if self.now > self._limit_s:
                raise RuntimeError(
                    f"step {self.trainer.steps[-1].step} does not end: {self.trainer.missing} samples lack"
                )
        for worker in self.workers.values():
            if worker.alive:
                worker.engine.advance(self.now)

    # --- what workers and trainer use ---------------------------------------------------------------------------------

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        """Call at a moment of virtual time."""
        self._n_events += 1
        heapq.heappush(self._events, (max(time_s, self.now), self._n_events, call))

    def tell_manager(self, message: Message) -> None:
        """Let the manager read this after the latency."""
        self.at(self.now + self.case.latency_s, partial(self._arrive, message))

    def step_begins(self, step: int) -> None:
        """Let the cloud do what it does in this step."""
        for event in self.work.spot[step]:
            self.at(self.now + event.after_s, partial(self._spot, event))

    # --- the manager --------------------------------------------------------------------------------------------------

    def _arrive(self, message: Message) -> None:
        self._inbox.append(message)
        self._plan_turn(self._last_turn + self.case.turn_s)

    def _plan_turn(self, at: float) -> None:
        if at < self._turn_at or self._turn_at <= self._last_turn:
            self._turn_at = max(at, self.now)
            self.at(self._turn_at, self._turn)

    def _turn(self) -> None:
        if self.now < self._turn_at or self._last_turn >= self._turn_at:
            return  # another one was planned in its place
        self._last_turn = self.now
        inbox, self._inbox = self._inbox, []
        began = time.perf_counter()
        turn = self.manager.turn(inbox, self.now, self._holds_lease)
        self.host_s += time.perf_counter() - began
        self.turns += 1
        arrives = self.now + self.case.latency_s
        for worker, command in turn.commands:
            if isinstance(command, Assign):
                self.placements += len(command.samples)
                self.moves += sum(assignment.attempt > 1 for assignment in command.samples)
            if worker in self.workers:
                self.at(arrives, partial(self.workers[worker].receive, command))
        for message in turn.deliveries:
            self.at(arrives, partial(self.trainer.receive, message))
        self._plan_turn(self.now + self.case.tick_s)

    def _holds_lease(self, worker: str) -> bool:
        known = self.workers.get(worker)
        return known is not None and (known.alive or self.now - known.engine.now < self.case.lease_s)

    # --- the cloud ----------------------------------------------------------------------------------------------------

    def _join(self, worker: SimWorker) -> None:
        self.workers[worker.id] = worker
        # Workers do not report in step with each other.
        phase = self.case.report_s * (len(self.workers) * 0.618 % 1.0)
        self.at(self.now + phase / 4, worker.join)

    def _spot(self, event: SpotEvent) -> None:
        match event.what:
            case Joining(worker, speed):
                self._join(SimWorker(self, worker, "preemptible", speed))
            case Going(worker, noticed):
                if noticed:
                    self.workers[worker].give_notice()
                else:
                    self.workers[worker].kill()

    # --- watching -----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Add to the tail if this is it."""
        interval_s = self.case.report_s
        self.at(self.now + interval_s, self._watch)
        serving = [worker for worker in self.workers.values() if worker.generates]
        rate = 0.0
        for worker in serving:
            worker.engine.advance(self.now)
            decoded = worker.engine.decoded
            rate += (decoded - self._watched.get(worker.id, decoded)) / interval_s
            self._watched[worker.id] = decoded
        left, trainer = self.trainer.missing, self.trainer
        if not left or not serving or trainer.now_training or left >= self._enough * len(serving):
            return
        step = trainer.steps[-1].step
        best = self._best_tokens_per_s * sum(worker.engine.speed for worker in serving)
        self.tail.s[step] = self.tail.s.get(step, 0.0) + interval_s
        lost_s = interval_s * max(0.0, 1.0 - rate / best)
        self.tail.lost_s[step] = self.tail.lost_s.get(step, 0.0) + lost_s
