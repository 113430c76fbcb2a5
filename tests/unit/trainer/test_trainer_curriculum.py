"""Prompts that are skipped for what became of them before, and a job that is killed while it skips them."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlboost.services.trainer.adapters.user_code import load_skip_function
from rlboost.services.trainer.domain.curriculum import Curriculum, SkipFunction
from rlboost.services.trainer.domain.plan import prompt_indices
from rlboost.services.trainer.ports.samples import Prompt, RewardBatch, Scores
from rlboost.services.trainer.step.durable import DurableCurriculum
from rlboost.shared.errors import ConfigError, Fatal, Fenced
from rlboost.shared.ids import SampleId
from rlboost.shared.job.spec import RlJob
from rlboost.shared.messages import GroupRequested
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START, Fence
from rlboost.shared.wire import I32, unpack
from tests.support.eventually import eventually
from tests.support.trainer_rig import JOB, Rig, spec, succession

SOLVED_OR_FAILED = {"skip_solved_above": 1.0, "skip_failed_below": 0.0}


def job(per_step: int = 4, *, max_staleness: int = 0, **curriculum: Any) -> RlJob:
    return spec(
        data={"train": "t.jsonl", "prompts_per_step": per_step, "curriculum": curriculum or SOLVED_OR_FAILED},
        algorithm={"group_size": 2},
        elastic={"max_staleness": max_staleness},
    )


def play(
    curriculum: Curriculum, means: dict[int, float], steps: Sequence[int], *, records: dict[str, str] | None = None
) -> dict[int, tuple[int, ...]]:
    """Plan and score steps as a trainer does; row r's groups have the mean `means[r]`."""
    rows = {}
    for step in steps:
        rows[step] = curriculum.plan(step).rows
        if records is not None:
            records[str(step)] = curriculum.record(step)
        curriculum.score(step, [(row, means[row]) for row in rows[step]])
        if records is not None:
            records[str(step)] = curriculum.record(step)
    return rows


def test_the_first_epoch_is_the_one_without_a_curriculum() -> None:
    curriculum = Curriculum(job(), 8, None, {})
    rows = play(curriculum, dict.fromkeys(range(8), 1.0), [0, 1])
    assert [rows[0], rows[1]] == [tuple(prompt_indices(0, step, 4, 8)) for step in (0, 1)]


def test_solved_and_failed_prompts_are_skipped() -> None:
    means = {0: 1.0, 1: 0.0, **dict.fromkeys(range(2, 8), 0.5)}
    curriculum = Curriculum(job(), 8, None, {})
    rows = play(curriculum, means, range(5))
    assert {row for step in (0, 1) for row in rows[step]} == set(range(8))
    assert not {0, 1} & {row for step in (2, 3, 4) for row in rows[step]}
    assert sorted(rows[2] + rows[3][:2]) == [2, 3, 4, 5, 6, 7]
    skipped = [curriculum.plan(step).metrics() for step in range(5)]
    assert [row["data/skipped_solved"] + row["data/skipped_failed"] for row in skipped[:2]] == [0, 0]
    assert sum(row["data/skipped_solved"] for row in skipped[2:4]) >= 1
    assert {row["data/recalled"] for row in skipped} == {0}


def test_curriculum_averages_the_last_window_groups_of_a_prompt() -> None:
    curriculum = Curriculum(job(2, skip_solved_above=0.75, window=2), 2, None, {})
    for step, mean in enumerate([0.75, 0.5, 1.0]):
        assert sorted(curriculum.plan(step).rows) == [0, 1]
        curriculum.score(step, [(0, mean), (1, 0.5)])
    # One alone was enough at step 1 and is not judged alone; the last two, 0.5 and 1.0, are three quarters.
    assert curriculum.plan(3).rows == (1, 1)


def test_a_skipped_prompt_is_tried_again_after_a_while() -> None:
    means = {0: 0.0, 1: 0.5}
    never = play(Curriculum(job(1, skip_failed_below=0.0), 2, None, {}), means, range(12))
    again = play(Curriculum(job(1, skip_failed_below=0.0, retry_steps=5), 2, None, {}), means, range(12))
    assert [row for (row,) in never.values()].count(0) == 1
    assert [row for (row,) in again.values()].count(0) > 1


def test_curriculum_recalls_prompts_in_turn_if_all_are_solved() -> None:
    curriculum = Curriculum(job(), 8, None, {})
    rows = play(curriculum, dict.fromkeys(range(8), 1.0), range(6))
    assert all(len(set(found)) == 4 for found in rows.values())
    assert curriculum.plan(4).metrics() == {
        "data/recalled": 4,
        "data/skipped_solved": 8,
        "data/skipped_failed": 0,
    }
    assert {row for step in range(2, 6) for row in rows[step]} == set(range(8))


def test_a_function_sees_the_means_the_step_and_the_row() -> None:
    asked = []

    def skip_function(means: Sequence[float], step: int, row: int) -> bool:
        asked.append((tuple(means), step, row))
        return row == 0

    curriculum = Curriculum(job(2, function="m:f"), 4, skip_function, {})
    rows = play(curriculum, dict.fromkeys(range(4), 0.5), range(4))
    assert 0 not in {row for found in rows.values() for row in found}
    assert sum(curriculum.plan(step).metrics()["data/skipped_function"] for step in range(4)) >= 2
    assert ((), 0, rows[0][0]) in asked
    assert ((0.5,), 2, 1) in [(means, 2, row) for means, _, row in asked]


@given(
    st.data(),
    st.integers(0, 3),
    st.integers(1, 6),
    st.integers(1, 12),
)
def test_successor_curriculum_plans_the_recorded_prompts(data: Any, lag: int, per_step: int, n_rows: int) -> None:
    what = job(per_step, max_staleness=lag, **SOLVED_OR_FAILED, retry_steps=3)
    scores = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=n_rows, max_size=n_rows))
    means = dict(enumerate(scores))
    steps = 8
    undisturbed = _ahead(Curriculum(what, n_rows, None, {}), means, 0, steps, lag, {})
    # Killed in step `killed`, which the successor begins `back` steps before, and scores otherwise than was recorded.
    killed = data.draw(st.integers(0, steps - 1))
    records: dict[str, str] = {}
    _ahead(Curriculum(what, n_rows, None, {}), means, 0, killed, lag, records)
    back = data.draw(st.integers(0, killed))
    others = dict.fromkeys(means, 0.25)
    successor = Curriculum(what, n_rows, None, records)
    again = _ahead(successor, others, killed - back, killed, lag, {})
    assert again.items() <= undisturbed.items()
    on = _ahead(successor, means, killed, steps, lag, {})
    assert on.items() <= undisturbed.items()


def _ahead(
    curriculum: Curriculum, means: dict[int, float], first: int, end: int, lag: int, records: dict[str, str]
) -> dict[int, tuple[int, ...]]:
    """As a trainer that asks `lag` steps ahead."""
    rows = {}
    for step in range(first, end):
        for ahead in range(step, step + lag + 1):
            rows[ahead] = curriculum.plan(ahead).rows
            records[str(ahead)] = json.dumps(json.loads(curriculum.record(ahead)))
        curriculum.score(step, [(row, means[row]) for row in rows[step]])
        records[str(step)] = curriculum.record(step)
    return rows


def test_curriculum_with_a_missing_record_is_fatal() -> None:
    records: dict[str, str] = {}
    play(Curriculum(job(), 8, None, {}), dict.fromkeys(range(8), 0.5), range(3), records=records)
    del records["2"]
    with pytest.raises(Fatal, match="step 3 are not recorded"):
        Curriculum(job(), 8, None, records).plan(3)


def test_curriculum_without_a_rule_or_with_invalid_rules_is_refused() -> None:
    for wrong in ({"window": 2}, {"skip_solved_above": 0.5, "skip_failed_below": 0.5}, {"function": "nowhere"}):
        with pytest.raises(ConfigError, match=r"data\.curriculum"):
            job(**wrong)


# --- a whole job ------------------------------------------------------------------------------------------------------


def by_row(batch: RewardBatch) -> Scores:
    """Solve even rows, never solve the third and the seventh, and differ within the groups of the others."""
    rewards = []
    for member, row in enumerate(batch.columns["row"]):
        rewards.append(1.0 if row % 2 == 0 else 0.0 if row in {3, 7} else float(member))
    return Scores(tuple(rewards))


@pytest.mark.parametrize("max_staleness", [0, 2])
async def test_killed_curriculum_job_requests_the_same_prompts(tmp_path: Path, max_staleness: int) -> None:
    what = job(max_staleness=max_staleness).model_copy(update={"steps": 7})
    undisturbed = Rig(tmp_path / "a", what)
    undisturbed.reward = by_row
    assert (await undisturbed.run()).state == "completed"
    skipped = [report.metrics["data/skipped_solved"] for report in await undisturbed.steps()]
    assert skipped[:2] == [0.0, 0.0]
    assert sum(skipped) > 0
    for killed_in in (3, 5):
        rig = Rig(tmp_path / f"b{killed_in}", what)
        rig.reward = by_row
        await rig.killed_in(killed_in)
        # What is judged anew may be judged otherwise; what was asked for stays what was asked for.
        assert (await rig.resume()).state == "completed"
        assert _asked(rig) == _asked(undisturbed)
        assert rig.weights.versions == undisturbed.weights.versions
        assert [report.metrics["data/skipped_solved"] for report in await rig.steps()][-3:] == skipped[-3:]


def _asked(rig: Rig) -> dict[str, int]:
    """Group -> the second token of its prompt, which is its row."""
    return {str(SampleId.unpack(r.group)): int(unpack(r.prompt, I32)[1]) for r in rig.manager.requests}


async def test_curriculum_records_prompts_before_they_are_requested(tmp_path: Path) -> None:
    rig = Rig(tmp_path, job())
    rig.reward = by_row
    rig.manager.held = {2}
    async with rig.trainer(killed=True):
        await rig.command("create")
        await rig.waits_for("samples of step 3")
    records = await rig.bus.hash_all(names.job_curriculum(JOB))
    entries = await rig.bus.read({names.rollouts_requested(JOB): START}, count=100)
    asked = [int(unpack(e.message.prompt, I32)[1]) for e in entries if isinstance(e.message, GroupRequested)]
    assert len(asked) == 12
    assert [row for step in ("0", "1", "2") for row in json.loads(records[step])["rows"]] == asked
    assert [json.loads(records[step])["means"] is None for step in ("0", "1", "2")] == [False, False, True]


async def test_a_function_that_raises_ends_the_job_and_is_named(tmp_path: Path) -> None:
    rig = Rig(tmp_path, job(function="tests.unit.trainer.test_trainer_curriculum:broken"))
    build = rig.build

    def with_judge(*of: Any, **_: Any) -> Any:
        shop = build(*of)
        skip_function: SkipFunction = load_skip_function(
            "tests.unit.trainer.test_trainer_curriculum:broken", shop.data.train
        )
        return replace(shop, skip_function=skip_function)

    rig.build = with_judge  # type: ignore[method-assign]
    report = await rig.run()
    assert report.state == "failed"
    assert re.search(r"for prompt \d+ at step 1, .*broken raised KeyError: 'difficulty' \(.*\.py:\d+\)", report.error)


def kept(rig: Rig, skip_function: SkipFunction | None, fence: Fence | None = None) -> DurableCurriculum:
    rule = {"function": "m:f"} if skip_function is not None else SOLVED_OR_FAILED
    curriculum = Curriculum(job(**rule), 8, skip_function, {})
    return DurableCurriculum(rig.claimed(fence=fence), curriculum)


async def test_a_function_that_takes_its_time_holds_up_nothing_else() -> None:
    asked, may_answer = threading.Event(), threading.Event()

    def skip_function(_means: Sequence[float], _step: int, _row: int) -> bool:
        asked.set()
        assert may_answer.wait(60), "nothing else happened meanwhile"
        return False

    curriculum = kept(Rig(Path()), skip_function)
    preparing = asyncio.create_task(curriculum.prepare(0))
    await eventually(asked.is_set)
    may_answer.set()
    await preparing
    assert len(curriculum.plan(0).rows) == 4


async def test_a_function_that_never_answers_ends_the_job_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlboost.services.trainer.step.durable.PLAN_LIMIT_S", 0.1)
    rig = Rig(tmp_path, job(function="m:f"))
    build, stop = rig.build, threading.Event()
    rig.build = lambda *of: replace(  # type: ignore[method-assign]
        build(*of), skip_function=lambda *_: stop.wait(20)
    )
    report = await rig.run()
    stop.set()
    assert report.state == "failed"
    assert "for the curriculum (it chooses the prompts of step 1): make data.curriculum.function faster" in report.error


async def test_superseded_trainer_cannot_overwrite_recorded_scores() -> None:
    rig = Rig(Path())
    old, new = (kept(rig, None, fence) for fence in await succession(rig.bus))
    for curriculum in (old, new):
        await curriculum.prepare(0)
    await new.record_scores(0, [(row, 0.5) for row in new.plan(0).rows])
    with pytest.raises(Fenced):
        await old.persist(0)
    records = await rig.bus.hash_all(names.job_curriculum(JOB))
    assert [mean for _, mean in json.loads(records["0"])["means"]] == [0.5] * 4


def broken(means: list[float], step: int, columns: dict[str, Any]) -> bool:
    return bool(columns["difficulty"] > step)


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        ("None", "returned None: is there a `return`?"),
        ("'False'", "returned 'False': return True or False"),
        ("0.0", "returned 0.0: return True or False"),
        ("list(means)", "returned []: return True or False"),
    ],
)
def test_skip_function_that_returns_no_boolean_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: str, problem: str
) -> None:
    module = f"skips_{ord(result[0])}"
    (tmp_path / f"{module}.py").write_text(f"def skip(means, step, columns):\n    return {result}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    skips = load_skip_function(f"{module}:skip", [Prompt("p", b"", {})])
    with pytest.raises(ConfigError, match=re.escape(problem)):
        skips([], 0, 0)


def test_skip_function_gets_copies_of_the_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spoils.py").write_text(
        "import numpy\n"
        "def skip(means, step, columns):\n"
        "    columns['tags'].clear()\n"
        "    return numpy.bool_(len(means) > 1)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    prompt = Prompt("p", b"", {"tags": ["a"]})
    skips = load_skip_function("spoils:skip", [prompt])
    assert [skips(means, 0, 0) for means in ([], [1.0, 1.0])] == [False, True]
    assert prompt.columns == {"tags": ["a"]}
