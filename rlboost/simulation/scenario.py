"""What is simulated: a job, the machines that run it, and presets of both from the paper's evaluation.

The presets are calibrated on the paper's numbers for constant fleets. Set-up (arXiv 2510.19225 and its repository):
128 prompts x 8 samples a step, prompts up to 512 tokens, completions up to 14,336; engines of two H100 with tensor
parallelism; 8 reserved H100 (16 for 32B) with 200 Gb/s, $83.79 an hour for 8; spot instances of two H100 with 50 Gb/s,
$5.32 an hour.

Not reported are the lengths, the engines' throughput and the training time. The shape of the throughput comes from
arithmetic: a decode step reads the weights and each cached token once, at 6.7 TB/s, and computes at 40 % of 1,979
TFLOP/s. `python -m benchmarks.evaluation fit` finds the factor by which engines are slower, and the training rate. The
reported numbers do not determine lengths as well, so there are two calibrations: their results are a bracket.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np

from rlboost.services.rollout_manager.domain.placement import PREFILL_SPEEDUP
from rlboost.shared.ids import SampleId

# --- The job: what a step generates and trains ------------------------------------------------------------------------

JOB_ID = "job"
JOB_NO = 1

Quantiles = tuple[tuple[float, float], ...]
"""(probability, tokens), both rising; lengths between two points are interpolated geometrically."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The distribution of completion lengths in tokens: lognormal, or by quantiles."""

    cap: int
    median: float = 0.0
    sigma: float = 0.0
    """Standard deviation of the logarithm."""
    quantiles: Quantiles = ()
    """Replaces the lognormal distribution."""
    prompt_share: float = 0.5
    """Share of the variance that the prompt explains: samples of a group are alike, but not the same."""
    growth_per_step: float = 0.0
    """Relative growth of all lengths in one step of training."""

    def quantile(self, probability: float) -> float:
        """Return the length that this share of the first step's samples does not exceed."""
        return self.from_normal(NormalDist().inv_cdf(probability), 0)

    def from_normal(self, normal: float, step: int) -> float:
        """Return the length of a sample from a standard normal value."""
        if self.quantiles:
            probabilities, tokens = zip(*self.quantiles, strict=True)
            value = float(np.exp(np.interp(NormalDist().cdf(normal), probabilities, np.log(tokens))))
        else:
            value = self.median * float(np.exp(self.sigma * normal))
        return max(1.0, min(float(self.cap), value * (1.0 + self.growth_per_step) ** step))


@dataclass(frozen=True, slots=True)
class Group:
    """One prompt of one step."""

    id: int
    prompt_tokens: int
    lengths: tuple[int, ...]
    """Tokens of each completion."""

    @property
    def tokens(self) -> int:
        """Return the tokens to train on: prompts and completions."""
        return sum(self.lengths) + self.prompt_tokens * len(self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedJob:
    """One training job."""

    lengths: Lengths
    train_s_per_token: float
    """Training time per token of the reserved cluster: forward, backward and log-probabilities, over prompts and
    completions."""
    update_s: float = 0.0
    """Time after the last micro-batch: optimizer step and export of the weights, without their upload."""
    prompts: int = 128
    """Groups of a step."""
    group_size: int = 8
    prompt_tokens: tuple[int, int] = (64, 512)
    """Shortest and longest prompt."""
    micro_batch: int = 16
    """Samples that are trained at once."""
    reward_s: float = 0.2
    """Time to score one group."""

    @property
    def samples(self) -> int:
        """Return the samples of a step."""
        return self.prompts * self.group_size

    @property
    def mean_prompt_tokens(self) -> float:
        """Return the mean length of a prompt."""
        return sum(self.prompt_tokens) / 2

    def groups(self, step: int, seed: int) -> tuple[Group, ...]:
        """Return the groups of one step: the same for every policy."""
        rng = np.random.default_rng([seed, step])
        share = self.lengths.prompt_share
        common = rng.standard_normal((self.prompts, 1)) * share**0.5
        normals = common + rng.standard_normal((self.prompts, self.group_size)) * (1.0 - share) ** 0.5
        prompts = rng.integers(*self.prompt_tokens, size=self.prompts, endpoint=True)
        return tuple(
            Group(
                id=SampleId(JOB_NO, False, step, number, 0).pack(),
                prompt_tokens=int(prompts[number]),
                lengths=tuple(round(self.lengths.from_normal(float(normal), step)) for normal in normals[number]),
            )
            for number in range(self.prompts)
        )


# --- Machines: engines, the reserved cluster, spot instances, the network, and prices ---------------------------------

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
        """Return the upload time of this share of a version."""
        return share * self.weights_bytes / self.store_bytes_per_s

    def pull_s(self, share: float, pulling: int, *, peers: bool) -> float:
        """Return the download time of this share of a version, while `pulling` instances download."""
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


# --- Presets from the paper's evaluation ------------------------------------------------------------------------------

Model = Literal["8b", "14b", "32b"]
Completions = Literal["short", "long"]

BANDWIDTH_BYTES_PER_S = 6.7e12
LAUNCH_S = 0.003
"""Fixed time of a decode step, besides its kernels."""
FLOPS = 0.4 * 1.979e15
MEMORY_BYTES = 0.85 * 160e9
"""Memory of one engine for weights and KV cache."""
GBIT = 1e9 / 8
LENGTHS: dict[Completions, Lengths] = {
    "short": Lengths(cap=14_336, median=1800, sigma=0.7),
    "long": Lengths(cap=14_336, median=4500, sigma=0.6),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and its reserved cluster."""

    parameters: float
    kv_bytes_per_token: float
    nodes: int
    useful_instances: int
    """Beyond this the paper's throughput does not grow."""


class Fit(NamedTuple):
    """A calibration."""

    slowdown: float
    """Time of samples and cached tokens in a decode step, against arithmetic; weights are read at half bandwidth."""
    train_tokens_per_s: float


SHAPES: dict[Model, Shape] = {
    "8b": Shape(8.19e9, 147_456, 1, 4),
    "14b": Shape(14.8e9, 163_840, 1, 6),
    "32b": Shape(32.8e9, 262_144, 2, 6),
}
FITS: dict[tuple[Model, Completions], Fit] = {
    # 32B is not fitted: slowdown of 8B, training in proportion to the parameters of 14B.
    ("8b", "short"): Fit(4.27, 13_115),
    ("8b", "long"): Fit(4.278, 18_700),
    ("14b", "short"): Fit(4.27, 11_000),
    ("14b", "long"): Fit(4.278, 13_000),
    ("32b", "short"): Fit(4.27, 9_927),
    ("32b", "long"): Fit(4.278, 11_732),
}


def preset(model: Model, completions: Completions, fit: Fit | None = None) -> tuple[SimulatedJob, Machine]:
    """Return the job and the machine of one model.

    Args:
        model: which one.
        completions: which calibration.
        fit: replaces it.

    """
    shape, fit = SHAPES[model], fit or FITS[model, completions]
    weights = 2 * shape.parameters
    flops_s = 2 * shape.parameters / FLOPS
    decode = EngineSpec(
        step_s=LAUNCH_S + 2 * weights / BANDWIDTH_BYTES_PER_S,
        per_sample_s=fit.slowdown * flops_s,
        per_kv_token_s=fit.slowdown * shape.kv_bytes_per_token / BANDWIDTH_BYTES_PER_S,
        prefill_tokens_per_s=1 / flops_s,
        kv_tokens=round((MEMORY_BYTES - weights) / shape.kv_bytes_per_token),
    )
    job = SimulatedJob(lengths=LENGTHS[completions], train_s_per_token=1 / fit.train_tokens_per_s, update_s=2.0)
    machine = Machine(
        engine=decode,
        reserved_engines=4 * shape.nodes,
        reserved_price_per_hour=83.79 * shape.nodes,
        instance_price_per_hour=5.32,
        weights_bytes=weights,
        instance_bytes_per_s=50 * GBIT,
        store_bytes_per_s=200 * GBIT,
        load_s=1.0,
        reserved_load_s=1.5,
        switch_s=1.5,
        dedicated_engines=shape.useful_instances,
    )
    return job, machine
