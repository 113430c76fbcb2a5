"""The token ledger, record by record. Invariants 1, 3 and 4 by example; the stateful test has them by search."""

from __future__ import annotations

import pytest

from rlboost.services.rollout_manager.domain.tokens import PAST_TOKENS, Ledger
from rlboost.shared.errors import Unprocessable
from rlboost.shared.messages import FINISH_LENGTH, FINISH_STOP, Placed, SampleFailed, TokenFrame
from rlboost.shared.wire import U32, ints, pack
from tests.support import builders
from tests.support.builders import group_id, group_requested

GROUP = group_id()
REQUEST = group_requested(n=2, max_tokens=32, version=1, max_staleness=1)


def placed(worker: str, attempt: int, offset: int) -> Placed:
    return builders.placed(GROUP, worker=worker, attempt=attempt, offset=offset)


def frame(
    worker: str, attempt: int, offset: int, tokens: list[int], *, finish: int = 0, version: int = 0, sample: int = GROUP
) -> TokenFrame:
    row = (sample, attempt, offset, len(tokens), version, finish)
    return builders.token_frame([row], worker=worker, tokens=tokens)


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger()
    ledger.admit(REQUEST, "1-0")
    ledger.place(placed("w1", 1, 0))
    return ledger


def tokens_of(ledger: Ledger) -> list[int]:
    return ints(bytes(ledger.samples[GROUP].tokens))


def test_frame_at_the_end_extends_sample_and_spans(ledger: Ledger) -> None:
    ledger.extend(frame("w1", 1, 0, [5, 6]))
    outcome = ledger.extend(frame("w1", 1, 2, [7], version=1))
    assert tokens_of(ledger) == [5, 6, 7]
    assert ledger.samples[GROUP].spans == [("w1", 0, 2), ("w1", 1, 1)]
    assert outcome.accepted == {1: 1}


def test_frame_sent_twice_counts_once(ledger: Ledger) -> None:
    ledger.extend(frame("w1", 1, 0, [5, 6]))
    outcome = ledger.extend(frame("w1", 1, 0, [5, 6]))
    assert tokens_of(ledger) == [5, 6]
    assert outcome.duplicates == {1: 1}
    assert not outcome.accepted
    assert not outcome.refused


def test_overlap_of_a_frame_is_cut(ledger: Ledger) -> None:
    ledger.extend(frame("w1", 1, 0, [5, 6]))
    ledger.extend(frame("w1", 1, 1, [6, 7], finish=FINISH_STOP))
    assert tokens_of(ledger) == [5, 6, 7]
    assert list(ledger.finished) == [GROUP]


def test_frame_repeated_after_an_overlap_counts_once(ledger: Ledger) -> None:
    ledger.extend(frame("w1", 1, 0, [5]))
    ledger.extend(frame("w1", 1, 0, [5, 6]))
    outcome = ledger.extend(frame("w1", 1, 1, [6]))
    assert tokens_of(ledger) == [5, 6]
    assert outcome.duplicates == {1: 1}


def test_frame_of_a_worker_without_the_sample_counts_nothing(ledger: Ledger) -> None:
    ledger.extend(frame("w1", 1, 0, [5]))
    outcome = ledger.extend(frame("w2", 1, 1, [666], finish=FINISH_STOP), frame("w1", 1, 1, [6]))
    assert tokens_of(ledger) == [5, 6]
    assert not ledger.finished
    assert outcome.refused == [(1, "late", 1)]


def test_frame_for_a_sample_never_placed_counts_nothing(ledger: Ledger) -> None:
    ledger.extend(frame("w1", 0, 0, [666], sample=GROUP + 1))
    assert not ledger.samples[GROUP + 1].tokens


def test_no_frame_extends_a_sample_whose_attempt_has_no_worker(ledger: Ledger) -> None:
    """As after `detach_samples`, also once the sample is restated."""
    ledger.place(placed("", 2, 0))
    fresh = Ledger()
    fresh.restate(ledger.restatement_of(ledger.samples[GROUP]), "9-0")
    for replayed in (ledger, fresh):
        replayed.extend(frame("w1", 2, 0, [666]), frame("w9", 2, 0, [666]), frame("", 2, 0, [666]))
        assert tokens_of(replayed) == []
        assert not replayed.fail(failed(2, "w1"))


def test_failure_reported_by_another_worker_does_not_count(ledger: Ledger) -> None:
    assert not ledger.fail(failed(worker="w2"))
    assert not ledger.fail(SampleFailed(worker="w1", sample=GROUP + 1, attempt=0, reason="no"))


def test_worker_of_an_attempt_survives_in_a_restatement(ledger: Ledger) -> None:
    """Its last frame may follow the restatement of a sample that it has lost."""
    ledger.samples[GROUP].worker = ""
    fresh = Ledger()
    fresh.restate(ledger.restatement_of(ledger.samples[GROUP]), "9-0")
    fresh.extend(frame("w2", 1, 0, [666]), frame("w1", 1, 0, [5]))
    assert tokens_of(fresh) == [5]


@pytest.mark.parametrize("end_in", ["one_frame", "overlapping_frame"])
def test_tokens_after_the_end_of_a_sample_add_nothing(ledger: Ledger, end_in: str) -> None:
    if end_in == "overlapping_frame":
        ledger.extend(frame("w1", 1, 0, [5]))
    ledger.extend(frame("w1", 1, 0, [5, 6], finish=FINISH_STOP))
    for more in (frame("w1", 1, 2, [7]), frame("w1", 1, 1, [6, 7, 8]), frame("w1", 1, 2, [7], finish=FINISH_LENGTH)):
        outcome = ledger.extend(more)
        assert not outcome.accepted
        assert outcome.duplicates == {1: 1}
    sample = ledger.samples[GROUP]
    assert (tokens_of(ledger), sample.finish, ledger.tokens_live) == ([5, 6], FINISH_STOP, 2)
    assert sample.spans == [("w1", 0, 2)]


def test_row_after_the_end_in_the_same_frame_adds_nothing(ledger: Ledger) -> None:
    rows = [(GROUP, 1, 0, 2, 0, FINISH_STOP), (GROUP, 1, 2, 1, 0, 0)]
    ledger.extend(builders.token_frame(rows, worker="w1", tokens=[5, 6, 7]))
    assert tokens_of(ledger) == [5, 6]
    assert list(ledger.finished) == [GROUP]


def test_gap_is_reported_and_adds_nothing(ledger: Ledger) -> None:
    outcome = ledger.extend(frame("w1", 1, 3, [9]))
    assert outcome.gaps == [GROUP]
    assert tokens_of(ledger) == []


@pytest.mark.parametrize("version", [2, 5])
def test_row_of_a_version_within_the_staleness_extends_its_sample(version: int) -> None:
    ledger = Ledger()
    ledger.admit(group_requested(version=5, max_staleness=3), "1-0")
    ledger.place(placed("w1", 1, 0))
    ledger.extend(frame("w1", 1, 0, [5], version=version))
    assert tokens_of(ledger) == [5]


@pytest.mark.parametrize("version", [1, 6])
def test_row_of_a_version_that_the_request_excludes_is_invalid(version: int) -> None:
    ledger = Ledger()
    ledger.admit(group_requested(version=5, max_staleness=3), "1-0")
    ledger.place(placed("w1", 1, 0))
    outcome = ledger.extend(frame("w1", 1, 0, [5], version=version))
    assert tokens_of(ledger) == []
    assert outcome.invalid == [GROUP]


@pytest.mark.parametrize("next_worker", ["w1", "w2"])
def test_late_frame_of_an_earlier_attempt_is_refused(ledger: Ledger, next_worker: str) -> None:
    ledger.extend(frame("w1", 1, 0, [5]))
    ledger.place(placed(next_worker, 2, 1))
    outcome = ledger.extend(frame("w1", 1, 1, [6], finish=FINISH_STOP))
    assert tokens_of(ledger) == [5]
    assert outcome.refused == [(1, "late", 1)]
    assert not ledger.finished


def test_placement_cuts_tokens_after_its_offset(ledger: Ledger) -> None:
    """The placement was decided before the first owner's last frame was read; the log has both."""
    ledger.extend(frame("w1", 1, 0, [5, 6, 7], finish=FINISH_STOP))
    ((_, cut),) = ledger.place(placed("w2", 2, 2))
    assert cut == 1
    assert tokens_of(ledger) == [5, 6]
    assert ledger.samples[GROUP].spans == [("w1", 0, 2)]
    assert not ledger.finished
    ledger.extend(frame("w2", 2, 2, [8]))
    assert tokens_of(ledger) == [5, 6, 8]


def test_placement_applied_twice_changes_nothing(ledger: Ledger) -> None:
    ledger.extend(frame("w1", 1, 0, [5]))
    assert ledger.place(placed("w1", 1, 0)) == []
    assert tokens_of(ledger) == [5]


def test_columns_of_different_length_are_refused(ledger: Ledger) -> None:
    bad = frame("w1", 1, 0, [5]).model_copy(update={"counts": pack([2], U32)})
    with pytest.raises(Unprocessable, match="differ in length"):
        ledger.extend(bad)
    assert tokens_of(ledger) == []


def test_request_without_a_valid_group_id_is_refused() -> None:
    with pytest.raises(Unprocessable, match="invalid group id"):
        Ledger().admit(REQUEST.model_copy(update={"group": GROUP + 1}), "1-0")


def test_failure_counts_only_under_the_current_attempt(ledger: Ledger) -> None:
    assert not ledger.fail(SampleFailed(worker="w1", sample=GROUP, attempt=9, reason="no"))
    assert ledger.fail(SampleFailed(worker="w1", sample=GROUP, attempt=1, reason="too long"))
    assert ledger.failed == {GROUP: "too long"}


def failed(attempt: int = 1, worker: str = "w1") -> SampleFailed:
    return SampleFailed(worker=worker, sample=GROUP, attempt=attempt, reason="no")


def test_failure_of_a_complete_sample_does_not_count(ledger: Ledger) -> None:
    ledger.extend(frame("w1", 1, 0, [5], finish=FINISH_STOP))
    assert not ledger.fail(failed())
    assert not ledger.failed


def test_failures_start_anew_past_the_position_of_the_last(ledger: Ledger) -> None:
    assert ledger.fail(failed())
    ledger.place(placed("w2-1", 2, 0))
    ledger.extend(frame("w2-1", 2, 0, list(range(PAST_TOKENS))))
    assert ledger.fail(failed(2, "w2-1"))
    assert ledger.samples[GROUP].failed_on == ["w2"]


def test_failures_survive_in_a_restatement(ledger: Ledger) -> None:
    """Also where the last one was: a replay must not count later failures as being at the same position."""
    ledger.fail(failed())
    ledger.place(placed("w2", 2, 0))
    ledger.extend(frame("w2", 2, 0, list(range(PAST_TOKENS - 1))))
    fresh = Ledger()
    fresh.restate(ledger.restatement_of(ledger.samples[GROUP]), "9-0")
    assert fresh.samples[GROUP].failed_on == ["w1"]
    assert not fresh.samples[GROUP].past_failure
    fresh.extend(frame("w2", 2, PAST_TOKENS - 1, [7]))
    assert fresh.samples[GROUP].past_failure


def test_restatement_without_a_later_placement_keeps_older_entries(ledger: Ledger) -> None:
    record = ledger.restatement_of(ledger.samples[GROUP])
    ledger.place(placed("w2", 2, 0))
    ledger.restate(record, "9-0")
    assert ledger.samples[GROUP].first_id == "1-0"


def test_restatement_counts_the_log_from_its_own_entry(ledger: Ledger) -> None:
    ledger.extend(frame("w1", 1, 0, [5, 6]))
    ledger.restate(ledger.restatement_of(ledger.samples[GROUP]), "9-0")
    assert (ledger.samples[GROUP].log_tokens_before, ledger.tokens_in_log) == (2, 4)


def test_restated_sample_replaces_older_entries(ledger: Ledger) -> None:
    ledger.extend(frame("w1", 1, 0, [5, 6]))
    record = ledger.restatement_of(ledger.samples[GROUP])
    ledger.restate(record, "9-0")
    assert ledger.samples[GROUP].first_id == "9-0"
    fresh = Ledger()
    fresh.restate(record, "9-0")
    fresh.extend(frame("w1", 1, 2, [7]))
    assert tokens_of(fresh) == [5, 6, 7]
    assert fresh.samples[GROUP].spans == [("w1", 0, 3)]


def test_restatement_without_a_later_frame_keeps_older_entries(ledger: Ledger) -> None:
    record = ledger.restatement_of(ledger.samples[GROUP])
    ledger.extend(frame("w1", 1, 0, [5]))
    ledger.restate(record, "9-0")
    assert ledger.samples[GROUP].first_id == "1-0"


def test_closing_the_last_sample_closes_the_group(ledger: Ledger) -> None:
    ledger.remove(GROUP)
    assert ledger.open_in_group == {GROUP: 1}
    ledger.remove(GROUP + 1)
    assert ledger.remove(GROUP + 1) is None
    assert not ledger.open_in_group
    assert not ledger.samples
