"""The cases: what is generated, on which engines, beside which trainer. Every number says where it comes from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.scheduling.engine import EngineSpec

Quantiles = tuple[tuple[float, float], ...]
"""(probability, tokens), rising in both; lengths between two points are interpolated geometrically."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long completions are.

    A sample's place in the distribution comes from its prompt and from itself: `between` is the prompt's share of the
    variance, so that the members of a group are alike but not the same.
    """

    cap: int
    median: float = 0.0
    """Lognormal: the median and the standard deviation of the logarithm."""
    sigma: float = 0.0
    quantiles: Quantiles = ()
    """Instead of lognormal."""
    between: float = 0.5


@dataclass(frozen=True, slots=True)
class Case:
    """One world. Times in seconds of virtual time, speeds as parts of the reserved engine's."""

    name: str
    about: str
    lengths: Lengths
    engine: EngineSpec
    reserved: int
    preemptible: tuple[float, ...]
    """Speed of each preemptible worker that is there at the start."""
    train_tokens_per_s: float
    """Of forward, backward and what goes with it, over prompt and completion."""
    publish_s: float
    """From the last gradient to the committed weights: optimizer, export, upload."""
    pull_s: float
    """A preemptible worker gets a version and loads it."""
    reserved_pull_s: float
    switch_s: float
    """A reserved engine frees the device, or takes it again."""
    first_window_s: float
    """T_seed of the first step for the two baselines, tuned by hand for the first fleet; ours is given nothing."""
    theta: int
    """The paper's Theta: of 4, 16 and 64 one with which its policy did best, or nearly so, on seed 0."""
    prompts: int = 128
    group_size: int = 8
    prompt_tokens: tuple[int, int] = (64, 512)
    micro_batch: int = 16
    """Samples that are trained at once."""
    steps: int = 8
    warm_up: int = 2
    """Steps that are not measured: what adapts, adapts in them."""
    report_s: float = 1.0
    """A worker reports all its samples so often; real ones do every 0.05 s."""
    beat_s: float = 1.0
    """Real ones beat every 0.5 s."""
    finish_s: float = 0.1
    """What ended is reported within this time."""
    latency_s: float = 0.02
    """Of a message, either way."""
    turn_s: float = 0.1
    """The manager's shortest turn; the real one takes 0.01."""
    tick_s: float = 0.25
    """The manager's longest pause between two turns."""
    lease_s: float = 2.0
    """A worker that was killed without notice counts as lost after so long."""
    polyrl_second_s: float = 1.0
    """What a second of the released code's constants is: a world of milliseconds gets them to its own measure."""
    reward_s: float = 0.2
    """Scoring one group."""

    @property
    def samples(self) -> int:
        """Return how many samples a step has."""
        return self.prompts * self.group_size

    @property
    def reserved_ready_s(self) -> float:
        """Return how long a reserved engine takes to begin a step: it gets weights and takes the device at once."""
        return max(self.reserved_pull_s, self.switch_s)

    def smaller(self, parts: int, steps: int) -> Case:
        """Return the same world with a part of the prompts, and of the slots and KV memory, for tests."""
        kv = self.engine.kv_tokens
        engine = replace(
            self.engine,
            slots=max(2, self.engine.slots // parts),
            kv_tokens=kv and max(kv // parts, 2 * (self.lengths.cap + self.prompt_tokens[1])),
        )
        return replace(self, engine=engine, prompts=self.prompts // parts, steps=steps)


# Speeds: one engine is two H100 (TP 2, 6.7 TB/s together). Weights of 8B in bf16 are 16 GB and 2.4 ms at full
# bandwidth, KV 147 kB a token (36 layers, 8 heads, 128, bf16, keys and values); 14B 30 GB and 164 kB; 32B 66 GB and
# 262 kB. The factors to real engines are set so that a co-located run makes what the paper's authors report: 8B about
# 10,000 tokens/s, generated and trained, and up to 73 % of a step in rollout (arXiv 2510.19225 and its repository).
_8B = EngineSpec(
    step_s=0.010, per_sample_s=6e-5, per_kv_token_s=6e-8, prefill_tokens_per_s=40_000, slots=256, kv_tokens=800_000
)
_14B = EngineSpec(
    step_s=0.014, per_sample_s=9e-5, per_kv_token_s=7e-8, prefill_tokens_per_s=24_000, slots=256, kv_tokens=620_000
)
_32B = EngineSpec(
    step_s=0.024, per_sample_s=2e-4, per_kv_token_s=1e-7, prefill_tokens_per_s=10_000, slots=256, kv_tokens=230_000
)
# A model of 0.8 M parameters in torch on one core: 1.6 / 12 / 18 thousand tokens/s at batch 1 / 16 / 64.
_DEMO = EngineSpec(step_s=0.00058, per_sample_s=4.7e-5, per_kv_token_s=1e-8, prefill_tokens_per_s=100_000, slots=32)

LOGNORMAL = Case(
    name="lognormal",
    about="8B, lognormal lengths up to 5k",
    lengths=Lengths(cap=5120, median=1200, sigma=0.7),
    engine=_8B,
    reserved=4,
    preemptible=(1.0,) * 3,
    train_tokens_per_s=22_000,
    publish_s=4.0,
    pull_s=2.6,  # 16 GB at 50 Gb/s
    reserved_pull_s=1.5,
    switch_s=1.5,
    first_window_s=40.0,
    theta=64,
)
DEMO = Case(
    name="demo",
    about="the demo's lengths (cap 256) on CPU engines",
    # What examples/countdown's samples have after training, as its recipe reports.
    lengths=Lengths(
        cap=256, quantiles=((0.0, 8), (0.1, 22), (0.5, 62), (0.75, 122), (0.9, 202), (0.95, 256), (1.0, 256))
    ),
    engine=_DEMO,
    reserved=1,
    preemptible=(1.0,) * 3,
    prompts=32,
    prompt_tokens=(6, 10),
    train_tokens_per_s=25_000,
    publish_s=0.08,
    pull_s=0.06,
    reserved_pull_s=0.05,
    switch_s=0.02,
    first_window_s=0.1,
    theta=16,
    report_s=0.05,
    beat_s=0.05,
    finish_s=0.01,
    latency_s=0.002,
    turn_s=0.01,
    tick_s=0.05,
    polyrl_second_s=0.005,
    reward_s=0.01,
)
TAIL = Case(
    name="tail14k",
    about="14B, lengths up to 14k",
    lengths=Lengths(cap=14_336, median=2200, sigma=0.95),
    engine=_14B,
    reserved=4,
    preemptible=(1.0,) * 5,
    train_tokens_per_s=15_500,
    publish_s=6.0,
    pull_s=4.7,  # 30 GB at 50 Gb/s
    reserved_pull_s=2.0,
    switch_s=2.0,
    first_window_s=100.0,
    theta=16,
    report_s=2.0,
    turn_s=0.2,
    tick_s=0.5,
)
KV = Case(
    name="kv32b",
    about="32B, lengths up to 14k, KV memory limits the batch",
    lengths=Lengths(cap=14_336, median=2200, sigma=0.95),
    engine=_32B,
    reserved=8,
    preemptible=(1.0,) * 6,
    train_tokens_per_s=11_500,
    publish_s=10.0,
    pull_s=10.5,  # 66 GB at 50 Gb/s
    reserved_pull_s=4.0,
    switch_s=3.0,
    first_window_s=200.0,
    theta=64,
    report_s=2.0,
    turn_s=0.2,
    tick_s=0.5,
)
UNEVEN = replace(
    LOGNORMAL,
    name="uneven",
    about="8B, preemptible workers of speed 1 : 0.6 : 0.3",
    preemptible=(1.0, 0.6, 0.3),
    first_window_s=90.0,
)

CASES = {case.name: case for case in (LOGNORMAL, DEMO, TAIL, KV, UNEVEN)}
