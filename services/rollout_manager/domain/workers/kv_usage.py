"""Counts the tokens that a worker's samples occupy in its KV cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlboost.services.rollout_manager.domain.token_log.sample import Sample
from rlboost.shared.wire.columns import length


@dataclass(slots=True)
class KvUsage:
    """Token counts of the worker's samples as they are in the ledger, so less than the engine has generated."""

    capacity: int = 0
    """Tokens that the cache holds; 0 where the engine reports none."""
    block_tokens: int = 0
    """Size of the blocks that samples of a group share; 0 where the engine shares none."""
    held: int = 0
    """Sum over the samples of prompt and generated tokens."""
    shared: int = 0
    """Part of `held` that the engine stores once because another sample of the group has the same prompt."""

    @property
    def used(self) -> int:
        """Return the tokens that the samples occupy."""
        return self.held - self.shared

    def add(self, sample: Sample, *, has_sibling: bool) -> None:
        """Count one more sample; `has_sibling`: the worker holds another sample of its group."""
        self.held += tokens_of(sample)
        self.shared += self._shared_tokens(sample) if has_sibling else 0

    def remove(self, sample: Sample, *, has_sibling: bool) -> None:
        """Count one sample less; `has_sibling`: the worker still holds another sample of its group."""
        self.held -= tokens_of(sample)
        self.shared -= self._shared_tokens(sample) if has_sibling else 0

    def recount(self, samples: Iterable[Sample]) -> None:
        """Count all samples of the worker from scratch."""
        self.held = self.shared = 0
        groups: set[int] = set()
        for sample in samples:
            self.add(sample, has_sibling=sample.request.group in groups)
            groups.add(sample.request.group)

    def _shared_tokens(self, sample: Sample) -> int:
        # Full blocks, without the prompt's last token: each sample runs that through the model, and its block with it.
        if not self.block_tokens:
            return 0
        return (length(sample.request.prompt) - 1) // self.block_tokens * self.block_tokens


def tokens_of(sample: Sample) -> int:
    """Return the tokens of a sample in the KV cache: its prompt and what was generated."""
    return length(sample.request.prompt) + sample.n_tokens
