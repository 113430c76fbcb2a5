"""Frames applied at once leave the same ledger as frames applied one by one, whatever is in them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.rollout_manager.domain.ledger import Ledger, Outcome
from services.rollout_manager.runs import apply
from shared.bus import Entry
from shared.columns import F32, I32, U8, U32, U64, pack
from shared.errors import Bury
from shared.ids import SampleId
from shared.messages import FINISH_RELEASED, FINISH_STOP, GroupRequested, Message, Placed, Sampling, TokenFrame

GROUPS = [SampleId(job, False, 0, 0, 0).pack() for job in (1, 2)]
SAMPLES = [group + i for group in GROUPS for i in range(2)]


def ledger_with_samples() -> Ledger:
    ledger = Ledger()
    for group in GROUPS:
        request = GroupRequested(
            job_id="j", group=group, n=2, prompt=pack([1], I32), sampling=Sampling(max_tokens=8), version=0, seed=1
        )
        ledger.admit(request, "1-0")
    n = len(SAMPLES)
    ledger.place(
        Placed(worker="w0", samples=pack(SAMPLES, U64), attempts=pack([1] * n, U32), offsets=pack([0] * n, U32))
    )
    return ledger


Row = tuple[int, int, int, int, int, int]
"""Sample, attempt, offset, number of tokens, version, finish."""


def frame_of(rows: list[Row], first_token: int = 0) -> TokenFrame:
    samples, attempts, offsets, counts, versions, finish = zip(*rows, strict=True) if rows else ((),) * 6
    n = sum(counts)
    return TokenFrame(
        worker="w0",
        seq=0,
        samples=pack(samples, U64),
        attempts=pack(attempts, U32),
        offsets=pack(offsets, U32),
        counts=pack(counts, U32),
        versions=pack(versions, U32),
        finish=pack(finish, U8),
        tokens=pack(range(first_token, first_token + n), I32),
        logprobs=pack([-float(i) for i in range(first_token, first_token + n)], F32),
    )


@st.composite
def frames(draw: st.DrawFn) -> list[TokenFrame]:
    """Frames that mostly continue their samples, and sometimes repeat, overlap, skip, come late or name nobody."""
    at = dict.fromkeys([*SAMPLES, 99], 0)
    made, token = [], 0
    for _ in range(draw(st.integers(1, 6))):
        rows = []
        for sample in draw(st.lists(st.sampled_from(list(at)), max_size=5)):
            count = draw(st.integers(0, 3))
            offset = max(0, at[sample] + draw(st.sampled_from([0, 0, 0, 0, -1, -2, 1])))
            finish = draw(st.sampled_from([0, 0, 0, FINISH_STOP, FINISH_RELEASED]))
            rows.append((sample, draw(st.sampled_from([1, 1, 1, 2])), offset, count, draw(st.integers(0, 1)), finish))
            at[sample] = offset + count
        made.append(frame_of(rows, first_token=token))
        token += sum(row[3] for row in rows)
    return made


def state_of(ledger: Ledger) -> object:
    samples = [(s.id, bytes(s.tokens), bytes(s.logprobs), s.finish, s.attempt) for s in ledger.samples.values()]
    return samples, set(ledger.finished), ledger.tokens_live, ledger.tokens_in_log


def total_of(outcomes: list[Outcome]) -> object:
    def summed(counters: list[dict[int, int]]) -> dict[int, int]:
        keys = {key for counter in counters for key in counter}
        return {key: sum(counter.get(key, 0) for counter in counters) for key in keys}

    return (
        summed([o.accepted for o in outcomes]),
        summed([o.duplicates for o in outcomes]),
        sorted(refused for o in outcomes for refused in o.refused),
        sorted(gap for o in outcomes for gap in o.gaps),
        sorted(released for o in outcomes for released in o.released),
    )


@settings(max_examples=300)
@given(frames())
def test_frames_at_once_do_what_they_do_one_by_one(given_frames: list[TokenFrame]) -> None:
    at_once, one_by_one = ledger_with_samples(), ledger_with_samples()
    outcome = at_once.extend(*given_frames)
    outcomes = [one_by_one.extend(frame) for frame in given_frames]
    assert state_of(at_once) == state_of(one_by_one)
    assert total_of([outcome]) == total_of(outcomes)
    assert all(sum(n for _, _, n in s.spans) == s.n_tokens for s in at_once.samples.values())
    assert [s.spans for s in at_once.samples.values()] == [s.spans for s in one_by_one.samples.values()]


def test_a_frame_that_names_a_sample_twice_extends_it_twice() -> None:
    ledger = ledger_with_samples()
    ledger.extend(frame_of([(SAMPLES[0], 1, 0, 2, 0, 0), (SAMPLES[0], 1, 2, 1, 1, 0)]))
    assert ledger.samples[SAMPLES[0]].tokens == pack([0, 1, 2], I32)
    assert ledger.samples[SAMPLES[0]].spans == [("w0", 0, 2), ("w0", 1, 1)]


def test_a_closed_sample_s_place_is_not_mistaken_for_that_of_the_next() -> None:
    ledger = ledger_with_samples()
    ledger.close([SAMPLES[0]])
    group = SampleId(1, False, 0, 1, 0).pack()
    ledger.admit(
        GroupRequested(job_id="j", group=group, n=1, prompt=b"1234", sampling=Sampling(), version=0, seed=1), "2-0"
    )
    ledger.place(Placed(worker="w1", samples=pack([group], U64), attempts=pack([1], U32), offsets=pack([0], U32)))
    outcome = ledger.extend(frame_of([(SAMPLES[0], 1, 0, 2, 0, 0)]))
    assert outcome.refused == [(1, "sample_over", 2)]
    assert ledger.samples[group].n_tokens == 0


def test_more_samples_than_sixteen_bits_can_number_are_told_apart() -> None:
    ledger = Ledger()
    n_groups = (1 << 16) // 256 + 1
    for i in range(n_groups):
        group = SampleId(1, False, 0, i, 0).pack()
        ledger.admit(
            GroupRequested(job_id="j", group=group, n=256, prompt=b"1234", sampling=Sampling(), version=0, seed=1),
            "1-0",
        )
    ids = list(ledger.samples)
    n = len(ids)
    ledger.place(Placed(worker="w0", samples=pack(ids, U64), attempts=pack([1] * n, U32), offsets=pack([0] * n, U32)))
    twice = [frame_of([(sample, 1, offset, 1, 0, 0) for sample in ids], first_token=offset * n) for offset in range(2)]
    ledger.extend(*twice)
    assert all(s.tokens == pack([i, n + i], I32) for i, s in enumerate(ledger.samples.values()))


def test_of_frames_at_once_only_the_one_that_makes_no_sense_is_refused() -> None:
    ledger = ledger_with_samples()
    good = [frame_of([(SAMPLES[0], 1, i, 1, 0, 0)], first_token=i) for i in range(3)]
    bad = good[1].model_copy(update={"counts": pack([7], U32)})
    entries = [Entry("log", f"{i}-0", frame) for i, frame in enumerate([good[0], bad, good[1], good[2]], 1)]

    def one(entry: Entry) -> None:
        assert isinstance(entry.message, TokenFrame)
        ledger.extend(entry.message)

    unusable = apply(entries, lambda run: ledger.extend(*run), one)
    assert [(entry.id, type(error)) for entry, error in unusable] == [("2-0", Bury)]
    assert ledger.samples[SAMPLES[0]].tokens == pack([0, 1, 2], I32)


def test_entries_keep_their_order_around_frames_that_are_applied_at_once() -> None:
    frame = frame_of([])
    other = Placed(worker="w", samples=b"", attempts=b"", offsets=b"")
    messages: list[Message] = [frame, frame, other, frame, other, frame, frame]
    seen: list[str] = []
    unusable = apply(
        [Entry("log", f"{i}-0", message) for i, message in enumerate(messages)],
        lambda run: seen.append(f"{len(run)} frames"),
        lambda entry: seen.append(entry.message.tag),
    )
    assert seen == ["2 frames", "Placed", "TokenFrame", "Placed", "2 frames"]
    assert not unusable


def test_the_oldest_samples_are_those_whose_entries_reach_back_farthest() -> None:
    ledger = ledger_with_samples()
    ledger.extend(frame_of([(SAMPLES[0], 1, 0, 2, 0, 0)]))
    ledger.restate(ledger.restated(ledger.samples[SAMPLES[0]]), "9-0")
    assert [s.id for s in ledger.oldest(9)] == [*SAMPLES[1:], SAMPLES[0]]


def test_an_admission_counts_as_old_only_once_its_entry_is_known() -> None:
    ledger = Ledger()
    request = GroupRequested(job_id="j", group=GROUPS[0], n=1, prompt=b"1234", sampling=Sampling(), version=0, seed=1)
    ledger.admit(request, "")
    assert ledger.oldest(1) == []
    ledger.recorded(request, "3-0")
    assert [s.first_id for s in ledger.oldest(1)] == ["3-0"]


def test_frames_of_nothing_change_nothing() -> None:
    ledger = ledger_with_samples()
    assert ledger.extend(frame_of([])).accepted == {}


@pytest.mark.parametrize(
    "column", ["samples", "attempts", "offsets", "counts", "versions", "finish", "tokens", "logprobs"]
)
def test_a_column_of_another_length_is_refused(column: str) -> None:
    frame = frame_of([(SAMPLES[0], 1, 0, 2, 0, 0)])
    short = frame.model_copy(update={column: getattr(frame, column)[:-1]})
    with pytest.raises(Bury, match="do not fit"):
        ledger_with_samples().extend(short)
