"""vLLM logits processor that samples each token by the sample's seed.

vLLM's own sampling restarts its random generator with every request, so a migrated sample would continue differently.
Here the token at offset o of a sample is where the uniform number of (seed, o) falls in its distribution, as in the
torch engine. The processor sets the sampled token's logit to its log-probability and all others to minus infinity;
vLLM, set to greedy sampling and processed logits, then selects that token and returns its log-probability.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from rlboost.services.rollout_worker.adapters.torch.sampling import sample
from rlboost.services.rollout_worker.domain.requests import Request
from rlboost.services.rollout_worker.domain.uniforms import as_u64, uniforms

if TYPE_CHECKING:
    from vllm.v1.sample.logits_processor import BatchUpdate

CLASS = f"{__name__}:SeededSampling"
"""The value for `EngineArgs.logits_processors`."""
_KEY = "rlboost_sampling"


class _Params(NamedTuple):
    seed: int
    temperature: float
    top_p: float
    n_resumed: int
    """Completion tokens that were part of the prompt that vLLM got."""
    forced_token: int = -1
    """The token to select instead of the sampled one; below 0 = none."""


class _Slot(NamedTuple):
    params: _Params
    output: list[int]
    """vLLM's own list of the request's output tokens, which grows."""


def extra_args(request: Request, n_resumed: int) -> dict[str, Any]:
    """Return the `SamplingParams.extra_args` of a request.

    Args:
        request: has the sample's seed.
        n_resumed: number of its completion tokens that are part of the prompt that vLLM gets.

    """
    sampling = request.sampling
    return {_KEY: _Params(as_u64(request.seed), sampling.temperature, sampling.top_p, n_resumed)}


def forced_token_args(token: int, temperature: float) -> dict[str, Any]:
    """Return the `SamplingParams.extra_args` of a request that only scores `token`."""
    return {_KEY: _Params(0, temperature, 1.0, 0, token)}


class SeededSampling(LogitsProcessor):  # type: ignore[misc] # vLLM may not be installed
    """See the module. A request whose logits are not numbers gets the log-probability plus infinity."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:  # noqa: ARG002 - vLLM's
        self._slots: dict[int, _Slot] = {}

    def is_argmax_invariant(self) -> bool:
        """See `LogitsProcessor`."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """See `LogitsProcessor`."""
        process_dict_updates(self._slots, batch_update, lambda params, _, out: _Slot(params.extra_args[_KEY], out))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """See `LogitsProcessor`: logits [running requests, vocabulary]."""
        slots = [self._slots[slot] for slot in range(len(logits))]
        seeds = np.array([slot.params.seed for slot in slots], np.uint64)
        offsets = np.array([slot.params.n_resumed + len(slot.output) for slot in slots], np.int64)
        temperature = np.array([slot.params.temperature for slot in slots], np.float32)
        top_p = np.array([slot.params.top_p for slot in slots], np.float64)
        tokens, logprobs = sample(logits, temperature, top_p, uniforms(seeds, offsets))
        forced = torch.tensor([slot.params.forced_token for slot in slots], device=logits.device)
        if (is_forced := forced >= 0).any():
            tokens = torch.where(is_forced, forced, tokens)
            scaled = torch.log_softmax(logits.float() / torch.from_numpy(temperature).to(logits.device)[:, None], -1)
            logprobs = torch.where(is_forced, scaled.gather(1, tokens[:, None])[:, 0], logprobs)
        logprobs = torch.where(logprobs.isfinite(), logprobs, torch.inf)
        return torch.full_like(logits, -torch.inf).scatter_(1, tokens[:, None], logprobs[:, None])
