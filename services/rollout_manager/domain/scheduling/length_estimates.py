"""Estimates how long samples get, from finished siblings and from earlier epochs of the same prompt.

Sources: Seer (arXiv 2511.14617) for one probe sample a group and the longest finished sibling as the estimate; a mean
over epochs as in RLHFless (arXiv 2602.22718).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b

from rlboost.services.rollout_manager.domain.token_log.sample import Sample

NEWEST_EPOCH_WEIGHT = 0.5
"""Weight of the newest epoch in a prompt's mean."""
MAX_PROMPTS = 1 << 16
"""Prompts remembered per job; beyond it the least recently seen are dropped."""
NEWEST_SAMPLE_WEIGHT = 0.02
"""Weight of the newest sample in a job's mean."""


def prompt_key(prompt: bytes) -> str:
    """Return the key under which a prompt is remembered."""
    return blake2b(prompt, digest_size=8).hexdigest()


@dataclass(slots=True)
class LengthEstimates:
    """Lengths of one job's samples, in tokens."""

    prompts: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """Prompt -> mean over epochs of its groups' longest samples; the most recently seen last."""
    longest: dict[int, int] = field(default_factory=dict)
    """Open group -> its longest finished sample."""
    mean: float = 0.0
    """Recent mean of all finished samples; 0 before the first."""

    def expected_length(self, sample: Sample) -> float | None:
        """Return the expected final length of the sample; None when nothing is known of its group."""
        known = self.longest.get(sample.request.group)
        return self.mean_of_epochs(sample) if known is None else float(known)

    def mean_of_epochs(self, sample: Sample) -> float | None:
        """Return the mean length over earlier epochs of the sample's prompt; None for a new prompt."""
        return self.prompts.get(prompt_key(sample.request.prompt)) if self.prompts else None

    def remaining_tokens(self, sample: Sample) -> float:
        """Return how many more tokens the sample is expected to generate.

        A sample that has outgrown its estimate is expected to grow by half: lengths are long-tailed.
        """
        cap = sample.request.sampling.max_tokens
        generated = sample.n_tokens
        expected = self.expected_length(sample) or self.mean or cap
        return min(max(expected - generated, generated / 2, 1.0), cap - generated)

    def on_finished(self, sample: Sample) -> bool:
        """Learn from a complete sample; return True if the estimate of its group has changed."""
        generated = sample.n_tokens
        self.mean += (generated - self.mean) * (NEWEST_SAMPLE_WEIGHT if self.mean else 1.0)
        group = sample.request.group
        before = self.longest.get(group)
        if before is None or generated > before:
            self.longest[group] = generated
        return before is None or generated > before

    def on_group_closed(self, sample: Sample) -> tuple[str, float] | None:
        """Learn from a group when its last sample has closed.

        Args:
            sample: that sample.

        Returns:
            The key of the prompt and its new mean; None if nothing was learned.

        """
        longest = self.longest.pop(sample.request.group, None)
        if longest is None or sample.request.preferred_worker:
            return None  # a later turn of a conversation: its prompt does not come again
        key = prompt_key(sample.request.prompt)
        before = self.prompts.pop(key, float(longest))
        self.prompts[key] = before + NEWEST_EPOCH_WEIGHT * (longest - before)
        return key, self.prompts[key]

    def evict(self) -> list[str]:
        """Drop the prompts beyond `MAX_PROMPTS`, and return them."""
        evicted = []
        while len(self.prompts) > MAX_PROMPTS:
            evicted.append(self.prompts.popitem(last=False)[0])
        return evicted
