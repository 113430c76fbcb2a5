"""What the manager measures of workers: their throughput, KV caches, answers to commands, and trust."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
import numpy.typing as npt

from rlboost.services.rollout_manager.domain.tokens import Sample
from rlboost.shared.messages.command_digest import MODULUS
from rlboost.shared.streams.bus import START
from rlboost.shared.wire import length

# --- throughput -------------------------------------------------------------------------------------------------------
#
# Models the throughput of a kind of worker, learned from heartbeats.
#
# One decode step takes about `fixed_s + each_s * samples + token_s * tokens`: the weights are read once a step, each
# sample has a cost, and its KV cache is read. So throughput is nearly proportional to small batches and flat for large
# ones. In between, at the *batching plateau* (B in the paper's algorithm 2), a larger batch makes each sample slower
# and the whole hardly faster.
#
# An engine that drafts takes longer for a pass, by a cost per sample, and gets more than one token from it, so the time
# per token of small batches is another line. One line through both kinds of steps would follow neither.


MIN_STEP_S, MAX_STEP_S = 1e-6, 1e4
"""No engine's decode step takes less or more: such a report is wrong."""
OBSERVATION_DECAY = 0.995
"""Factor by which each new observation lowers the weight of earlier ones."""
MIN_OBSERVATIONS = 6
"""Observations before the model is used."""
FIT_EVERY = 8
"""Observations between two fits after that."""
DRAFTS_STEP = 0.05
"""Weight of one observation in what is known of drafts: few wrong ones do not count."""
FIRST_DRAFTS = 3
"""Observations of drafts before an engine counts as one that drafts: one may be wrong."""
MIN_TOKENS_PER_PASS = 1.05
"""Fewer: the engine tries drafts that do not pay."""
MAX_TOKENS_PER_PASS = 64.0
"""No engine accepts longer drafts: such a report is wrong."""
SPEED_STEP = 0.1
"""Weight of one observation in a worker's speed."""

_CHOICES = [list(chosen) for size in (3, 2, 1) for chosen in combinations(range(3), size)]


@dataclass(slots=True)
class Profile:
    """Seconds of a step against samples and tokens in the batch: weighted least squares, no coefficient negative.

    Observations last about equally long, so each is weighted by its number of steps: where the speed varies, as on a
    shared machine, the fit then has the mean throughput. Least squares of relative errors would follow the fast ones.
    """

    fixed_s: float = 1.0
    """Seconds per step, independent of the batch; before the first fit, the unit of all comparisons."""
    each_s: float = 0.0
    """Seconds per step and sample in the batch."""
    token_s: float = 0.0
    """Seconds per step and token in the KV cache."""
    verify_s: float = 0.0
    """Seconds per step and sample in the batch on top, where the engine verifies drafts."""
    tokens_per_pass: float = 1.0
    """Tokens of a sample in such a step."""
    drafted: float = 0.0
    """The largest batch with drafts."""
    observed: int = 0
    _drafts: int = 0
    _without_drafts: int = 0
    _products: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros((3, 3)))
    _targets: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(3))

    @property
    def known(self) -> bool:
        """Return True if there were enough observations."""
        return self.observed >= MIN_OBSERVATIONS

    def observe(self, running: float, tokens: float, tokens_per_s: float, tokens_per_pass: float = 1.0) -> None:
        """Take one observation.

        Args:
            running: samples in the batch.
            tokens: theirs in the KV cache.
            tokens_per_s: their joint throughput, without accepted drafts.
            tokens_per_pass: tokens of a sample in a step, with them.

        """
        step_s, drafts = running / tokens_per_s, tokens_per_pass > MIN_TOKENS_PER_PASS
        self._drafts += drafts
        if drafts and not self.drafted:
            self.drafted = running if self._drafts >= FIRST_DRAFTS else 0.0
        elif drafts and running > self.drafted:
            self.drafted = min(running, (1 + DRAFTS_STEP) * self.drafted)
        elif not drafts and running <= self.drafted:
            self.drafted *= 1 - DRAFTS_STEP
        if drafts != (running <= self.drafted):
            return  # a mean over steps of both kinds
        self._without_drafts += not drafts
        if drafts:
            self.tokens_per_pass += DRAFTS_STEP * (tokens_per_pass - self.tokens_per_pass)
            if self._without_drafts >= MIN_OBSERVATIONS:  # else nothing tells the cost of drafts apart
                more_s = (step_s - self.pass_s(running, tokens)) / running
                self.verify_s += DRAFTS_STEP * (max(0.0, more_s) - self.verify_s)
                return
        row = np.array([1.0, running, tokens])
        self._products = OBSERVATION_DECAY * self._products + np.outer(row, row) / step_s
        self._targets = OBSERVATION_DECAY * self._targets + row
        self.observed += 1
        if self.observed == MIN_OBSERVATIONS or (self.known and self.observed % FIT_EVERY == 0):
            self._fit()

    def _fit(self) -> None:
        # Of all subsets of the terms with positive coefficients, take the one that explains most.
        scale = np.sqrt(np.diag(self._products)) + 1e-12
        products, targets = self._products / np.outer(scale, scale), self._targets / scale
        best, explained = np.zeros(3), 0.0
        for chosen in _CHOICES:
            part = products[np.ix_(chosen, chosen)] + 1e-9 * np.eye(len(chosen))
            found = np.linalg.solve(part, targets[chosen])
            if (found > 0).all() and float(found @ targets[chosen]) > explained * 1.0001:
                best, explained = np.zeros(3), float(found @ targets[chosen])
                best[chosen] = found
        fixed_s, self.each_s, self.token_s = (float(value) for value in best / scale)
        self.fixed_s = max(fixed_s, 1e-9)  # a step always takes time

    def pass_s(self, running: float, tokens: float, *, drafts: bool = False) -> float:
        """Return the seconds of one step."""
        return self.fixed_s + (self.each_s + drafts * self.verify_s) * running + self.token_s * tokens

    def uses_drafts(self, running: float, tokens: float) -> bool:
        """Return True if an engine drafts a batch: where that is faster, up to the largest one that was seen."""
        drafted_s = self.pass_s(running, tokens, drafts=True)
        return running <= self.drafted and drafted_s < self.tokens_per_pass * self.pass_s(running, tokens)

    def step_s(self, running: float, tokens: float) -> float:
        """Return the seconds between two tokens of a sample in a batch."""
        if self.uses_drafts(running, tokens):
            return self.pass_s(running, tokens, drafts=True) / self.tokens_per_pass
        return self.pass_s(running, tokens)

    def batch_share(self, running: float, tokens: float) -> float:
        """Return the part of a step that grows with its batch."""
        return 1.0 - self.fixed_s / self.pass_s(running, tokens, drafts=self.uses_drafts(running, tokens))

    def token_interval_s(self, load: int, batch_cap: int, tokens: float) -> float:
        """Return the seconds between two tokens of one of `load` samples; those beyond the batch cap take turns."""
        return self.step_s(min(load, batch_cap), tokens) * max(1.0, load / batch_cap)

    def tokens_per_s(self, running: float, tokens: float) -> float:
        """Return the throughput."""
        return running / self.step_s(running, tokens) if running else 0.0

    def plateau(self, slots: int, share: float, tokens_each: float) -> int:
        """Return the smallest batch that reaches `share` of the best throughput.

        Args:
            slots: the largest batch.
            share: fraction of the throughput, below 1.
            tokens_each: mean number of tokens of a sample in the KV cache.

        """
        if not self.known:
            return slots
        drafted = min(float(slots), self.drafted)
        least = share * max(self.tokens_per_s(n, n * tokens_each) for n in (slots, drafted))
        each_s, batches = self.each_s + self.token_s * tokens_each, [float(slots)]
        for more_s, per_pass, largest in ((0.0, 1.0, float(slots)), (self.verify_s, self.tokens_per_pass, drafted)):
            left = per_pass - least * (each_s + more_s)
            if left > 0 and least * self.fixed_s / left <= largest:
                batches.append(least * self.fixed_s / left)
        return max(1, round(min(batches)))


def is_possible(batch: float, step_s: float, slots: int) -> bool:
    """Return True if an engine with this many slots can report this mean batch and time of a decode step."""
    return 1.0 <= batch <= slots and MIN_STEP_S < step_s < MAX_STEP_S


def speed_after(speed: float, expected: float, tokens_per_s: float) -> float:
    """Return a worker's speed relative to its kind after one more observation."""
    return speed + SPEED_STEP * (min(max(tokens_per_s / expected, 0.05), 20.0) - speed)


# --- kv usage ---------------------------------------------------------------------------------------------------------
#
# Counts the tokens that a worker's samples occupy in its KV cache.


@dataclass(slots=True)
class KvUsage:
    """Token counts of the worker's samples as they are in the ledger, so less than the engine has generated."""

    capacity: int = 0
    """Tokens that the cache holds; 0 where the engine reports none."""
    block_tokens: int = 0
    """Size of the blocks that samples of a group share; 0 where the engine shares none."""
    held: int = 0
    """Sum over the samples of prompt and generated tokens."""
    shared: int = 0
    """Part of `held` that the engine stores once because another sample of the group has the same prompt."""

    @property
    def used(self) -> int:
        """Return the tokens that the samples occupy."""
        return self.held - self.shared

    def add(self, sample: Sample, *, has_sibling: bool) -> None:
        """Count one more sample; `has_sibling`: the worker holds another sample of its group."""
        self.held += tokens_of(sample)
        self.shared += self._shared_tokens(sample) if has_sibling else 0

    def remove(self, sample: Sample, *, has_sibling: bool) -> None:
        """Count one sample less; `has_sibling`: the worker still holds another sample of its group."""
        self.held -= tokens_of(sample)
        self.shared -= self._shared_tokens(sample) if has_sibling else 0

    def recount(self, samples: Iterable[Sample]) -> None:
        """Count all samples of the worker from scratch."""
        self.held = self.shared = 0
        groups: set[int] = set()
        for sample in samples:
            self.add(sample, has_sibling=sample.request.group in groups)
            groups.add(sample.request.group)

    def _shared_tokens(self, sample: Sample) -> int:
        # Full blocks, without the prompt's last token: each sample runs that through the model, and its block with it.
        if not self.block_tokens:
            return 0
        return (length(sample.request.prompt) - 1) // self.block_tokens * self.block_tokens


def tokens_of(sample: Sample) -> int:
    """Return the tokens of a sample in the KV cache: its prompt and what was generated."""
    return length(sample.request.prompt) + sample.n_tokens


# --- command check ----------------------------------------------------------------------------------------------------
#
# Detects that a worker has missed commands, by comparing digests of what it was assigned (`messages.command_digest`).
#
# Redis may lose the newest commands when it restarts from an older file, and a stream may be trimmed or deleted.
# Worker and manager then differ for good, and a sample that only the manager believes to be assigned would never end.
#
# Commands and frames in transit change the difference from heartbeat to heartbeat; a lost command leaves a constant
# one. A worker is mismatched if the same non-zero difference was seen in `MIN_HEARTBEATS` heartbeats over `settle_s`,
# without an equal digest in between. The manager then checks that the worker has read all of its commands, which
# excludes a slow worker.


MIN_HEARTBEATS = 3
"""How many heartbeats must show the same difference."""
_MAX_DIFFERENCES = 64


@dataclass(slots=True)
class CommandCheck:
    """The differences between one worker's digest and the manager's, since the two were equal last."""

    last_command: str = START
    """Entry id of the last command that the worker has applied, as of its last heartbeat."""
    _seen: dict[int, tuple[float, int]] = field(default_factory=dict)
    """Difference -> when it was seen first (manager's clock), and how often."""
    _mismatched_for_s: float = 0.0

    def observe(self, expected: int, reported: int, last_command: str, now: float) -> None:
        """Compare the digest in a heartbeat with the manager's at this moment."""
        self.last_command, self._mismatched_for_s = last_command, 0.0
        difference = (expected - reported) % MODULUS
        if not difference or len(self._seen) >= _MAX_DIFFERENCES:
            self._seen.clear()
        if difference:
            first_at, count = self._seen.get(difference, (now, 0))
            self._seen[difference] = first_at, count + 1
            if count + 1 >= MIN_HEARTBEATS:
                self._mismatched_for_s = now - first_at

    def is_mismatched(self, settle_s: float) -> bool:
        """Return True if the last heartbeat showed a difference that persists since `settle_s` or longer."""
        return self._mismatched_for_s >= settle_s

    def restart(self) -> None:
        """Forget all differences: they had another cause."""
        self._seen.clear()
        self._mismatched_for_s = 0.0


# --- trust ------------------------------------------------------------------------------------------------------------
#
# How many samples a worker may hold, by the tokens that it has sent so far (invariant 8).
#
# A worker claims its slots, its states and its heartbeats; only tokens that the ledger accepts are evidence. So a
# worker starts with a few samples, its *probe*, and each token that arrives admits more. A worker that held samples
# without generating gets none for some time, then a probe again; the time doubles with each offense.


PROBE_SAMPLES = 4
"""Samples of a worker that has not sent a token yet."""
SAMPLES_PER_TOKEN = 4
"""How many more samples each token admits: a full batch follows within a few flushes."""
MAX_OFFENSES = 3
"""A spot worker with this many is drained; one offense is forgiven after `FORGIVEN_AFTER_S` of work."""
FORGIVEN_AFTER_S = 600.0
_MEMORY_S = 60.0
"""About how long a measurement counts in a worker's pace."""


@dataclass(slots=True)
class Trust:
    """One worker's record. Times are the manager's clock."""

    allowance: float = math.inf
    """Samples that it may hold: `PROBE_SAMPLES` at first, infinite once it may have a full batch, 0 between probes."""
    probe_at: float = -math.inf
    """When it gets its next probe."""
    offenses: int = 0
    offended_at: float = -math.inf
    progressed_at: float = -math.inf
    """When a token of one of its samples was last seen."""
    silent_s: float = 0.0
    """For how long it has had unfinished samples and sent no token."""
    first_token_s: float = 0.0
    """Mean time from an assignment to its first token; 0 if unknown."""
    _running_s: float = 0.0
    """Recent time of its samples after their first token, summed over the samples."""
    _silent_running_s: float = 0.0
    """The same since its last token."""
    _tokens: float = 0.0
    """Tokens in that time."""

    @property
    def is_full(self) -> bool:
        """Return True if the allowance limits it no more."""
        return self.allowance == math.inf

    @property
    def on_probation(self) -> bool:
        """Return True if it gets no samples until its next probe."""
        return not self.allowance

    @property
    def token_interval_s(self) -> float:
        """Return the mean time between two tokens of one of its samples; 0 if unknown."""
        return self._running_s / self._tokens if self._tokens else 0.0

    def on_tokens(self, n_tokens: int, batch: int) -> None:
        """Count tokens that the ledger accepted; `batch` is how many samples it should hold at most."""
        if self.allowance and not self.is_full:
            self.allowance += SAMPLES_PER_TOKEN * n_tokens
            if self.allowance >= batch:
                self.allowance = math.inf

    def on_pace(self, n_running: int, tokens: int, elapsed_s: float) -> None:
        """Measure its pace: the new tokens of its running samples. Silence counts once it has ended."""
        self._silent_running_s += n_running * elapsed_s
        if tokens:
            keep = max(0.0, 1.0 - (elapsed_s + self.silent_s) / _MEMORY_S)
            self._running_s = keep * self._running_s + self._silent_running_s
            self._tokens, self._silent_running_s = keep * self._tokens + tokens, 0.0

    def on_first_token(self, seconds: float) -> None:
        """Measure the time from an assignment to its first token."""
        self.first_token_s = 0.9 * self.first_token_s + 0.1 * seconds if self.first_token_s else seconds

    def offend(self, now: float, pause_s: float) -> None:
        """Count an offense; the next probe is after `pause_s`, doubled with each offense."""
        self.offenses += 1
        self.offended_at, self.allowance = now, 0.0
        self.probe_at = now + pause_s * 2.0 ** (self.offenses - 1)

    def on_time(self, now: float) -> None:
        """Forgive an offense and grant a probe when these are due."""
        if self.offenses and self.progressed_at > self.offended_at and now - self.offended_at > FORGIVEN_AFTER_S:
            self.offenses, self.offended_at = self.offenses - 1, now
        if not self.allowance and now >= self.probe_at:
            self.allowance = PROBE_SAMPLES
