"""The metrics of one step, under the names that other trainers use.

`ProfileRecorder` records what a plan for another fleet needs to know of a run: lengths, times and throughput.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import comb
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from rlboost.services.trainer.domain.advantages import all_equal, reaches, standard_deviation
from rlboost.services.trainer.domain.groups import ScoredGroup
from rlboost.services.trainer.domain.loss.function import routing_metrics
from rlboost.services.trainer.domain.loss.preference import pair_metrics, score_metrics
from rlboost.shared.job.run_profile import RunProfile
from rlboost.shared.messages import EngineProfile
from rlboost.shared.wire import I32, floats, length

# --- pass@k: the probability that at least one of k completions of a problem passes -----------------------------------


def pass_at_k(n: int, n_passed: int, k: int) -> float:
    """Return the unbiased estimate of Chen et al. 2021 (arXiv 2107.03374, equation 1): 1 - C(n - c, k) / C(n, k).

    Args:
        n: number of completions, at least `k`.
        n_passed: number of completions that passed (c).
        k: number of attempts, at least 1.

    Raises:
        ValueError: `k` is below 1 or above `n`.

    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} cannot be estimated from {n} completions")
    return 1.0 - comb(n - n_passed, k) / comb(n, k)


def pass_rates(problems: Sequence[Sequence[bool]]) -> dict[int, float]:
    """Return k -> the mean of pass@k over problems, for k = 1, 2, 4, 8, ... up to the fewest completions of a problem.

    Args:
        problems: for each problem, whether each of its completions passed; at least one completion per problem.

    """
    if not problems:
        return {}
    fewest = min(map(len, problems))
    return {
        k: sum(pass_at_k(len(passed), sum(passed), k) for passed in problems) / len(problems)
        for k in (1 << i for i in range(fewest.bit_length()))
    }


# --- Model FLOPs utilization of a step (PaLM, arXiv 2204.02311, appendix B) -------------------------------------------


_PEAK_TFLOPS = {
    "A100": 312.0,
    "A800": 312.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "H200": 989.0,
    "B200": 2250.0,
    "L40S": 362.0,
    "L4": 121.0,
}
"""Dense bfloat16 on tensor cores, from NVIDIA's data sheets; the first entry that a device's name contains applies."""


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the peak floating point operations per second of a device, None if unknown.

    Args:
        device_name: as reported by the driver, such as `NVIDIA H100 80GB HBM3`.
        dtype: dtype of matrix multiplications; only `bfloat16` is known.

    """
    if dtype != "bfloat16":
        return None
    words = device_name.replace("-", " ").split()
    for name, tflops in _PEAK_TFLOPS.items():
        if all(word in words for word in name.split()):
            return tflops * 1e12
    return None


@dataclass(frozen=True, slots=True)
class TrainingHardware:
    """The devices that a model is trained on."""

    n_devices: int = 1
    flops_per_token: float = 0.0
    """Floating-point operations of a forward and backward pass per token; 0 if unknown."""
    peak_flops: float | None = None
    """Peak floating-point operations of one device per second; None if unknown."""

    def metrics(self, n_tokens: float, step_s: float, train_s: float) -> dict[str, float]:
        """Return the metrics of a step that trained on `n_tokens` tokens, prompts included."""
        row: dict[str, float] = {}
        if step_s:
            row["perf/throughput"] = n_tokens / step_s / self.n_devices
        if self.peak_flops and self.flops_per_token and train_s:
            row["perf/mfu"] = n_tokens * self.flops_per_token / (train_s * self.peak_flops * self.n_devices)
        return row


UNKNOWN_HARDWARE = TrainingHardware()
"""One device of unknown kind."""


def flops_per_token(n_parameters: int, *, frozen: bool) -> float:
    """Return 6 operations per parameter: 2 forward, 2 for activation gradients, 2 for weight gradients.

    The last 2 are not needed if the weights are `frozen` below an adapter. Attention is not counted, so the
    result is too low for long sequences.
    """
    return (4.0 if frozen else 6.0) * n_parameters


# --- The metrics of one step ------------------------------------------------------------------------------------------


_TOKEN_MEANS = {
    "ratio/mean": "ratio",
    "ratio/mean_clipped": "ratio_clipped",
    "clip_ratio/low": "clipped_low",
    "clip_ratio/high": "clipped_high",
    "off_policy/abs_log_ratio": "abs_log_ratio",
    "off_policy/kl": "kl",
    "off_policy/tis_capped": "tis_capped",
    "off_policy/rejected": "rejected",
    "kl": "reference_kl",
    "policy/entropy": "policy_entropy",
    "value/loss": "value_loss",
    "value/clip_ratio": "value_clipped",
    "moe/replayed": "replayed_tokens",
}
"""Metric -> the sum that it is the mean of, over tokens."""


@dataclass(slots=True)
class Durations:
    """How long the phases of a step took, in seconds."""

    seeding_s: float = 0.0
    """Time from the start of the step until the trainer got the device."""
    wait_s: float = 0.0
    """Time for which the trainer had the device, but nothing to train on."""
    resample_s: float = 0.0
    """The part of `wait_s` in which only replacement groups were pending; generating the initial groups earlier would
    not shorten it."""
    train_s: float = 0.0
    """Time of computing on the device."""
    device_wait_s: float | None = None
    """Time for which there was something to train on, and another job had the device; None if it is not shared."""
    publish_s: float = 0.0
    step_s: float = 0.0
    """The whole step."""

    def metrics(self) -> dict[str, float]:
        """Return those that every step has, and the wait for a shared device if there is one."""
        row = {
            "time/step_s": self.step_s,
            "time/seeding_s": self.seeding_s,
            "time/wait_s": self.wait_s,
            "time/train_s": self.train_s,
            "time/publish_s": self.publish_s,
        }
        return row if self.device_wait_s is None else {**row, "time/device_wait_s": self.device_wait_s}


@dataclass(slots=True)
class RolloutTally:
    """What `StepIntake` counts while a step's groups are generated and scored."""

    scored: list[ScoredGroup] = field(default_factory=list)
    evaluated: list[ScoredGroup] = field(default_factory=list)
    scoring_s: list[float] = field(default_factory=list)
    """Time from each training group's last sample to its rewards, with the wait for a free reward process."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Reason -> groups, training and evaluation."""
    first_detail: str = ""
    """Detail of the first dropped group."""
    lost: Counter[str] = field(default_factory=Counter)
    """Reason -> conversations that a fault ended, training and evaluation."""
    n_begun_again: int = 0
    """How many of them were begun again."""
    replaced: Counter[str] = field(default_factory=Counter)
    """Reason -> scored training groups that were replaced."""
    resampled: int | None = None
    """Number of replacement groups; None if the job replaces no group."""
    penalties: list[float] = field(default_factory=list)
    """Length penalty of each training sample; empty without one."""
    duplicates: int = 0
    engines: Sequence[EngineProfile] = ()
    """Throughput of the workers that generated, by kind."""
    measured: dict[str, float] = field(default_factory=dict)
    """Metrics of the step's prompts, by name."""

    @property
    def groups(self) -> list[ScoredGroup]:
        """Return all scored groups in the order of their ids, which is that of the plan."""
        return sorted((*self.scored, *self.evaluated), key=attrgetter("group"))


@dataclass(slots=True)
class StepTally:
    """The counts and sums of one step, which `StepRun` collects while it trains."""

    step: int = 0
    """The weight version that was trained."""
    rollouts: RolloutTally = field(default_factory=RolloutTally)
    """Set once all groups are scored."""
    requested_before: bool = False
    """An earlier trainer process may have requested it, so the time in which its tokens were generated is unknown."""
    excluded: Counter[str] = field(default_factory=Counter)
    """Reason -> scored training groups that are neither replaced nor in the loss."""
    masked: Counter[bool] = field(default_factory=Counter)
    """Whether `algorithm.mask_truncated` leaves a completion out -> completions of groups in the loss; empty if it is
    not set."""
    loss_sums: dict[str, float] = field(default_factory=dict)
    """The loss function's sums over loss tokens; `tokens` counts these. `mismatch_tokens` counts the tokens that
    `mismatch_kl` covers, and `all_tokens` includes prompts."""
    measured: dict[str, float] = field(default_factory=dict)
    """Further metrics of training, by name."""
    grad_norms: list[float] = field(default_factory=list)
    learning_rate: float = 0.0
    durations: Durations = field(default_factory=Durations)
    hardware: TrainingHardware = UNKNOWN_HARDWARE

    def metrics(self) -> dict[str, float]:
        """Return the step's row of the run log, without metrics that do not apply."""
        rollouts = self.rollouts
        row = _rollout(rollouts.scored, self.step) | _training(self)
        by_set: dict[str, list[ScoredGroup]] = {}
        for group in rollouts.evaluated:
            by_set.setdefault(group.held_out.name if group.held_out is not None else "", []).append(group)
        for groups in by_set.values():
            row |= _evaluation(groups)
        row |= rollouts.measured | self.measured
        n_dropped = rollouts.dropped.total()
        row |= {"samples/duplicates": rollouts.duplicates, "groups/dropped": n_dropped}
        if n_groups := len(rollouts.scored) + len(rollouts.evaluated) + n_dropped:
            row["groups/dropped_ratio"] = n_dropped / n_groups
        row |= {f"groups/dropped/{reason}": n for reason, n in sorted(rollouts.dropped.items())}
        if n_lost := rollouts.lost.total():
            n_samples = sum(len(group.samples) for group in (*rollouts.scored, *rollouts.evaluated))
            row |= {"conversations/lost": n_lost, "conversations/begun_again": rollouts.n_begun_again}
            row["conversations/lost_ratio"] = n_lost / (n_lost + n_samples)
            row |= {f"conversations/lost/{reason}": n for reason, n in sorted(rollouts.lost.items())}
        excluded = rollouts.replaced.copy()
        excluded.update(self.excluded)
        row |= {f"groups/excluded/{reason}": n for reason, n in sorted(excluded.items())}
        if n_completions := self.masked.total():
            row["completions/masked_ratio"] = self.masked[True] / n_completions
        if rollouts.penalties:
            row["reward/overlong_penalty"] = _mean(rollouts.penalties)
        times = self.durations
        if rollouts.resampled is not None:
            row |= {"groups/resampled": rollouts.resampled, "time/resample_s": times.resample_s}
        tokens = sum(length(s.tokens, I32) for group in (*rollouts.scored, *rollouts.evaluated) for s in group.samples)
        row |= times.metrics()
        if not self.requested_before:
            row["perf/tokens_per_s"] = tokens / times.step_s if times.step_s else 0.0
        if trained := self.loss_sums.get("all_tokens"):
            row |= self.hardware.metrics(trained, times.step_s, times.train_s)
        return {name: float(value) for name, value in row.items()}

    def tokens_by_worker(self) -> dict[str, int]:
        """Return how many tokens of the step's samples each worker generated, the most first."""
        tokens: Counter[str] = Counter()
        for group in (*self.rollouts.scored, *self.rollouts.evaluated):
            for sample in group.samples:
                for worker, _, n_tokens in sample.spans:
                    tokens[worker] += n_tokens
        return dict(tokens.most_common())


def _rollout(groups: Sequence[ScoredGroup], step: int) -> dict[str, float]:
    if not groups:
        return {}
    rewards = [reward for group in groups for reward in group.rewards]
    samples = [sample for group in groups for sample in group.samples]
    lengths = [length(sample.tokens, I32) for sample in samples]
    n_tokens = sum(lengths)
    ages = [(step - version, n) for sample in samples for _, version, n in sample.spans if n]
    # The mean of -log p over tokens drawn from p estimates the policy's entropy without another pass.
    surprise = -sum(sum(floats(sample.logprobs)) for sample in samples)
    return {
        "reward/mean": _mean(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        # As in TRL: the mean of the groups' standard deviations.
        "reward/std": _mean([standard_deviation(group.rewards) for group in groups]),
        "frac_reward_zero_std": _mean([all_equal(_compared(group)) for group in groups]),
        "completions/mean_length": _mean(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": _mean([sample.finish == "length" for sample in samples]),
        "tokens/completion": n_tokens,
        "entropy": surprise / n_tokens if n_tokens else 0.0,
        "off_policy/staleness": sum(age * n for age, n in ages) / n_tokens if n_tokens else 0.0,
        "off_policy/staleness_max": max((age for age, _ in ages), default=0),
        **_parts("reward", groups),
        **_costs("cost/mean", groups),
        **_cost_penalty(groups),
        **_turns(groups),
    }


def _compared(group: ScoredGroup) -> Sequence[float]:
    return group.compared_rewards if group.has_row_rewards else group.rewards


def _turns(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    conversations = [conversation for group in groups for conversation in group.conversations]
    if not conversations:
        return {}
    turns = [len(conversation.turns) for conversation in conversations]
    return {
        "turns/mean": _mean(turns),
        "turns/max": max(turns),
        "tokens/observation": sum(conversation.n_observation_tokens for conversation in conversations),
        "turns/model_s": _mean([conversation.model_s for conversation in conversations]),
        "turns/outside_s": _mean([conversation.outside_s for conversation in conversations]),
    }


def _training(tally: StepTally) -> dict[str, float]:
    sums, n_tokens = tally.loss_sums, tally.loss_sums.get("tokens", 0.0)
    if not n_tokens:
        return {}
    row = {
        "loss": sums["loss"] / sums["divisor"],
        "ratio/max": sums["max_ratio"],
        "tokens/trained": n_tokens,
        "grad_norm": _mean(tally.grad_norms) if tally.grad_norms else 0.0,
        "lr": tally.learning_rate,
    }
    row |= {name: sums[key] / n_tokens for name, key in _TOKEN_MEANS.items() if key in sums}
    row |= pair_metrics(sums)
    if "max_ratio_clipped" in sums:
        row["ratio/max_clipped"] = sums["max_ratio_clipped"]
    if tokens := sums.get("mismatch_tokens"):
        row["mismatch_kl"] = sums["mismatch_kl"] / tokens
    return row | routing_metrics(sums)


def _evaluation(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return the metrics of one held-out set."""
    held_out = groups[0].held_out
    assert held_out is not None, "a group of an evaluation has its set"
    rates = pass_rates([[reaches(reward, held_out.pass_reward) for reward in group.rewards] for group in groups])
    row = {
        **{f"eval/pass@{k}": rate for k, rate in rates.items()},
        "eval/reward_mean": _mean([reward for group in groups for reward in group.rewards]),
        "eval/mean_length": _mean([length(sample.tokens, I32) for group in groups for sample in group.samples]),
        **_parts("eval/reward", groups),
        **_costs("eval/cost/mean", groups),
    }
    return {name.replace("eval/", held_out.prefix, 1): value for name, value in row.items()}


def _parts(prefix: str, groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return the mean of each reward function over the samples that it applies to, if there are several functions."""
    found: dict[str, list[float]] = {}
    for group in groups:
        for name, values in group.parts.items():
            found.setdefault(name, []).extend(value for value in values if value is not None)
    return {f"{prefix}/{name}/mean": _mean(values) for name, values in found.items() if values}


def _costs(name: str, groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return the mean cost of a sample, nothing if no sample has a cost."""
    costs = [cost for group in groups for cost in group.costs or (0.0,) * len(group.rewards)]
    return {name: _mean(costs)} if any(group.costs for group in groups) else {}


def _cost_penalty(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    penalties = [penalty for group in groups for penalty in group.cost_penalties]
    return {"reward/cost_penalty": _mean(penalties)} if penalties else {}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


RECENT_STEPS = 20
"""Completions get longer in training, so only the recent steps count."""
_PROBABILITIES = (0.0, 0.01, *(twentieth / 20 for twentieth in range(1, 20)), 0.99, 1.0)


@dataclass(frozen=True, slots=True)
class _Step:
    prompts: tuple[int, ...]
    completions: npt.NDArray[np.int32]
    """Tokens of each completion."""
    tokens: int
    """Tokens of all samples, prompts included."""
    train_s: float
    reward_s: float
    update_s: float
    step_s: float


class ProfileRecorder:
    """The recent steps of one job."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque(maxlen=RECENT_STEPS)
        self._engines: dict[tuple[str, str], deque[EngineProfile]] = defaultdict(partial(deque, maxlen=RECENT_STEPS))
        """(role, kind) -> its profile in each of its recent steps."""

    def observe(self, tally: StepTally) -> RunProfile | None:
        """Take a complete step; return the profile, None while a throughput or a training time is unknown."""
        for engine in tally.rollouts.engines:
            self._engines[engine.role, engine.kind].append(engine)
        times, scored, scoring_s = tally.durations, tally.rollouts.scored, tally.rollouts.scoring_s
        if scored and times.train_s and not tally.requested_before:
            waited_s = times.seeding_s + times.wait_s + (times.device_wait_s or 0.0)
            lengths = [length(s.tokens, I32) for group in scored for s in group.samples]
            prompt_tokens = sum(length(group.prompt, I32) * len(group.samples) for group in scored)
            self._steps.append(
                _Step(
                    prompts=tuple(length(group.prompt, I32) for group in scored),
                    completions=np.array(lengths, np.int32),
                    tokens=sum(lengths) + prompt_tokens,
                    train_s=times.train_s,
                    reward_s=float(np.mean(scoring_s)) if scoring_s else 0.0,
                    update_s=max(0.0, times.step_s - waited_s - times.train_s),
                    step_s=times.step_s,
                )
            )
        return self._profile() if self._engines and self._steps else None

    def _profile(self) -> RunProfile:
        steps = self._steps
        prompts = [tokens for step in steps for tokens in step.prompts]
        completions = np.maximum(1, np.concatenate([step.completions for step in steps]))
        train_s_per_token = sum(step.train_s for step in steps) / sum(step.tokens for step in steps)
        quantiles = np.quantile(completions, _PROBABILITIES).tolist()
        return RunProfile(
            steps=len(steps),
            step_s=float(np.mean([step.step_s for step in steps])),
            engines=tuple(_mean_profile(seen) for _, seen in sorted(self._engines.items())),
            prompt_tokens=(min(prompts), max(prompts)),
            completion_quantiles=tuple(zip(_PROBABILITIES, quantiles, strict=True)),
            train_s_per_token=train_s_per_token,
            slowdowns=tuple(step.train_s / step.tokens / train_s_per_token for step in steps),
            reward_s=float(np.mean([step.reward_s for step in steps])),
            update_s=float(np.mean([step.update_s for step in steps])),
        )


def _mean_profile(seen: Collection[EngineProfile]) -> EngineProfile:
    """Return the newest profile with the mean times of all: a machine's speed may vary from step to step."""
    *_, newest = seen
    names = ("step_s", "per_sample_s", "per_kv_token_s", "update_s", "update_pause_s")
    return newest.model_copy(update={name: float(np.mean([getattr(one, name) for one in seen])) for name in names})


# --- The metrics of one step that learns from completions in the data -------------------------------------------------


_MAX_NATS = 700.0
"""Above it a perplexity overflows a float."""


def perplexity(loss: float) -> float:
    """Return the perplexity of a mean loss in nats per token."""
    return math.exp(min(loss, _MAX_NATS))


@dataclass(frozen=True, slots=True)
class OfflineStep:
    """The results of one step."""

    sums: Mapping[str, float]
    """The loss function's sums over all micro-batches, and those of pairs."""
    lengths: Sequence[int]
    """Number of tokens of each completion."""
    grad_norm: float
    """Norm of the gradient before clipping."""
    learning_rate: float
    train_s: float
    device_wait_s: float | None = None
    """See `Durations`."""

    def metrics(self) -> dict[str, float]:
        """Return the step's row of the run log."""
        loss, n_tokens = self.sums["loss"] / self.sums["divisor"], float(sum(self.lengths))
        step_s = self.train_s + (self.device_wait_s or 0.0)
        return {
            "loss": loss,
            **(pair_metrics(self.sums) or score_metrics(self.sums) or {"perplexity": perplexity(loss)}),
            "grad_norm": self.grad_norm,
            "lr": self.learning_rate,
            "tokens/trained": n_tokens,
            "completions/mean_length": n_tokens / len(self.lengths),
            "completions/max_length": float(max(self.lengths)),
            "time/step_s": step_s,
            "time/train_s": self.train_s,
            **({} if self.device_wait_s is None else {"time/device_wait_s": self.device_wait_s}),
            "perf/tokens_per_s": n_tokens / step_s if step_s else 0.0,
            **routing_metrics(self.sums),
        }
