"""The simulated machines: engines, the reserved cluster, spot instances, the network, and prices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from rlboost.services.rollout_manager.domain.placement import PREFILL_SPEEDUP

ADMIT_UP_TO = 0.99
"""Share of the KV cache that an admission may fill, as with the watermark of vLLM V0."""
DELTA_SHARE = 0.024
"""Bytes of a delta per byte of the bf16 model where 4.9 % of the values change, more than at most steps with a learning
rate of 1e-6: `benchmarks/weight_delta.py` measured 0.98 bytes for each changed value."""


class Pass(NamedTuple):
    """What one forward pass does for each sample."""

    drafted: float
    """Drafted tokens that it verifies."""
    tokens: float
    """Tokens that the sample gets."""


PLAIN = Pass(0.0, 1.0)
DRAFTS = {
    0: (Pass(8, 2.14), Pass(4, 1.9)),
    1: (Pass(8, 2.59), Pass(4, 2.4)),
    3: (Pass(8, 3.19), Pass(4, 2.7)),
    7: (Pass(8, 3.39), Pass(4, 2.8)),
}
"""Siblings that have ended -> passes with drafts of up to 8 and 4 tokens: the torch engine's for the trained Countdown
model (docs/performance.md#drafts). Most drafts are shorter, so each pass counts as more work than it is."""


def passes(siblings: float) -> tuple[Pass, ...]:
    """Return the passes among which an engine that drafts chooses, if this many siblings of a sample have ended."""
    known = list(DRAFTS)
    by_length = (np.array(points) for points in zip(*DRAFTS.values(), strict=True))
    found = ([float(np.interp(siblings, known, column)) for column in points.T] for points in by_length)
    return PLAIN, *(Pass(*one) for one in found)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Throughput of one engine; a decode step of n samples with k tokens of KV takes a + b n + c k seconds.

    A pass that verifies d drafted tokens of each sample takes a + b (1 + d) n + c k: it reads weights and cache once.
    """

    step_s: float
    """a: of one decode step, independent of the batch."""
    per_sample_s: float
    """b: for each sample in the batch."""
    per_kv_token_s: float
    """c: for each token in the KV cache."""
    prefill_tokens_per_s: float
    slots: int = 256
    """The largest batch."""
    kv_tokens: int = 0
    """Capacity of the KV cache in tokens; 0: unlimited. A full cache retracts the sample admitted last."""

    def fastest(self, choices: Iterable[Pass], batch: float, kv_tokens: float) -> Pass:
        """Return the pass with the most tokens per second; none has more tokens than slots, as in the torch engine."""
        plain_s, drafted_s = self.decode_s(batch, kv_tokens), self.per_sample_s * batch
        possible = (one for one in choices if batch * (1.0 + one.drafted) <= self.slots or one is PLAIN)
        return min(possible, key=lambda one: (plain_s + drafted_s * one.drafted) / one.tokens)

    def decode_s(self, batch: float, kv_tokens: float) -> float:
        """Return the seconds of one decode step."""
        return self.step_s + self.per_sample_s * batch + self.per_kv_token_s * kv_tokens

    def max_batch(self, kv_per_sample: float) -> int:
        """Return how many samples of this size run at once."""
        if not self.kv_tokens:
            return self.slots
        return max(1, min(self.slots, int(ADMIT_UP_TO * self.kv_tokens / kv_per_sample)))

    def tokens_per_s(self, batch: float, kv_per_sample: float) -> float:
        """Return the throughput of a batch of samples of this size."""
        return batch / self.decode_s(batch, batch * kv_per_sample)

    def with_assumed_prefill(self) -> EngineSpec:
        """Return this engine with the prefill throughput that the rollout manager assumes."""
        return replace(self, prefill_tokens_per_s=PREFILL_SPEEDUP * self.tokens_per_s(self.slots, kv_per_sample=0))

    def slowed(self, slowdown: float) -> EngineSpec:
        """Return this engine where all that it computes takes `slowdown` times as long."""
        return replace(
            self,
            step_s=slowdown * self.step_s,
            per_sample_s=slowdown * self.per_sample_s,
            per_kv_token_s=slowdown * self.per_kv_token_s,
            prefill_tokens_per_s=self.prefill_tokens_per_s / slowdown,
        )

    def plateau(self, kv_per_sample: float, share: float) -> int:
        """Return the smallest batch that reaches `share` of the best throughput (B in the paper)."""
        most = self.max_batch(kv_per_sample)
        best = self.tokens_per_s(most, kv_per_sample)
        return next(n for n in range(1, most + 1) if self.tokens_per_s(n, kv_per_sample) >= share * best)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A reserved cluster that trains and generates, and one kind of spot instance with one engine each."""

    engine: EngineSpec
    reserved_engines: int
    reserved_price_per_hour: float
    """Dollars for the whole reserved cluster."""
    instance_price_per_hour: float
    """Dollars for one spot instance, from its request to its end."""
    weights_bytes: float
    """One version in bf16."""
    instance_bytes_per_s: float
    """Download bandwidth of an instance."""
    store_bytes_per_s: float
    """Upload bandwidth of the weight store, shared by all instances that download from it."""
    pull_latency_s: float = 0.0
    """Time of a download in addition to the transfer of its bytes."""
    load_s: float
    """How long an engine generates nothing while it loads a version, in full or as a delta."""
    reserved_load_s: float
    """Time from committed weights to their use in a reserved engine."""
    switch_s: float
    """A reserved engine releases the device to the trainer, or takes it back."""
    slowdowns: tuple[float, ...] = (1.0,)
    """Duration of training and generation relative to their mean, in consecutive steps: other programs on the machine
    slow both down. Each simulation begins at another one, and repeats them."""
    dedicated_engines: int = 0
    """Reserved engines outside the cluster that generate for a disaggregated trainer."""
    startup_s: float = 60.0
    """Time from an instance's request to its join: boot, image, engine. It is billed."""
    notice_s: float = 30.0
    """Time from the preemption notice to an instance's end: 30 s on Google Cloud and Azure, 120 s on AWS;
    0: it ends without one."""

    def publish_s(self, share: float) -> float:
        """Return the upload time of a version of which `share` is sent."""
        return share * self.weights_bytes / self.store_bytes_per_s

    def pull_s(self, share: float, pulling: int, *, peers: bool) -> float:
        """Return the download time of a version of which `share` is sent, while `pulling` instances download."""
        star_s = pulling * share * self.weights_bytes / self.store_bytes_per_s
        store_s = share * self.weights_bytes / self.store_bytes_per_s if peers else star_s
        return self.pull_latency_s + max(share * self.weights_bytes / self.instance_bytes_per_s, store_s)

    def nodes(self, factor: int) -> Machine:
        """Return a machine with `factor` times the reserved cluster."""
        return replace(
            self,
            reserved_engines=factor * self.reserved_engines,
            reserved_price_per_hour=factor * self.reserved_price_per_hour,
        )

    def dedicated(self) -> Machine:
        """Return a machine whose reserved cluster only trains, and whose instances are priced as reserved ones."""
        price = self.reserved_price_per_hour / self.reserved_engines
        return replace(self, reserved_engines=0, instance_price_per_hour=price)


def typical_kv(prompt_tokens: float, completion_tokens: float) -> float:
    """Return the KV tokens of a sample in the middle of its generation."""
    return prompt_tokens + completion_tokens / 2
