"""The probe of a version, the trainer's answer, and how far from it an engine may be."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from rlboost.services.rollout_worker.domain.parity_check import (
    DRAWS,
    FLOAT32_TOLERANCE,
    MAX_PER_MEAN,
    RELATIVE_TOLERANCE,
    continuations,
    draws,
    judge,
    judge_draws,
)
from rlboost.services.rollout_worker.domain.requests import Emission
from rlboost.services.trainer.domain.canary_prompts import COMMON_TOKENS, build_canary_prompts, build_reference
from rlboost.shared.errors import Fatal, Undecodable
from rlboost.shared.weights.manifest import ParityReference, ScoredSequence
from rlboost.shared.wire import F32, pack


def canary(
    *, temperature: float = 1.0, dtype: str = "float32", logprobs: tuple[float, ...] = (-1.0, -2.0)
) -> ParityReference:
    rows = [{"prompt": [1], "completion": list(range(len(logprobs))), "logprobs": logprobs}]
    return ParityReference.model_validate({"temperature": temperature, "dtype": dtype, "rows": rows})


# --- the probe --------------------------------------------------------------------------------------------------------


def test_the_probe_is_the_same_in_every_process_and_of_tokens_that_the_model_has() -> None:
    for vocabulary in (2, 96, 151_936):
        asked = build_canary_prompts(vocabulary, temperature=1.0, dtype="float32")
        assert asked == build_canary_prompts(vocabulary, temperature=1.0, dtype="float32")
        tokens = [token for prompt, completion in asked.rows for token in (*prompt, *completion)]
        assert 0 <= min(tokens) <= max(tokens) < min(vocabulary, COMMON_TOKENS)
    assert build_canary_prompts(96, temperature=1.0, dtype="float32").rows[0][0] == (67, 90, 4, 83, 69, 13, 76, 14)


def test_reference_has_a_logprob_per_completion_token() -> None:
    asked = build_canary_prompts(96, temperature=0.7, dtype="bfloat16")
    columns = [pack([-0.5 * row] * len(completion), F32) for row, (_, completion) in enumerate(asked.rows)]
    answer = build_reference(asked, columns)
    assert (answer.temperature, answer.dtype) == (0.7, "bfloat16")
    assert [(row.prompt, row.completion) for row in answer.rows] == list(asked.rows)
    assert answer.rows[2].logprobs == (-1.0,) * len(asked.rows[2][1])
    assert ParityReference.decode(answer.encode()) == answer


def test_model_with_nan_logprobs_is_not_published() -> None:
    asked = build_canary_prompts(96, temperature=1.0, dtype="float32")
    columns = [pack([math.nan] * len(completion), F32) for _, completion in asked.rows]
    with pytest.raises(Fatal, match="not published"):
        build_reference(asked, columns)


@pytest.mark.parametrize("text", ["", "{}", '{"temperature": 1, "dtype": "float32", "rows": []}'])
def test_invalid_reference_does_not_decode(text: str) -> None:
    with pytest.raises(Undecodable, match="parity reference"):
        ParityReference.decode(text)


def test_reference_needs_one_logprob_per_token() -> None:
    with pytest.raises(ValueError, match="1 log-probabilities for 2 tokens"):
        ScoredSequence(prompt=(1,), completion=(2, 3), logprobs=(-1.0,))


# --- the verdict ------------------------------------------------------------------------------------------------------


def test_float32_engine_agrees_within_a_fixed_tolerance() -> None:
    within, beyond = 0.9 * FLOAT32_TOLERANCE, 1.1 * FLOAT32_TOLERANCE
    assert judge(canary(), [[-1.0 + within, -2.0 - within]], precision="float32").agrees
    verdict = judge(canary(), [[-1.0 + beyond, -2.0 - beyond]], precision="float32")
    assert not verdict.agrees
    assert f"{beyond:.3g} nats mean" in str(verdict)


@pytest.mark.parametrize("confidence", [1.0, 10.0])
def test_bfloat16_tolerance_grows_with_the_spread_of_the_reference(confidence: float) -> None:
    logprobs = (-1.0 * confidence, -2.0 * confidence)
    within = RELATIVE_TOLERANCE["bfloat16"] * 0.5 * confidence
    for factor, agrees in ((0.9, True), (1.1, False)):
        scored = [[logprobs[0] + factor * within, logprobs[1] - factor * within]]
        assert judge(canary(logprobs=logprobs), scored, precision="bfloat16").agrees is agrees


def test_the_coarser_of_the_two_precisions_counts() -> None:
    scored = [[-1.0 + 0.09, -2.0]]
    assert judge(canary(dtype="bfloat16"), scored, precision="float32").agrees
    assert judge(canary(), scored, precision="bfloat16").agrees
    assert not judge(canary(), scored, precision="float32").agrees
    assert judge(canary(), [[-1.3, -2.0]], precision="quantized").agrees
    assert not judge(canary(), [[-1.3, -2.0]], precision="bfloat16").agrees


def test_mixture_of_experts_may_differ_more_below_float32() -> None:
    scored = [[-1.0 + 0.19, -2.0]]
    assert judge(canary(), scored, precision="bfloat16", has_experts=True).agrees
    assert not judge(canary(), scored, precision="bfloat16").agrees
    assert not judge(canary(), scored, precision="float32", has_experts=True).agrees


def test_single_large_difference_fails() -> None:
    off = 1.1 * MAX_PER_MEAN * FLOAT32_TOLERANCE
    ours = [-1.0] * 100
    assert judge(canary(logprobs=(-1.0,) * 100), [ours], precision="float32").agrees
    verdict = judge(canary(logprobs=(-1.0,) * 100), [[-1.0 - off, *ours[1:]]], precision="float32")
    assert verdict.mean < verdict.mean_tolerance
    assert not verdict.agrees


def test_configured_tolerance_replaces_that_of_the_precision() -> None:
    assert judge(canary(), [[-1.5, -2.5]], precision="float32", tolerance=0.6).agrees
    assert not judge(canary(), [[-1.02, -2.02]], precision="bfloat16", tolerance=0.01).agrees


def test_differences_count_as_at_temperature_1() -> None:
    assert judge(canary(temperature=0.1), [[-1.02, -2.02]], precision="float32").mean == pytest.approx(0.002)
    verdict = judge(canary(temperature=0.5), [[-1.0, -2.0]], precision="bfloat16")
    assert verdict.mean_tolerance == pytest.approx(0.5 * RELATIVE_TOLERANCE["bfloat16"] * 0.5)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_nan_never_agrees(broken: float) -> None:
    verdict = judge(canary(), [[-1.0, broken]], precision="bfloat16", tolerance=1e9)
    assert not verdict.agrees
    assert "inf" in str(verdict)


# --- sampling ---------------------------------------------------------------------------------------------------------

SHAPES = {
    "flat": [1.0] * 96,
    "a large vocabulary": [1.0] * 150_000,
    "zipf": [1 / n for n in range(1, 5001)],
    "peaked": [0.98] + [0.02 / 1000] * 1000,
    "certain": [1 - 1e-9, 1e-9],
    "geometric": [0.9**n for n in range(200)],
}


def drawn(weights: list[float], keep: float = 1.0, k: int = 0, seed: int = 0) -> list[Emission]:
    """Draw as an engine does that leaves out all but the k most likely tokens, or those beyond a nucleus of `keep`."""
    whole = np.array(weights) / sum(weights)
    rest = whole.copy()
    if k:
        rest[np.argsort(-whole)[k:]] = 0
    rest[np.argsort(-whole)[np.cumsum(-np.sort(-whole)) - -np.sort(-whole) >= keep]] = 0
    tokens = np.random.default_rng(seed).choice(len(rest), DRAWS, p=rest / rest.sum())
    return [Emission(n, 1, 0, [int(token)], [math.log(whole[token])], 0) for n, token in enumerate(tokens)]


@pytest.mark.parametrize("weights", SHAPES.values(), ids=SHAPES)
def test_true_draws_never_contradict_their_logprobs(weights: list[float]) -> None:
    assert [judge_draws(drawn(weights, seed=seed)) for seed in range(30)] == [""] * 30


@pytest.mark.parametrize(
    ("shape", "cut"),
    [
        *((shape, {"k": k}) for shape in ("flat", "a large vocabulary", "zipf", "geometric") for k in (1, 5, 20)),
        *((shape, {"keep": 0.4}) for shape in ("flat", "zipf", "geometric")),
    ],
)
def test_draws_that_leave_out_tokens_contradict_their_logprobs(shape: str, cut: dict[str, Any]) -> None:
    assert "draws of one token" in judge_draws(drawn(SHAPES[shape], **cut))


def test_draws_of_reported_certainties_contradict_them() -> None:
    emissions = drawn(SHAPES["flat"])
    for emission in emissions:
        emission.logprobs = [0.0]
    assert judge_draws(emissions)


def test_continuations_sample_as_training_does_and_draws_without_top_p() -> None:
    reference = canary(temperature=0.7).model_copy(update={"top_p": 0.9})
    (one,) = continuations(reference)
    assert (one.sampling.temperature, one.sampling.top_p, one.sampling.max_tokens) == (0.7, 0.9, 16)
    assert one.sampling.whole_logprobs
    assert one.prompt == [1, 1], "repeated, so that there is something to look up"
    first, *rest = draws(reference)
    assert (first.sampling.temperature, first.sampling.top_p, first.sampling.max_tokens) == (0.7, 1.0, 1)
    assert len({request.seed for request in (first, *rest)}) == DRAWS
