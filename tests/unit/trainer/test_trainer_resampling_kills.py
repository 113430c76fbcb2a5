"""A trainer that is killed while groups are replaced by others: what was recorded counts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlboost.services.trainer.domain.plan import plan_step
from rlboost.services.trainer.ports.samples import RewardBatch, Scores
from rlboost.services.trainer.step.durable import DurableResampling
from rlboost.shared.errors import Fenced
from rlboost.shared.ids import SampleId
from rlboost.shared.job.environment import Step
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Fence, HashSet, Op
from rlboost.shared.wire import I32, unpack
from tests.support.conversation_rig import ConversationRig, done
from tests.support.eventually import eventually
from tests.support.memory_bus import MemoryBus
from tests.support.resampled_job import (
    EQUAL,
    PLACES,
    ROWS,
    TRIES,
    asked,
    by_row,
    completed,
    dawdling,
    in_places,
    job,
    rig_of,
)
from tests.support.scripted_manager import scripted
from tests.support.trainer_rig import JOB, Rig, succession


class Deaf(MemoryBus):
    """Answers no more once the trainer has recorded that a group of a step is replaced."""

    deaf_in: int | None = None
    reached = False

    async def transact(self, ops: Sequence[Op], fence: Fence | None = None) -> None:
        recorded = [op for op in ops if isinstance(op, HashSet) and op.key == names.job_resampled(JOB)]
        steps = {SampleId.unpack(int(group)).step for op in recorded for group in op.fields}
        await super().transact(ops, fence)
        if self.deaf_in in steps:
            self.reached = True
            await asyncio.Event().wait()


async def killed(rig: Rig, point: str, step: int) -> None:
    """Have a job made, and its trainer killed at a point of a step; then its lease runs out."""
    if point == "recorded":
        rig.bus = bus = Deaf()
        rig.manager.bus = bus
        bus.deaf_in = step
    of_step = [group.id for group in plan_step(rig.rl_job, 1, step, ROWS, ())]
    late: dict[str, Callable[[int], bool]] = {
        "recorded": lambda _: False,
        "asked": lambda sample: SampleId.unpack(sample).group >= PLACES,
        "last": lambda sample: SampleId.unpack(sample)[2:] == (step, 0, 1),
        "came": lambda sample: sample == of_step[-1],
    }
    rig.manager.withholds = lambda sample: SampleId.unpack(sample).step == step and late[point](sample)
    async with rig.trainer(killed=True):
        await rig.command("create")
        if point == "recorded":
            await eventually(lambda: bus.reached)
        else:
            await rig.waits_for(f"samples of step {step + 1}")
            await eventually(lambda: rig.manager._withheld)
            await eventually(lambda: (asked(rig).keys() - of_step) & replacements(rig, step))
    if point == "recorded":
        bus.deaf_in = None
    rig.lease_runs_out()
    await rig.manager.release()


def replacements(rig: Rig, step: int) -> set[int]:
    found = [SampleId.unpack(group) for group in asked(rig)]
    return {one.pack() for one in found if one.step == step and one.group >= PLACES}


@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize("point", ["recorded", "asked", "last", "came"])
async def test_killed_resampling_job_requests_the_same_and_reaches_the_same_bits(
    tmp_path: Path, point: str, max_staleness: int
) -> None:
    what = job(elastic={"max_staleness": max_staleness})
    rig, same = rig_of(tmp_path / "a", what), await completed(rig_of(tmp_path / "b", what))
    await killed(rig, point, 2)
    await completed(rig, create=False)
    assert asked(rig) == asked(same) == in_places(what, EQUAL)[0]
    assert set(rig.manager.answered.values()) == {1}
    assert rig.weights.versions == same.weights.versions
    counts = [[report.metrics["groups/resampled"] for report in await one.steps()][-2:] for one in (rig, same)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("later", ["another reward", "no reward"])
async def test_recorded_replacements_outlast_a_changed_reward(tmp_path: Path, later: str) -> None:
    undisturbed = await completed(rig_of(tmp_path / "a"))
    rig = rig_of(tmp_path / "b")
    await rig.killed_in(3)
    replaced = {int(group) for group in await rig.bus.hash_all(names.job_resampled(JOB))}
    rows = {asked(rig)[group] for group in replaced}
    fickle: Counter[int] = Counter()

    def reward(batch: RewardBatch) -> Scores:
        row = batch.columns["row"][0]
        fickle[row] += 1
        if row in rows and fickle[row] <= 2 and later == "no reward":
            return Scores(None, "timeout", "no answer")
        return by_row(EQUAL - rows if fickle[row] <= 2 and later == "another reward" else EQUAL)(batch)

    first = {group for group in replaced if SampleId.unpack(group).step >= 2}
    assert first, "step 2, which is trained again from the checkpoint, has groups that were replaced"
    rig.reward = lambda batch: reward(batch) if _of(rig, batch) in first else by_row()(batch)
    await completed(rig, create=False)
    assert asked(rig) == asked(undisturbed)
    assert rig.weights.versions == undisturbed.weights.versions


@pytest.mark.parametrize("before", ["another reward", "no reward"])
async def test_trained_step_requests_no_more_replacements(tmp_path: Path, before: str) -> None:
    rig = rig_of(tmp_path)
    first = plan_step(rig.rl_job, 1, 2, ROWS, ())[0].row
    assert first in EQUAL

    def reward(batch: RewardBatch) -> Scores:
        if before == "no reward" and batch.columns["row"][0] == first:
            return Scores(None, "timeout", "no answer")
        return by_row(frozenset())(batch)

    rig.reward = reward
    await rig.killed_in(3)
    of_step_2 = {group for group in asked(rig) if SampleId.unpack(group).step == 2}
    rig.reward = by_row()
    await completed(rig, create=False)
    # It is trained again from the checkpoint, and workers have the weights of step 3.
    assert {group for group in asked(rig) if SampleId.unpack(group).step == 2} == of_step_2
    assert replacements(rig, 3), "in the step after, groups are replaced as ever"


def _of(rig: Rig, batch: RewardBatch) -> int | None:
    """Return the group that is scored, by what was generated for it."""
    row, tokens = batch.columns["row"][0], batch.completion_ids
    for request in rig.manager.requests:
        members = [scripted(request, request.group + i).tokens for i in range(request.n)]
        if asked(rig)[request.group] == row and [list(unpack(one, I32)) for one in members] == tokens:
            return request.group
    return None


async def test_with_a_curriculum_a_replacement_is_of_no_prompt_that_it_skips(tmp_path: Path) -> None:
    curriculum = {"skip_solved_above": 1.0}
    what = job(data={"train": "t.jsonl", "prompts_per_step": PLACES, "curriculum": curriculum}, steps=6)
    equal = frozenset({0, 1, 2, 3})
    rig = await completed(rig_of(tmp_path / "a", what, equal))
    judged: set[int] = set()
    for step in range(6):
        groups = {g: row for g, row in asked(rig).items() if SampleId.unpack(g).step == step}
        taken = {row for group, row in groups.items() if SampleId.unpack(group).group >= PLACES}
        assert not taken & judged
        judged |= set(groups.values()) & equal
    assert judged
    again = rig_of(tmp_path / "b", what, equal)
    await again.killed_in(3)
    await completed(again, create=False)
    assert asked(again) == asked(rig)
    assert again.weights.versions == rig.weights.versions


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_resampling_with_a_curriculum_repeats_no_replacement_in_a_step(
    tmp_path: Path, max_staleness: int
) -> None:
    """Neither the order of scores nor a kill of the trainer changes which prompts are requested."""
    curriculum = {"skip_solved_above": 1.0}
    what = job(
        data={"train": "t.jsonl", "prompts_per_step": PLACES, "curriculum": curriculum},
        steps=6,
        elastic={"max_staleness": max_staleness},
    )
    equal = frozenset({0, 1, 2, 6, 7, 8})
    rigs = [rig_of(tmp_path / str(seed), what, equal) for seed in range(4)]
    for seed, rig in enumerate(rigs):
        dawdling(rig, seed)
        if seed == 3:
            await killed(rig, "asked", 1)
        await completed(rig, create=seed != 3)
    assert all(asked(rig) == asked(rigs[0]) for rig in rigs)
    n_later = []
    for step in range(6):
        of_step = {
            SampleId.unpack(g).group: row for g, row in asked(rigs[0]).items() if SampleId.unpack(g).step == step
        }
        later = [row for number, row in of_step.items() if number >= PLACES]
        assert len({*later} - {of_step[number] for number in range(PLACES)}) == len(later)
        n_later.append(len(later))
    assert sum(n_later) > PLACES


async def test_successor_finishes_replaced_conversations(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "data": {"train": "t.jsonl", "prompts_per_step": PLACES},
        "algorithm": {"group_size": 2, "resample": TRIES},
        "steps": 3,
    }

    def conversations(folder: Path) -> ConversationRig:
        rig = ConversationRig(folder, Constant, **changes)
        rig.manager.script = done
        rig.reward = by_row()
        return rig

    undisturbed, rig = conversations(tmp_path / "a"), conversations(tmp_path / "b")
    await completed(undisturbed)
    assert sum(report.metrics["groups/resampled"] for report in await undisturbed.steps()) > 0
    await rig.killed_in(1)
    await completed(rig, create=False)
    assert asked(rig) == asked(undisturbed)
    assert {row.prompt for row in rig.rows} == {row.prompt for row in undisturbed.rows}
    assert not {int(unpack(row.prompt, I32)[1]) for row in rig.rows} & EQUAL


class Constant:
    """Gives nothing, so that the reward function alone decides whether a group teaches."""

    def reset(self, row: dict[str, Any], seed: int) -> None:
        self.n_turns = 0

    def step(self, text: str) -> Step:
        self.n_turns += 1
        return Step("50", 0.0, done=self.n_turns >= 2)


async def test_steps_that_are_never_trained_again_are_forgotten(tmp_path: Path) -> None:
    rig = await completed(rig_of(tmp_path, job(steps=8)))
    kept = {SampleId.unpack(int(group)).step for group in await rig.bus.hash_all(names.job_resampled(JOB))}
    replaced = {SampleId.unpack(group).step for group in asked(rig) if SampleId.unpack(group).group >= PLACES}
    assert kept < replaced
    assert min(kept) >= 2


async def test_a_superseded_trainer_records_nothing_any_more() -> None:
    rig = Rig(Path(), job())
    old, new = (DurableResampling(rig.claimed(fence=fence)) for fence in await succession(rig.bus))
    await new.record(256, 1)
    with pytest.raises(Fenced):
        await old.record(256, 2)
    assert await rig.bus.hash_all(names.job_resampled(JOB)) == {"256": "1"}
