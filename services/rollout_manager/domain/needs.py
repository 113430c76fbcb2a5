"""What samples need of workers, and what they take up there."""

from __future__ import annotations

from typing import NamedTuple

from services.rollout_manager.domain.ledger import Sample
from shared.columns import U32, U64, length, pack
from shared.ids import is_served
from shared.messages import Revoke


class Need(NamedTuple):
    """What a sample needs of a worker: its job, and weights of a version between two."""

    job_id: str
    version: int
    """The step that is trained on it, and the newest version that may generate it."""
    oldest: int

    @property
    def serves(self) -> bool:
        """Tell whether this is what clients' samples need: any version, so that they hold no worker back."""
        return self.version == ANY_VERSION


ANY_VERSION = 1 << 32
"""Newer than any there is."""


def kv_of(sample: Sample) -> int:
    """Return how many tokens a sample keeps in the KV cache of who generates it."""
    return length(sample.request.prompt) + sample.n_tokens


def common_of(sample: Sample, page: int) -> int:
    """Return how many tokens of a sample are kept once for its group, in a KV cache with pages of so many tokens.

    Full ones, without the prompt's last token: that goes through the model for each sample, and its page with it.
    """
    return (length(sample.request.prompt) - 1) // page * page


def limit_of(sample: Sample) -> int:
    """Return the length, prompt included, at which a sample ends at the latest."""
    return length(sample.request.prompt) + sample.request.sampling.max_tokens


def need_of(sample: Sample) -> Need:
    """Return what a sample needs of a worker."""
    request = sample.request
    if is_served(sample.id):
        return Need(request.job_id, ANY_VERSION, 0)
    return Need(request.job_id, request.version, request.version - request.max_staleness)


def revoke(sample: Sample) -> Revoke:
    """Return the command that takes one sample's current attempt from its owner."""
    return Revoke(samples=pack([sample.id], U64), attempts=pack([sample.attempt], U32))
