"""Emissions to frames: nothing is lost, doubled or reordered, and no frame is too large."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlboost.services.rollout_worker.domain.frames import UNSENT_BYTES, UnsentQueue, frames
from rlboost.services.rollout_worker.domain.requests import Emission
from rlboost.shared.messages import FINISH_LENGTH, FINISH_NONE, FINISH_STOP, SampleFailed, TokenFrame
from rlboost.shared.messages.token_rows import token_rows
from rlboost.shared.wire import floats, ints


def piece(
    sample: int,
    tokens: list[int],
    *,
    offset: int = 0,
    attempt: int = 1,
    version: int = 0,
    finish: int = 0,
    error: str = "",
) -> Emission:
    return Emission(sample, attempt, offset, tokens, [-0.5 * token for token in tokens], version, finish, error)


Row = tuple[int, int, int, int, int, tuple[int, ...], tuple[float, ...]]


def rows(frame: TokenFrame) -> list[Row]:
    tokens, logprobs, start, found = ints(frame.tokens), floats(frame.logprobs), 0, []
    for sample, attempt, offset, count, version, finish in token_rows(frame):
        end = start + count
        found.append((sample, attempt, offset, version, finish, tuple(tokens[start:end]), tuple(logprobs[start:end])))
        start = end
    return found


def n_bytes(frame: TokenFrame) -> int:
    return sum(len(value) for value in frame.model_dump().values() if isinstance(value, bytes))


def test_flush_of_many_samples_is_one_frame() -> None:
    made = [piece(sample, [sample, 7], offset=3 * sample, attempt=2, version=9) for sample in range(64)]
    (frame,) = frames("w", 5, made)
    assert (frame.worker, frame.seq) == ("w", 5)
    assert rows(frame) == [
        (sample, 2, 3 * sample, 9, FINISH_NONE, (sample, 7), (-0.5 * sample, -3.5)) for sample in range(64)
    ]


def test_no_emissions_make_no_frame() -> None:
    assert list(frames("w", 0, [])) == []
    assert list(frames("w", 0, [piece(1, [], error="too long")])) == []


def test_finish_without_tokens_is_a_row() -> None:
    (frame,) = frames("w", 0, [piece(1, [], offset=4, finish=FINISH_LENGTH)])
    assert rows(frame) == [(1, 1, 4, 0, FINISH_LENGTH, (), ())]


def test_long_emission_is_split_and_only_its_last_row_has_the_finish() -> None:
    made = [piece(1, list(range(100)), offset=10, finish=FINISH_STOP)]
    parts = [row for frame in frames("w", 0, made, max_bytes=25 + 8 * 40) for row in rows(frame)]
    assert [(offset, finish, len(tokens)) for _, _, offset, _, finish, tokens, _ in parts] == [
        (10, FINISH_NONE, 40),
        (50, FINISH_NONE, 40),
        (90, FINISH_STOP, 20),
    ]


pieces = st.lists(
    st.builds(
        piece,
        sample=st.integers(0, 2**64 - 1),
        tokens=st.lists(st.integers(0, 2**31 - 1), max_size=40),
        offset=st.integers(0, 1000),
        finish=st.sampled_from([FINISH_NONE, FINISH_STOP, FINISH_LENGTH]),
    ),
    max_size=12,
)


@given(pieces, st.integers(60, 400))
def test_frames_carry_every_token_once_in_order_within_the_limit(made: list[Emission], limit: int) -> None:
    sent = list(frames("w", 3, made, max_bytes=limit))
    assert [frame.seq for frame in sent] == list(range(3, 3 + len(sent)))
    assert all(n_bytes(frame) <= limit for frame in sent)
    assert all(rows(frame) for frame in sent)
    left = [row for frame in sent for row in rows(frame)]
    for item in made:
        at, done = item.offset, not item.tokens and item.finish == FINISH_NONE
        while not done:
            sample, _, offset, _, finish, tokens, _ = left.pop(0)
            assert (sample, offset) == (item.sample, at)
            assert list(tokens) == item.tokens[at - item.offset :][: len(tokens)]
            at += len(tokens)
            done = at == item.offset + len(item.tokens)
            assert finish == (item.finish if done else FINISH_NONE)
    assert left == []


def test_queue_preserves_unsent_order_and_numbers_frames_once() -> None:
    queue = UnsentQueue("w")
    queue.add([piece(1, [1])])
    queue.add([piece(1, [2], offset=1), piece(2, [], error="the prompt is too long")])
    first = queue.batch()
    assert [message.seq for message in first if isinstance(message, TokenFrame)] == [0, 1]
    assert first[2] == SampleFailed(worker="w", sample=2, attempt=1, reason="the prompt is too long")
    assert queue.batch() == first
    queue.sent(1)
    queue.add([piece(1, [3], offset=2)])
    assert [message.seq for message in queue.batch() if isinstance(message, TokenFrame)] == [1, 2]
    queue.sent(3)
    assert (len(queue), queue.unsent_bytes) == (0, 0)


def test_queue_batches_are_bounded_and_never_empty() -> None:
    queue = UnsentQueue("w")
    for offset in range(5):
        queue.add([piece(1, [1], offset=offset)])
    assert len(queue.batch(max_bytes=80)) == 2
    assert len(queue.batch(max_bytes=1)) == 1


def test_queue_over_its_limit_is_full() -> None:
    queue = UnsentQueue("w")
    queue.add([piece(1, [0] * (UNSENT_BYTES // 8))])
    assert queue.is_full
    while batch := queue.batch():
        queue.sent(len(batch))
    assert not queue.is_full
