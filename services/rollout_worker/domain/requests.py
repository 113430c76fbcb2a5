"""A request to an inference engine, and the tokens that it emits."""

from __future__ import annotations

from dataclasses import dataclass

from rlboost.shared.messages import FINISH_NONE, Sampling

Key = tuple[int, int]
"""Identifies a request: (sample, attempt)."""


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

    @property
    def key(self) -> Key:
        """Return (sample, attempt), which identifies the request in the engine."""
        return self.sample, self.attempt


@dataclass(slots=True)
class Emission:
    """Tokens of one sample, all generated under one weight version."""

    sample: int
    attempt: int
    offset: int
    """Index of `tokens[0]` within the completion."""
    tokens: list[int]
    logprobs: list[float]
    """Log-probability of each token under the distribution it was sampled from, after temperature and top-p. At
    temperature 0, where that would be 0, under the model's distribution at temperature 1."""
    version: int
    """Meaningless if there are no tokens."""
    finish: int = FINISH_NONE
    """FINISH_* of `shared.messages`. A stop token is the last of `tokens`."""
    error: str = ""
    """Why the request cannot be generated; empty if it can. It is the request's last emission then."""
