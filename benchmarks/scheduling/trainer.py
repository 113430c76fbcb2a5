"""A trainer that computes nothing: it asks for steps, trains for as long as it would take, and says how it went."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from benchmarks.scheduling.cases import Case
from benchmarks.scheduling.workload import Group, Workload
from rlboost.shared.columns import I32, pack
from rlboost.shared.ids import SampleId, group_of
from rlboost.shared.messages import (
    GroupRequested,
    Message,
    SampleFinished,
    Sampling,
    SeedingEnded,
    SeedingReopened,
    StepReport,
    WeightsCommitted,
)

JOB_ID = "job"


class Surroundings(Protocol):
    """What a trainer needs of the simulation."""

    now: float
    case: Case
    work: Workload

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        """Call at a moment of virtual time."""

    def tell_manager(self, message: Message) -> None:
        """Send requests, reports and the news of weights."""

    def step_begins(self, step: int) -> None:
        """Let the cloud know."""


@dataclass(slots=True)
class StepTimes:
    """How a step went. Moments of virtual time, and durations in seconds."""

    step: int
    began: float
    ended: float = 0.0
    device_at: float = 0.0
    """When the device was the trainer's for the first time."""
    all_there_at: float = 0.0
    """When the last sample came."""
    idle_s: float = 0.0
    """While the device was the trainer's and there was nothing to train."""
    train_s: float = 0.0


class SimTrainer:
    """One job from its first step to its last."""

    def __init__(self, sim: Surroundings) -> None:
        self._sim = sim
        self.steps: list[StepTimes] = []
        self.done = False
        self.delivered: dict[int, int] = {}
        """Sample -> tokens: what came, once each."""
        self._missing: dict[int, int] = {}
        """Group -> members that are not there yet."""
        self._scored: deque[Group] = deque()
        self._untrained = 0
        self._device_ours = self._busy = False
        self._idle_since: float | None = None

    @property
    def now_training(self) -> bool:
        """Return True if it computes at this moment."""
        return self._busy

    @property
    def missing(self) -> int:
        """Return how many samples of this step are still to come."""
        return sum(self._missing.values())

    def start(self) -> None:
        """Begin the first step."""
        self._announce(0)
        self._begin(0)

    def _announce(self, version: int) -> None:
        now = self._sim.now
        self._sim.tell_manager(WeightsCommitted(job_id=JOB_ID, version=version, manifest_digest="", n_bytes=1, at=now))

    def _begin(self, step: int) -> None:
        sim = self._sim
        if step == len(sim.work.steps):
            self.done = True
            return
        groups = sim.work.steps[step]
        self.steps.append(StepTimes(step, sim.now))
        self._missing = {group.id: len(group.lengths) for group in groups}
        self._untrained = len(groups)
        self._device_ours = False
        sampling = Sampling(max_tokens=sim.case.lengths.cap)
        for group in groups:
            # A prompt has the group's number as its content: prompts never repeat here.
            prompt = pack([group.id % 2**31] * group.prompt_tokens, I32)
            request = GroupRequested(
                job_id=JOB_ID,
                group=group.id,
                n=len(group.lengths),
                prompt=prompt,
                sampling=sampling,
                version=step,
                seed=group.id % 2**31,
            )
            sim.tell_manager(request)
        sim.step_begins(step)

    def receive(self, message: Message) -> None:
        """Take what the manager delivers."""
        match message:
            case SampleFinished():
                self._take(message)
            case SeedingEnded():
                if message.step == self.steps[-1].step:
                    self._device_ours = True
                    self.steps[-1].device_at = self.steps[-1].device_at or self._sim.now
            case SeedingReopened():
                self._device_ours = False
            case _:
                raise AssertionError(message)
        self._go_on()

    def _take(self, message: SampleFinished) -> None:
        sample, group = message.sample, group_of(message.sample)
        assert sample not in self.delivered, f"sample {SampleId.unpack(sample)} came twice"
        self.delivered[sample] = len(message.tokens) // I32.itemsize
        self._missing[group] -= 1
        if not self._missing[group]:
            del self._missing[group]
            number = SampleId.unpack(group).group
            scored = partial(self._score, self._sim.work.steps[self.steps[-1].step][number])
            self._sim.at(self._sim.now + self._sim.case.reward_s, scored)
        if not self._missing:
            self.steps[-1].all_there_at = self._sim.now

    def _score(self, group: Group) -> None:
        self._scored.append(group)
        self._go_on()

    def _go_on(self) -> None:
        """Train a micro-batch if whole groups fill one, else note since when there is nothing to do."""
        now, step = self._sim.now, self.steps[-1]
        if self._idle_since is not None:
            step.idle_s += now - self._idle_since
            self._idle_since = None
        if self._busy or not self._device_ours or not self._untrained:
            return
        groups_at_once = max(1, self._sim.case.micro_batch // self._sim.case.group_size)
        if len(self._scored) < min(groups_at_once, self._untrained):
            self._idle_since = now
            return
        batch = [self._scored.popleft() for _ in range(min(groups_at_once, len(self._scored)))]
        seconds = sum(group.tokens for group in batch) / self._sim.case.train_tokens_per_s
        self._busy = True
        step.train_s += seconds
        self._sim.at(now + seconds, partial(self._trained, len(batch)))

    def _trained(self, groups: int) -> None:
        self._busy = False
        self._untrained -= groups
        if self._untrained:
            self._go_on()
        else:
            self._sim.at(self._sim.now + self._sim.case.publish_s, self._published)

    def _published(self) -> None:
        step = self.steps[-1]
        step.ended = self._sim.now
        report = StepReport(
            job_id=JOB_ID,
            step=step.step,
            metrics={},
            checkpointed_step=step.step + 1,
            wait_s=step.idle_s,
            train_s=step.train_s,
        )
        self._announce(step.step + 1)
        self._sim.tell_manager(report)
        self._begin(step.step + 1)
