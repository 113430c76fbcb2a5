"""One incarnation of a worker, as the manager sees it: what it was told, what it serves, which samples it holds.

Commands come in the order of their stream and each is answered at once with what is to be done. A pull of weights goes
on beside later commands; what it made possible is submitted when it is done, so the outcome is that of handling every
command to its end before the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.rollout_worker.domain.actions import (
    Abort,
    Action,
    Complain,
    Continue,
    Halt,
    HandBack,
    Key,
    Leave,
    Pull,
    Rejoin,
    Return,
    StopPulling,
    Submit,
)
from services.rollout_worker.domain.frames import Made
from shared.columns import U32, U64, ints
from shared.messages import (
    FINISH_NONE,
    Assign,
    Assignment,
    Dismissed,
    Drain,
    InFlight,
    Message,
    Release,
    Resume,
    Revoke,
    Suspend,
    UseVersion,
    WorkerState,
)

Weights = tuple[str, int]
"""Which weights: (job id, version)."""


class Session:
    """The state of one incarnation.

    Args:
        worker: the incarnation's id.
        serving: the weights that the engine has loaded and verified, if any.

    """

    def __init__(self, worker: str, serving: Weights | None = None) -> None:
        self.worker = worker
        self.serving = serving
        self.wanted: Weights | None = None
        """What the manager told it to serve; unlike `serving`, a pull is under way."""
        self.held: dict[int, int] = {}
        """Sample -> attempt, of what the engine has or will get."""
        self._early: dict[int, Assignment] = {}
        """Those of `held` that wait for the weights they were assigned for."""
        self._taken: dict[int, int] = {}
        """Sample -> highest attempt taken since the weights changed: a repeated assignment is not generated again."""
        self._suspended = False
        self._quiet = False
        self._draining = False

    @property
    def state(self) -> WorkerState:
        """Return what a beat says."""
        if self._draining:
            return "draining"
        if self._quiet:
            return "suspended"
        if self.wanted is None:
            return "joining"
        return "ready" if self.serving == self.wanted else "pulling"

    @property
    def started(self) -> int:
        """Return how many held samples the engine has."""
        return len(self.held) - len(self._early)

    @property
    def early(self) -> int:
        """Return how many assigned samples wait for their weights."""
        return len(self._early)

    def handle(self, command: Message) -> list[Action]:
        """Take the next command."""
        if self._draining:
            return []
        actions: list[Action]
        match command:
            case UseVersion():
                actions = self._use((command.job_id, command.version), command.in_flight)
            case Assign():
                actions = self._assign(command)
            case Revoke():
                actions = self._revoke(command)
            case Release():
                actions = self._release(command)
            case Suspend():
                actions = self._suspend()
            case Resume():
                actions = self._resume()
            case Drain():
                actions = [*self.drain(), Leave(command.reason or "drained")]
            case Dismissed():
                actions = [Rejoin(command.reason)]
            case _:
                actions = [Complain(f"{command.tag} is not a worker's command")]
        return actions

    # --- commands -----------------------------------------------------------------------------------------------------

    def _use(self, weights: Weights, in_flight: InFlight) -> list[Action]:
        if weights == self.wanted:
            return []
        gone: list[Action] = []
        if self.wanted is not None and self.wanted[0] != weights[0]:
            # Another job's model makes nothing of what is held: it goes on where its own is served.
            gone = self._hand_back(list(self.held.items()))
        self.wanted = weights
        if weights == self.serving:
            return [*gone, StopPulling(), *self._submit_early()]
        return [*gone, Pull(*weights, in_flight)]

    def _assign(self, command: Assign) -> list[Action]:
        if self._suspended:
            return []  # it crossed the suspension: the manager moves it when it hears `suspended`
        if (command.job_id, command.version) != self.wanted:
            reason = (
                f"{len(command.samples)} samples were assigned for version {command.version} of job {command.job_id}, "
                f"but the worker was told to serve {_describe(self.wanted)}"
            )
            return [Complain(reason), Rejoin(reason)]
        stale: list[Key] = []
        fresh: dict[int, Assignment] = {}
        for assignment in command.samples:
            if assignment.attempt <= self._taken.get(assignment.sample, 0):
                continue
            if assignment.sample in self.held:
                stale.append((assignment.sample, self.held[assignment.sample]))
            fresh[assignment.sample] = assignment
        aborts = self._forget(stale)
        for sample, assignment in fresh.items():
            self.held[sample] = self._taken[sample] = assignment.attempt
        if self.serving == self.wanted:
            return [*aborts, *([Submit(tuple(fresh.values()))] if fresh else [])]
        self._early |= fresh
        return aborts

    def _revoke(self, command: Revoke) -> list[Action]:
        keys = zip(ints(command.samples, U64), ints(command.attempts, U32), strict=False)
        held = self.held
        return self._forget([(i, held[i]) for i, attempt in keys if i in held and held[i] <= attempt])

    def _release(self, command: Release) -> list[Action]:
        keys = dict(zip(ints(command.samples, U64), ints(command.attempts, U32), strict=False))
        return self._hand_back([key for key in keys.items() if self.held.get(key[0]) == key[1]])

    def _suspend(self) -> list[Action]:
        if self._suspended:
            return []
        self._suspended = True
        keys = list(self.held.items())
        self._forget(keys)
        return [Halt(tuple(keys))]

    def _resume(self) -> list[Action]:
        if not self._suspended:
            return []
        self._suspended = self._quiet = False
        return [Continue()]

    def drain(self) -> list[Action]:
        """Take nothing new from now on."""
        self._draining = True
        return [StopPulling()]

    # --- what came of the actions -------------------------------------------------------------------------------------

    def halted(self) -> None:
        """Note that the engine stands still and that all it has made is in the log: now a beat may say `suspended`."""
        self._quiet = True

    def unloaded(self) -> None:
        """Note that the engine's weights are being replaced: until `loaded` it serves nothing."""
        self.serving = None

    def loaded(self, weights: Weights) -> list[Action]:
        """Note that the engine holds these weights and that their digests were right (invariant 5)."""
        self.serving = weights
        self._taken = dict(self.held)
        return self._submit_early() if weights == self.wanted else []

    def unavailable(self, weights: Weights, reason: str) -> list[Action]:
        """Note that these weights cannot be had any more; stay with the old ones until the next command."""
        if weights != self.wanted:
            return []
        self.wanted = self.serving
        stranded = self._early or (self.held and self.serving is None)
        return [Rejoin(reason)] if stranded else []

    def made(self, emissions: Iterable[Made]) -> None:
        """Note what the engine handed out: what has ended is not held any more."""
        for emission in emissions:
            ended = emission.finish != FINISH_NONE or emission.error
            if ended and self.held.get(emission.sample) == emission.attempt:
                del self.held[emission.sample]

    # --- helpers ------------------------------------------------------------------------------------------------------

    def _submit_early(self) -> list[Action]:
        early, self._early = tuple(self._early.values()), {}
        return [Submit(early)] if early else []

    def _forget(self, keys: Sequence[Key]) -> list[Action]:
        started, _ = self._let_go(keys)
        return [Abort(started)] if started else []

    def _hand_back(self, keys: Sequence[Key]) -> list[Action]:
        started, early = self._let_go(keys)
        return [*([HandBack(started)] if started else []), *([Return(early)] if early else [])]

    def _let_go(self, keys: Sequence[Key]) -> tuple[tuple[Key, ...], tuple[Assignment, ...]]:
        """Hold these no more; return those that the engine has, and those that it was not given yet."""
        for sample, _ in keys:
            del self.held[sample]
        early = {sample: self._early.pop(sample) for sample, _ in keys if sample in self._early}
        return tuple(key for key in keys if key[0] not in early), tuple(early.values())


def _describe(weights: Weights | None) -> str:
    return f"version {weights[1]} of job {weights[0]}" if weights else "nothing yet"
