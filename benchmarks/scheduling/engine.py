"""An inference engine in closed form: continuous batching with slots, prefill and a bounded KV cache.

One decode step of a batch of n samples that hold k tokens of KV takes `a + b n + c k` seconds (roofline: weights are
read once, each sample costs some arithmetic, each token held is read once). All running samples get one token a step,
so between two events the time of m steps is `m (a + b n + c k) + c n m^2 / 2`, and nothing needs simulating.

Prefill comes before decoding and stops it. When the KV cache is full, the sample that was admitted last is retracted:
it keeps its tokens, waits at the head of the queue and is prefilled again (as vLLM recomputes).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field

ADMIT_UP_TO = 0.99
"""Part of the KV cache that an admission may fill; vLLM's watermark."""
_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine of speed 1 does; a slower one takes longer for everything by the same factor."""

    step_s: float
    """a: of one decode step, whatever it holds."""
    per_sample_s: float
    """b: more for each sample of the batch."""
    per_kv_token_s: float
    """c: more for each token of KV that is held."""
    prefill_tokens_per_s: float
    slots: int
    kv_tokens: int = 0
    """How many tokens the KV cache holds; 0: enough."""

    def decode_s(self, batch: float, kv_tokens: float) -> float:
        """Return the seconds of one decode step."""
        return self.step_s + self.per_sample_s * batch + self.per_kv_token_s * kv_tokens

    def fits(self, kv_per_sample: float) -> int:
        """Return how many samples of this size run at once."""
        if not self.kv_tokens:
            return self.slots
        return max(1, min(self.slots, int(ADMIT_UP_TO * self.kv_tokens / kv_per_sample)))

    def tokens_per_s(self, batch: float, kv_per_sample: float) -> float:
        """Return the speed with a batch of samples of this size."""
        return batch / self.decode_s(batch, batch * kv_per_sample)

    def plateau(self, kv_per_sample: float, part: float) -> int:
        """Return the smallest batch that reaches `part` of the best speed that fits (the paper's B)."""
        most = self.fits(kv_per_sample)
        best = self.tokens_per_s(most, kv_per_sample)
        return next(n for n in range(1, most + 1) if self.tokens_per_s(n, kv_per_sample) >= part * best)


@dataclass(slots=True)
class Held:
    """One sample at an engine."""

    sample: int
    attempt: int
    group: int
    prompt: int
    """Tokens of the prompt."""
    length: int
    """Tokens that it will have when it ends; only the engine knows."""
    base: float
    """Tokens that it had when it was admitted last."""
    flushed: int
    """Tokens that were reported."""
    admitted_at: float = 0.0
    """The engine's count of decode steps then."""
    ends_at: float = 0.0
    """The engine's count of decode steps when it is complete."""
    running: bool = False
    prefill_s: float = 0.0
    """What its last admission took to prefill, at speed 1."""


@dataclass(slots=True)
class Engine:
    """The state of one engine; it is where it was at `now` until `advance` is called."""

    spec: EngineSpec
    speed: float = 1.0
    now: float = 0.0
    running: dict[int, Held] = field(default_factory=dict)
    """In order of admission."""
    pending: deque[Held] = field(default_factory=deque)
    done: list[Held] = field(default_factory=list)
    """Complete and not yet taken by the caller."""
    busy_s: float = 0.0
    decoded: float = 0.0
    """Tokens, counting those of complete samples too."""
    prefilled_again: float = 0.0
    """Completion tokens that were prefilled: of samples that came from elsewhere or were retracted."""
    retractions: int = 0
    _steps: float = 0.0
    _kv: float = 0.0
    _prefill_s: float = 0.0
    _ends: list[tuple[float, int, Held]] = field(default_factory=list)
    _prefixes: set[int] = field(default_factory=set)
    _admissions: int = 0

    def submit(self, held: Held) -> None:
        """Queue a sample."""
        self.pending.append(held)
        self._admit()

    def remove(self, sample: int) -> Held | None:
        """Take a sample out, whether it runs or waits."""
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

    def clear(self) -> list[Held]:
        """Take everything out that is not complete."""
        everything = [*self.running.values(), *self.pending]
        for held in self.running.values():
            self._stop(held)
        self.running.clear()
        self.pending.clear()
        self._ends.clear()
        self._kv = self._prefill_s = 0.0
        return everything

    def forget_prefixes(self) -> None:
        """Note that the weights changed: no cached prompt is of use any more."""
        self._prefixes.clear()

    def made(self, held: Held) -> int:
        """Return how many tokens a sample has."""
        more = self._steps - held.admitted_at if held.running else 0.0
        return min(held.length, int(held.base + more + _EPSILON))

    def next_event_at(self) -> float:
        """Return when something happens by itself: a sample ends, or the KV cache is full; infinity if never."""
        if not self.running:
            return math.inf
        return self.now + (self._prefill_s + self._seconds(self._steps_to_event())) / self.speed

    def advance(self, now: float) -> None:
        """Go on to `now`."""
        left = (now - self.now) * self.speed
        self.now = max(self.now, now)
        while left > 0 and self.running:
            if self._prefill_s > 0:
                used = min(left, self._prefill_s)
                self._prefill_s -= used
            else:
                steps = self._steps_to_event()
                used = self._seconds(steps)
                if used > left + _EPSILON:  # a caller who comes for an event has it, in spite of rounding
                    self._progress(self._steps_in(left))
                    used = left
                else:
                    self._progress(steps)
                    self._settle()
            left -= used
            self.busy_s += used / self.speed

    # --- between two events -------------------------------------------------------------------------------------------

    def _seconds(self, steps: float) -> float:
        n = len(self.running)
        return steps * (self.spec.decode_s(n, self._kv) + self.spec.per_kv_token_s * n * steps / 2)

    def _steps_in(self, seconds: float) -> float:
        n = len(self.running)
        first, slope = self.spec.decode_s(n, self._kv), self.spec.per_kv_token_s * n
        if slope == 0:
            return seconds / first
        return (math.sqrt(first * first + 2 * slope * seconds) - first) / slope

    def _progress(self, steps: float) -> None:
        made = steps * len(self.running)
        self._steps += steps
        self._kv += made
        self.decoded += made

    def _steps_to_event(self) -> float:
        ends = self._ends
        while ends and not (ends[0][2].running and ends[0][2].ends_at == ends[0][0]):
            heapq.heappop(ends)
        steps = ends[0][0] - self._steps
        if self.spec.kv_tokens and len(self.running) > 1:
            steps = min(steps, (self.spec.kv_tokens - self._kv) / len(self.running))
        return max(0.0, steps)

    # --- events -------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        while self._ends and self._ends[0][0] <= self._steps + _EPSILON:
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
            held.running, held.admitted_at = True, self._steps
            held.ends_at = self._steps + held.length - held.base
            self.running[held.sample] = held
            self._admissions += 1
            heapq.heappush(self._ends, (held.ends_at, self._admissions, held))
            cached = held.group in self._prefixes
            self._prefixes.add(held.group)
            held.prefill_s = (held.base + (0 if cached else held.prompt)) / self.spec.prefill_tokens_per_s
            self._prefill_s += held.prefill_s
            self.prefilled_again += held.base
            self._kv += size

    def _stop(self, held: Held) -> None:
        if held.admitted_at == self._steps:  # what was not read in yet of an aborted sample never is
            self._prefill_s = max(0.0, self._prefill_s - held.prefill_s)
        held.base = self.made(held)
        held.running = False
        self._kv = max(0.0, self._kv - held.prompt - held.base) if self.running else 0.0
