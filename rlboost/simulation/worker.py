"""A rollout worker with a simulated engine: it executes the manager's commands and sends what a real worker sends.

The engine is in closed form: continuous batching with slots, prefill and a bounded KV cache. One decode step of n
samples with k tokens of KV takes `a + b n + c k` seconds (roofline: each step reads the weights once and each cached
token once, and each sample costs some arithmetic). All running samples get one token per step, so m steps between two
events take `m (a + b n + c k) + c n m^2 / 2`: no step is simulated on its own.

With drafts, a sample gets several tokens per pass on average: time and steps count per token, with the pass that is
chosen when the batch changes.

Prefill comes before decoding and stops it. A full KV cache retracts the sample that was admitted last: it keeps its
tokens, waits at the head of the queue and is prefilled again, as in vLLM, which calls this a preemption.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from functools import partial

from rlboost.services.rollout_worker.domain.load import DecodeMeter, Throughput
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
from rlboost.shared.messages.codec import PROTOCOL
from rlboost.shared.wire import F32, I32, U8, U32, U64, ints, pack
from rlboost.simulation.environment import Environment
from rlboost.simulation.scenario import ADMIT_UP_TO, PLAIN, EngineSpec, Pass, passes

# --- The engine -------------------------------------------------------------------------------------------------------

_EPSILON = 1e-6


@dataclass(slots=True)
class Held:
    """One sample at an engine."""

    sample: int
    attempt: int
    group: int
    prompt: int
    """Tokens of the prompt."""
    length: int
    """Tokens of the complete sample; only the engine knows."""
    base: float
    """Tokens at its last admission."""
    flushed: int
    """Tokens that were reported."""
    admitted_at: float = 0.0
    """The engine's count of decode steps at its last admission."""
    ends_at: float = 0.0
    """The engine's count of decode steps when it is complete."""
    running: bool = False
    prefill_s: float = 0.0
    """Prefill of its last admission."""


@dataclass(slots=True)
class Engine:
    """The state of one engine as of `now`; `advance` moves it."""

    spec: EngineSpec
    now: float = 0.0
    running: dict[int, Held] = field(default_factory=dict)
    """Sample -> its state, in order of admission."""
    pending: deque[Held] = field(default_factory=deque)
    done: list[Held] = field(default_factory=list)
    """Complete samples; the caller takes them."""
    decoded: float = 0.0
    """Generated tokens."""
    steps: float = 0.0
    """Decode steps, one for each token of a sample."""
    passes: float = 0.0
    """Forward passes: fewer than steps with drafts."""
    decode_s: float = 0.0
    """Time in decode steps."""
    retractions: int = 0
    _kv: float = 0.0
    _passes: tuple[Pass, ...] = (PLAIN,)
    """Those among which it chooses."""
    _pass: Pass = PLAIN
    _prefill_s: float = 0.0
    _ends: list[tuple[float, int, Held]] = field(default_factory=list)
    _prefixes: set[int] = field(default_factory=set)
    _admissions: int = 0

    def submit(self, held: Held) -> None:
        """Queue a sample."""
        self.pending.append(held)
        self._admit()

    def remove(self, sample: int) -> Held | None:
        """Remove a running or pending sample; None if it is not here."""
        held = self.running.pop(sample, None)
        if held is not None:
            self._stop(held)
            self._admit()
            return held
        for held in self.pending:
            if held.sample == sample:
                self.pending.remove(held)
                return held
        return None

    def clear(self) -> None:
        """Remove all samples that are not complete."""
        for held in self.running.values():
            self._stop(held)
        self.running.clear()
        self.pending.clear()
        self._ends.clear()
        self._kv = self._prefill_s = 0.0

    def load_weights(self, seconds: float) -> None:
        """Stand still to load weights; then recompute the KV cache of running samples (`in_flight: recompute`)."""
        self._prefixes.clear()
        if self.running:
            self._prefill_s += seconds + self._kv / self.spec.prefill_tokens_per_s

    def know_siblings(self, siblings: float) -> None:
        """Draft from this number of ended siblings of each running sample, a mean."""
        self._passes = passes(siblings)
        self._choose_pass()

    def tokens_of(self, held: Held) -> int:
        """Return how many tokens a sample has now."""
        more = self.steps - held.admitted_at if held.running else 0.0
        return min(held.length, int(held.base + more + _EPSILON))

    def next_event_at(self) -> float:
        """Return when the next sample ends or the KV cache is full; infinity if the engine is idle."""
        if not self.running:
            return math.inf
        return self.now + self._prefill_s + self._seconds(self._steps_to_event())

    def advance(self, now: float) -> None:
        """Move to `now`."""
        left = now - self.now
        self.now = max(self.now, now)
        while left > 0 and self.running:
            if self._prefill_s > 0:
                used = min(left, self._prefill_s)
                self._prefill_s -= used
            else:
                steps = self._steps_to_event()
                used = self._seconds(steps)
                if used > left + _EPSILON:  # the tolerance lets an event happen at the time that was announced
                    self._progress(self._steps_in(left))
                    used = left
                else:
                    self._progress(steps)
                    self._settle()
                self.decode_s += used
            left -= used

    # --- between two events -------------------------------------------------------------------------------------------

    def _seconds(self, steps: float) -> float:
        first, slope = self._step_s()
        return steps * (first + slope * steps / 2)

    def _step_s(self) -> tuple[float, float]:
        """Return the seconds of the next step, and by how much more each one takes as the KV cache grows."""
        n, spec = len(self.running), self.spec
        first = spec.decode_s(n, self._kv) + spec.per_sample_s * n * self._pass.drafted
        return first / self._pass.tokens, spec.per_kv_token_s * n / self._pass.tokens

    def _choose_pass(self) -> None:
        if len(self._passes) > 1:
            self._pass = self.spec.fastest(self._passes, len(self.running), self._kv)

    def _steps_in(self, seconds: float) -> float:
        first, slope = self._step_s()
        if slope == 0:
            return seconds / first
        return (math.sqrt(first * first + 2 * slope * seconds) - first) / slope

    def _progress(self, steps: float) -> None:
        tokens = steps * len(self.running)
        self.steps += steps
        self.passes += steps / self._pass.tokens
        self._kv += tokens
        self.decoded += tokens

    def _steps_to_event(self) -> float:
        ends = self._ends
        while ends and not (ends[0][2].running and ends[0][2].ends_at == ends[0][0]):
            heapq.heappop(ends)
        steps = ends[0][0] - self.steps
        if self.spec.kv_tokens and len(self.running) > 1:
            steps = min(steps, (self.spec.kv_tokens - self._kv) / len(self.running))
        return max(0.0, steps)

    # --- events -------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        while self._ends and self._ends[0][0] <= self.steps + _EPSILON:
            at, _, held = heapq.heappop(self._ends)
            if held.running and held.ends_at == at:
                del self.running[held.sample]
                self._stop(held)
                held.base = held.length
                self.done.append(held)
        capacity = self.spec.kv_tokens
        while capacity and len(self.running) > 1 and self._kv >= capacity - _EPSILON:
            _, youngest = self.running.popitem()
            self._stop(youngest)
            self.pending.appendleft(youngest)
            self.retractions += 1
        self._admit()

    def _admit(self) -> None:
        capacity = self.spec.kv_tokens
        while self.pending and len(self.running) < self.spec.slots:
            held = self.pending[0]
            size = held.prompt + held.base
            if capacity and self.running and self._kv + size > ADMIT_UP_TO * capacity:
                return
            self.pending.popleft()
            held.running, held.admitted_at = True, self.steps
            held.ends_at = self.steps + held.length - held.base
            self.running[held.sample] = held
            self._admissions += 1
            heapq.heappush(self._ends, (held.ends_at, self._admissions, held))
            cached = held.group in self._prefixes
            self._prefixes.add(held.group)
            held.prefill_s = (held.base + (0 if cached else held.prompt)) / self.spec.prefill_tokens_per_s
            self._prefill_s += held.prefill_s
            self._kv += size
            self._choose_pass()

    def _stop(self, held: Held) -> None:
        if held.admitted_at == self.steps:  # the rest of the prefill of a removed sample does not happen
            self._prefill_s = max(0.0, self._prefill_s - held.prefill_s)
        held.base = self.tokens_of(held)
        held.running = False
        self._kv = max(0.0, self._kv - held.prompt - held.base) if self.running else 0.0
        self._choose_pass()


# --- The worker -------------------------------------------------------------------------------------------------------


class SimWorker:
    """One incarnation. A reserved worker is suspended and resumed; a preemptible one may be preempted."""

    def __init__(self, env: Environment, worker: str, role: Role) -> None:
        self.id, self.role = worker, role
        self.engine = Engine(env.engine, now=env.now)
        self.alive = True
        self._env = env
        self._job_id, self._serving, self._assigned = "", -1, -1
        self._suspend_requested = self._is_suspended = self._resuming = self._draining = False
        self._awaiting_weights: dict[int, Held] = {}
        """Samples that were assigned for weights that are not loaded yet."""
        self._pulls = self._wakes = self._seq = 0
        self._throughput, self._decode = Throughput(), DecodeMeter(env.machine.engine.slots)
        self._measured = (0.0, 0.0, 0.0, 0.0)
        """Seconds, passes, steps and tokens of decoding as of the last heartbeat."""

    @property
    def state(self) -> WorkerState:
        """Return the state that a heartbeat reports."""
        if self._draining:
            return "draining"
        if self._is_suspended:
            return "suspended"
        if self._assigned < 0:
            return "joining"
        return "ready" if self._serving == self._assigned and not self._resuming else "pulling"

    # --- life cycle ---------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Join, and report from now on."""
        if not self.alive:
            return
        env, engine = self._env, self._env.machine.engine
        env.send(
            WorkerJoined(
                worker=self.id,
                role=self.role,
                kind="simulated",
                slots=engine.slots,
                host=self.id,
                pid=1,
                price_per_hour=env.machine.instance_price_per_hour if self.role == "preemptible" else 0.0,
                at=env.now,
                trainer="trainer" if self.role == "reserved" else "",
                kv_tokens=engine.kv_tokens,
                protocol=PROTOCOL,
            )
        )
        self._heartbeat_periodically()
        self._report_periodically()

    def adopt_speed(self) -> None:
        """Generate with the speed of the step that begins."""
        if self.alive and self.engine.spec != self._env.engine:
            self._advance()
            self.engine.spec = self._env.engine
            self._schedule_wake()

    def kill(self) -> None:
        """End without notice; all tokens are in the log, up to the 0.05 s between two flushes of a real worker."""
        if self.alive:
            self._advance()
            self._flush(everything=True)
            self.alive = False

    def give_notice(self) -> None:
        """Report a preemption notice, hand all samples off and leave."""
        if self.alive:
            self._advance()
            lead_s, reason = self._env.machine.notice_s, "spot preemption"
            self._env.send(PreemptionNotice(worker=self.id, lead_s=lead_s, reason=reason, at=self._env.now))
            self._leave(reason)

    def _leave(self, reason: str) -> None:
        self._draining = True
        self._flush(everything=True)
        self._env.send(WorkerLeft(worker=self.id, reason=reason, at=self._env.now))
        self.alive = False

    # --- commands -----------------------------------------------------------------------------------------------------

    def receive(self, command: Message) -> None:
        """Execute one command."""
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
                self._revoke_or_release(command)
            case Suspend():
                self._suspend()
            case Resume():
                self._resume()
            case Drain():
                self._leave("drained")
            case _:
                raise RuntimeError(f"unexpected command: {command.tag}")
        if self.alive and self.state != before:
            self._heartbeat()
        self._schedule_wake()

    def _use(self, job_id: str, version: int) -> None:
        if (job_id, version) == (self._job_id, self._assigned):
            return
        self._job_id, self._assigned = job_id, version
        self._pulls += 1
        env, machine = self._env, self._env.machine
        if self.role == "reserved":
            self._load(self._pulls, machine.reserved_load_s)
            return
        share = env.sent_share if self._serving >= 0 else env.policy.bytes_factor
        env.pulling += 1
        # The bandwidth is shared with those that pull already, and with those that are commanded at this moment.
        pull = self._pulls
        env.at(env.now, lambda: env.at(env.now + self._pull_s(share), partial(self._pulled, pull)))

    def _pull_s(self, share: float) -> float:
        env = self._env
        return env.machine.pull_s(share, env.pulling, peers=env.policy.peers)

    def _pulled(self, pull: int) -> None:
        self._env.pulling -= 1
        if self.alive:
            self._advance()
            self._load(pull, self._env.machine.load_s)

    def _load(self, pull: int, seconds: float) -> None:
        if pull == self._pulls:
            self.engine.load_weights(seconds)
            self._env.at(self._env.now + seconds, partial(self._loaded, pull))

    def _loaded(self, pull: int) -> None:
        if pull != self._pulls or not self.alive:
            return
        self._advance()
        self._flush(everything=True)  # a row is of one version
        self._serving = self._assigned
        for held in self._awaiting_weights.values():
            self.engine.submit(held)
        self._awaiting_weights.clear()
        self._count_siblings()
        self._heartbeat()
        self._schedule_wake()

    def _assign(self, command: Assign) -> None:
        if self._suspend_requested:
            return  # the manager does not know yet
        if (command.job_id, command.version) != (self._job_id, self._assigned):
            raise RuntimeError(f"{self.id} was assigned samples of version {command.version}, not {self._assigned}")
        was_idle = not self.engine.running
        for assignment in command.samples:
            self._forget(assignment.sample)
            held = self._held(assignment)
            if self._serving == self._assigned:
                self.engine.submit(held)
            else:
                self._awaiting_weights[held.sample] = held
        if was_idle:
            self._count_siblings()

    def _held(self, assignment: Assignment) -> Held:
        tokens = len(assignment.tokens) // I32.itemsize
        return Held(
            sample=assignment.sample,
            attempt=assignment.attempt,
            group=group_of(assignment.sample),
            prompt=len(assignment.prompt) // I32.itemsize,
            length=self._env.length_of(assignment.sample),
            base=tokens,
            flushed=tokens,
        )

    def _revoke_or_release(self, command: Revoke | Release) -> None:
        taken = [held for sample in ints(command.samples, U64) if (held := self._forget(sample)) is not None]
        if isinstance(command, Release) and taken:
            self._send_tokens(taken, FINISH_RELEASED)

    def _forget(self, sample: int) -> Held | None:
        return self._awaiting_weights.pop(sample, None) or self.engine.remove(sample)

    def _suspend(self) -> None:
        if self._suspend_requested:
            return
        self._suspend_requested = True
        self._flush(everything=True)
        self.engine.clear()
        self._awaiting_weights.clear()
        self._env.at(self._env.now + self._env.machine.switch_s, self._on_suspended)

    def _on_suspended(self) -> None:
        if self._suspend_requested:
            self._is_suspended = True
            self._heartbeat()

    def _resume(self) -> None:
        if not self._suspend_requested:
            return
        self._suspend_requested = self._is_suspended = False
        self._resuming = True
        self._env.at(self._env.now + self._env.machine.switch_s, self._on_resumed)

    def _on_resumed(self) -> None:
        self._advance()
        self._resuming = False
        self._heartbeat()

    # --- reports ------------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        self.engine.advance(self._env.now)

    def _report_periodically(self) -> None:
        if self.alive:
            self._advance()
            self._flush(everything=True)
            self._count_siblings()
            self._env.at(self._env.now + self._env.report_s, self._report_periodically)
            self._schedule_wake()

    def _count_siblings(self) -> None:
        running = self.engine.running.values()
        if self._env.policy.speculation and running:
            self.engine.know_siblings(sum(self._env.ended[held.group] for held in running) / len(running))

    def _heartbeat_periodically(self) -> None:
        if self.alive:
            self._advance()
            self._heartbeat()
            self._env.at(self._env.now + self._env.heartbeat_s, self._heartbeat_periodically)
            self._schedule_wake()

    def _schedule_wake(self) -> None:
        """Wake when the next sample ends; later calls replace earlier ones."""
        self._wakes += 1
        at = self._env.now if self.engine.done else self.engine.next_event_at()
        if at < self._env.now + self._env.report_s:
            grid = self._env.finish_s
            self._env.at(math.ceil(at / grid + 1e-9) * grid, partial(self._wake, self._wakes))

    def _wake(self, wake: int) -> None:
        if wake == self._wakes and self.alive:
            self._advance()
            self._flush(everything=False)
            self._schedule_wake()

    def _flush(self, *, everything: bool) -> None:
        rows, self.engine.done = self.engine.done, []
        if everything:
            tokens_of = self.engine.tokens_of
            rows += [held for held in self.engine.running.values() if tokens_of(held) > held.flushed]
        if rows:
            self._send_tokens(rows, FINISH_NONE)

    def _send_tokens(self, rows: list[Held], finish: int) -> None:
        totals = [self.engine.tokens_of(held) for held in rows]
        counts = [total - held.flushed for total, held in zip(totals, rows, strict=True)]
        cap = self._env.job.lengths.cap
        ends = [
            (FINISH_LENGTH if total >= cap else FINISH_STOP) if total == held.length else finish
            for total, held in zip(totals, rows, strict=True)
        ]
        frame = TokenFrame(
            worker=self.id,
            seq=self._seq,
            samples=pack([held.sample for held in rows], U64),
            attempts=pack([held.attempt for held in rows], U32),
            offsets=pack([held.flushed for held in rows], U32),
            counts=pack(counts, U32),
            versions=pack([self._serving] * len(rows), U32),
            finish=pack(ends, U8),
            tokens=bytes(I32.itemsize * sum(counts)),
            logprobs=bytes(F32.itemsize * sum(counts)),
        )
        self._seq += 1
        for total, held in zip(totals, rows, strict=True):
            held.flushed = total
            self._env.ended[held.group] += total == held.length
        self._env.send(frame)

    def _heartbeat(self) -> None:
        engine = self.engine
        measured = engine.decode_s, engine.passes, engine.steps, engine.decoded
        seconds, passes, steps, tokens = (new - old for new, old in zip(measured, self._measured, strict=True))
        tokens_per_pass = steps / passes if passes else 1.0
        self._decode.add(seconds, passes, tokens / tokens_per_pass)  # accepted tokens do not count, as in real workers
        self._measured = measured
        batch, step_s = self._decode.take()
        self._env.send(
            WorkerHeartbeat(
                worker=self.id,
                state=self.state,
                job_id=self._job_id,
                version=self._serving,
                running=len(engine.running),
                pending=len(engine.pending) + len(self._awaiting_weights),
                tokens_per_s=self._throughput.update(round(engine.decoded), self._env.now),
                at=self._env.now,
                batch=batch,
                step_s=step_s,
                tokens_per_pass=tokens_per_pass if self._env.policy.speculation else 0.0,
            )
        )
