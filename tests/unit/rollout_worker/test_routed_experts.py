"""Routed experts on their way from an engine's emissions through frames and the ledger."""

from __future__ import annotations

import pytest

from rlboost.services.rollout_manager.domain.tokens import Ledger
from rlboost.services.rollout_worker.domain.frames import FRAME_BYTES, frames
from rlboost.services.rollout_worker.domain.requests import Emission
from rlboost.services.trainer.domain.conversations import Conversation
from rlboost.shared.errors import ConfigError, Unprocessable
from rlboost.shared.job.spec import parse
from rlboost.shared.messages import FINISH_RELEASED, FINISH_STOP, SampleFinished, TokenFrame, TurnAnswered
from rlboost.shared.wire import RoutedShape
from tests.support import builders
from tests.support.builders import group_id, group_requested
from tests.support.jobs import job_file

SHAPE = RoutedShape(layers=3, experts_per_token=2, experts=8)
GROUP = group_id()
OTHER = GROUP + 1


def column(n_tokens: int, expert: int = 7) -> bytes:
    return bytes([expert] * (n_tokens * SHAPE.token_bytes))


@pytest.fixture
def ledger() -> Ledger:
    request = group_requested(n=2, max_tokens=2000)
    ledger = Ledger()
    sampling = request.sampling.model_copy(update={"routed_experts": tuple(SHAPE)})
    ledger.admit(request.model_copy(update={"sampling": sampling}), "1-0")
    for sample in (GROUP, OTHER):
        ledger.place(builders.placed(sample, worker="w1", attempt=1, offset=0))
    return ledger


def emission(sample: int, offset: int, n: int, finish: int = 0, routed: bytes = b"", attempt: int = 1) -> Emission:
    return Emission(sample, attempt, offset, [5] * n, [-1.0] * n, 0, finish, routed_experts=routed)


def sent(*emissions: Emission, first_seq: int = 0) -> list[TokenFrame]:
    return list(frames("w1", first_seq, emissions))


def test_wide_models_have_two_bytes_per_expert() -> None:
    assert RoutedShape(61, 8, 256).token_bytes == 488
    assert RoutedShape(61, 8, 257).token_bytes == 976


def test_ended_rows_bring_the_experts_of_whole_completions(ledger: Ledger) -> None:
    ledger.extend(*sent(emission(GROUP, 0, 3), emission(OTHER, 0, 1)))
    ledger.extend(
        *sent(emission(OTHER, 1, 1, FINISH_STOP, column(2, 1)), emission(GROUP, 3, 2, FINISH_STOP, column(5)))
    )
    assert [ledger.samples[sample].routed_experts for sample in (GROUP, OTHER)] == [column(5), column(2, 1)]
    assert set(ledger.finished) == {GROUP, OTHER}


def test_end_that_repeats_tokens_brings_its_experts(ledger: Ledger) -> None:
    ledger.extend(*sent(emission(GROUP, 0, 3)))
    ledger.extend(*sent(emission(GROUP, 0, 5, FINISH_STOP, column(5))))
    assert ledger.samples[GROUP].routed_experts == column(5)


def test_end_without_experts_completes_the_sample(ledger: Ledger) -> None:
    """An engine that gets a completion with its end has nothing to compute."""
    ledger.extend(*sent(emission(GROUP, 0, 3, FINISH_STOP)))
    assert GROUP in ledger.finished
    assert ledger.samples[GROUP].routed_experts == b""


@pytest.mark.parametrize(
    ("finish", "routed"),
    [(FINISH_STOP, column(4)), (FINISH_STOP, column(5, 8)), (FINISH_RELEASED, column(5)), (0, column(5))],
    ids=["too short", "no such expert", "released", "not ended"],
)
def test_experts_of_another_shape_fail_the_sample(ledger: Ledger, finish: int, routed: bytes) -> None:
    outcome = ledger.extend(*sent(emission(GROUP, 0, 5, finish, routed)))
    assert outcome.invalid == [GROUP]
    assert not ledger.samples[GROUP].tokens
    assert not ledger.samples[GROUP].routed_experts


def test_experts_that_were_not_requested_fail_the_sample() -> None:
    ledger = Ledger()
    ledger.admit(group_requested(n=1, max_tokens=32), "1-0")
    ledger.place(builders.placed(GROUP, worker="w1", attempt=1, offset=0))
    assert ledger.extend(*sent(emission(GROUP, 0, 5, FINISH_STOP, column(5)))).invalid == [GROUP]


def test_frame_with_missing_experts_changes_nothing(ledger: Ledger) -> None:
    (frame,) = sent(emission(GROUP, 0, 5, FINISH_STOP, column(5)))
    with pytest.raises(Unprocessable, match="its columns differ in length"):
        ledger.extend(frame.model_copy(update={"routed_experts": column(4)}))
    assert not ledger.samples[GROUP].tokens


def test_sample_that_is_cut_loses_its_experts(ledger: Ledger) -> None:
    ledger.extend(*sent(emission(GROUP, 0, 5, FINISH_STOP, column(5))))
    ledger.place(builders.placed(GROUP, worker="w2", attempt=2, offset=3))
    assert ledger.samples[GROUP].routed_experts == b""


def test_frames_are_split_by_their_experts() -> None:
    half = bytes(FRAME_BYTES // 2)
    found = sent(*(emission(GROUP + i, 0, 2, FINISH_STOP, half) for i in range(3)))
    assert [frame.routed_experts for frame in found] == [half] * 3
    assert [frame.routed_experts for frame in sent(emission(GROUP, 0, 2))] == [b""]


def test_replay_without_generated_samples_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.router_replay: R3 replays .* a job of kind sft generates nothing"):
        parse(job_file(kind="sft", reward=None, trainer={"router_replay": "R3"}))
    with pytest.raises(ConfigError, match=r"trainer\.router_replay: R3 .* a job of kind eval trains nothing"):
        parse(job_file(kind="eval", data={"eval": "t.jsonl"}, eval={"samples": 1}, trainer={"router_replay": "R3"}))


def test_conversation_has_experts_only_if_all_turns_have() -> None:
    over = [TurnAnswered(sample=1, over="done")]
    turns = [finished_turn(b"abc"), finished_turn(b"de"), finished_turn(b"", tokens=0)]
    assert Conversation(1, turns, over).as_sample().routed_experts == b"abcde"
    assert Conversation(1, [*turns, finished_turn(b"")], over).as_sample().routed_experts == b""


def finished_turn(routed: bytes, tokens: int = 1) -> SampleFinished:
    columns = {"tokens": bytes(4 * tokens), "logprobs": bytes(4 * tokens)}
    return SampleFinished(
        sample=1, **columns, finish="stop", spans=[("w", 0, tokens)], attempts=1, group_done=True, routed_experts=routed
    )
