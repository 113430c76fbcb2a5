"""What a worker's session decides, as values; `commands` executes them."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlboost.services.rollout_worker.domain.requests import RequestKey
from rlboost.shared.messages import Assignment, InFlightPolicy


@dataclass(frozen=True, slots=True)
class PullWeights:
    """Pull, load and verify these weights in the background; cancel an earlier pull."""

    job_id: str
    version: int
    in_flight: InFlightPolicy = "recompute"
    """What happens to the samples that are running by then."""


@dataclass(frozen=True, slots=True)
class CancelPull:
    """Cancel the pull under way."""


@dataclass(frozen=True, slots=True)
class RenewAccess:
    """Pull weights with this credential from now on."""

    credential: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class SubmitSamples:
    """Submit samples to the engine."""

    samples: tuple[Assignment, ...]


@dataclass(frozen=True, slots=True)
class AbortRequests:
    """Abort requests in the engine."""

    keys: tuple[RequestKey, ...]


@dataclass(frozen=True, slots=True)
class ReleaseRequests:
    """End requests in the engine; the last emission of each one carries FINISH_RELEASED."""

    keys: tuple[RequestKey, ...]


@dataclass(frozen=True, slots=True)
class ReleaseUnstarted:
    """Report samples that never reached the engine as released, each without tokens and at its assigned offset."""

    samples: tuple[Assignment, ...]


@dataclass(frozen=True, slots=True)
class SuspendEngine:
    """Pause the engine, flush all generated tokens, abort these requests; then call `Session.on_engine_suspended`."""

    keys: tuple[RequestKey, ...]


@dataclass(frozen=True, slots=True)
class ResumeEngine:
    """Resume the suspended engine."""


@dataclass(frozen=True, slots=True)
class DrainWorker:
    """Flush, leave and end the process."""

    reason: str


@dataclass(frozen=True, slots=True)
class Rejoin:
    """Drop everything but the loaded weights, and join as a new incarnation."""

    reason: str


@dataclass(frozen=True, slots=True)
class DeadLetterCommand:
    """Dead-letter the command: it violates the protocol."""

    reason: str


EngineEffect = SubmitSamples | AbortRequests | ReleaseRequests | ReleaseUnstarted | SuspendEngine | ResumeEngine
Effect = EngineEffect | PullWeights | CancelPull | RenewAccess | DrainWorker | Rejoin | DeadLetterCommand
