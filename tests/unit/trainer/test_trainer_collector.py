from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlboost.services.trainer.domain.groups import DroppedGroup, StepCollector, WholeGroup
from rlboost.shared.errors import Fatal, Unprocessable
from rlboost.shared.ids import SampleId
from rlboost.shared.messages import Message, SampleDropped, SampleFinished, SeedingEnded, SeedingReopened
from rlboost.shared.wire import F32, I32, pack

STEP = 3


def sample_id(group: int, member: int, *, step: int = STEP, job: int = 1) -> int:
    return SampleId(job, False, step, group, member).pack()


def finished(sample: int, n: int = 2, version: int = STEP) -> SampleFinished:
    return SampleFinished(
        sample=sample,
        tokens=pack(range(n), I32),
        logprobs=pack([-1.0] * n, F32),
        finish="stop",
        spans=[("w", version, n)],
        attempts=1,
        group_done=False,
    )


def dropped(sample: int) -> SampleDropped:
    return SampleDropped(sample=sample, reason="too long", group_done=False)


def collector(n_groups: int = 2, size: int = 2, max_staleness: int = 0) -> StepCollector:
    return StepCollector(1, STEP, {sample_id(g, 0): size for g in range(n_groups)}, max_staleness)


def of_versions(sample: int, *versions: int) -> SampleFinished:
    return finished(sample, n=len(versions)).model_copy(update={"spans": [("w", version, 1) for version in versions]})


def test_a_group_comes_when_its_last_sample_does() -> None:
    fold = collector().apply
    assert fold(finished(sample_id(0, 1))) is None
    whole = fold(finished(sample_id(0, 0)))
    assert isinstance(whole, WholeGroup)
    assert [sample.sample for sample in whole.samples] == [sample_id(0, 0), sample_id(0, 1)]


def test_a_sample_that_comes_twice_counts_once() -> None:
    collected = collector()
    collected.apply(finished(sample_id(0, 0)))
    assert collected.apply(finished(sample_id(0, 0))) is None
    assert collected.duplicates == 1
    assert not collected.complete


def test_a_dropped_sample_drops_its_whole_group_with_the_reason() -> None:
    collected = collector()
    collected.apply(finished(sample_id(0, 0)))
    assert collected.apply(dropped(sample_id(0, 1))) == DroppedGroup(sample_id(0, 0), "generation", "too long")


def test_samples_of_a_dropped_group_change_nothing() -> None:
    collected = collector()
    collected.apply(dropped(sample_id(0, 0)))
    assert collected.apply(finished(sample_id(0, 1))) is None
    assert collected.apply(dropped(sample_id(0, 1))) is None
    assert collected.n_arrived == 2


def test_a_late_sample_of_an_earlier_step_is_counted_and_left() -> None:
    collected = collector()
    assert collected.apply(finished(sample_id(5, 0, step=STEP - 1), version=STEP - 1)) is None
    assert collected.duplicates == 1


@pytest.mark.parametrize(
    "stranger", [sample_id(2, 0), sample_id(0, 2), sample_id(0, 0, step=STEP + 1), sample_id(0, 0, job=2)]
)
def test_unrequested_sample_is_rejected_without_effect(stranger: int) -> None:
    collected = collector()
    with pytest.raises(Unprocessable, match="not requested"):
        collected.apply(finished(stranger))
    assert collected.n_arrived == 0


def test_tokens_of_another_weight_version_are_fatal() -> None:
    with pytest.raises(Fatal, match="weight versions"):
        collector().apply(finished(sample_id(0, 0), version=STEP - 1))


def test_tokens_of_as_many_versions_before_the_step_as_the_job_allows_may_be_used() -> None:
    collected = collector(max_staleness=2)
    collected.apply(of_versions(sample_id(0, 0), STEP - 2, STEP - 1, STEP))
    assert isinstance(collected.apply(finished(sample_id(0, 1))), WholeGroup)


@pytest.mark.parametrize("versions", [(STEP - 3, STEP), (STEP, STEP + 1), (STEP - 3,)])
def test_stale_group_is_dropped_once_it_is_complete(versions: tuple[int]) -> None:
    collected = collector(n_groups=1, max_staleness=2)
    assert collected.apply(of_versions(sample_id(0, 0), *versions)) is None
    assert not collected.complete
    outcome = collected.apply(finished(sample_id(0, 1)))
    assert isinstance(outcome, DroppedGroup)
    assert (outcome.group, outcome.reason) == (sample_id(0, 0), "stale")
    assert f"{list(versions)}; only 1 to 3 are allowed" in outcome.detail
    assert collected.complete


def test_evaluation_allows_no_staleness() -> None:
    groups = [SampleId(1, True, STEP, g, 0).pack() for g in range(2)]
    collected = StepCollector(1, STEP, dict.fromkeys(groups, 1), max_staleness=2)
    outcome = collected.apply(of_versions(groups[0], STEP - 1))
    assert isinstance(outcome, DroppedGroup)
    assert "only 3 is allowed" in outcome.detail
    assert isinstance(collected.apply(of_versions(groups[1], STEP)), WholeGroup)


@pytest.mark.parametrize("change", [{"spans": [("w", STEP, 1)]}, {"logprobs": pack([-1.0], F32)}])
def test_columns_and_spans_that_do_not_add_up_drop_the_group(change: dict[str, object]) -> None:
    outcome = collector().apply(finished(sample_id(0, 0)).model_copy(update=change))
    assert isinstance(outcome, DroppedGroup)
    assert outcome.reason == "generation"
    assert "spans over" in outcome.detail


def test_the_trainer_has_device_between_the_end_of_seeding_and_its_reopening() -> None:
    collected = collector()
    has_device = [collected.trainer_has_device]
    for message in (
        SeedingEnded(step=STEP - 1, window_s=1.0, reason="window"),
        SeedingEnded(step=STEP, window_s=1.0, reason="window"),
        SeedingReopened(step=STEP),
    ):
        collected.apply(message)
        has_device.append(collected.trainer_has_device)
    assert has_device == [False, False, True, False]


@given(st.data())
def test_every_group_is_decided_exactly_once_in_any_order(data: st.DataObject) -> None:
    ids = [sample_id(g, m) for g in range(4) for m in range(3)]
    gone = data.draw(st.sets(st.sampled_from(ids), max_size=3))
    answers: list[Message] = [dropped(i) if i in gone else finished(i) for i in ids]
    again = data.draw(st.lists(st.sampled_from(answers), max_size=5))
    messages = data.draw(st.permutations([*answers, *again]))
    collected = collector(4, 3)
    outcomes = [outcome for message in messages if (outcome := collected.apply(message)) is not None]
    assert collected.complete
    assert sorted(outcome.group for outcome in outcomes) == [sample_id(g, 0) for g in range(4)]
    for outcome in outcomes:
        members = {outcome.group + m for m in range(3)}
        assert isinstance(outcome, DroppedGroup) == bool(members & gone)
    assert collected.duplicates == len(again)
