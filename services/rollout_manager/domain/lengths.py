"""How long samples will get: what finished siblings show, and what the same prompt took in earlier epochs.

Sources: Seer (arXiv 2511.14617) for one probe sample a group and the longest finished sibling as the estimate; a mean
over epochs as in RLHFless (arXiv 2602.22718).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b

from services.rollout_manager.domain.ledger import Sample

NEWEST = 0.5
"""What the newest epoch counts in a prompt's mean."""
PROMPTS_KEPT = 1 << 16
"""Of one job; beyond it the prompts that were not seen for longest are forgotten."""
RECENT = 0.02
"""What the newest sample counts in a job's mean."""


def prompt_key(prompt: bytes) -> str:
    """Return what a prompt is remembered by."""
    return blake2b(prompt, digest_size=8).hexdigest()


@dataclass(slots=True)
class Lengths:
    """Lengths of one job's samples, in tokens."""

    prompts: OrderedDict[str, float] = field(default_factory=OrderedDict)
    """Prompt -> mean over epochs of its groups' longest samples; the newest last."""
    longest: dict[int, int] = field(default_factory=dict)
    """Open group -> its longest finished sample."""
    mean: float = 0.0
    """Recent mean of all finished samples; 0 before the first."""

    def estimate(self, sample: Sample) -> float | None:
        """Return how long the sample is expected to get in all; None when nothing is known of its group."""
        known = self.longest.get(sample.request.group)
        return self.before(sample) if known is None else float(known)

    def before(self, sample: Sample) -> float | None:
        """Return what earlier epochs say of the sample's prompt."""
        return self.prompts.get(prompt_key(sample.request.prompt)) if self.prompts else None

    def rest(self, sample: Sample) -> float:
        """Return how many tokens the sample is expected to make yet.

        A sample that has outgrown its estimate is expected to grow by half: long ones have long tails.
        """
        cap = sample.request.sampling.max_tokens
        made = sample.n_tokens
        expected = self.estimate(sample) or self.mean or cap
        return min(max(expected - made, made / 2, 1.0), cap - made)

    def finished(self, sample: Sample) -> bool:
        """Note a complete sample; tell whether the estimate of its group has changed."""
        made = sample.n_tokens
        self.mean += (made - self.mean) * (RECENT if self.mean else 1.0)
        group = sample.request.group
        before = self.longest.get(group)
        if before is None or made > before:
            self.longest[group] = made
        return before is None or made > before

    def group_closed(self, sample: Sample) -> tuple[str, float] | None:
        """Note that the group of this sample, its last, is over; return the prompt whose mean has changed."""
        longest = self.longest.pop(sample.request.group, None)
        if longest is None or sample.request.near:
            return None  # a later turn of a conversation: its prompt does not come again
        key = prompt_key(sample.request.prompt)
        before = self.prompts.pop(key, float(longest))
        self.prompts[key] = before + NEWEST * (longest - before)
        return key, self.prompts[key]

    def forget(self) -> list[str]:
        """Drop the prompts beyond those that are kept, and return them."""
        gone = []
        while len(self.prompts) > PROMPTS_KEPT:
            gone.append(self.prompts.popitem(last=False)[0])
        return gone
