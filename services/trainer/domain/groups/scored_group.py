"""A complete group after its rewards are computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlboost.services.trainer.domain.groups.conversation import Conversation, completions_of
from rlboost.shared.messages import SampleFinished


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A complete group with a reward for each sample."""

    group: int
    """Its id."""
    samples: tuple[SampleFinished, ...]
    rewards: tuple[float, ...]
    parts: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    """Reward function -> its reward per sample, if there are several; None where it does not apply."""
    conversations: tuple[Conversation, ...] = ()
    """The conversation of each sample, if the job has an environment."""
    prompt: bytes = b""
    """int32 column of token ids, of all samples."""
    penalties: tuple[float, ...] = ()
    """The length penalty of each sample; empty if the job has none."""

    @property
    def shaped_rewards(self) -> list[float]:
        """Return the rewards minus length penalties."""
        penalties = self.penalties or (0.0,) * len(self.rewards)
        return [reward - penalty for reward, penalty in zip(self.rewards, penalties, strict=True)]

    @property
    def completions(self) -> list[bytes]:
        """Return the completion of each sample; see `completions_of`."""
        return completions_of(self.samples, self.conversations)
