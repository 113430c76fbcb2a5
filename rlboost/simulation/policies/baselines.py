"""The baselines: the paper's policy as printed, and the rule of its released code, without any of our own domain code.

A baseline follows the same messages as ours and learns of lost workers in the same way. Which worker gets a sample,
what a migration takes along and how long the seeding window is, its subclass decides.

The paper's policy is algorithm 1 (adaptive offload) and algorithm 2 (placement and balancing). Where the paper leaves
something open, this favors its policy: the plateau B is known from the first step on instead of measured, and Theta is
the best of those tried.

The rule of the released code (PolyRL, commit 836120a), as read from it:

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

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from rlboost.shared.ids import SampleId
from rlboost.shared.messages import (
    FINISH_NONE,
    FINISH_RELEASED,
    Assign,
    Assignment,
    GroupRequested,
    Message,
    PreemptionNotice,
    Release,
    Resume,
    SampleFinished,
    SeedingEnded,
    SeedingReopened,
    StepReport,
    Suspend,
    TokenFrame,
    UseVersion,
    WeightsCommitted,
    WorkerHeartbeat,
    WorkerJoined,
    WorkerLeft,
)
from rlboost.shared.messages.token_rows import token_rows
from rlboost.shared.wire import I32, U32, U64, pack
from rlboost.simulation.environment import LEASE_S, generation_s
from rlboost.simulation.policies import Policy, Turn
from rlboost.simulation.scenario import JOB_ID, Machine, SimulatedJob, typical_kv

# --- Bookkeeping of a manager, which both share -----------------------------------------------------------------------


@dataclass(slots=True)
class Tracked:
    """One sample in flight."""

    id: int
    request: GroupRequested
    tokens: int = 0
    attempt: int = 0
    worker: str = ""
    """Its owner; empty while it is queued."""
    finish: int = FINISH_NONE
    releasing: bool = False
    """Its owner was asked to release it."""


@dataclass(slots=True)
class Instance:
    """One worker as the manager sees it."""

    id: str
    reserved: bool
    last_seen_at: float
    state: str = "joining"
    version: int = -1
    noticed: bool = False
    assigned_version: int = -1
    assigned_active: bool | None = None
    held: dict[int, Tracked] = field(default_factory=dict)
    """Sample -> its state, in order of assignment."""
    queue: int = 0
    """Pending samples at its last heartbeat."""
    assigned: int = 0
    """Samples assigned since then."""
    releasing: int = 0
    """Samples that it was asked to release since then."""
    idle_since: float = 0.0

    @property
    def pending(self) -> int:
        """Return how many samples are known to wait for a slot."""
        return max(0, self.queue - self.releasing)


@dataclass(slots=True)
class Window:
    """The seeding window of one step."""

    step: int
    length_s: float
    phase: Literal["open", "closing", "ended"] = "open"
    began_at: float = math.inf


@dataclass(slots=True)
class FleetSize:
    """The number of preemptible workers during a step."""

    since: float = 0.0
    """When the step began."""
    changed: bool = False
    last: int = -1

    def update(self, n: int) -> None:
        """Record the present number."""
        self.changed |= self.last not in {-1, n}
        self.last = n

    def begin(self, now: float) -> None:
        """Begin a step."""
        self.since, self.changed = now, False


class Baseline:
    """A manager; subclasses implement `schedule` and `learn`."""

    ends_early = True
    """The window ends once everything is generated."""

    def __init__(self, job: SimulatedJob, machine: Machine, policy: Policy) -> None:
        self.job, self.machine, self.policy = job, machine, policy
        self.now = 0.0
        self.workers: dict[str, Instance] = {}
        self.samples: dict[int, Tracked] = {}
        self.queued: dict[int, Tracked] = {}
        """Without an owner, in the order in which they start."""
        self.window: Window | None = None
        self.window_s = generation_s(job, machine) / 2 if policy.seeding else 0.0
        self.fleet = FleetSize()
        self.version = -1
        self._out = Turn()

    # --- what a subclass decides --------------------------------------------------------------------------------------

    def schedule(self) -> None:
        """Assign queued samples, and migrate running ones."""
        raise NotImplementedError

    def learn(self, report: StepReport, remote_wait_s: float) -> None:
        """Set `window_s` for the next step."""
        raise NotImplementedError

    def requeue(self, samples: Iterable[Tracked]) -> None:
        """Queue samples that have lost their owner: before all others, with their tokens."""
        first = {sample.id: sample for sample in samples if not sample.finish}
        self.queued = {**first, **self.queued}

    def finished(self, sample: Tracked) -> None:
        """Deliver a sample that is complete."""
        self.deliver(sample)

    # --- a turn -------------------------------------------------------------------------------------------------------

    def turn(self, messages: Collection[Message], now: float, has_lease: Callable[[str], bool]) -> Turn:
        """Take one turn: read, decide, write."""
        self.now, self._out = now, Turn()
        reports = [m for m in messages if isinstance(m, WorkerHeartbeat | WorkerLeft | PreemptionNotice)]
        for message in messages:
            if not isinstance(message, WorkerHeartbeat | WorkerLeft | PreemptionNotice):
                self._take(message)
        for message in reports:
            self._on_report(message)
        for worker in list(self.workers.values()):
            if now - worker.last_seen_at > LEASE_S and not has_lease(worker.id):
                self._remove(worker)
        self.fleet.update(len(self._preemptible()))
        self._advance_window()
        for worker in self.workers.values():
            self._instruct(worker)
        self.schedule()
        return self._out

    def _take(self, message: Message) -> None:
        match message:
            case TokenFrame():
                self._frame(message)
            case GroupRequested():
                self._request(message)
            case WeightsCommitted():
                self.version = message.version
            case StepReport():
                idle = [self.now - w.idle_since for w in self._preemptible() if not w.held]
                n = len(self._preemptible())
                if self.policy.seeding:
                    self.learn(message, sum(idle) / n if n else 0.0)
                self.fleet.begin(self.now)
            case WorkerJoined():
                self.workers[message.worker] = Instance(
                    message.worker, message.role == "reserved", self.now, idle_since=self.now
                )
            case _:
                raise RuntimeError(f"unexpected message: {message.tag}")

    def _request(self, request: GroupRequested) -> None:
        step = SampleId.unpack(request.group).step
        if self.window is None or step > self.window.step:
            self.window = Window(step, self.window_s)
        for i in range(request.n):
            sample = Tracked(request.group + i, request)
            self.samples[sample.id] = self.queued[sample.id] = sample

    def _frame(self, frame: TokenFrame) -> None:
        worker = self.workers.get(frame.worker)
        for sample_id, attempt, offset, count, _version, finish in token_rows(frame):
            sample = self.samples.get(sample_id)
            if sample is None or worker is None or attempt != sample.attempt or sample.finish:
                continue
            if offset != sample.tokens:
                raise RuntimeError(
                    f"sample {sample_id} has {sample.tokens} tokens, but its worker continues at {offset}"
                )
            sample.tokens += count
            if finish == FINISH_RELEASED:
                self.unassign(sample)
                self.requeue([sample])
            elif finish:
                sample.finish = finish
                self.unassign(sample)
                self.finished(sample)

    def unassign(self, sample: Tracked) -> None:
        """Take a sample from its owner."""
        worker = self.workers.get(sample.worker)
        if worker is not None:
            worker.held.pop(sample.id, None)
            if not worker.held:
                worker.idle_since = self.now
        sample.worker, sample.releasing = "", False

    # --- workers ------------------------------------------------------------------------------------------------------

    def _on_report(self, message: Message) -> None:
        match message:
            case WorkerHeartbeat() if message.worker in self.workers:
                worker = self.workers[message.worker]
                before = worker.state
                worker.last_seen_at, worker.version = self.now, message.version
                worker.state = "draining" if worker.noticed else message.state
                worker.queue, worker.assigned, worker.releasing = message.pending, 0, 0
                if worker.state == "suspended" != before:
                    self._unassign_all(worker)
            case PreemptionNotice() if message.worker in self.workers:
                worker = self.workers[message.worker]
                worker.noticed, worker.state = True, "draining"
            case WorkerLeft() if message.worker in self.workers:
                self._remove(self.workers[message.worker])

    def _remove(self, worker: Instance) -> None:
        if not self.policy.migration:
            for sample in worker.held.values():
                sample.tokens = 0
        self._unassign_all(worker)
        del self.workers[worker.id]

    def _unassign_all(self, worker: Instance) -> None:
        samples = list(worker.held.values())
        for sample in samples:
            self.unassign(sample)
        self.requeue(samples)

    def _preemptible(self) -> list[Instance]:
        return [worker for worker in self.workers.values() if not worker.reserved and worker.state != "draining"]

    def serving(self) -> list[Instance]:
        """Return the workers that can take samples now."""
        return [
            worker
            for worker in self.workers.values()
            if worker.state == "ready" and worker.version == self.version and worker.assigned_active is not False
        ]

    def _instruct(self, worker: Instance) -> None:
        if worker.state == "draining" or self.window is None:
            return
        if worker.assigned_version != self.version:
            worker.assigned_version = self.version
            self._send(worker, UseVersion(job_id=JOB_ID, version=self.version))
        active = self.window.phase == "open"
        if worker.reserved and worker.assigned_active is not active:
            worker.assigned_active = active
            step = self.window.step
            self._send(worker, Resume(step=step) if active else Suspend(step=step))

    # --- the window ---------------------------------------------------------------------------------------------------

    def _advance_window(self) -> None:
        window, reserved = self.window, [worker for worker in self.workers.values() if worker.reserved]
        if window is None:
            return
        preemptible = self._preemptible()
        if window.phase == "open":
            over = self.now - window.began_at >= window.length_s
            ready = any(worker.state == "ready" and worker.version == self.version for worker in preemptible)
            nothing_left = not self.samples and (self.ends_early or over or not preemptible)
            if nothing_left or (over and ready):
                window.phase = "closing"
        elif window.phase == "closing":
            if all(worker.state == "suspended" for worker in reserved):
                window.phase = "ended"
                length_s = 0.0 if window.began_at == math.inf else self.now - window.began_at
                self._out.deliveries.append(SeedingEnded(step=window.step, window_s=length_s, reason="window"))
        elif self.samples and not preemptible and reserved:
            window.phase, window.began_at = "open", self.now
            self._out.deliveries.append(SeedingReopened(step=window.step))

    # --- commands and deliveries --------------------------------------------------------------------------------------

    def _send(self, worker: Instance, message: Message) -> None:
        self._out.commands.append((worker.id, message))

    def assign(self, worker: Instance, samples: Collection[Tracked]) -> None:
        """Assign queued samples to a worker."""
        if self.window is not None:
            self.window.began_at = min(self.window.began_at, self.now)
        for sample in samples:
            del self.queued[sample.id]
            sample.attempt += 1
            sample.worker = worker.id
            worker.held[sample.id] = sample
        worker.assigned += len(samples)
        assignments = [
            Assignment(
                sample=sample.id,
                attempt=sample.attempt,
                prompt=sample.request.prompt,
                tokens=bytes(I32.itemsize * sample.tokens),
                sampling=sample.request.sampling,
                seed=0,
            )
            for sample in samples
        ]
        self._send(worker, Assign(job_id=JOB_ID, version=self.version, samples=assignments))

    def release(self, worker: Instance, samples: Collection[Tracked]) -> None:
        """Ask a worker to release samples."""
        for sample in samples:
            sample.releasing = True
        worker.releasing += len(samples)
        columns = [sample.id for sample in samples], [sample.attempt for sample in samples]
        self._send(worker, Release(samples=pack(columns[0], U64), attempts=pack(columns[1], U32)))

    def deliver(self, sample: Tracked) -> None:
        """Deliver a complete sample to the trainer."""
        del self.samples[sample.id]
        self._out.deliveries.append(
            SampleFinished(
                sample=sample.id,
                tokens=bytes(I32.itemsize * sample.tokens),
                logprobs=b"",
                finish="stop" if sample.tokens < self.job.lengths.cap else "length",
                spans=[],
                attempts=sample.attempt,
                group_done=False,
            )
        )


# --- The paper's policy as printed ------------------------------------------------------------------------------------

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


# --- The rule of the paper's released code ----------------------------------------------------------------------------

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
