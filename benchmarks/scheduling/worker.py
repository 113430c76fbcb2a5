"""A rollout worker around a simulated engine: it obeys the manager's commands and sends what a real worker sends."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from benchmarks.scheduling.cases import Case
from benchmarks.scheduling.engine import Engine, Held
from rlboost.services.rollout_worker.domain.throughput import Throughput
from rlboost.shared.columns import F32, I32, U8, U32, U64, ints, pack
from rlboost.shared.ids import group_of
from rlboost.shared.messages import (
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_RELEASED,
    FINISH_STOP,
    Assign,
    Assignment,
    Drain,
    Message,
    PreemptionNotice,
    Release,
    Resume,
    Revoke,
    Role,
    Suspend,
    TokenFrame,
    UseVersion,
    WorkerHeartbeat,
    WorkerJoined,
    WorkerLeft,
    WorkerState,
)

NOTICE_S = 30.0
"""How long before the end a cloud says so; AWS gives 120, Azure and Google 30."""


class Surroundings(Protocol):
    """What a worker needs of the simulation."""

    now: float
    case: Case
    lengths: dict[int, int]

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        """Call at a moment of virtual time."""

    def tell_manager(self, message: Message) -> None:
        """Send to the token log or to the beats."""


@dataclass(slots=True)
class Totals:
    """What a worker did in its life."""

    present_s: float = 0.0
    busy_s: float = 0.0
    decoded: float = 0.0
    prefilled_again: float = 0.0


class SimWorker:
    """One incarnation. A reserved one is suspended and resumed; a preemptible one may be killed."""

    def __init__(self, sim: Surroundings, worker: str, role: Role, speed: float) -> None:
        self.id, self.role = worker, role
        self.engine = Engine(sim.case.engine, speed, now=sim.now)
        self.alive = True
        self._sim = sim
        self._joined_at = sim.now
        self._job_id, self._serving, self._wanted = "", -1, -1
        self._suspended = self._quiet = self._resuming = self._draining = False
        self._early: dict[int, Held] = {}
        self._pulls = self._wakes = self._seq = 0
        self._throughput = Throughput()

    @property
    def state(self) -> WorkerState:
        """Return what a beat says."""
        if self._draining:
            return "draining"
        if self._quiet:
            return "suspended"
        if self._wanted < 0:
            return "joining"
        return "ready" if self._serving == self._wanted and not self._resuming else "pulling"

    @property
    def generates(self) -> bool:
        """Return True if its engine is there for samples."""
        return self.alive and self.state == "ready" and not self._suspended

    def totals(self) -> Totals:
        """Return what it did so far."""
        engine = self.engine
        return Totals(engine.now - self._joined_at, engine.busy_s, engine.decoded, engine.prefilled_again)

    # --- coming and going ---------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Say who it is, and report from now on."""
        if not self.alive:
            return
        case = self._sim.case
        joined = WorkerJoined(
            worker=self.id,
            role=self.role,
            kind=f"{case.name}-{self.engine.speed:g}",
            slots=case.engine.slots,
            host=self.id,
            pid=1,
            price_per_hour=5.32 if self.role == "preemptible" else 0.0,
            at=self._sim.now,
            trainer="trainer" if self.role == "reserved" else "",
            kv_tokens=case.engine.kv_tokens,
        )
        self._sim.tell_manager(joined)
        self._beat_on()
        self._report()

    def kill(self) -> None:
        """Take the machine away at once."""
        self._advance()
        self.alive = False

    def give_notice(self) -> None:
        """Take nothing new, hand everything off, leave."""
        self._sim.tell_manager(
            PreemptionNotice(worker=self.id, lead_s=NOTICE_S, reason="spot preemption", at=self._sim.now)
        )
        self._leave("spot preemption")

    def _leave(self, reason: str) -> None:
        self._draining = True
        self._flush(everything=True)
        self._sim.tell_manager(WorkerLeft(worker=self.id, reason=reason, at=self._sim.now))
        self.alive = False

    # --- commands -----------------------------------------------------------------------------------------------------

    def receive(self, command: Message) -> None:
        """Obey one command."""
        if not self.alive:
            return
        self._advance()
        before = self.state
        match command:
            case UseVersion():
                self._use(command.job_id, command.version)
            case Assign():
                self._assign(command)
            case Revoke() | Release():
                self._take_back(command)
            case Suspend():
                self._suspend()
            case Resume():
                self._resume()
            case Drain():
                self._leave("drained")
            case _:
                raise AssertionError(command)
        if self.alive and self.state != before:
            self._beat()
        self._wake_in_time()

    def _use(self, job_id: str, version: int) -> None:
        if (job_id, version) == (self._job_id, self._wanted):
            return
        self._job_id, self._wanted = job_id, version
        self._pulls += 1
        case = self._sim.case
        pull_s = case.reserved_pull_s if self.role == "reserved" else case.pull_s
        self._sim.at(self._sim.now + pull_s, partial(self._loaded, self._pulls))

    def _loaded(self, pull: int) -> None:
        if pull != self._pulls or not self.alive:
            return
        self._advance()
        self._flush(everything=True)  # a row is of one version
        self._serving = self._wanted
        self.engine.forget_prefixes()
        for held in self._early.values():
            self.engine.submit(held)
        self._early.clear()
        self._beat()
        self._wake_in_time()

    def _assign(self, command: Assign) -> None:
        if self._suspended:
            return  # it crossed the suspension
        assert (command.job_id, command.version) == (self._job_id, self._wanted), "assigned for other weights"
        for assignment in command.samples:
            stale = self._forget(assignment.sample)
            assert stale is None or stale.attempt < assignment.attempt, "an attempt came twice"
            held = self._held(assignment)
            if self._serving == self._wanted:
                self.engine.submit(held)
            else:
                self._early[held.sample] = held

    def _held(self, assignment: Assignment) -> Held:
        tokens = len(assignment.tokens) // I32.itemsize
        return Held(
            sample=assignment.sample,
            attempt=assignment.attempt,
            group=group_of(assignment.sample),
            prompt=len(assignment.prompt) // I32.itemsize,
            length=self._sim.lengths[assignment.sample],
            base=tokens,
            flushed=tokens,
        )

    def _take_back(self, command: Revoke | Release) -> None:
        taken = [held for sample in ints(command.samples, U64) if (held := self._forget(sample)) is not None]
        if isinstance(command, Release) and taken:
            self._send(taken, FINISH_RELEASED)

    def _forget(self, sample: int) -> Held | None:
        return self._early.pop(sample, None) or self.engine.remove(sample)

    def _suspend(self) -> None:
        if self._suspended:
            return
        self._suspended = True
        self._flush(everything=True)
        self.engine.clear()
        self._early.clear()
        self._sim.at(self._sim.now + self._sim.case.switch_s, self._halted)

    def _halted(self) -> None:
        if self._suspended:
            self._quiet = True
            self._beat()

    def _resume(self) -> None:
        if not self._suspended:
            return
        self._suspended = self._quiet = False
        self._resuming = True
        self._sim.at(self._sim.now + self._sim.case.switch_s, self._resumed)

    def _resumed(self) -> None:
        self._advance()
        self._resuming = False
        self._beat()

    # --- reports ------------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        self.engine.advance(self._sim.now)

    def _report(self) -> None:
        """Send what was made, and again after the interval."""
        if not self.alive:
            return
        self._advance()
        self._flush(everything=True)
        self._sim.at(self._sim.now + self._sim.case.report_s, self._report)
        self._wake_in_time()

    def _beat_on(self) -> None:
        """Beat, and again after the interval."""
        if not self.alive:
            return
        self._advance()
        self._beat()
        self._sim.at(self._sim.now + self._sim.case.beat_s, self._beat_on)
        self._wake_in_time()

    def _wake_in_time(self) -> None:
        """Be there when the next sample ends."""
        self._wakes += 1
        at = self.engine.next_event_at()
        if self.engine.done:
            at = self._sim.now
        if at < self._sim.now + self._sim.case.report_s:
            grid = self._sim.case.finish_s
            self._sim.at(math.ceil(at / grid + 1e-9) * grid, partial(self._wake, self._wakes))

    def _wake(self, wake: int) -> None:
        if wake != self._wakes or not self.alive:
            return
        self._advance()
        self._flush(everything=False)
        self._wake_in_time()

    def _flush(self, *, everything: bool) -> None:
        done, self.engine.done = self.engine.done, []
        if everything:
            made = self.engine.made
            done += [held for held in self.engine.running.values() if made(held) > held.flushed]
        if done:
            self._send(done, FINISH_NONE)

    def _send(self, rows: list[Held], finish: int) -> None:
        made = [self.engine.made(held) for held in rows]
        counts = [tokens - held.flushed for tokens, held in zip(made, rows, strict=True)]
        cap = self._sim.case.lengths.cap
        ended = [
            (FINISH_LENGTH if tokens >= cap else FINISH_STOP) if tokens == held.length else finish
            for tokens, held in zip(made, rows, strict=True)
        ]
        frame = TokenFrame(
            worker=self.id,
            seq=self._seq,
            samples=pack([held.sample for held in rows], U64),
            attempts=pack([held.attempt for held in rows], U32),
            offsets=pack([held.flushed for held in rows], U32),
            counts=pack(counts, U32),
            versions=pack([self._serving] * len(rows), U32),
            finish=pack(ended, U8),
            tokens=bytes(I32.itemsize * sum(counts)),
            logprobs=bytes(F32.itemsize * sum(counts)),
        )
        self._seq += 1
        for tokens, held in zip(made, rows, strict=True):
            held.flushed = tokens
        self._sim.tell_manager(frame)

    def _beat(self) -> None:
        engine = self.engine
        self._sim.tell_manager(
            WorkerHeartbeat(
                worker=self.id,
                state=self.state,
                job_id=self._job_id,
                version=self._serving,
                running=len(engine.running),
                pending=len(engine.pending) + len(self._early),
                tokens_per_s=self._throughput.update(round(engine.decoded), self._sim.now),
                at=self._sim.now,
            )
        )
