"""A request to an inference engine, and the tokens that it emits."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rlboost.shared.errors import Conflict
from rlboost.shared.messages import FINISH_LENGTH, FINISH_NONE, FINISH_STOP, Sampling
from rlboost.shared.wire import RoutedShape, ints

# --- One uniform random number per (seed, offset), so that the randomness of a sample needs no state ------------------
# A worker that resumes a sample at offset o needs only the seed. The generator is SplitMix64 (Steele, Lea, Flood: "Fast
# splittable pseudorandom number generators", OOPSLA 2014), evaluated directly at any offset and started from a hash of
# the seed, so that neighboring seeds are independent.


_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def as_u64(seed: int) -> int:
    """Return any integer as an unsigned 64-bit seed."""
    return seed & _MASK


def uniforms(seeds: npt.NDArray[np.uint64], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) for each (seed, offset); both arrays have the shape [n].

    The numbers are multiples of 2^-52, so that `number * total` never rounds up to `total`.
    """
    state = _mix(seeds + _GAMMA) + (offsets.astype(np.uint64) + np.uint64(1)) * _GAMMA
    return (_mix(state) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def stream_seed(seed: int, offset: int) -> int:
    """Return the seed with which an engine's own random generator starts a sample at an offset, below 2^63."""
    uniform = uniforms(np.array([as_u64(seed)], np.uint64), np.array([offset], np.int64))
    return int(uniform[0] * 2.0**63)


# --- Requests, and the tokens that an engine emits for them -----------------------------------------------------------


NOT_A_NUMBER = "the model's output is not a number"
"""Error of a request whose log-probabilities are not finite."""
RequestKey = tuple[int, int]
"""Identifies a request: (sample, attempt)."""


class PromptImages(Protocol):
    """The images of a prompt, as an engine has prepared them."""

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """Return the prompt; each token of an image has an id of its own below -1, so other images differ."""


@dataclass(frozen=True, slots=True)
class Request:
    """One sample to generate, from its prompt or from the last token of an earlier attempt."""

    sample: int
    attempt: int
    prompt: list[int]
    tokens: list[int]
    """Completion tokens generated so far; the first new token has offset `len(tokens)`."""
    sampling: Sampling
    """`max_tokens` counts the whole completion, `tokens` included."""
    seed: int
    """The sample's seed. The token at offset o depends only on (weights, prompt, earlier tokens, seed, o), so a worker
    that resumes the sample generates the same tokens as the first worker would have."""
    job_id: str = ""
    """Whose adapter it needs, of an engine that holds several."""
    images: PromptImages | None = None
    """Those of `sampling.images`, once the engine has them."""

    @property
    def key(self) -> RequestKey:
        """Return (sample, attempt), which identifies the request in the engine."""
        return self.sample, self.attempt

    def emission_without_tokens(self, version: int, finish: int, error: str = "") -> Emission:
        """Return the only emission of a request that has generated nothing."""
        return Emission(
            sample=self.sample,
            attempt=self.attempt,
            offset=len(self.tokens),
            tokens=[],
            logprobs=[],
            version=version,
            finish=finish,
            error=error,
        )


@dataclass(slots=True)
class Emission:
    """Tokens of one sample, all generated under one weight version."""

    sample: int
    attempt: int
    offset: int
    """Index of `tokens[0]` within the completion."""
    tokens: list[int]
    logprobs: list[float]
    """Log-probability of each token under the model's whole distribution at the request's temperature, or at 1 if that
    is 0: as a trainer computes it. Top-p narrows what is drawn, not what is reported, if the engine supports that: see
    `Sampling.whole_logprobs`."""
    version: int
    """Meaningless if there are no tokens."""
    finish: int = FINISH_NONE
    """FINISH_* of `shared.messages`. A stop token is the last of `tokens`."""
    error: str = ""
    """Why the request cannot be generated; the emission is then its last. Empty if it can."""
    routed_experts: bytes = b""
    """At the end of a request that asks for it: the column of `shared.wire` of the whole completion."""
    top_logprobs: bytes = b""
    """Of each token, if the request asks for them: see `TokenFrame`."""
    is_forced: bool = False
    """True if the tokens were given: they took less than decode steps."""

    def top_of(self, start: int, end: int) -> bytes:
        """Return the `top_logprobs` of some of the tokens."""
        width = len(self.top_logprobs) // max(1, len(self.tokens))
        return self.top_logprobs[start * width : end * width]


def require_new(requests: Iterable[Request], known: set[RequestKey]) -> None:
    """Check that no two requests have the same key, and none a known one; the keys are added to `known`.

    Raises:
        Conflict: two have.

    """
    for request in requests:
        if request.key in known:
            raise Conflict(f"sample {request.sample}, attempt {request.attempt} is already queued or running")
        known.add(request.key)


def validation_error(
    request: Request,
    max_len: int,
    vocabulary: int,
    shape: RoutedShape | None = None,
    options: Collection[str] = (),
) -> str:
    """Return why the engine cannot generate a request; empty if it can.

    Args:
        request: not validated.
        max_len: maximum length of prompt and completion together.
        vocabulary: token ids are 0..vocabulary-1.
        shape: shape of the routed experts that the engine returns; None if it returns none.
        options: those that the engine supports.

    """
    ids, sampling = request.prompt + request.tokens, request.sampling
    if not ids:
        return "prompt and completion are both empty"
    if len(ids) >= max_len:
        return f"prompt and completion have {len(ids)} tokens; the maximum length is {max_len}"
    if not (min(ids) >= 0 and max(ids) < vocabulary):
        return f"a token id is outside the model's 0..{vocabulary - 1}"
    if not (sampling.temperature >= 0 and 0 < sampling.top_p <= 1):
        return f"temperature {sampling.temperature} or top_p {sampling.top_p} is outside [0, inf) or (0, 1]"
    if error := _option_error(sampling, vocabulary, options) or _forced_error(request, max_len, vocabulary):
        return error
    return _routing_error(sampling.routed_experts, shape) if sampling.routed_experts else ""


_NEEDS = {
    "stop": "stop strings need a tokenizer.json in the model's folder, where the manager reads it",
    "batch_invariant": "trainer.deterministic needs torch workers on CPUs and a dense model",
    "images": "prompts with images need a model that sees them, and torch workers, or vllm without language_model_only "
    "and limit_mm_per_prompt",
    "forced": "a teacher or reward model on workers needs torch, or vllm without speculative decoding and "
    "kv_sharing_fast_prefill",
}


def _option_error(sampling: Sampling, vocabulary: int, options: Collection[str]) -> str:
    if unsupported := sorted(sampling.options.difference(options)):
        needs = "; ".join(_NEEDS[name] for name in unsupported if name in _NEEDS)
        return f"this worker does not support {', '.join(unsupported)}{needs and ': '}{needs}"
    if sampling.min_p > 1:
        return f"min_p {sampling.min_p} is outside [0, 1]"
    if sampling.top_logprobs > vocabulary:
        return f"top_logprobs {sampling.top_logprobs} are more than the model's {vocabulary} tokens"
    if any(token >= vocabulary for token, _ in sampling.logit_bias):
        return f"a token id of logit_bias is outside the model's 0..{vocabulary - 1}"
    return ""


def _forced_error(request: Request, max_len: int, vocabulary: int) -> str:
    if not (given := ints(request.sampling.forced)):
        return ""
    if not request.prompt:
        return "a completion without a prompt cannot be scored"
    if len(given) != request.sampling.max_tokens or request.tokens != list(given[: len(request.tokens)]):
        return "the completion to score is not max_tokens long, or differs from its tokens so far"
    if (n_tokens := len(request.prompt) + len(given)) > max_len:
        return f"prompt and completion have {n_tokens} tokens; the maximum length is {max_len}"
    if not (min(given) >= 0 and max(given) < vocabulary):
        return f"a token id to score is outside the model's 0..{vocabulary - 1}"
    return ""


def _routing_error(requested: tuple[int, ...], shape: RoutedShape | None) -> str:
    if shape is None:
        return (
            "the job has trainer.router_replay, and this engine does not return routed experts: start vllm workers "
            """with RLBOOST_WORKER_VLLM_ARGS='{"enable_return_routed_experts": true}', or remove router_replay"""
        )
    if requested != shape:
        return f"the routed experts of the model are {tuple(shape)}, and {requested} are requested"
    return ""


def finish_at_start(request: Request) -> int:
    """Return the FINISH_* of a request that has nothing to generate; FINISH_NONE if it has."""
    if request.tokens and request.tokens[-1] in request.sampling.stop_token_ids:
        return FINISH_STOP
    return FINISH_LENGTH if len(request.tokens) >= request.sampling.max_tokens else FINISH_NONE
