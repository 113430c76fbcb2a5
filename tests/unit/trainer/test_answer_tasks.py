"""The tasks in which environments answer turns, next to a log that an earlier trainer process also wrote."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rlboost.services.trainer.domain.conversations import TurnIds
from rlboost.services.trainer.domain.groups import StepCollector
from rlboost.services.trainer.domain.plan import PlannedGroup, turn_ids
from rlboost.services.trainer.step.turns import StepTurns
from rlboost.shared.ids import SampleId
from rlboost.shared.job.environment import Message, Step
from rlboost.shared.messages import SampleFinished, TurnAnswered
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START
from rlboost.shared.wire import F32, I32, pack
from tests.support.conversation_rig import ConversationRig
from tests.support.eventually import eventually
from tests.support.trainer_rig import JOB

GROUP = SampleId(1, False, 4, 0, 0).pack()
SECOND_TURN = TurnIds(n_groups=4, group_size=2, max_turns=3).id_of(GROUP, 1)


class Echo:
    """Never ends; answers with the number of turns so far."""

    def reset(self, row: dict[str, object], seed: int) -> Message | None:
        self.n_turns = 0
        return None

    def step(self, text: str) -> Step:
        self.n_turns += 1
        return Step(f"50 {self.n_turns}", 1.0, done=False)


async def test_turn_answered_in_the_log_before_its_task_starts_is_answered_once() -> None:
    rig = ConversationRig(Path(), Echo)
    job = rig.claimed()
    planned = {GROUP: PlannedGroup(GROUP, held_out=None, row=0, n=1, seed=0, number=0)}
    ids = turn_ids(job.generating_spec, ())
    groups = StepCollector(job.no, 4, {GROUP: 1}, turns=ids)
    async with asyncio.TaskGroup() as scoring:
        turns = StepTurns(job, 4, planned, groups, ids, scoring)
        await turns.start([planned[GROUP]])
        groups.apply(_turn(GROUP))
        turns.answer_turns()
        # Before the task starts, the log has the answer of an earlier trainer process, and the next turn.
        groups.apply(TurnAnswered(sample=GROUP, tokens=pack([50, 1], I32), reward=1.0))
        groups.apply(_turn(SECOND_TURN))
        turns.answer_turns()

    async def answered() -> list[int]:
        entries = await rig.bus.read({names.rollouts_finished(JOB): START})
        return [entry.message.sample for entry in entries if isinstance(entry.message, TurnAnswered)]

    assert await eventually(answered) == [SECOND_TURN]
    assert rig.environments[-1].n_made == 1


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
