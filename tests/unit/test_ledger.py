"""The token ledger, record by record. Invariants 1, 3 and 4 by example; the stateful test has them by search."""

from __future__ import annotations

import pytest

from services.rollout_manager.domain.ledger import Ledger
from shared.columns import F32, I32, U8, U32, U64, ints, pack
from shared.errors import Bury
from shared.ids import SampleId
from shared.messages import FINISH_STOP, GroupRequested, Placed, SampleFailed, Sampling, TokenFrame

GROUP = SampleId(1, False, 0, 0, 0).pack()
REQUEST = GroupRequested(
    job_id="j", group=GROUP, n=2, prompt=pack([1], I32), sampling=Sampling(max_tokens=8), version=0, seed=1
)


def placed(worker: str, attempt: int, offset: int, sample: int = GROUP) -> Placed:
    return Placed(
        worker=worker, samples=pack([sample], U64), attempts=pack([attempt], U32), offsets=pack([offset], U32)
    )


def frame(
    worker: str, attempt: int, offset: int, tokens: list[int], *, finish: int = 0, version: int = 0, sample: int = GROUP
) -> TokenFrame:
    return TokenFrame(
        worker=worker,
        seq=0,
        samples=pack([sample], U64),
        attempts=pack([attempt], U32),
        offsets=pack([offset], U32),
        counts=pack([len(tokens)], U32),
        versions=pack([version], U32),
        finish=pack([finish], U8),
        tokens=pack(tokens, I32),
        logprobs=pack([-0.5] * len(tokens), F32),
    )


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger()
    ledger.admit(REQUEST, "1-0")
    ledger.place(placed("w1", 1, 0))
    return ledger


def tokens_of(ledger: Ledger) -> list[int]:
    return ints(bytes(ledger.samples[GROUP].tokens))


def test_frames_that_meet_the_end_extend_a_sample_and_its_spans(ledger: Ledger) -> None:
    ledger.extend(frame("w1", 1, 0, [5, 6]))
    outcome = ledger.extend(frame("w1", 1, 2, [7], version=1))
    assert tokens_of(ledger) == [5, 6, 7]
    assert ledger.samples[GROUP].spans == [("w1", 0, 2), ("w1", 1, 1)]
    assert outcome.accepted == {1: 1}


def test_a_frame_sent_twice_counts_once(ledger: Ledger) -> None:
    ledger.extend(frame("w1", 1, 0, [5, 6]))
    outcome = ledger.extend(frame("w1", 1, 0, [5, 6]))
    assert tokens_of(ledger) == [5, 6]
    assert outcome.duplicates == {1: 1}
    assert not outcome.accepted
    assert not outcome.refused


def test_the_overlap_of_a_frame_is_cut(ledger: Ledger) -> None:
    ledger.extend(frame("w1", 1, 0, [5, 6]))
    ledger.extend(frame("w1", 1, 1, [6, 7], finish=FINISH_STOP))
    assert tokens_of(ledger) == [5, 6, 7]
    assert list(ledger.finished) == [GROUP]


def test_a_gap_is_reported_and_adds_nothing(ledger: Ledger) -> None:
    outcome = ledger.extend(frame("w1", 1, 3, [9]))
    assert outcome.gaps == [GROUP]
    assert tokens_of(ledger) == []


def test_a_late_frame_of_an_earlier_attempt_never_changes_a_sample(ledger: Ledger) -> None:
    ledger.extend(frame("w1", 1, 0, [5]))
    ledger.place(placed("w2", 2, 1))
    outcome = ledger.extend(frame("w1", 1, 1, [6], finish=FINISH_STOP))
    assert tokens_of(ledger) == [5]
    assert outcome.refused == [(1, "late", 1)]
    assert not ledger.finished


def test_a_placement_cuts_what_its_owner_was_not_given(ledger: Ledger) -> None:
    """The placement was decided before the first owner's last frame was read; the log has both."""
    ledger.extend(frame("w1", 1, 0, [5, 6, 7], finish=FINISH_STOP))
    ((_, cut),) = ledger.place(placed("w2", 2, 2))
    assert cut == 1
    assert tokens_of(ledger) == [5, 6]
    assert ledger.samples[GROUP].spans == [("w1", 0, 2)]
    assert not ledger.finished
    ledger.extend(frame("w2", 2, 2, [8]))
    assert tokens_of(ledger) == [5, 6, 8]


def test_reading_a_placement_again_changes_nothing(ledger: Ledger) -> None:
    ledger.extend(frame("w1", 1, 0, [5]))
    assert ledger.place(placed("w1", 1, 0)) == []
    assert tokens_of(ledger) == [5]


def test_columns_that_do_not_fit_are_buried_and_change_nothing(ledger: Ledger) -> None:
    bad = frame("w1", 1, 0, [5]).model_copy(update={"counts": pack([2], U32)})
    with pytest.raises(Bury, match="do not fit"):
        ledger.extend(bad)
    assert tokens_of(ledger) == []


def test_a_request_that_is_no_group_is_buried() -> None:
    with pytest.raises(Bury, match="not a group"):
        Ledger().admit(REQUEST.model_copy(update={"group": GROUP + 1}), "1-0")


def test_a_failure_counts_only_under_the_current_attempt(ledger: Ledger) -> None:
    assert not ledger.fail(SampleFailed(worker="w1", sample=GROUP, attempt=9, reason="no"))
    assert ledger.fail(SampleFailed(worker="w1", sample=GROUP, attempt=1, reason="too long"))
    assert ledger.failed == {GROUP: "too long"}


def test_a_restated_sample_stands_for_all_that_was_older(ledger: Ledger) -> None:
    ledger.extend(frame("w1", 1, 0, [5, 6]))
    record = ledger.restated(ledger.samples[GROUP])
    ledger.restate(record, "9-0")
    assert ledger.samples[GROUP].first_id == "9-0"
    fresh = Ledger()
    fresh.restate(record, "9-0")
    fresh.extend(frame("w1", 1, 2, [7]))
    assert tokens_of(fresh) == [5, 6, 7]
    assert fresh.samples[GROUP].spans == [("w1", 0, 3)]


def test_a_restatement_that_missed_a_frame_does_not_free_the_older_entries(ledger: Ledger) -> None:
    record = ledger.restated(ledger.samples[GROUP])
    ledger.extend(frame("w1", 1, 0, [5]))
    ledger.restate(record, "9-0")
    assert ledger.samples[GROUP].first_id == "1-0"


def test_closing_the_last_sample_of_a_group_closes_the_group(ledger: Ledger) -> None:
    ledger.close([GROUP])
    assert ledger.open_in_group == {GROUP: 1}
    ledger.close([GROUP + 1, GROUP + 1])
    assert not ledger.open_in_group
    assert not ledger.samples
