"""One order of entries for several steps: whoever reads it again from where it is needed gets the same groups."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlboost.services.trainer.domain.groups import OpenSteps, StepCollector
from rlboost.shared.errors import Unprocessable
from rlboost.shared.ids import SampleId
from rlboost.shared.messages import Message, SampleDropped, SampleFinished, SeedingEnded, SeedingReopened
from rlboost.shared.streams.bus import START, Entry
from rlboost.shared.wire import F32, I32, pack

N_STEPS, N_GROUPS, SIZE = 5, 2, 2


def sample_id(step: int, group: int, member: int) -> int:
    return SampleId(1, False, step, group, member).pack()


def finished(step: int, group: int = 0, member: int = 0) -> SampleFinished:
    return SampleFinished(
        sample=sample_id(step, group, member),
        tokens=pack([5], I32),
        logprobs=pack([-1.0], F32),
        finish="stop",
        spans=[("w", step, 1)],
        attempts=1,
        group_done=False,
    )


def collector(step: int, k: int = 1) -> StepCollector:
    return StepCollector(1, step, {sample_id(step, g, 0): SIZE for g in range(N_GROUPS)}, k)


def entry(number: int, message: Message) -> Entry:
    return Entry("finished", f"{number}-0", message)


def open_steps(*steps: int, read_until: str = START) -> OpenSteps:
    opened = OpenSteps(read_until)
    for step in steps:
        opened.open(step, collector(step))
    opened.enter(steps[0])
    return opened


def test_early_entries_are_kept_for_their_step() -> None:
    steps = open_steps(3, 4)
    assert steps.apply("0-0", entry(1, finished(4))) is None
    assert steps.apply("1-0", entry(2, SeedingEnded(step=4, window_s=0.0, reason="window"))) is None
    decided = steps.apply("2-0", entry(3, finished(4, member=1)))
    assert decided is not None
    assert (decided[0], decided[1].group) == (4, sample_id(4, 0, 0))


def test_the_position_before_the_first_early_entry_is_kept_until_its_step_is_done() -> None:
    steps = open_steps(3, 4)
    assert steps.needed_from("7-0") == "7-0"
    steps.apply("7-0", entry(8, finished(3)))
    steps.apply("8-0", entry(9, finished(4)))
    steps.apply("9-0", entry(10, finished(3, member=1)))
    assert steps.needed_from("10-0") == "7-0"
    steps.open(5, collector(5))
    steps.enter(4)
    assert steps.needed_from("10-0") == "8-0"
    steps.enter(5)
    assert steps.needed_from("10-0") == "10-0"


def test_window_holds_no_entry_of_an_unrequested_step() -> None:
    steps = open_steps(3, 4)
    assert steps.holds(finished(4))
    assert steps.holds(finished(2))
    assert not steps.holds(finished(5))
    assert not steps.holds(SeedingReopened(step=5))


def test_sample_of_an_unopened_step_is_rejected() -> None:
    with pytest.raises(Unprocessable, match="not requested"):
        open_steps(3, 4).apply("0-0", entry(1, finished(5)))


def test_late_entries_are_counted_unless_a_predecessor_counted_them() -> None:
    steps, current = OpenSteps("5-0"), collector(3)
    steps.open(3, current)
    steps.enter(3)
    steps.apply("4-0", entry(5, finished(2)))
    assert current.duplicates == 0
    steps.apply("5-0", entry(6, finished(2)))
    assert current.duplicates == 1


def _take(
    log: list[Message], start: int, first: int, k: int, read_until: str = START, greed: int = 0
) -> tuple[list[tuple[int, int]], dict[int, tuple[str, str]]]:
    """Run the steps from `first` on as the trainer does, from entry `start` on.

    Returns:
        The groups in the order in which they were decided, and at each step's begin (needed from, read until).

    """
    steps, collectors = OpenSteps(read_until), {}
    at, decided, checkpoints = start, [], {}

    def take() -> None:
        nonlocal at
        done = steps.apply(f"{at}-0", entry(at + 1, log[at]))
        at += 1
        decided.extend([(done[0], done[1].group)] if done else [])

    for step in range(first, N_STEPS):
        for number in range(step, min(step + k, N_STEPS - 1) + 1):
            if number not in collectors:
                collectors[number] = collector(number, max(k, 1))
                steps.open(number, collectors[number])
        steps.enter(step)
        checkpoints[step] = (steps.needed_from(f"{at}-0"), f"{at}-0")
        while not collectors[step].complete or not collectors[step].trainer_has_device:
            take()
        for _ in range(greed):
            if k and at < len(log) and steps.holds(log[at]):
                take()
    return decided, checkpoints


@given(st.data(), st.integers(0, 3))
def test_a_successor_gets_the_same_groups_in_the_same_order_from_any_checkpoint(data: st.DataObject, k: int) -> None:
    log = _a_log(data, k)
    whole, checkpoints = _take(log, 0, 0, k, greed=data.draw(st.integers(0, 5), label="read on"))
    for step, (needed_from, read_until) in checkpoints.items():
        greed = data.draw(st.integers(0, 5), label="read on, again")
        again, _ = _take(log, int(needed_from.partition("-")[0]), step, k, read_until, greed)
        for number in range(step, N_STEPS):
            assert [g for s, g in again if s == number] == [g for s, g in whole if s == number]
            assert sorted(g for s, g in again if s == number) == [sample_id(number, g, 0) for g in range(N_GROUPS)]


def _a_log(data: st.DataObject, k: int) -> list[Message]:
    """Draw what a manager might write: entries of a step come in any order, but none of step s + k before s is done."""
    left: dict[int, list[Message]] = {}
    log: list[Message] = []
    for step in range(N_STEPS):
        for number in range(step, min(step + k, N_STEPS - 1) + 1):
            left.setdefault(number, _answers(data, number) if number not in left else left[number])
        while left[step]:
            numbers = [number for number in range(step, step + k + 1) if left.get(number)]
            log.append(left[data.draw(st.sampled_from(numbers), label="whose")].pop())
    return log


def _answers(data: st.DataObject, step: int) -> list[Message]:
    ids = [(g, m) for g in range(N_GROUPS) for m in range(SIZE)]
    answers: list[Message] = [
        SampleDropped(sample=sample_id(step, g, m), reason="too long", group_done=False)
        if data.draw(st.booleans(), label="dropped")
        else finished(step, g, m)
        for g, m in ids
    ]
    seeding = SeedingEnded(step=step, window_s=0.0, reason="window")
    mixed: list[Message] = data.draw(st.permutations([*answers, seeding]), label="order")
    return list(mixed)
