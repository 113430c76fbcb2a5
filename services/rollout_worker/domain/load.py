"""What a worker reports of its load: throughput, memory for tokens, and whether its engine hangs."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlboost.services.rollout_worker.domain.requests import Emission
from rlboost.services.rollout_worker.domain.session import Session
from rlboost.shared.messages import Wait, WorkerHeartbeat

# --- Detects a hanging engine: one that has requests and generates no tokens ------------------------------------------
# A hanging engine cannot report itself, and the process's heartbeats continue: only the missing tokens show it. The
# time allowed for the next token depends on the engine's work. It is counted in `elapsed_s`, not by the wall clock, so
# that time in which the whole process was stopped does not count.


FIRST_TOKEN_FACTOR = 5.0
"""The first token after a start or a pause may take this multiple of the limit: kernels compile and caches fill."""
PREFILL_TOKENS_PER_S = 100.0
"""Lower bound of any engine's prefill speed, in tokens per second."""


class HangDetector:
    """Adds up the time without a new token. Call `update` regularly."""

    def __init__(self) -> None:
        self.silent_s = 0.0
        """Time for which the engine has had requests and generated no token."""
        self._n_generated = 0
        self._first = True
        self._longest_prefill = 0
        """The longest prefill that may be in progress."""
        self._longest_submitted = 0
        """The longest one submitted since the last token: that token may be of a request before it."""

    def on_submit(self, tokens: int) -> None:
        """Record a request whose first token needs a prefill of `tokens` tokens."""
        self._longest_submitted = max(self._longest_submitted, tokens)

    def on_resume(self) -> None:
        """Record that the engine starts, or resumes after a pause."""
        self.silent_s, self._first = 0.0, True

    def update(self, *, busy: bool, n_generated: int, elapsed_s: float) -> None:
        """Record the engine's state.

        Args:
            busy: True if it has requests and is not paused.
            n_generated: total tokens that it has generated.
            elapsed_s: time since the last call.

        """
        if n_generated != self._n_generated:
            self._n_generated, self.silent_s, self._first = n_generated, 0.0, False
            self._longest_prefill, self._longest_submitted = self._longest_submitted, 0
        elif busy:
            self.silent_s += elapsed_s
        else:
            self.silent_s = 0.0

    def hangs(self, limit_s: float) -> bool:
        """Return True if no token has come for longer than allowed, where a decode step may take `limit_s`."""
        prefill_s = max(self._longest_prefill, self._longest_submitted) / PREFILL_TOKENS_PER_S
        return self.silent_s > limit_s * (FIRST_TOKEN_FACTOR if self._first else 1.0) + prefill_s


# --- Capacity of a dense KV cache of shape [slots, columns]: every slot is as long as the longest running sample ------
# A slot is counted with the length at which its sample ends at the latest, so an admitted sample can run to its end.


QUANTUM = 16
"""Columns come in multiples of this: kernels want aligned masks, and neighboring lengths come out equal."""


def round_up(length: int) -> int:
    """Return the number of columns for this many tokens."""
    return -(-length // QUANTUM) * QUANTUM


@dataclass(frozen=True, slots=True)
class KvCapacity:
    """The limits of a KV cache."""

    slots: int
    """Largest number of slots."""
    max_len: int
    """Largest number of tokens in one slot."""
    tokens: int
    """Largest number of tokens in all slots together."""

    def fits(self, slots: int, longest: int) -> bool:
        """Return True if this many samples can run at once when the longest of them ends at this length."""
        return slots <= self.tokens // max(QUANTUM, round_up(longest))

    @property
    def max_request_tokens(self) -> int:
        """Return the length above which no sample fits, 0 if every length up to `max_len` fits."""
        return 0 if self.fits(1, self.max_len) else self.tokens // QUANTUM * QUANTUM

    def shape(self, slots: int, columns: int) -> tuple[int, int]:
        """Return the (slots, columns) to allocate for this many slots and columns in use, which `fits`.

        Allocates up to twice the columns, so that the cache seldom grows, then as many slots as the memory holds.
        """
        needed = round_up(columns)
        spare = min(2 * needed, round_up(self.max_len), self.tokens // slots // QUANTUM * QUANTUM)
        wide = max(needed, spare)
        return min(self.slots, self.tokens // wide), wide


# --- Measures an engine: its throughput, and its decode steps ---------------------------------------------------------


WINDOW_S = 1.0
MIN_MEASURED_S = 0.2
"""Fewer seconds are too imprecise: each flush may come in the middle of a step."""


class Throughput:
    """Tokens per second over the last `WINDOW_S` seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def update(self, total: int, now: float) -> float:
        """Record the counter's value at `now` (seconds of any clock); return the speed, 0 after a counter reset."""
        if self._seen and total < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((now, total))
        while len(self._seen) > 2 and now - self._seen[1][0] >= WINDOW_S:
            self._seen.popleft()
        since, before = self._seen[0]
        return (total - before) / (now - since) if now > since else 0.0


class DecodeMeter:
    """Mean batch and mean duration of decode steps.

    The manager's model of a step's duration is linear in its batch, so it can be fitted to means over steps with
    different batches. An interval between two flushes counts if the engine generated throughout. The number of its
    steps is the most tokens that one sample got, or more if so few steps could not hold all tokens: then no sample
    lasted the whole interval. With drafts it follows from the present batch. The accepted tokens do not count: what
    the means say of a batch holds for one without drafts too, only that its steps are a little shorter.

    Args:
        slots: the largest batch.

    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._seconds = self._steps = self._tokens = 0.0
        self._since: float | None = None
        """The last flush with tokens; None if the engine was idle or paused after it."""
        self._version = -1

    def on_flush(self, emissions: Iterable[Emission], running: int, now: float, accepted: int = 0) -> None:
        """Count the interval from the last flush with tokens to this one, if the engine generated throughout.

        Args:
            emissions: what all samples have emitted since the last flush.
            running: samples in the batch now; 0 while the engine is paused.
            now: the present time, in seconds of any clock.
            accepted: how many of these tokens were drafted.

        """
        tokens: Counter[int] = Counter()
        version, scored = self._version, False
        for emission in emissions:
            if emission.is_forced:
                scored = True
            else:
                tokens[emission.sample] += len(emission.tokens)
            version = max(version, emission.version)
        total = tokens.total()
        if total and running and self._since is not None and version == self._version:
            steps, decoded = max(*tokens.values(), total / self._slots), total
            if accepted > 0:  # not if a new engine counts from 0
                decoded = max(1, total - accepted)
                steps = decoded / running
            self.add(now - self._since, steps, decoded)
        if not running or (scored and not total):
            self._since = None  # given tokens alone took the time
        elif total:
            self._since = now
        self._version = version

    def add(self, seconds: float, steps: float, tokens: float) -> None:
        """Count time in which the engine generated throughout."""
        self._seconds, self._steps, self._tokens = self._seconds + seconds, self._steps + steps, self._tokens + tokens

    def take(self) -> tuple[float, float]:
        """Return mean batch and mean duration in seconds of the steps since the last result.

        Zeros, and no result, until they have taken `MIN_MEASURED_S` together.
        """
        if self._seconds <= MIN_MEASURED_S:
            return 0.0, 0.0
        means = min(self._slots, self._tokens / self._steps), self._seconds / self._steps
        self._seconds = self._steps = self._tokens = 0.0
        return means


# --- The load of one worker: what it measures about its engine, for heartbeats and metrics ----------------------------


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine's current load."""

    running: int
    """Requests in each decode step."""
    pending: int
    """Requests waiting for a slot or for KV-cache capacity."""
    tokens_generated_total: int
    """Completion tokens generated since the engine was built, including those of aborted requests."""
    version: int
    """The loaded weight version; -1 before the first load and after a failed one."""
    drafted_total: int = 0
    """Drafted tokens that the engine has verified; 0 = it does not draft, or does not say."""
    accepted_total: int = 0
    """Drafted tokens that were drawn and so took no forward pass of their own."""
    uses_drafts: bool = False
    """True while it looks for drafts."""
    can_generate: bool = True
    """False while each of its requests waits for something else, such as its images."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory in use; 0 = unknown."""

    resident_bytes: int = 0
    """Memory of this process."""
    device_used_bytes: int = 0
    """Memory of the engine's device that all processes use."""
    device_total_bytes: int = 0
    """All memory of the engine's device."""


@dataclass(frozen=True, slots=True)
class Load:
    """The measurements of one moment."""

    tokens_per_s: float = 0.0
    memory: Memory = field(default_factory=Memory)
    batch: float = 0.0
    """Mean batch of the decode steps since an earlier measurement; see `DecodeMeter.take`."""
    step_s: float = 0.0
    """Mean duration of these steps."""
    update_s: float = 0.0
    """Duration of the last weight update; 0 before the first."""
    update_pause_s: float = 0.0
    """Part of `update_s` without generation."""
    tokens_per_pass: float = 0.0
    """Mean number of tokens that a sample got in a forward pass since the last measurement; 0 without drafts."""


@dataclass(slots=True)
class FlushTimes:
    """Total duration of flushes, from the engine to Redis's answer."""

    count: int = 0
    sum_s: float = 0.0


class LoadMeters:
    """Measures a worker's load.

    Args:
        slots: the engine's largest batch.

    """

    def __init__(self, slots: int) -> None:
        self._throughput = Throughput()
        self._decode = DecodeMeter(slots)
        self._update_s = self._update_pause_s = 0.0
        self._accepted_total = 0
        self._measured = (0, 0)
        """Tokens and accepted ones at the last measurement."""
        self.flush_times = FlushTimes()
        self.last = Load()
        """The newest result of `measure`."""

    def on_emissions(self, emissions: Sequence[Emission], running: int, now: float, accepted_total: int = 0) -> None:
        """Record what the engine has generated; see `DecodeMeter.on_flush` and `EngineStats`."""
        self._decode.on_flush(emissions, running, now, accepted_total - self._accepted_total)
        self._accepted_total = accepted_total

    def on_flushed(self, duration_s: float) -> None:
        """Record a flush that has sent tokens."""
        self.flush_times.count += 1
        self.flush_times.sum_s += duration_s

    def on_weights_replaced(self, update_s: float, pause_s: float) -> None:
        """Record a weight update: its duration, and the part without generation."""
        self._update_s, self._update_pause_s = update_s, pause_s

    def measure(self, stats: EngineStats, memory: Memory, now: float) -> Load:
        """Return the load at `now` (seconds of any clock), since the last call for what is a mean."""
        batch, step_s = self._decode.take()
        speed = self._throughput.update(stats.tokens_generated_total, now)
        before, self._measured = self._measured, (stats.tokens_generated_total, stats.accepted_total)
        tokens, accepted = (new - old for new, old in zip(self._measured, before, strict=True))
        per_pass = tokens / (tokens - accepted) if stats.drafted_total and tokens > accepted >= 0 else 0.0
        self.last = Load(speed, memory, batch, step_s, self._update_s, self._update_pause_s, per_pass)
        return self.last


# --- Builds a worker's heartbeat --------------------------------------------------------------------------------------


def build_heartbeat(
    session: Session,
    stats: EngineStats,
    load: Load,
    *,
    capabilities: Mapping[str, Any],
    last_command: str,
    waiting: Wait | None,
    at: float,
) -> WorkerHeartbeat:
    """Return the heartbeat of an incarnation.

    Args:
        session: the incarnation's session.
        stats: the engine's statistics.
        load: measured now.
        capabilities: the fields that describe the engine; empty before there is one.
        last_command: entry id of the last command that the session has taken.
        waiting: the oldest wait.
        at: seconds since the epoch.

    """
    job_id, version = session.serving or ("", -1)
    return WorkerHeartbeat(
        worker=session.worker,
        state=session.state,
        job_id=job_id,
        version=version,
        # The engine removes aborted requests at its next step; they are not held any more.
        running=min(stats.running, len(session.held)),
        pending=stats.pending + session.n_awaiting_weights,
        tokens_per_s=load.tokens_per_s,
        update_s=load.update_s,
        at=at,
        resident_bytes=load.memory.resident_bytes,
        device_used_bytes=load.memory.device_used_bytes,
        device_total_bytes=load.memory.device_total_bytes,
        command_digest=session.command_digest(),
        last_command=last_command,
        waiting=waiting,
        batch=load.batch,
        step_s=load.step_s,
        update_pause_s=load.update_pause_s,
        tokens_per_pass=load.tokens_per_pass,
        uses_drafts=stats.uses_drafts,
        alongside=tuple(session.alongside.items()),
        slots=session.seats,
        **capabilities,
    )
