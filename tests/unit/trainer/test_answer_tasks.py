"""The tasks in which environments answer turns, next to a log that an earlier trainer process also wrote."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

from rlboost.services.trainer.domain.groups.turns import TurnIds
from rlboost.services.trainer.domain.plan import PlannedGroup
from rlboost.services.trainer.fakes.environments import FakeChatFormatter, FakeEnvironments
from rlboost.services.trainer.ports.data import Data, Prompt
from rlboost.services.trainer.step.context import JobContext
from rlboost.services.trainer.step.multi_turn import MultiTurn
from rlboost.shared.ids import SampleId
from rlboost.shared.job.environment import Message, Step
from rlboost.shared.messages import SampleFinished, TurnAnswered
from rlboost.shared.process.waiting import Waits
from rlboost.shared.streams import names
from rlboost.shared.streams.entries import START
from rlboost.shared.streams.fakes import MemoryBus
from rlboost.shared.wire.columns import F32, I32, pack
from tests.support.decoding import decode_as_numbers
from tests.support.eventually import eventually
from tests.support.trainer_rig import JOB, spec

GROUP = SampleId(1, False, 4, 0, 0).pack()
SECOND_TURN = TurnIds(n_groups=4, group_size=2, max_turns=3).id_of(GROUP, 1)
PROMPT = Prompt("1 2", pack([1, 2], I32), {})


class Echo:
    """Never ends; answers with the number of turns so far."""

    def reset(self, row: dict[str, object], seed: int) -> Message | None:
        self.n_turns = 0
        return None

    def step(self, text: str) -> Step:
        self.n_turns += 1
        return Step(f"50 {self.n_turns}", 1.0, done=False)


async def test_turn_answered_in_the_log_before_its_task_starts_is_answered_once() -> None:
    bus, environments = MemoryBus(), FakeEnvironments(Echo)
    async with asyncio.TaskGroup() as scoring:
        conversations = _conversations(bus, environments, scoring)
        await conversations.start([PlannedGroup(GROUP, is_eval=False, row=0, n=1, seed=0, number=0)])
        conversations.apply(_turn(GROUP))
        conversations.answer_turns()
        # Before the task starts, the log has the answer of an earlier trainer process, and the next turn.
        conversations.apply(TurnAnswered(sample=GROUP, tokens=pack([50, 1], I32), reward=1.0))
        conversations.apply(_turn(SECOND_TURN))
        conversations.answer_turns()

    async def answered() -> list[int]:
        entries = await bus.read({names.rollouts_finished(JOB): START})
        return [entry.message.sample for entry in entries if isinstance(entry.message, TurnAnswered)]

    assert await eventually(answered) == [SECOND_TURN]
    assert environments.n_made == 1


def _turn(turn: int) -> SampleFinished:
    return SampleFinished(
        sample=turn,
        tokens=pack([7, 8], I32),
        logprobs=pack([-0.5, -0.5], F32),
        finish="stop",
        spans=[("w-1", 4, 2)],
        attempts=1,
        group_done=True,
    )


def _conversations(bus: MemoryBus, environments: FakeEnvironments, scoring: asyncio.TaskGroup) -> MultiTurn:
    job = spec(reward=None, environment={"function": "m:game", "max_turns": 3}, sampling={"max_tokens": 40})
    data = Data(
        [PROMPT],
        [],
        (2,),
        decode_as_numbers,
        chat_formatter=FakeChatFormatter(),
        vocab_size=99,
    )

    async def warn(text: str) -> None:
        assert not text

    context = SimpleNamespace(
        spec=job,
        resources=SimpleNamespace(data=data, environments=environments, replayed=None),
        no=1,
        id=JOB,
        limit_s=60.0,
        waits=Waits(),
        streams=SimpleNamespace(bus=bus),
        scoring=scoring,
        faults=SimpleNamespace(on_note=lambda text: text),
        warn=warn,
        prompt=lambda _group: PROMPT,
    )
    return MultiTurn(cast("JobContext", context), 4, [PlannedGroup(GROUP, False, 0, 1, 0, 0)])
