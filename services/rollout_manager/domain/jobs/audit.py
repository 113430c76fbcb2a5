"""Counts what happened to every sample and token of one job. Counters only grow."""

from __future__ import annotations

from collections import Counter

from pydantic import BaseModel, Field

from rlboost.services.rollout_manager.domain.jobs.cost import Cost


class ServingAudit(BaseModel):
    """Counters of clients' samples. `requested = delivered + dropped + in flight`, at every moment."""

    requested: int = 0
    delivered: int = 0
    dropped: Counter[str] = Counter()
    """Reason -> dropped samples."""
    tokens_delivered: int = 0
    """Tokens of delivered completions, including a few after a stop string that the client does not get."""


class Audit(BaseModel):
    """Counters of one job.

    At every moment, `requested = delivered + dropped + in flight` for the trainer's samples, and `tokens_generated =
    tokens_delivered + serving.tokens_delivered + tokens_regenerated + tokens in flight` for all samples.
    """

    requested: int = 0
    delivered: int = 0
    dropped: Counter[str] = Counter()
    """Reason -> dropped samples."""
    duplicates: int = 0
    """Frame rows that repeated tokens of the ledger (a frame sent twice); cut, never delivered."""
    tokens_generated: int = 0
    """Tokens that reached the log, each counted once."""
    tokens_delivered: int = 0
    tokens_regenerated: Counter[str] = Counter()
    """Tokens that reached the log and were discarded, by cause."""
    tokens_saved: int = 0
    """Tokens of migrated samples that were not regenerated."""
    preemptions: Counter[str] = Counter()
    """`with_notice` and `without_notice`."""
    migrations: int = 0
    """Times a sample resumed on another worker."""
    serving: ServingAudit = Field(default_factory=ServingAudit)
    cost: Cost = Field(default_factory=Cost)
