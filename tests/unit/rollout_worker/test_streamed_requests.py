"""The bookkeeping of an engine that streams tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from rlboost.services.rollout_worker.adapters.vllm.options import logprobs_error
from rlboost.services.rollout_worker.domain.frames import StreamedRequests
from rlboost.services.rollout_worker.domain.requests import stream_seed
from rlboost.shared.errors import Conflict
from rlboost.shared.messages import FINISH_LENGTH, FINISH_NONE, FINISH_RELEASED, FINISH_STOP, SAMPLING_OPTIONS
from tests.support.engines import request


@pytest.fixture
def table() -> StreamedRequests:
    table = StreamedRequests(slots=2, max_len=20, vocabulary=96)
    table.begin_version(0)
    return table


def test_tokens_before_and_after_a_version_are_emitted_separately(table: StreamedRequests) -> None:
    table.submit([request(1, tokens=[5])])
    (live,) = table.start()
    table.extend(live, [6, 7], [-0.5, -0.25])
    table.begin_version(1)
    table.extend(live, [8], [-1.0])
    table.end(live, finish=FINISH_LENGTH)
    emissions = [(e.offset, e.tokens, e.logprobs, e.version, e.finish) for e in table.take_emissions()]
    assert emissions == [(1, [6, 7], [-0.5, -0.25], 0, FINISH_NONE), (3, [8], [-1.0], 1, FINISH_LENGTH)]
    assert table.generated_total == 3
    assert table.take_emissions() == []


def test_version_of_a_jobs_adapter_is_that_of_its_requests_alone(table: StreamedRequests) -> None:
    table.submit([request(1), replace(request(2), job_id="a")])
    lives = table.start()
    for begin in (("a", 7), ("a", 8), ("", 3)):
        for live in lives:
            table.extend(live, [6], [-0.5])
        table.begin_version(begin[1], begin[0])
    for live in lives:
        table.extend(live, [6], [-0.5])
    made = {(e.sample, e.offset): e.version for e in table.take_emissions()}
    assert made == {
        (1, 0): 0,
        (1, 3): 3,
        (2, 0): 0,
        (2, 1): 7,
        (2, 2): 8,
        (2, 3): 3,
    }


def test_repeated_submission_is_a_conflict_and_adds_nothing(table: StreamedRequests) -> None:
    table.submit([request(1)])
    with pytest.raises(Conflict, match="sample 1, attempt 1"):
        table.submit([request(2), request(1)])
    assert [live.request.sample for live in table.start()] == [1]


def test_started_requests_run_in_order_up_to_the_slots(table: StreamedRequests) -> None:
    table.submit([request(n) for n in range(4)])
    assert (table.running, table.n_pending) == (set(), 4)
    first, *_ = table.start()
    assert (table.running, table.n_pending) == ({(0, 1), (1, 1)}, 2)
    table.end(first, finish=FINISH_STOP)
    assert table.running == {(1, 1), (2, 1)}


def test_aborted_request_keeps_its_tokens_and_ignores_later_ones(table: StreamedRequests) -> None:
    table.submit([request(1)])
    (live,) = table.start()
    table.extend(live, [6], [-0.5])
    assert table.abort([(1, 1), (7, 1)]) == [live]
    table.extend(live, [7], [-0.5])
    table.end(live, finish=FINISH_STOP)
    (emission,) = table.take_emissions()
    assert (emission.tokens, emission.finish) == ([6], FINISH_NONE)


def test_released_request_ends_with_released_even_without_a_token(table: StreamedRequests) -> None:
    table.submit([request(1, tokens=[5, 6])])
    (live,) = table.start()
    assert table.release([(1, 1)]) == [live]
    assert table.release([(1, 1)]) == []
    (emission,) = table.take_emissions()
    assert (emission.offset, emission.tokens, emission.finish) == (2, [], FINISH_RELEASED)


def test_logprob_that_is_not_a_number_ends_the_request_with_an_error(table: StreamedRequests) -> None:
    table.submit([request(1)])
    (live,) = table.start()
    table.extend(live, [6], [math.nan])
    (emission,) = table.take_emissions()
    assert (emission.tokens, emission.error) == ([], "the model's output is not a number")
    assert not table.is_live(live)


def test_invalid_and_finished_requests_end_at_the_start(table: StreamedRequests) -> None:
    table.submit([request(1, prompt=[96]), request(2, tokens=[1, 2], stop=[2]), request(3)])
    assert [live.request.sample for live in table.start()] == [3]
    invalid, finished = table.take_emissions()
    assert "token id" in invalid.error
    assert finished.finish == FINISH_STOP


def test_request_waits_for_its_images_and_no_other_one_does() -> None:
    table = StreamedRequests(8, 20, 96, options={"images"})
    shown = [request(i, images=(("digest", 3),)) for i in (1, 2)]
    table.submit(shown)
    assert [table.can_generate, table.start()] == [False, []]
    table.submit([request(3)])
    assert table.can_generate
    assert [live.request.sample for live in table.start()] == [3]
    for one, images in zip(shown, (["pixels"], "no such chunk"), strict=True):
        waiting = table.awaiting_images(one.key)
        assert waiting is not None
        waiting.images = images
        assert table.awaiting_images(one.key) is None
    assert table.awaiting_images((3, 1)) is table.awaiting_images((4, 1)) is None
    assert [live.request.sample for live in table.start()] == [1, 3]
    assert [emission.error for emission in table.take_emissions()] == ["no such chunk"]


def test_engine_without_images_refuses_them_at_once(table: StreamedRequests) -> None:
    table.submit([request(1, images=(("digest", 3),))])
    assert table.start() == []
    (emission,) = table.take_emissions()
    assert "need a model that sees them" in emission.error


def test_stream_seed_differs_by_seed_and_offset_and_fits_63_bits() -> None:
    seeds = {stream_seed(seed, offset) for seed in (-(2**63), -1, 0, 1, 2**63) for offset in range(50)}
    assert len(seeds) == 4 * 50  # modulo 2^64, -2^63 and 2^63 are one seed
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("mode", "temperature", "limits", "why"),
    [
        ("processed_logprobs", 0.7, {}, ""),
        ("processed_logprobs", 1.0, {"top_p": 0.99}, "sampling.top_p is 0.99"),
        ("processed_logprobs", 1.0, {"top_k": 5}, "sampling.top_k is 5"),
        ("processed_logprobs", 1.0, {"min_p": 0.1}, "sampling.min_p is 0.1"),
        ("processed_logprobs", 0.0, {"top_p": 0.5, "top_k": 5, "min_p": 0.1}, ""),
        ("processed_logprobs", 0.0, {"min_tokens": 2}, "sampling.min_tokens is 2"),
        ("raw_logprobs", 1.0, {"top_p": 0.5, "top_k": 5, "min_p": 0.1, "min_tokens": 2}, ""),
        ("raw_logprobs", 0.0, {"top_p": 0.5}, ""),
        ("raw_logprobs", 0.7, {}, "sampling.temperature is 0.7"),
        ("raw_logprobs", 1.1, {"top_p": 0.9}, "sampling.temperature is 1.1"),
        ("processed_logprobs", 0.009, {}, "vllm samples at 0.01 or more"),
        ("processed_logprobs", 0.01, {}, ""),
    ],
)
def test_vllm_refuses_training_samples_whose_logprobs_it_cannot_report(
    mode: str, temperature: float, limits: dict[str, Any], why: str
) -> None:
    options = frozenset(SAMPLING_OPTIONS)
    table = StreamedRequests(8, 20, 96, logprobs_error=partial(logprobs_error, mode), options=options)
    sampling: dict[str, Any] = {"temperature": temperature, **limits}
    table.submit([request(1, whole_logprobs=True, **sampling), request(2, **sampling)])
    started = [live.request.sample for live in table.start()]
    assert started == ([2] if why else [1, 2]), "an evaluation's is generated"
    assert [why in emission.error for emission in table.take_emissions()] == ([True] if why else [])
