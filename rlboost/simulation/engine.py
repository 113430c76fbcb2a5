"""An inference engine in closed form: continuous batching with slots, prefill and a bounded KV cache.

One decode step of n samples with k tokens of KV takes `a + b n + c k` seconds (roofline: each step reads the weights
once and each cached token once, and each sample costs some arithmetic). All running samples get one token per step, so
m steps between two events take `m (a + b n + c k) + c n m^2 / 2`: no step is simulated on its own.

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

from rlboost.simulation.scenario import ADMIT_UP_TO, PLAIN, EngineSpec, Pass, passes

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
