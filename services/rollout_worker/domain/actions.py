"""What a worker's session wants done, as values. Only `app` carries them out."""

from __future__ import annotations

from dataclasses import dataclass

from shared.messages import Assignment, InFlight

Key = tuple[int, int]
"""Which request: (sample, attempt)."""


@dataclass(frozen=True, slots=True)
class Pull:
    """Begin to fetch, load and verify these weights, beside everything else; an earlier pull is given up."""

    job_id: str
    version: int
    in_flight: InFlight = "recompute"
    """What becomes of the samples that run by then."""


@dataclass(frozen=True, slots=True)
class StopPulling:
    """Give up the pull under way."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Hand samples to the engine."""

    samples: tuple[Assignment, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Let the engine forget requests."""

    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class HandBack:
    """Let the engine end requests where they stand: their last rows say that they go on elsewhere."""

    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Return:
    """Answer for samples that never reached the engine: a row without tokens each, at the offset it came with."""

    samples: tuple[Assignment, ...]


@dataclass(frozen=True, slots=True)
class Halt:
    """Stop the engine between two steps, flush all it has made, let it forget these; then call `Session.halted`."""

    keys: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Continue:
    """Let the engine go on."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Flush, say good-bye and end the process."""

    reason: str


@dataclass(frozen=True, slots=True)
class Rejoin:
    """Drop everything but the loaded weights, and join as a new incarnation."""

    reason: str


@dataclass(frozen=True, slots=True)
class Complain:
    """The manager broke the protocol: put its message among the dead letters, with the reason."""

    reason: str


Action = Pull | StopPulling | Submit | Abort | HandBack | Return | Halt | Continue | Leave | Rejoin | Complain
