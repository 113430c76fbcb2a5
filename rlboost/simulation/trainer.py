"""A simulated trainer: it requests steps, trains for as long as the job states, and reports what it waited for."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial

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
from rlboost.shared.wire import I32, pack
from rlboost.simulation.environment import Environment
from rlboost.simulation.result import StepResult
from rlboost.simulation.scenario import JOB_ID, Group


@dataclass(slots=True)
class Intake:
    """The samples of one step, requested and not trained yet."""

    missing: dict[int, int]
    """Group -> its samples that were not delivered."""
    scored: deque[Group] = field(default_factory=deque)
    last_sample_at: float = 0.0


class SimTrainer:
    """One job, without an end."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self.steps: list[StepResult] = []
        """Complete steps."""
        self.step = -1
        self.step_began_at = 0.0
        self._intakes: dict[int, Intake] = {}
        self._delivered: set[int] = set()
        self._untrained = 0
        self._has_device = self._is_training = False
        self._device_at: float | None = None
        self._idle_since: float | None = None
        self._wait_s = self._train_s = 0.0
        self._training: list[tuple[float, float]] = []

    @property
    def missing(self) -> int:
        """Return how many samples of the step were not delivered."""
        return sum(self._intakes[self.step].missing.values())

    def start(self) -> None:
        """Begin the first step."""
        self._announce(0)
        self._begin(0)

    def _announce(self, version: int) -> None:
        now = self._env.now
        self._env.send(WeightsCommitted(job_id=JOB_ID, version=version, manifest_digest="", n_bytes=1, at=now))

    def _begin(self, step: int) -> None:
        self.step, self.step_began_at = step, self._env.now
        self._env.begin_step(step)
        for number in range(step, step + self._env.policy.staleness + 1):
            if number not in self._intakes:
                self._request(number)
        self._untrained = self._env.job.prompts
        self._has_device, self._device_at = False, None
        self._wait_s = self._train_s = 0.0
        self._training = []

    def _request(self, step: int) -> None:
        env = self._env
        groups = env.groups(step)
        self._intakes[step] = Intake({group.id: len(group.lengths) for group in groups.values()})
        sampling = Sampling(max_tokens=env.job.lengths.cap)
        for group in groups.values():
            request = GroupRequested(
                job_id=JOB_ID,
                group=group.id,
                n=len(group.lengths),
                # Each group's prompt is different, so no estimate comes from an earlier epoch.
                prompt=pack([group.id % 2**31] * group.prompt_tokens, I32),
                sampling=sampling,
                version=step,
                seed=group.id % 2**31,
                max_staleness=env.policy.staleness,
            )
            env.send(request)

    def receive(self, message: Message) -> None:
        """Take what the manager delivers."""
        match message:
            case SampleFinished():
                self._take(message)
            case SeedingEnded():
                if message.step == self.step:
                    self._has_device = True
                    self._device_at = self._env.now if self._device_at is None else self._device_at
            case SeedingReopened():
                self._has_device = False
            case _:
                raise RuntimeError(f"unexpected message: {message.tag}")
        self._train_next()

    def _take(self, message: SampleFinished) -> None:
        env, sample, group_id = self._env, message.sample, group_of(message.sample)
        tokens = len(message.tokens) // I32.itemsize
        if sample in self._delivered or tokens != env.length_of(sample):
            raise RuntimeError(f"sample {SampleId.unpack(sample)} was delivered twice or with {tokens} tokens")
        self._delivered.add(sample)
        step = SampleId.unpack(sample).step
        intake = self._intakes[step]
        intake.missing[group_id] -= 1
        if not intake.missing[group_id]:
            del intake.missing[group_id]
            group = env.groups(step)[group_id]
            env.at(env.now + env.job.reward_s, partial(self._on_scored, intake, group))
        if not intake.missing:
            intake.last_sample_at = env.now

    def _on_scored(self, intake: Intake, group: Group) -> None:
        intake.scored.append(group)
        self._train_next()

    def _train_next(self) -> None:
        """Train a micro-batch if whole groups fill one, else note since when the trainer waits."""
        env, now = self._env, self._env.now
        if self._idle_since is not None:
            self._wait_s += now - self._idle_since
            self._idle_since = None
        if self._is_training or not self._has_device or not self._untrained:
            return
        scored = self._intakes[self.step].scored
        groups_at_once = min(max(1, env.job.micro_batch // env.job.group_size), self._untrained)
        if len(scored) < groups_at_once:
            self._idle_since = now
            return
        tokens = sum(scored.popleft().tokens for _ in range(groups_at_once))
        seconds = tokens * env.job.train_s_per_token * env.slowdown
        self._is_training = True
        self._train_s += seconds
        began = self._training.pop()[0] if self._training and self._training[-1][1] == now else now
        self._training.append((began, now + seconds))
        env.at(now + seconds, partial(self._on_trained, groups_at_once))

    def _on_trained(self, groups: int) -> None:
        self._is_training = False
        self._untrained -= groups
        if self._untrained:
            self._train_next()
            return
        env = self._env
        publish_s = 0.0 if env.policy.fleet == "none" else env.machine.publish_s(env.sent_share)
        env.at(env.now + env.job.update_s + publish_s, self._on_committed)

    def _on_committed(self) -> None:
        env, step, began = self._env, self.step, self.step_began_at
        intake = self._intakes.pop(step)
        groups = env.groups(step).values()
        self.steps.append(
            StepResult(
                step=step,
                start_s=began,
                end_s=env.now,
                seeding_s=(self._device_at or env.now) - began,
                last_sample_s=max(0.0, intake.last_sample_at - began),
                train_wait_s=self._wait_s,
                generated_tokens=sum(sum(group.lengths) for group in groups),
                trained_tokens=sum(group.tokens for group in groups),
                training=tuple(self._training),
            )
        )
        self._delivered = {sample for sample in self._delivered if SampleId.unpack(sample).step > step}
        self._announce(step + 1)
        env.send(
            StepReport(
                job_id=JOB_ID,
                step=step,
                metrics={},
                checkpointed_step=step + 1,
                wait_s=self._wait_s,
                train_s=self._train_s,
            )
        )
        self._begin(step + 1)
