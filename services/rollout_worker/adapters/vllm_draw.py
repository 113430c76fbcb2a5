"""Draws each token for vLLM, by the sample's own seed: a logits processor that leaves nothing to choose.

vLLM's own sampling draws from a generator that starts anew with every request, so a sample that goes on elsewhere would
go on differently. Here the token at offset o of a sample is where the uniform number of (seed, o) falls in its
distribution, as in the torch engine. The drawn token's logit becomes its log-probability and every other one minus
infinity: vLLM, told to be greedy and to return processed logits, takes the token and passes its log-probability on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from services.rollout_worker.adapters.torch_sampling import draw
from services.rollout_worker.domain.uniforms import as_u64, uniforms
from services.rollout_worker.ports import Request

if TYPE_CHECKING:
    from vllm.v1.sample.logits_processor import BatchUpdate

CLASS = f"{__name__}:SeededDraw"
"""What `EngineArgs.logits_processors` is told."""
_KEY = "rlboost_draw"


class _How(NamedTuple):
    seed: int
    temperature: float
    top_p: float
    made_before: int
    """Completion tokens that were part of the prompt that vLLM got."""
    given: int = -1
    """The token to take, whatever is drawn; below 0: none."""


class _Row(NamedTuple):
    how: _How
    made: list[int]
    """vLLM's own list of what it has made, which grows."""


def extra_args(request: Request, made_before: int) -> dict[str, Any]:
    """Return what `SamplingParams.extra_args` must hold for `SeededDraw`.

    Args:
        request: with the sample's seed.
        made_before: how many of its completion tokens are part of the prompt that vLLM gets.

    """
    sampling = request.sampling
    return {_KEY: _How(as_u64(request.seed), sampling.temperature, sampling.top_p, made_before)}


def given_args(token: int, temperature: float) -> dict[str, Any]:
    """Return `SamplingParams.extra_args` of a request whose one token is given: what comes back is its logprob."""
    return {_KEY: _How(0, temperature, 1.0, 0, token)}


class SeededDraw(LogitsProcessor):  # type: ignore[misc] # vLLM is not there everywhere
    """See the module. A row whose logits are not numbers gets the log-probability plus infinity."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:  # noqa: ARG002 - vLLM's
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        """See `LogitsProcessor`."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """See `LogitsProcessor`."""
        process_dict_updates(self._rows, batch_update, lambda params, _, made: _Row(params.extra_args[_KEY], made))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """See `LogitsProcessor`: logits [rows, vocabulary]."""
        rows = [self._rows[row] for row in range(len(logits))]
        seeds = np.array([row.how.seed for row in rows], np.uint64)
        offsets = np.array([row.how.made_before + len(row.made) for row in rows], np.int64)
        temperature = np.array([row.how.temperature for row in rows], np.float32)
        top_p = np.array([row.how.top_p for row in rows], np.float64)
        tokens, logprobs = draw(logits, temperature, top_p, uniforms(seeds, offsets))
        given = torch.tensor([row.how.given for row in rows], device=logits.device)
        if (is_given := given >= 0).any():
            tokens = torch.where(is_given, given, tokens)
            scaled = torch.log_softmax(logits.float() / torch.from_numpy(temperature).to(logits.device)[:, None], -1)
            logprobs = torch.where(is_given, scaled.gather(1, tokens[:, None])[:, 0], logprobs)
        logprobs = torch.where(logprobs.isfinite(), logprobs, torch.inf)
        return torch.full_like(logits, -torch.inf).scatter_(1, tokens[:, None], logprobs[:, None])
