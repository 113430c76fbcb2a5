"""The probe of a version, the trainer's answer, and how far from it an engine may be."""

from __future__ import annotations

import math

import pytest

from rlboost.services.rollout_worker.domain.parity import MAX_PER_MEAN, MEAN_TOLERANCE, judge
from rlboost.services.trainer.domain.parity import COMMON_TOKENS, build_probe, build_reference
from rlboost.shared.columns import F32, pack
from rlboost.shared.errors import Fatal, Undecodable
from rlboost.shared.model.parity import ParityReference, ScoredSequence


def canary(
    *, temperature: float = 1.0, dtype: str = "float32", logprobs: tuple[float, ...] = (-1.0, -2.0)
) -> ParityReference:
    rows = [{"prompt": [1], "completion": list(range(len(logprobs))), "logprobs": logprobs}]
    return ParityReference.model_validate({"temperature": temperature, "dtype": dtype, "rows": rows})


# --- the probe --------------------------------------------------------------------------------------------------------


def test_the_probe_is_the_same_in_every_process_and_of_tokens_that_the_model_has() -> None:
    for vocabulary in (2, 96, 151_936):
        asked = build_probe(vocabulary, temperature=1.0, dtype="float32")
        assert asked == build_probe(vocabulary, temperature=1.0, dtype="float32")
        tokens = [token for prompt, completion in asked.rows for token in (*prompt, *completion)]
        assert 0 <= min(tokens) <= max(tokens) < min(vocabulary, COMMON_TOKENS)
    assert build_probe(96, temperature=1.0, dtype="float32").rows[0][0] == (67, 90, 4, 83, 69, 13, 76, 14)


def test_reference_has_a_logprob_per_completion_token() -> None:
    asked = build_probe(96, temperature=0.7, dtype="bfloat16")
    columns = [pack([-0.5 * row] * len(completion), F32) for row, (_, completion) in enumerate(asked.rows)]
    answer = build_reference(asked, columns)
    assert (answer.temperature, answer.dtype) == (0.7, "bfloat16")
    assert [(row.prompt, row.completion) for row in answer.rows] == list(asked.rows)
    assert answer.rows[2].logprobs == (-1.0,) * len(asked.rows[2][1])
    assert ParityReference.decode(answer.encode()) == answer


def test_model_with_nan_logprobs_is_not_published() -> None:
    asked = build_probe(96, temperature=1.0, dtype="float32")
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


def test_an_engine_agrees_within_the_tolerance_of_its_dtype() -> None:
    within, beyond = 0.9 * MEAN_TOLERANCE["float32"], 1.1 * MEAN_TOLERANCE["float32"]
    assert judge(canary(), [[-1.0 + within, -2.0 - within]], dtype="float32").agrees
    verdict = judge(canary(), [[-1.0 + beyond, -2.0 - beyond]], dtype="float32")
    assert not verdict.agrees
    assert f"{beyond:.3g} nats mean" in str(verdict)


def test_the_coarser_of_the_two_dtypes_counts() -> None:
    off = 0.9 * MEAN_TOLERANCE["bfloat16"]
    assert judge(canary(dtype="bfloat16"), [[-1.0 + off, -2.0]], dtype="float32").agrees
    assert judge(canary(), [[-1.0 + off, -2.0]], dtype="bfloat16").agrees
    assert not judge(canary(), [[-1.0 + off, -2.0]], dtype="float32").agrees


def test_single_large_difference_fails() -> None:
    off = 1.1 * MAX_PER_MEAN * MEAN_TOLERANCE["float32"]
    ours = [-1.0] * 100
    assert judge(canary(logprobs=(-1.0,) * 100), [ours], dtype="float32").agrees
    verdict = judge(canary(logprobs=(-1.0,) * 100), [[-1.0 - off, *ours[1:]]], dtype="float32")
    assert verdict.mean < verdict.mean_tolerance
    assert not verdict.agrees


def test_configured_tolerance_replaces_the_dtypes() -> None:
    assert judge(canary(), [[-1.5, -2.5]], dtype="float32", tolerance=0.6).agrees
    assert not judge(canary(), [[-1.5, -2.5]], dtype="bfloat16", tolerance=0.4).agrees


def test_differences_count_as_at_temperature_1() -> None:
    assert judge(canary(temperature=0.1), [[-1.02, -2.02]], dtype="float32").mean == pytest.approx(0.002)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_nan_never_agrees(broken: float) -> None:
    verdict = judge(canary(), [[-1.0, broken]], dtype="bfloat16", tolerance=1e9)
    assert not verdict.agrees
    assert "inf" in str(verdict)
