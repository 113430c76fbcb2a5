"""What became of every sample and token of one job, as counters that only grow."""

from __future__ import annotations

from collections import Counter

from pydantic import BaseModel, Field


class ServingAudit(BaseModel):
    """What clients asked for. `requested = delivered + dropped + in flight`, at every moment."""

    requested: int = 0
    delivered: int = 0
    dropped: Counter[str] = Counter()
    """By reason."""
    tokens_delivered: int = 0
    """Of delivered completions, with a few behind a stop string that no client has seen."""


class Audit(BaseModel):
    """Counters of one job.

    `requested = delivered + dropped + in flight` for the trainer's samples, and for those and the clients' together
    `tokens_generated = tokens_delivered + serving.tokens_delivered + made again + tokens in flight`, at every moment.
    """

    requested: int = 0
    delivered: int = 0
    dropped: Counter[str] = Counter()
    """By reason."""
    duplicates: int = 0
    """Frame rows that repeated tokens the ledger had (a frame sent twice); cut, never delivered."""
    tokens_generated: int = 0
    """Tokens that reached the log, each counted once."""
    tokens_delivered: int = 0
    tokens_made_again: Counter[str] = Counter()
    """Tokens that reached the log and were thrown away, by cause."""
    tokens_saved: int = 0
    """Tokens that a migrated sample took along instead of making them again."""
    preemptions: Counter[str] = Counter()
    """`with_notice` and `without_notice`."""
    migrations: int = 0
    """Times a sample went on elsewhere."""
    serving: ServingAudit = Field(default_factory=ServingAudit)
