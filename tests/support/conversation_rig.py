"""A trainer whose job has an environment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rlboost.services.trainer.domain.plan import TrainingRow
from rlboost.services.trainer.ports.samples import Scores
from rlboost.services.trainer.ports.storage import JobResources
from rlboost.shared.ids import SampleId
from rlboost.shared.job.environment import Environment, Message, Step
from rlboost.shared.job.spec import JobSpec
from rlboost.shared.messages import Event, GroupRequested, TurnAnswered
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START
from tests.support.scripted_manager import Answer, scripted
from tests.support.trainer_fakes import FakeChatFormatter, FakeEnvironments
from tests.support.trainer_rig import JOB, Rig, WatchedEngine, spec

TURNS = 3


GAME: dict[str, Any] = {
    "reward": None,
    "environment": {"function": "m:game", "max_turns": TURNS},
    "sampling": {"max_tokens": 40},
    "trainer": {"checkpoint_every": 2, "micro_batch_tokens": 100},
}


class Echo:
    """Says how many words it heard, for two or three turns."""

    def reset(self, row: dict[str, Any], seed: int) -> Message | None:
        self.n = 2 + row["row"] % 2
        self.n_turns = 0
        return None

    def step(self, text: str) -> Step:
        self.n_turns += 1
        return Step(f"50 {len(text.split())}", len(text.split()) % 3, done=self.n_turns >= self.n)


class ConversationRig(Rig):
    """A trainer whose samples are conversations."""

    def __init__(self, folder: Path, make: Callable[[], Environment] = Echo, **changes: Any) -> None:
        super().__init__(folder, spec(**{**GAME, **changes}))
        self.make = make
        self.rows: list[TrainingRow] = []
        self.make_engine = lambda: WatchedEngine(self.rows)
        self.environments: list[FakeEnvironments] = []
        self.reward = lambda batch: Scores((0.0,) * len(batch.completions))

    def build(self, spec: JobSpec, job_id: str, created: datetime) -> JobResources:
        resources = super().build(spec, job_id, created)
        self.environments.append(FakeEnvironments(self.make))
        data = replace(resources.data, chat_formatter=FakeChatFormatter())
        return replace(resources, data=data, environments=self.environments[-1])

    @property
    def turns(self) -> list[GroupRequested]:
        """Requests of turns behind the first."""
        return [request for request in self.manager.requests if SampleId.unpack(request.group).group >= 4]

    async def answers(self) -> list[TurnAnswered]:
        entries = await self.bus.read({names.rollouts_finished(JOB): START}, count=10_000)
        return [entry.message for entry in entries if isinstance(entry.message, TurnAnswered)]

    async def samples(self) -> list[dict[str, Any]]:
        entries = await self.bus.read({names.job_samples(JOB): START}, count=10_000)
        return [entry.message.fields for entry in entries if isinstance(entry.message, Event)]


def done(request: GroupRequested, sample: int) -> Answer:
    """Turns of up to nine tokens, so that three of them have room."""
    short = request.model_copy(update={"sampling": request.sampling.model_copy(update={"max_tokens": 9})})
    return scripted(short, sample)
