"""Log-probabilities of chosen tokens and their gradient, against autograd's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from services.trainer.adapters.torch import chosen
from services.trainer.adapters.torch.chosen import chosen_logprobs
from tests.support.kept import counting

VOCABULARY = 50


def made(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, tokens, and a gradient for each of them."""
    generator = torch.Generator().manual_seed(rows)
    logits = (4 * torch.randn(rows, VOCABULARY, generator=generator)).to(dtype).requires_grad_()
    return logits, torch.randint(VOCABULARY, (rows,), generator=generator), torch.randn(rows, generator=generator)


@pytest.mark.parametrize("at_once", [1, 3 * VOCABULARY, 1 << 26], ids=["one-by-one", "by-threes", "at-once"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_and_gradients_are_those_of_autograd(
    dtype: torch.dtype, temperature: float, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chosen, "_AT_ONCE", at_once)
    logits, tokens, weights = made(7, dtype)
    expected = -functional.cross_entropy(logits.float() / temperature, tokens, reduction="none")
    (gradient,) = torch.autograd.grad(expected, logits, weights)
    found = chosen_logprobs(logits, tokens, temperature)
    (ours,) = torch.autograd.grad(found, logits, weights)
    assert (found.dtype, ours.dtype) == (torch.float32, dtype)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    # Both are rounded once to the logits' dtype, from float32 values that differ in their last digits.
    rtol = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(ours, gradient, rtol=rtol, atol=1e-6)


def test_how_many_rows_are_taken_at_once_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for at_once in (1, 2 * VOCABULARY, 1 << 26):
        monkeypatch.setattr(chosen, "_AT_ONCE", at_once)
        logits, tokens, weights = made(5, torch.float32)
        found = chosen_logprobs(logits, tokens, 0.7)
        seen.append((found.tolist(), torch.autograd.grad(found, logits, weights)[0].tolist()))
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_more_than_the_logits_and_tokens_is_kept_for_the_gradient(dtype: torch.dtype) -> None:
    logits, tokens, _ = made(7, dtype)
    with counting() as kept_bytes:
        chosen_logprobs(logits, tokens, 0.7)
        assert kept_bytes() == logits.nbytes + tokens.nbytes


def test_log_probabilities_of_nothing_are_nothing() -> None:
    logits, tokens, weights = made(0, torch.float32)
    found = chosen_logprobs(logits, tokens, 1.0)
    assert found.shape == (0,)
    assert torch.autograd.grad(found, logits, weights)[0].shape == (0, VOCABULARY)
