"""The state of one incarnation of a worker: assigned and loaded weights, held samples. Decides what each command does.

`on_command` takes commands in the order of their stream and returns effects at once. A weight update runs in the
background while later commands are taken; samples that it makes possible are submitted when it is done. The outcome is
the same as if every command were executed to its end before the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rlboost.services.rollout_worker.domain.requests import Emission, RequestKey
from rlboost.shared.ids import WeightsRef, job_of
from rlboost.shared.messages import (
    FINISH_NONE,
    Alongside,
    Assign,
    Assignment,
    Dismissed,
    Drain,
    InFlightPolicy,
    Message,
    Release,
    Resume,
    Revoke,
    Siblings,
    StoreCredential,
    Suspend,
    UseVersion,
    WorkerState,
)
from rlboost.shared.messages.command_digest import command_digest
from rlboost.shared.wire import I32, U32, U64, ints

# --- What a worker's session decides, as values; `commands` executes them ---------------------------------------------


@dataclass(frozen=True, slots=True)
class PullWeights:
    """Pull, load and verify these weights in the background; cancel an earlier pull."""

    job_id: str
    version: int
    in_flight: InFlightPolicy = "recompute"
    """What happens to the samples that are running by then."""
    alongside: bool = False
    """Load them only as an adapter of the weights that the engine has, next to those of other jobs."""


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Drop the adapter of a job."""

    job_id: str


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
class HintSiblings:
    """Give the engine completions of other samples of these samples' prompts, as drafts."""

    completions: tuple[tuple[int, tuple[int, ...]], ...]
    """(sample, tokens)."""


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


EngineEffect = (
    SubmitSamples
    | AbortRequests
    | ReleaseRequests
    | ReleaseUnstarted
    | HintSiblings
    | SuspendEngine
    | ResumeEngine
    | UnloadAdapter
)
Effect = EngineEffect | PullWeights | CancelPull | RenewAccess | DrainWorker | Rejoin | DeadLetterCommand


# --- Tracks whether the engine is paused, for which reasons, and what a pause has left in device memory ---------------
# The caller pauses and resumes the engine, and reports here what it has done.


PauseReason = Literal["suspended", "loading", "unsent", "shutdown"]
DeviceOwner = Literal["trainer", "serving"]
"""Who else uses the device: the trainer, for which the manager commands it, or the serving engine beside a worker."""


class EnginePause:
    """The reasons to pause one engine, and the state of its memory while it is paused."""

    def __init__(self) -> None:
        self.reasons: set[PauseReason] = set()
        self.is_paused = False
        """True once the engine has confirmed that it has stopped decoding."""
        self.keeps_kv = False
        """While paused: True if the engine still has its KV cache."""
        self._took_memory = False
        """While paused: True if the engine has since allocated device memory, for a load or for the parity check."""

    def must_suspend(self, *, keep_kv: bool) -> bool:
        """Return True if the engine decodes or, without `keep_kv`, still has a KV cache or memory to free."""
        return not self.is_paused or (not keep_kv and (self.keeps_kv or self._took_memory))

    def on_suspended(self, *, keep_kv: bool) -> None:
        """Record that the engine was suspended, which frees its device memory, except for the KV cache if `keep_kv`."""
        self.is_paused, self.keeps_kv, self._took_memory = True, keep_kv, False

    def on_memory_taken(self) -> None:
        """Record that the paused engine allocates device memory."""
        self._took_memory = True

    def is_only(self, reason: PauseReason) -> bool:
        """Return True if this is the one reason to pause."""
        return self.reasons == {reason}

    def on_decoding(self) -> None:
        """Record that the engine is resumed, or that a new engine replaces it."""
        self.is_paused = False


# --- The session ------------------------------------------------------------------------------------------------------


class Session:
    """The state of one incarnation.

    Args:
        worker: the incarnation's id.
        serving: the weights that the engine has loaded and verified, if any.

    """

    def __init__(self, worker: str, serving: WeightsRef | None = None) -> None:
        self.worker = worker
        self.loaded: dict[str, int] = dict([serving] if serving else [])
        """Job -> version that the engine has loaded and verified; several jobs with adapters of the same weights."""
        self.assigned: WeightsRef | None = None
        """The weights of the last `UseVersion`."""
        self.target: WeightsRef | None = None
        """`assigned`, unless those are unavailable; they differ from `serving` while an update is under way."""
        self._assigned_alongside: dict[str, int] = {}
        self._alongside: dict[str, Alongside] = {}
        """By job: what to serve in addition to `target`, less what is unavailable."""
        self._in_flight: InFlightPolicy = "recompute"
        self._pulling: PullWeights | None = None
        """The update under way; None whenever nothing is missing."""
        self._lost_adapters = False
        """True once all weights were unloaded, until others are loaded: requests of other jobs cannot go on."""
        self._jobs: dict[int, str] = {}
        """Number of a job -> its id, of all jobs that samples were assigned of."""
        self.held: dict[int, int] = {}
        """Sample -> attempt, of the samples that the engine has or will get."""
        self._awaiting_weights: dict[int, Assignment] = {}
        """The held samples whose weights are not loaded yet."""
        self._accepted: dict[int, int] = {}
        """Sample -> highest attempt accepted since the weights changed: a repeated assignment is ignored."""
        self.seats = 0
        """How many samples it may hold, while an engine that serves others needs the rest; 0: no limit."""
        self._suspended_for: set[DeviceOwner] = set()
        self._engine_suspended = False
        self._draining = False

    @property
    def state(self) -> WorkerState:
        """Return the state that heartbeats report."""
        if self._draining:
            return "draining"
        if self._engine_suspended:
            return "suspended"
        if self.target is None:
            return "joining"
        return "ready" if self.serving == self.target else "pulling"

    @property
    def serving(self) -> WeightsRef | None:
        """Return what is loaded of the target's job, else what is loaded of another; None if nothing is."""
        own = self.target.job_id if self.target is not None else ""
        job_id = own if own in self.loaded else next(iter(self.loaded), "")
        return WeightsRef(job_id, self.loaded[job_id]) if job_id else None

    @property
    def alongside(self) -> dict[str, int]:
        """Return the other jobs that it serves, each with the version that is loaded."""
        return {job_id: self.loaded[job_id] for job_id in self._alongside if job_id in self.loaded}

    @property
    def n_alongside(self) -> int:
        """Return how many other jobs it is to serve."""
        return len(self._alongside)

    def n_submitted(self, job_id: str) -> int:
        """Return the number of held samples of a job that the engine has."""
        return sum(self.job_of(sample) == job_id for sample in self.held.keys() - self._awaiting_weights.keys())

    @property
    def n_awaiting_weights(self) -> int:
        """Return the number of held samples whose weights are not loaded yet."""
        return len(self._awaiting_weights)

    def command_digest(self) -> int:
        """Return the digest of what is assigned, for the manager to compare."""
        suspended = "trainer" in self._suspended_for
        samples, attempts = list(self.held), list(self.held.values())
        return command_digest(samples, attempts, self.assigned, suspended=suspended, alongside=self._assigned_alongside)

    @property
    def yields(self) -> bool:
        """Return True while the device is the serving engine's: see `yield_device`."""
        return "serving" in self._suspended_for

    def on_command(self, command: Message) -> list[Effect]:
        """Take the next command; return what to do. A draining session ignores all commands."""
        return [] if self._draining else self._effects_of(command)

    def _effects_of(self, command: Message) -> list[Effect]:  # noqa: C901 - one flat table
        effects: list[Effect]
        match command:
            case UseVersion():
                effects = self._use_version(command)
            case Assign():
                effects = self._assign(command)
            case Revoke():
                effects = self._revoke(command)
            case Release():
                effects = self._release(command)
            case Siblings():
                effects = self._hint(command)
            case Suspend():
                effects = self._suspend("trainer")
            case Resume():
                effects = self._resume("trainer")
            case Drain():
                effects = [*self.drain(), DrainWorker(command.reason or "drained")]
            case StoreCredential():
                effects = [RenewAccess(command.credential)]
            case Dismissed():
                effects = [Rejoin(command.reason)]
            case _:
                effects = [DeadLetterCommand(f"{command.tag} is not a worker's command")]
        return effects

    # --- commands -----------------------------------------------------------------------------------------------------

    def _use_version(self, command: UseVersion) -> list[Effect]:
        self.assigned = weights = WeightsRef(command.job_id, command.version)
        self._assigned_alongside = {other.job_id: other.version for other in command.alongside}
        alongside = {other.job_id: other for other in command.alongside}
        if weights == self.target and alongside == self._alongside:
            return []
        self._in_flight, self._alongside = command.in_flight, alongside
        released: list[Effect] = []
        if self.target is not None:
            # Another model cannot continue the held samples: they resume on a worker that serves theirs.
            kept = {weights.job_id, *alongside}
            released = self._release_keys([key for key in self.held.items() if self.job_of(key[0]) not in kept])
            released += [self._unload(job_id) for job_id in list(self.loaded) if alongside and job_id not in kept]
        self.target, before = weights, self._pulling
        pulls = self._next_pull() or ([] if self._pulling else [CancelPull()])
        if before is not None and self._target_version(before.job_id) is None and before.job_id not in self.loaded:
            pulls.append(UnloadAdapter(before.job_id))  # its load may have begun
        return [*released, *pulls, *self._submit_awaiting()]

    def _unload(self, job_id: str) -> Effect:
        del self.loaded[job_id]
        return UnloadAdapter(job_id)

    def _next_pull(self) -> list[Effect]:
        """Return the pull of the first weights that are not loaded; none while one of them is under way."""
        missing: list[PullWeights] = []
        if self.target is not None and self.serving != self.target:
            missing = [PullWeights(*self.target, self._in_flight)]
        elif self.target is not None:
            alongside = (one for one in self._alongside.values() if self.loaded.get(one.job_id) != one.version)
            missing = [PullWeights(one.job_id, one.version, one.in_flight, alongside=True) for one in alongside]
        if not missing:
            self._pulling = None
        elif self._pulling not in missing:
            self._pulling = missing[0]
            return [missing[0]]
        return []

    def _end_pull(self, weights: WeightsRef) -> None:
        if self._pulling is not None and weights == (self._pulling.job_id, self._pulling.version):
            self._pulling = None

    def _target_version(self, job_id: str) -> int | None:
        """Return the version of a job that is to be served, None if none is."""
        if self.target is not None and self.target.job_id == job_id:
            return self.target.version
        return self._alongside[job_id].version if job_id in self._alongside else None

    def _serves(self, job_id: str) -> bool:
        return job_id in self.loaded and self.loaded[job_id] == self._target_version(job_id)

    def job_of(self, sample: int) -> str:
        """Return the job of a sample that was assigned."""
        return self._jobs.get(job_of(sample), "")

    def _assign(self, command: Assign) -> list[Effect]:
        if "trainer" in self._suspended_for:
            return []  # sent before the manager saw `suspended`; it reassigns these samples then
        if command.version != self._target_version(command.job_id):
            reason = (
                f"{len(command.samples)} samples were assigned for version {command.version} of job {command.job_id}, "
                f"but the worker is assigned {self.target or 'nothing yet'}"
            )
            return [DeadLetterCommand(reason), Rejoin(reason)]
        replaced: list[RequestKey] = []
        accepted: dict[int, Assignment] = {}
        self._jobs |= {job_of(assignment.sample): command.job_id for assignment in command.samples}
        for assignment in command.samples:
            if assignment.attempt <= self._accepted.get(assignment.sample, 0):
                continue
            if assignment.sample in self.held:
                replaced.append((assignment.sample, self.held[assignment.sample]))
            accepted[assignment.sample] = assignment
        aborts = self._abort_keys(replaced)
        self._accepted |= {sample: assignment.attempt for sample, assignment in accepted.items()}
        released: list[Effect] = []
        n_taken = 0 if self.yields else max(0, self.seats - len(self.held)) if self.seats else len(accepted)
        if surplus := [accepted.pop(sample) for sample in list(accepted)[n_taken:]]:
            released.append(ReleaseUnstarted(tuple(surplus)))
        self.held |= {sample: assignment.attempt for sample, assignment in accepted.items()}
        if self._serves(command.job_id):
            return [*aborts, *released, *([SubmitSamples(tuple(accepted.values()))] if accepted else [])]
        self._awaiting_weights |= accepted
        return [*aborts, *released]

    def _revoke(self, command: Revoke) -> list[Effect]:
        keys = zip(ints(command.samples, U64), ints(command.attempts, U32), strict=True)
        held = self.held
        return self._abort_keys([(i, held[i]) for i, attempt in keys if i in held and held[i] <= attempt])

    def _release(self, command: Release) -> list[Effect]:
        keys = dict(zip(ints(command.samples, U64), ints(command.attempts, U32), strict=True))
        return self._release_keys([(i, attempt) for i, attempt in keys.items() if self.held.get(i) == attempt])

    def _hint(self, command: Siblings) -> list[Effect]:
        tokens, start = ints(command.tokens, I32), 0
        hints: list[tuple[int, tuple[int, ...]]] = []
        for sample, n in zip(ints(command.samples, U64), ints(command.lengths, U32), strict=False):
            if sample in self.held:
                hints.append((sample, tuple(tokens[start : start + n])))
            start += n
        return [HintSiblings(tuple(hints))] if hints else []

    def _suspend(self, owner: DeviceOwner) -> list[Effect]:
        was_suspended = bool(self._suspended_for)
        self._suspended_for.add(owner)
        if was_suspended:
            return []
        keys = list(self.held.items())
        self._drop(keys)
        return [SuspendEngine(tuple(keys))]

    def _resume(self, owner: DeviceOwner) -> list[Effect]:
        if self._suspended_for != {owner}:
            self._suspended_for.discard(owner)
            return []
        self._suspended_for.clear()
        self._engine_suspended = False
        return [ResumeEngine()]

    def yield_device(self) -> list[Effect]:
        """Hand all samples back and take none until `take_device`: the serving engine beside it needs the device.

        To the manager it is a worker that suspends itself, which the digest of its commands does not show.
        """
        return [] if self._draining else self._suspend("serving")

    def take_device(self) -> list[Effect]:
        """Generate again. The manager must have read `suspended` by then: it takes the samples back by that alone."""
        return [] if self._draining else self._resume("serving")

    def use_seats(self, seats: int) -> list[Effect]:
        """Hold at most this many samples from now on; the newest of those above it are handed back."""
        self.seats = seats
        return [] if self._draining else self._release_keys(list(self.held.items())[seats:])

    def drain(self) -> list[Effect]:
        """Ignore all commands from now on; return the effect that cancels a running pull."""
        self._draining = True
        return [CancelPull()]

    # --- outcomes -----------------------------------------------------------------------------------------------------

    def on_engine_suspended(self) -> None:
        """Record that the engine is suspended and the log has all its tokens: heartbeats now report `suspended`."""
        self._engine_suspended = True

    def on_weights_unloaded(self, job_id: str = "") -> None:
        """Record that a job's adapter is being replaced, or all weights: not served until `on_weights_loaded`."""
        if job_id:
            self.loaded.pop(job_id, None)
        else:
            self.loaded.clear()
            self._lost_adapters = True

    def on_weights_loaded(self, weights: WeightsRef, *, alone: bool = False) -> list[Effect]:
        """Record that the engine has loaded these weights and that their digests match (invariant 5).

        With `alone`, it can serve no other job next to them. The effects must come before the engine decodes.
        """
        self.loaded[weights.job_id] = weights.version
        self._end_pull(weights)
        if alone:
            self._alongside = {}
        gone = [
            key
            for key in self.held.items()
            if self.job_of(key[0]) != weights.job_id
            and (alone or (self._lost_adapters and key[0] not in self._awaiting_weights))
        ]
        released, self._lost_adapters = self._release_keys(gone), False
        self._accepted = dict(self.held)
        left = [one for one in self.loaded if one != weights.job_id and self._target_version(one) is None]
        unloaded = [self._unload(job_id) for job_id in left]
        return [*released, *unloaded, *self._submit_awaiting(), *self._next_pull()]

    def on_weights_unavailable(self, weights: WeightsRef, reason: str) -> list[Effect]:
        """Record that these weights cannot be pulled, or do not fit; keep what is loaded until the next command."""
        self._end_pull(weights)
        if weights.version != self._target_version(weights.job_id):
            return []
        loaded = self.loaded.get(weights.job_id)
        if other := self._alongside.pop(weights.job_id, None):
            if loaded is not None:
                self._alongside[other.job_id] = Alongside(job_id=other.job_id, version=loaded)
            samples = list(self.held if loaded is None else self._awaiting_weights)
            stranded = any(self.job_of(sample) == other.job_id for sample in samples)
        else:
            self.target = self.serving
            stranded = bool(self._awaiting_weights) or any(self.job_of(each) not in self.loaded for each in self.held)
        return [Rejoin(reason)] if stranded else self._next_pull()

    def on_emissions(self, emissions: Iterable[Emission]) -> None:
        """Record drained emissions: samples that have ended are not held any more."""
        for emission in emissions:
            ended = emission.finish != FINISH_NONE or emission.error
            if ended and self.held.get(emission.sample) == emission.attempt:
                del self.held[emission.sample]

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _submit_awaiting(self) -> list[Effect]:
        ready = {id_: one for id_, one in self._awaiting_weights.items() if self._serves(self.job_of(id_))}
        self._awaiting_weights = {id_: one for id_, one in self._awaiting_weights.items() if id_ not in ready}
        return [SubmitSamples(tuple(ready.values()))] if ready else []

    def _abort_keys(self, keys: Sequence[RequestKey]) -> list[Effect]:
        submitted, _ = self._drop(keys)
        return [AbortRequests(submitted)] if submitted else []

    def _release_keys(self, keys: Sequence[RequestKey]) -> list[Effect]:
        submitted, unstarted = self._drop(keys)
        return [
            *([ReleaseRequests(submitted)] if submitted else []),
            *([ReleaseUnstarted(unstarted)] if unstarted else []),
        ]

    def _drop(self, keys: Sequence[RequestKey]) -> tuple[tuple[RequestKey, ...], tuple[Assignment, ...]]:
        """Stop holding samples; return those that the engine has, and those that it does not have yet."""
        for sample, _ in keys:
            del self.held[sample]
        unstarted = {s: self._awaiting_weights.pop(s) for s, _ in keys if s in self._awaiting_weights}
        submitted = tuple((sample, attempt) for sample, attempt in keys if sample not in unstarted)
        return submitted, tuple(unstarted.values())
