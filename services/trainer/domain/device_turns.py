"""Which job gets a device that several trainers use in turns, and when the one that has it gives it up.

Each job counts the seconds for which it held the device, divided by its weight. A free device goes to the waiting job
with the fewest, so that jobs which always have work get it in proportion to their weights (start-time fair queueing).
A job keeps the device between its calls while no other job waits. It gives it up for one that does

- once it has been idle for as long as a change takes: then waiting any longer costs at most as much as it can save;
- after a turn of `TURN_S`, or of `CHANGES_PER_TURN` times a change, if the other job has had less of the device.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Self

from rlboost.shared.errors import Undecodable

CLAIM_TTL_S = 5.0
"""A claim that was not renewed for this time is that of a dead or suspended trainer."""
TURN_S = 10.0
CHANGES_PER_TURN = 20.0
"""Least length of a turn with work left, in changes of the device, so that changes take at most a twentieth of it."""
LEAST_PATIENCE_S = 0.1
"""Least idle time after which a device is given up."""
MAX_CREDIT_S = 60.0
"""How much less than the others a job may have used: one that generated for hours does not get the device for hours."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a trainer tells the others about its job."""

    trainer: str
    weight: float = 1.0
    """The job's `elastic.share`."""
    used_s: float = 0.0
    """How long it held the device, divided by its weight."""
    waits_since: float = 0.0
    """Since when it waits for the device (Unix seconds); 0 while it does not."""
    holds: bool = False
    """Whether it has the device."""
    at: float = 0.0
    """When it was written (Unix seconds). All trainers of a device are on one machine."""

    def to_json(self) -> str:
        """Return the text to store."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return what `to_json` has stored.

        Raises:
            Undecodable: it is something else.

        """
        try:
            stored = json.loads(text)
            numbers = (float(stored[name]) for name in ("weight", "used_s", "waits_since", "at"))
            weight, used_s, waits_since, at = numbers
            return cls(str(stored["trainer"]), weight, used_s, waits_since, holds=stored["holds"] is True, at=at)
        except (ValueError, TypeError, KeyError) as error:
            raise Undecodable(f"{text[:100]!r} is no claim of a device: {error}") from error


def live(claims: Mapping[str, Claim], now: float) -> dict[str, Claim]:
    """Return the claims of living trainers, by job."""
    return {job: claim for job, claim in claims.items() if now - claim.at < CLAIM_TTL_S}


def next_job(claims: Mapping[str, Claim]) -> str | None:
    """Return the waiting job that gets a free device, None if none waits; of equal ones, the one that waits longest."""
    waiting = [(claim.used_s, claim.waits_since, job) for job, claim in claims.items() if claim.waits_since]
    return min(waiting)[2] if waiting else None


def begin_waiting(mine: Claim, others: Mapping[str, Claim], now: float, *, is_new: bool) -> Claim:
    """Return the claim of a job that begins to wait, as if it had used the device like the others until now.

    That is like the one with the least of those that wait for the device or have it; if none does, like the one with
    the most: any that has used more waits until this one has, too.

    Args:
        mine: its claim so far.
        others: the living claims of the other jobs.
        now: the time (Unix seconds).
        is_new: whether it has not waited before; then it has no credit.

    """
    active = [claim.used_s for claim in others.values() if claim.waits_since or claim.holds]
    until_now_s = min(active) if active else max((claim.used_s for claim in others.values()), default=0.0)
    credit_s = 0.0 if is_new else MAX_CREDIT_S
    return replace(mine, used_s=max(mine.used_s, until_now_s - credit_s), waits_since=now, at=now)


def patience_s(change_s: float) -> float:
    """Return the idle time after which a device is given up to a waiting job; `change_s` is what a change takes."""
    return max(LEAST_PATIENCE_S, change_s)


def turn_s(change_s: float) -> float:
    """Return the length of a turn after which a job with work left may have to give the device up."""
    return max(TURN_S, CHANGES_PER_TURN * change_s)


def gives_up(mine: Claim, others: Mapping[str, Claim], *, idle_s: float, held_s: float, change_s: float) -> bool:
    """Return True if the job that holds the device should give it up now.

    Args:
        mine: its claim.
        others: the living claims of the other jobs.
        idle_s: how long it has computed nothing; 0 between two calls.
        held_s: how long its turn has lasted.
        change_s: what a change takes: offloading its state, and onloading it again.

    """
    if (job := next_job(others)) is None:
        return False
    if idle_s >= patience_s(change_s):
        return True
    return held_s >= turn_s(change_s) and others[job].used_s < mine.used_s
