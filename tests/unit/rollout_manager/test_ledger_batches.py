"""Frames applied at once leave the same ledger as frames applied one by one, whatever is in them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlboost.services.rollout_manager.domain.effects import Effect, forget_job
from rlboost.services.rollout_manager.domain.tokens import FrameOutcome, Ledger
from rlboost.services.rollout_manager.recovery import PoisonEntries, apply_in_batches
from rlboost.shared.errors import Unprocessable
from rlboost.shared.ids import SampleId
from rlboost.shared.messages import FINISH_RELEASED, FINISH_STOP, GroupRequested, Message, Placed, Sampling, TokenFrame
from rlboost.shared.streams.bus import Entry
from rlboost.shared.wire import I32, U32, U64, ints, pack
from tests.support.builders import Row, group_id, group_requested, placed, token_frame

GROUPS = [group_id(job_no=job) for job in (1, 2)]
SAMPLES = [group + i for group in GROUPS for i in range(2)]


def ledger_with_samples() -> Ledger:
    ledger = Ledger()
    for group in GROUPS:
        ledger.admit(group_requested(group=group, n=2, max_tokens=64, version=1, max_staleness=1), "1-0")
    ledger.place(placed(*SAMPLES, worker="w0"))
    return ledger


def frame_of(rows: list[Row], first_token: int = 0) -> TokenFrame:
    n = sum(row[3] for row in rows)
    return token_frame(rows, worker="w0", tokens=range(first_token, first_token + n))


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


def folded(given_frames: list[TokenFrame]) -> dict[int, list[int]]:
    """Return the tokens of each sample, by the rules of invariant 3 for one row after the other."""
    tokens: dict[int, list[int]] = {sample: [] for sample in SAMPLES}
    ended: set[int] = set()
    for frame in given_frames:
        sent = ints(frame.tokens)
        rows = zip(
            ints(frame.samples, U64),
            ints(frame.attempts, U32),
            ints(frame.offsets, U32),
            ints(frame.counts, U32),
            frame.finish,
            strict=True,
        )
        for sample, attempt, offset, count, finish in rows:
            row, sent = sent[:count], sent[count:]
            if sample not in tokens or attempt != 1 or sample in ended or offset > len(tokens[sample]):
                continue
            tokens[sample] += row[len(tokens[sample]) - offset :]
            ended |= {sample} if finish == FINISH_STOP else set()
    return tokens


def total_of(outcomes: list[FrameOutcome]) -> object:
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
def test_frames_in_a_batch_equal_frames_one_by_one(given_frames: list[TokenFrame]) -> None:
    at_once, one_by_one = ledger_with_samples(), ledger_with_samples()
    outcome = at_once.extend(*given_frames)
    outcomes = [one_by_one.extend(frame) for frame in given_frames]
    assert state_of(at_once) == state_of(one_by_one)
    assert {s.id: ints(bytes(s.tokens)) for s in at_once.samples.values()} == folded(given_frames)
    assert total_of([outcome]) == total_of(outcomes)
    assert all(sum(n for _, _, n in s.spans) == s.n_tokens for s in at_once.samples.values())
    assert [s.spans for s in at_once.samples.values()] == [s.spans for s in one_by_one.samples.values()]


def test_frame_with_two_rows_of_a_sample_extends_it_twice() -> None:
    ledger = ledger_with_samples()
    ledger.extend(frame_of([(SAMPLES[0], 1, 0, 2, 0, 0), (SAMPLES[0], 1, 2, 1, 1, 0)]))
    assert ledger.samples[SAMPLES[0]].tokens == pack([0, 1, 2], I32)
    assert ledger.samples[SAMPLES[0]].spans == [("w0", 0, 2), ("w0", 1, 1)]


def test_reused_slot_is_not_mistaken_for_the_closed_sample() -> None:
    ledger = ledger_with_samples()
    ledger.remove(SAMPLES[0])
    group = SampleId(1, False, 0, 1, 0).pack()
    ledger.admit(
        GroupRequested(job_id="j", group=group, n=1, prompt=b"1234", sampling=Sampling(), version=0, seed=1), "2-0"
    )
    ledger.place(Placed(worker="w1", samples=pack([group], U64), attempts=pack([1], U32), offsets=pack([0], U32)))
    outcome = ledger.extend(frame_of([(SAMPLES[0], 1, 0, 2, 0, 0)]))
    assert outcome.refused == [(1, "sample_over", 2)]
    assert ledger.samples[group].n_tokens == 0


def test_more_samples_than_16_bits_are_distinguished() -> None:
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
    half = n // 2  # a frame has at most `MAX_ROWS`
    frames = [
        frame_of([(sample, 1, offset, 1, 0, 0) for sample in ids[start : start + half]], first_token=offset * n + start)
        for offset in range(2)
        for start in (0, half)
    ]
    ledger.extend(*frames)
    assert all(s.tokens == pack([i, n + i], I32) for i, s in enumerate(ledger.samples.values()))


def test_only_the_invalid_frame_of_a_batch_is_refused() -> None:
    ledger = ledger_with_samples()
    good = [frame_of([(SAMPLES[0], 1, i, 1, 0, 0)], first_token=i) for i in range(3)]
    bad = good[1].model_copy(update={"counts": pack([7], U32)})
    entries = [Entry("log", f"{i}-0", frame) for i, frame in enumerate([good[0], bad, good[1], good[2]], 1)]

    def run(frames: list[TokenFrame]) -> list[Effect]:
        ledger.extend(*frames)
        return []

    def one(entry: Entry) -> list[Effect]:
        assert isinstance(entry.message, TokenFrame)
        return run([entry.message])

    applied = apply_in_batches(entries, run, one, PoisonEntries())
    assert [(entry.id, type(error)) for entry, error in applied.invalid] == [("2-0", Unprocessable)]
    assert ledger.samples[SAMPLES[0]].tokens == pack([0, 1, 2], I32)


def test_entries_and_effects_keep_their_order_around_batches_of_frames() -> None:
    frame = frame_of([])
    other = Placed(worker="w", samples=b"", attempts=b"", offsets=b"")
    messages: list[Message] = [frame, frame, other, frame, other, frame, frame]
    applied = apply_in_batches(
        [Entry("log", f"{i}-0", message) for i, message in enumerate(messages)],
        lambda run: [forget_job(f"{len(run)} frames")],
        lambda entry: [forget_job(entry.message.tag)],
        PoisonEntries(),
    )
    assert applied.effects == [forget_job(text) for text in ("2 frames", "Placed", "TokenFrame", "Placed", "2 frames")]
    assert not applied.invalid


def test_oldest_samples_have_the_oldest_log_entries() -> None:
    ledger = ledger_with_samples()
    ledger.extend(frame_of([(SAMPLES[0], 1, 0, 2, 0, 0)]))
    ledger.restate(ledger.restatement_of(ledger.samples[SAMPLES[0]]), "9-0")
    assert [s.id for s in ledger.oldest(9)] == [*SAMPLES[1:], SAMPLES[0]]


def test_admission_has_an_age_once_its_entry_is_known() -> None:
    ledger = Ledger()
    request = GroupRequested(job_id="j", group=GROUPS[0], n=1, prompt=b"1234", sampling=Sampling(), version=0, seed=1)
    ledger.admit(request, "")
    assert ledger.oldest(1) == []
    ledger.set_admission_entry(request, "3-0")
    assert [s.first_id for s in ledger.oldest(1)] == ["3-0"]


def test_empty_frames_change_nothing() -> None:
    ledger = ledger_with_samples()
    assert ledger.extend(frame_of([])).accepted == {}


@pytest.mark.parametrize(
    "column", ["samples", "attempts", "offsets", "counts", "versions", "finish", "tokens", "logprobs"]
)
def test_column_of_another_length_is_refused(column: str) -> None:
    frame = frame_of([(SAMPLES[0], 1, 0, 2, 0, 0)])
    short = frame.model_copy(update={column: getattr(frame, column)[:-1]})
    with pytest.raises(Unprocessable, match="differ in length"):
        ledger_with_samples().extend(short)
