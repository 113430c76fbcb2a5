"""Log-probabilities of selected tokens and their gradient, compared with autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from rlboost.services.trainer.adapters.torch.passes import selected_logprobs
from tests.support.saved_bytes import saved_bytes

VOCABULARY = 50


def random_case(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, tokens, and a gradient for each of them."""
    generator = torch.Generator().manual_seed(rows)
    logits = (4 * torch.randn(rows, VOCABULARY, generator=generator)).to(dtype).requires_grad_()
    return logits, torch.randint(VOCABULARY, (rows,), generator=generator), torch.randn(rows, generator=generator)


@pytest.mark.parametrize("chunk_logits", [1, 3 * VOCABULARY, 1 << 26], ids=["single-rows", "three-rows", "all-rows"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_selected_logprobs_values_and_gradients_match_autograd(
    dtype: torch.dtype, temperature: float, chunk_logits: int
) -> None:
    logits, tokens, weights = random_case(7, dtype)
    expected = -functional.cross_entropy(logits.float() / temperature, tokens, reduction="none")
    (gradient,) = torch.autograd.grad(expected, logits, weights)
    found = selected_logprobs(logits, tokens, temperature, chunk_logits)
    (ours,) = torch.autograd.grad(found, logits, weights)
    assert (found.dtype, ours.dtype) == (torch.float32, dtype)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    # Both are rounded once to the logits' dtype, from float32 values that differ in their last digits.
    rtol = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(ours, gradient, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("chunk_logits", [3 * VOCABULARY, 1 << 26], ids=["three-rows", "all-rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_entropies_and_their_gradients_match_autograd(dtype: torch.dtype, chunk_logits: int) -> None:
    logits, tokens, weights = random_case(7, dtype)
    with torch.no_grad():
        logits[0, 3] = -torch.inf  # as a masked token's, whose probability is 0
        tokens[0] = 4
    by_entropy = weights.flip(0)
    log_p = torch.log_softmax(logits.float() / 0.7, -1)
    entropy = -(log_p.exp() * log_p.masked_fill(log_p.isinf(), 0.0)).sum(-1)
    expected = torch.stack([log_p.gather(1, tokens[:, None])[:, 0], entropy])
    (gradient,) = torch.autograd.grad(expected, logits, torch.stack([weights, by_entropy]))
    with saved_bytes() as n_saved:
        found = selected_logprobs(logits, tokens, 0.7, chunk_logits, entropies=True)
        assert n_saved() == logits.nbytes + tokens.nbytes
    (ours,) = torch.autograd.grad(found, logits, torch.stack([weights, by_entropy]))
    torch.testing.assert_close(found, expected, rtol=0, atol=4e-6)
    torch.testing.assert_close(ours, gradient, rtol=2 * torch.finfo(dtype).eps, atol=4e-6)


def test_selected_logprobs_chunk_size_changes_no_bit() -> None:
    seen = []
    for chunk_logits in (1, 2 * VOCABULARY, 1 << 26):
        logits, tokens, weights = random_case(5, torch.float32)
        found = selected_logprobs(logits, tokens, 0.7, chunk_logits)
        seen.append((found.tolist(), torch.autograd.grad(found, logits, weights)[0].tolist()))
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_selected_logprobs_saves_only_logits_and_tokens_for_backward(dtype: torch.dtype) -> None:
    logits, tokens, _ = random_case(7, dtype)
    with saved_bytes() as n_saved:
        selected_logprobs(logits, tokens, 0.7)
        assert n_saved() == logits.nbytes + tokens.nbytes


def test_selected_logprobs_of_no_rows_is_empty() -> None:
    logits, tokens, weights = random_case(0, torch.float32)
    found = selected_logprobs(logits, tokens, 1.0)
    assert found.shape == (0,)
    assert torch.autograd.grad(found, logits, weights)[0].shape == (0, VOCABULARY)
