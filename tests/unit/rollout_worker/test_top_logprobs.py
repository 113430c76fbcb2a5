"""Top log-probabilities on their way from an engine's emissions through frames and the ledger."""

from __future__ import annotations

import numpy as np
import pytest

from rlboost.services.rollout_manager.domain.tokens import Ledger
from rlboost.services.rollout_worker.domain.frames import frames
from rlboost.services.rollout_worker.domain.requests import Emission
from rlboost.shared.errors import Unprocessable
from rlboost.shared.ids import request_group
from rlboost.shared.messages import FINISH_STOP, GroupRequested, Sampling, TokenFrame
from rlboost.shared.wire import TOP
from tests.support import builders
from tests.support.builders import group_requested

N_TOP = 2
GROUP = request_group(1, 5)
PLAIN = request_group(1, 6)


def request(group: int, n_top: int) -> GroupRequested:
    return group_requested(group=group, sampling=Sampling(max_tokens=9999, top_logprobs=n_top), vocab_size=10_000)


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger()
    for group, n_top in ((GROUP, N_TOP), (PLAIN, 0)):
        ledger.admit(request(group, n_top), "1-0")
        ledger.place(builders.placed(group, worker="w1", attempt=1, offset=0))
    return ledger


def column(*positions: int) -> bytes:
    """Return what an engine reports at positions: tokens and numbers that say which one it is."""
    return np.array([(p, -float(p + i)) for p in positions for i in range(N_TOP)], TOP).tobytes()


def emission(start: int, end: int, *, finish: int = 0, attempt: int = 1, group: int = GROUP) -> Emission:
    top = column(*range(start, end)) if group == GROUP else b""
    n = end - start
    return Emission(group, attempt, start, [5] * n, [-1.0] * n, 0, finish, top_logprobs=top)


def sent(*emissions: Emission, worker: str = "w1", max_bytes: int = 1 << 20) -> list[TokenFrame]:
    return list(frames(worker, 0, emissions, max_bytes))


def test_each_token_keeps_its_own_in_any_mix_of_frames(ledger: Ledger) -> None:
    ledger.extend(*sent(emission(0, 3, group=PLAIN), emission(0, 2), emission(3, 4, group=PLAIN)))
    many = sent(emission(2, 400), max_bytes=1000)
    assert len(many) > 5
    assert max(len(frame.top_logprobs) + len(frame.tokens) + len(frame.logprobs) for frame in many) <= 1000
    ledger.extend(*many, *sent(emission(400, 401, finish=FINISH_STOP)))
    assert ledger.samples[GROUP].top_logprobs == column(*range(401))
    assert ledger.samples[PLAIN].top_logprobs == b""
    assert set(ledger.finished) == {GROUP}
    assert ledger.tokens_in_log == 405 + 401 * N_TOP


def test_resumed_sample_has_those_of_all_its_tokens(ledger: Ledger) -> None:
    ledger.extend(*sent(emission(0, 6)))
    ledger.place(builders.placed(GROUP, worker="w2", attempt=2, offset=4))
    ledger.extend(*sent(emission(6, 8)))  # the earlier worker's, too late
    ledger.extend(*sent(emission(2, 7, attempt=2), worker="w2"))  # repeats two that the ledger has
    assert ledger.samples[GROUP].n_tokens == 7
    assert ledger.samples[GROUP].top_logprobs == column(*range(7))


def test_restated_sample_is_whole(ledger: Ledger) -> None:
    ledger.extend(*sent(emission(0, 6)))
    message = ledger.restatement_of(ledger.samples[GROUP])
    other = Ledger()
    other.restate(message, "9-0")
    assert other.samples[GROUP].top_logprobs == column(*range(6))
    with pytest.raises(Unprocessable, match="bytes of top log-probabilities"):
        Ledger().restate(message.model_copy(update={"top_logprobs": column(0)}), "9-0")


@pytest.mark.parametrize(
    "top",
    [
        b"",
        column(0),
        column(0, 1, 2),
        np.array([(10_000, -1.0)] * 4, TOP).tobytes(),
        np.array([(1, np.nan)] * 4, TOP).tobytes(),
    ],
)
def test_row_with_others_than_requested_is_invalid(ledger: Ledger, top: bytes) -> None:
    wrong = Emission(GROUP, 1, 0, [5, 5], [-1.0, -1.0], 0)
    (frame,) = sent(wrong)
    sizes = np.array([len(top)], "<u4").tobytes() if top else b""
    outcome = ledger.extend(frame.model_copy(update={"top_logprobs": top, "top_bytes": sizes}))
    assert outcome.invalid == [GROUP]
    assert ledger.samples[GROUP].n_tokens == 0


def test_frame_whose_sizes_do_not_add_up_is_refused(ledger: Ledger) -> None:
    (frame,) = sent(emission(0, 2))
    with pytest.raises(Unprocessable, match="columns differ in length"):
        ledger.extend(frame.model_copy(update={"top_logprobs": column(0)}))
