"""Groups that teach nothing are replaced by others: what replaces them, and what a step then trains on."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlboost.services.trainer.domain.plan import Replacements, TrainingRow, check, has_signal
from rlboost.services.trainer.ports.samples import RewardBatch, Scores
from rlboost.shared.errors import ConfigError
from rlboost.shared.ids import SampleId
from rlboost.shared.job.algorithm import PRESETS
from rlboost.shared.job.spec import parse, to_json
from tests.support.eventually import eventually
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
    rows_of,
)
from tests.support.trainer_fakes import FakeRewards
from tests.support.trainer_rig import WatchedEngine

# --- the rule ---------------------------------------------------------------------------------------------------------


@given(n=st.integers(1, 8), tries=st.integers(0, 5))
def test_replacements_of_a_slot_are_limited_and_distinct(n: int, tries: int) -> None:
    replacements = Replacements(n, tries, seed=0, step=0, n_rows=9)
    chains = []
    for first in range(n):
        chain: list[int] = []
        number: int | None = first
        while number is not None:
            chain.append(number)
            number = replacements.replacement_number(number)
        chains.append(chain)
    assert {len(chain) for chain in chains} == {1 + tries}
    assert sorted(one for chain in chains for one in chain) == list(range(n * (1 + tries)))


@given(
    n=st.integers(1, 8),
    tries=st.integers(1, 5),
    seed=st.integers(0, 3),
    step=st.integers(0, 9),
    n_rows=st.integers(1, 99),
)
def test_a_replacement_has_another_prompt_as_long_as_there_are_others(
    n: int, tries: int, seed: int, step: int, n_rows: int
) -> None:
    replacements = Replacements(n, tries, seed, step, n_rows)
    first = list(range(min(n, n_rows)))
    spare = replacements.replacement_rows(first)
    rows = [replacements.row(number, spare) for number in range(n, n * (1 + tries))]
    assert set(rows) <= set(spare)
    others = n_rows - len(first)
    assert len(spare) == (min(n * tries, others) if others else len(first))
    if others:
        assert not set(first) & set(spare)
    if others >= n * tries:
        assert len(set(rows)) == n * tries
    assert replacements.replacement_rows(first) == spare


@given(
    n=st.integers(1, 6),
    tries=st.integers(1, 4),
    step=st.integers(0, 9),
    more=st.integers(0, 60),
    skipped=st.sets(st.integers(0, 90)),
)
def test_replacement_rows_are_unique_and_skipped_ones_come_last(
    n: int, tries: int, step: int, more: int, skipped: set[int]
) -> None:
    replacements = Replacements(n, tries, seed=0, step=step, n_rows=n * (1 + tries) + more)
    first = list(range(n))
    spare = replacements.replacement_rows(first, skipped.__contains__)
    rows = [replacements.row(number, spare) for number in range(n, n * (1 + tries))]
    assert len({*first, *rows}) == n * (1 + tries)
    fit = set(range(n, replacements.n_rows)) - skipped
    assert [row in fit for row in rows] == [i < len(fit) for i in range(len(rows))]


@pytest.mark.parametrize("n_rows", [4, 6, 8])
def test_replacements_of_a_place_differ_even_with_few_prompts(n_rows: int) -> None:
    replacements = Replacements(4, 2, seed=0, step=1, n_rows=n_rows)
    first = [0, 1, 2, 3]
    spare = replacements.replacement_rows(first)
    for place in range(4):
        one, other = (replacements.row(place + 4 * again, spare) for again in (1, 2))
        assert one != other
        assert one != first[place]


def test_only_dapo_resamples_by_default() -> None:
    assert {name for name, preset in PRESETS.items() if preset["resample"]} == {"dapo"}
    assert job(algorithm={"name": "dapo"}).algorithm.resample == 8
    assert job(algorithm={"name": "gspo"}).algorithm.resample is None
    assert job(algorithm={"name": "gspo", "equal_groups": "drop", "resample": 2}).algorithm.resample == 2
    assert job(algorithm={"name": "dpo", "resample": 2}).algorithm.resample == 2
    again = job(algorithm={"name": "gspo"})
    assert parse(again.model_dump(mode="json")) == again, to_json(again)


@pytest.mark.parametrize(
    ("algorithm", "problem"),
    [
        ({"resample": -1}, "resample"),
        ({"resample": 65}, "resample"),
        ({"name": "rloo", "resample": 1}, "set algorithm.equal_groups to drop, or remove resample"),
        (
            {"name": "reinforce++", "equal_groups": "drop", "group_size": 1, "resample": 1},
            "a group of one are always equal",
        ),
    ],
)
def test_invalid_resample_settings_are_refused(algorithm: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        job(algorithm=algorithm)


def test_more_groups_than_a_step_has_ids_for_are_refused() -> None:
    large = {"train": "t", "prompts_per_step": 1 << 13}
    check(job(7, data=large), ())
    with pytest.raises(ConfigError, match=r"algorithm\.resample: 8192 prompts a step, and up to 8 more"):
        check(job(8, data=large), ())
    game = {"function": "m:f", "max_turns": 9}
    check(job(3, data={"train": "t", "prompts_per_step": 960}, environment=game), ())
    with pytest.raises(
        ConfigError, match=r"environment\.max_turns: 4800 prompts \(with those that algorithm\.resample may add\)"
    ):
        check(job(4, data={"train": "t", "prompts_per_step": 960}, environment=game), ())


# --- a whole job ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_staleness", "deterministic"), [(0, False), (2, False), (0, True)])
@pytest.mark.parametrize("seed", range(6))
async def test_step_trains_on_the_final_groups_of_its_places_in_any_order(
    tmp_path: Path, seed: int, max_staleness: int, deterministic: bool
) -> None:
    rng = random.Random(seed)
    equal = frozenset(rng.sample(range(ROWS), rng.randrange(ROWS + 1)))
    changes = {"elastic": {"max_staleness": max_staleness}, "trainer": {"deterministic": deterministic}}
    what = job(rng.randrange(1, 4), **changes)
    rows: list[TrainingRow] = []
    rig = rig_of(tmp_path, what, equal)
    rig.make_engine = lambda: WatchedEngine(rows)
    dawdling(rig, seed)
    await completed(rig)
    groups, teaching = in_places(what, equal)
    assert asked(rig) == groups
    assert Counter((row.prompt, row.completion) for row in rows) == rows_of(rig.manager.requests, teaching)
    assert sum(report.metrics["groups/resampled"] for report in await rig.steps()) == len(groups) - 4 * PLACES


@pytest.mark.parametrize(("deterministic", "order"), [(True, [0, 1, 2]), (False, [1, 2, 0])])
async def test_deterministic_step_trains_in_the_order_of_the_plan(
    tmp_path: Path, deterministic: bool, order: list[int]
) -> None:
    rows: list[TrainingRow] = []
    trainer = {"deterministic": deterministic, "micro_batch_tokens": 1}
    rig = rig_of(tmp_path, job(0, steps=1, trainer=trainer), frozenset())
    rig.make_engine = lambda: WatchedEngine(rows)
    rig.manager.withholds = lambda sample: SampleId.unpack(sample).group == 0
    async with rig.trainer():
        await rig.command("create")
        await eventually(lambda: any(wait.because.startswith("4 of 6") for wait in rig.waits.current()))
        await rig.manager.release()
        assert (await rig.ended()).state == "completed"
    groups = {request.prompt: SampleId.unpack(request.group).group for request in rig.manager.requests}
    assert list(dict.fromkeys(groups[row.prompt] for row in rows)) == order


async def test_step_without_signal_stops_at_the_resample_limit(tmp_path: Path) -> None:
    rig = await completed(rig_of(tmp_path, job(steps=1), frozenset(range(ROWS))))
    [report] = await rig.steps()
    assert report.metrics["groups/resampled"] == PLACES * TRIES
    assert report.metrics["groups/excluded/equal_rewards"] == PLACES * (1 + TRIES)
    assert report.metrics["groups/dropped"] == 0
    assert "tokens/trained" not in report.metrics


async def test_job_without_resample_requests_and_reports_no_replacements(tmp_path: Path) -> None:
    rig = await completed(rig_of(tmp_path, job(0)))
    assert len(asked(rig)) == 4 * PLACES
    assert not any("resample" in name for report in await rig.steps() for name in report.metrics)


async def test_a_group_that_was_dropped_for_a_fault_is_not_replaced(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, job(steps=1))
    rig.reward = lambda batch: (
        Scores(None, "timeout", "no answer") if batch.columns["row"][0] in EQUAL else by_row()(batch)
    )
    await completed(rig)
    [report] = await rig.steps()
    assert report.metrics["groups/resampled"] == 0
    assert report.metrics["groups/dropped/timeout"] > 0
    assert len(asked(rig)) == PLACES


async def test_evaluation_groups_of_equal_rewards_stay_as_they_are(tmp_path: Path) -> None:
    data = {"train": "t", "eval": "e", "prompts_per_step": PLACES}
    what = job(data=data, eval={"every": 1, "samples": 6}, steps=2)
    rig = await completed(rig_of(tmp_path, what, frozenset({0, 1, 2})))
    of_steps = Counter(SampleId.unpack(group).step for group in asked(rig) if SampleId.unpack(group).is_eval)
    assert of_steps == {0: 3, 1: 3, 2: 3}


@pytest.mark.parametrize("name", ["reinforce++", "dpo", "grpo"])
async def test_whole_step_algorithms_get_the_final_groups_of_the_places(tmp_path: Path, name: str) -> None:
    algorithm = {"name": name, "group_size": 2, "resample": TRIES, "updates_per_step": 2}
    if name != "dpo":
        algorithm |= {"equal_groups": "drop", "old_logprobs": "recomputed"}
    what = job(algorithm=algorithm)
    rows: list[TrainingRow] = []
    rig = rig_of(tmp_path, what)
    rig.make_engine = lambda: WatchedEngine(rows)
    await completed(rig)
    groups, teaching = in_places(what, EQUAL)
    assert asked(rig) == groups
    assert Counter((row.prompt, row.completion) for row in rows) == rows_of(rig.manager.requests, teaching)


async def test_overlong_penalty_counts_as_signal_of_a_group(tmp_path: Path) -> None:
    what = job(algorithm={"name": "dapo", "group_size": 2, "overlong_fraction": 1.0, "resample": TRIES}, steps=1)
    rig = await completed(rig_of(tmp_path, what, frozenset(range(ROWS))))
    [report] = await rig.steps()
    # Completions of a group have different lengths nearly always.
    assert report.metrics["tokens/trained"] > 0
    assert report.metrics["groups/resampled"] < PLACES * TRIES
    assert report.metrics["reward/overlong_penalty"] > 0
    assert not has_signal([1.0, 1.0])


async def test_resample_wait_is_not_part_of_the_reported_wait(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, job(steps=1))
    rig.manager.withholds = lambda sample: SampleId.unpack(sample).group >= PLACES
    async with rig.trainer():
        await rig.command("create")
        there = 2 * PLACES

        def waits_for_others() -> bool:
            return any(wait.because.startswith(f"{there} of ") for wait in rig.waits.current())

        await eventually(waits_for_others)
        await rig.manager.release()
        assert (await rig.ended()).state == "completed"
    [report] = await rig.steps()
    waited = report.metrics["time/wait_s"]
    assert 0 < report.metrics["time/resample_s"] <= waited
    assert report.wait_s == pytest.approx(waited - report.metrics["time/resample_s"])


class Silent(FakeRewards):
    """Never answers."""

    async def score(self, batch: RewardBatch) -> Scores:
        await asyncio.Event().wait()
        return await super().score(batch)


async def test_missing_scores_fail_the_job_with_the_named_wait(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, job(reward={"function": "m:f", "timeout_s": 0.05}))
    rig.samples_limit_s = 0.2
    build = rig.build
    rig.build = lambda *args: replace(build(*args), rewards=Silent(rig.reward))  # type: ignore[method-assign]
    report = await rig.run()
    assert report.state == "failed"
    assert "for the rewards (3 groups of step 1 may have to be replaced)" in report.error
