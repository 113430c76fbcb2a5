"""When to warn: of faults in user code, and of jobs that learn nothing or get worse."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rlboost.services.trainer.domain.advantages import is_equal, reaches
from rlboost.shared.job.algorithm import GROUPLESS
from rlboost.shared.job.fleet import HeldOutSet
from rlboost.shared.job.spec import JobSpec, RlJob

# --- When to warn of faults in user code: the first of each reason, and each note that user code gives ----------------
# `many_groups_dropped` and `many_conversations_lost` warn of their number.


_MAX_NOTES = 5
_NOT_USER_CODE = {"generation", "stale"}
"""Reasons of dropped groups that have other causes."""


class FaultWarnings:
    """The warnings of one job."""

    def __init__(self) -> None:
        self._reasons: set[str] = set()
        self._notes: set[str] = set()

    def on_group_dropped(self, step: int, reason: str, detail: str) -> str:
        """Return a warning about a dropped group of a step, empty unless it is the first for this reason."""
        if reason in self._reasons or reason in _NOT_USER_CODE:
            return ""
        self._reasons.add(reason)
        return f"a group of step {step + 1} was dropped ({reason}) and is not trained: {detail}"

    def on_conversation_lost(self, step: int, reason: str, detail: str) -> str:
        """Return a warning about a conversation that a fault ended, empty unless it is the first for this reason."""
        if reason in self._reasons:
            return ""
        self._reasons.add(reason)
        return f"a conversation of step {step + 1} was lost ({reason}) and is not trained: {detail}"

    def on_note(self, text: str) -> str:
        """Return a warning that user code gave, empty if its first line was reported before, or too many were."""
        head = text.partition("\n")[0]
        if not head or head in self._notes or len(self._notes) >= _MAX_NOTES:
            return ""
        self._notes.add(head)
        return text


# --- Rules that find a job that learns nothing, or gets worse, in the metrics of its last steps -----------------------
# Each rule is a pure function of `History` and `JobFacts`. It states only what the numbers show, and its threshold is a
# constant with the reason. A rule that lacks the metrics it needs finds nothing, so it applies to any kind of job.


Row = Mapping[str, float]
"""The metrics of one step, as in the run log."""

WINDOW_STEPS = 3
"""Steps in a row that must show the same before it counts. In a small batch one step without a signal is common; three
in a row are not, and three steps are little to lose."""
MANY_DROPPED, MOST_DROPPED = 0.25, 0.5
"""Fraction of groups that is dropped in each of two steps, or in one. A lost sample or a slow reward costs one or two
groups; a quarter, twice, is a fault that repeats."""
CLIPPED_RATIO = 0.9
"""Fraction of completions cut at `sampling.max_tokens`. Long answers of a healthy model lose some; if nine of ten are
cut, the reward sees almost no finished answer."""
COLLAPSED_NATS, COLLAPSED_RATIO = 0.5, 0.1
"""Entropy of a whole completion, and of a token relative to the first steps. Below half a nat, the same completion is
drawn about six times out of ten (e^-0.5); the ratio excludes tasks whose answers were short from the start."""
SOLVED_SCORE = 0.9
"""Mean reward within the range of rewards seen, from 0 to 1. Above it, equal completions are the aim of the training,
not a fault."""
FALL_RATIO, FALL_ERRORS = 0.5, 4.0
"""Part of the best mean reward that is lost, in a fall of at least this many standard errors of a mean of three steps.
The error assumes the largest deviation that the range of rewards allows, so different prompts alone do not explain such
a fall."""
KL_NATS = 1.0
"""KL to the starting weights, per token. At 1 nat an average token is e times as likely as in the starting model; runs
that stay usable are below about 0.1."""
MISMATCH_KL = 0.01
"""KL of the engine's to the trainer's distribution, per token, with the same weights. A mixture of experts without
router replay had 0.0025 here, an engine of the trainer's precision less."""
STALE_MISMATCH_KL = 0.1
"""The same where tokens are of older weights: the updates since then add to it."""
EXPECTED_REWARDS = 10.0
"""Rewarded completions that an earlier, or the training, reward leads to expect. If nothing had changed, seeing none of
ten would have a probability of about e^-10."""
CLIPPED_BEFORE = 0.5
"""Fraction of clipped completions in the first steps below which the limit was high enough then."""
UNPASSED = 100
"""Held-out completions of the last evaluations, none of which passes. A model that passes one time in 50 would show
none of a hundred with a probability of e^-2."""
LOSS_RATIO = 1.5
"""Loss of the last steps over that of the first. On completions in the data it ends above its start only if updates do
damage."""


@dataclass(frozen=True, slots=True)
class JobFacts:
    """The settings of a job that the rules read."""

    job_id: str
    prompts_per_step: int = 1
    group_size: int = 1
    compares_within_groups: bool = True
    """Whether advantages compare only completions of the same prompt."""
    has_teacher: bool = False
    """Whether a teacher scores the tokens: the job learns from equal rewards too, and `kl` is the KL to the teacher."""
    has_curriculum: bool = False
    limits: str = ""
    """The settings that cut a completion, with their values."""
    held_out: tuple[HeldOutSet, ...] = ()
    """The sets that the job is evaluated on."""

    @classmethod
    def of(cls, job_id: str, spec: JobSpec) -> JobFacts:
        """Return the facts of a job."""
        if not isinstance(spec, RlJob):
            return cls(job_id)
        section = "environment" if spec.agent is None else "agent"
        turns = f", {section}.max_turns {spec.conversation.max_turns}" if spec.conversation is not None else ""
        return cls(
            job_id,
            spec.data.prompts_per_step,
            spec.algorithm.group_size,
            compares_within_groups=spec.algorithm.advantage not in GROUPLESS,
            has_teacher=spec.teacher is not None,
            has_curriculum=spec.data.curriculum is not None,
            limits=f"sampling.max_tokens is {spec.sampling.max_tokens}{turns}",
            held_out=spec.held_out,
        )


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule found: one sentence each, without the final period."""

    name: str
    seen: str
    """The numbers."""
    causes: str
    remedy: str

    @property
    def text(self) -> str:
        """Return it as one line."""
        return f"{self.seen}. Likely: {self.causes}. What to do: {self.remedy}"


@dataclass(slots=True)
class History:
    """Facts of all steps so far that the rules use."""

    first: list[Row] = field(default_factory=list)
    """The first training steps, at most `WINDOW_STEPS`."""
    last: deque[Row] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    """The last training steps."""
    evaluations: deque[Row] = field(default_factory=lambda: deque(maxlen=2))
    """The last steps with an evaluation."""
    n_steps: int = 0
    """Number of training steps."""
    lowest: float = math.inf
    """Lowest reward of a completion."""
    highest: float = -math.inf
    best_step_mean: float = -math.inf
    """Highest mean reward of a step."""
    best_window_mean: float = -math.inf
    """Highest mean reward of `WINDOW_STEPS` steps in a row."""

    def add(self, row: Row) -> None:
        """Take the next step."""
        if any(name.startswith("eval/") for name in row):
            self.evaluations.append(row)
        if "reward/mean" not in row and "lr" not in row:
            return  # the evaluation after the last step
        self.n_steps += 1
        self.last.append(row)
        if len(self.first) < WINDOW_STEPS:
            self.first.append(row)
        if "reward/mean" in row:
            self.lowest = min(self.lowest, row.get("reward/min", row["reward/mean"]))
            self.highest = max(self.highest, row.get("reward/max", row["reward/mean"]))
            self.best_step_mean = max(self.best_step_mean, row["reward/mean"])
            if len(means := self.window("reward/mean")) == WINDOW_STEPS:
                self.best_window_mean = max(self.best_window_mean, _mean(means))

    def window(self, metric: str) -> list[float]:
        """Return a metric in the last `WINDOW_STEPS` steps; nothing if there are fewer, or one lacks it."""
        values = [row[metric] for row in self.last if metric in row]
        return values if len(values) == WINDOW_STEPS else []

    def score(self, reward: float) -> float:
        """Return where a reward lies between the lowest and the highest seen: 0 to 1."""
        return (reward - self.lowest) / (self.highest - self.lowest) if self.highest > self.lowest else 0.0


Rule = Callable[[History, JobFacts], Finding | None]


def no_learning_signal(history: History, job: JobFacts) -> Finding | None:
    """Return a finding if all rewards are equal, or those of each prompt: no completion is better than another."""
    equal, rows = history.window("frac_reward_zero_std"), history.last
    penalties = ("reward/overlong_penalty", "reward/cost_penalty")
    if not equal or min(equal) < 1 or any(row.get(name) for row in rows for name in penalties):
        return None
    if job.has_teacher:
        return None
    low = min(row.get("reward/min", row["reward/mean"]) for row in rows)
    high = max(row.get("reward/max", row["reward/mean"]) for row in rows)
    if not is_equal(low, high):
        return _equal_groups(history) if job.compares_within_groups else None
    look = f"'rlboost samples {job.job_id}' shows completions with their rewards"
    seen = f"every completion of the last {WINDOW_STEPS} steps got reward {low:g}, so none is better than another"
    n_completions = WINDOW_STEPS * job.prompts_per_step * job.group_size
    if (
        not reaches(low, history.best_step_mean)
        and history.score(history.best_step_mean) * n_completions >= EXPECTED_REWARDS
    ):
        seen += f", after a mean reward of {history.best_step_mean:.3g} in an earlier step"
        causes = "updates damaged the model (optimizer.lr is too high), or the reward changed during the run"
        remedy = f"{look}; start again, or from an earlier checkpoint, with a lower optimizer.lr"
    elif reaches(0.0, low):
        causes = (
            "the reward does not recognize right answers (it compares another text than the model writes: spaces, "
            "special tokens, an unfinished answer), or the prompts are too hard for this model"
        )
        remedy = f"{look}; correct reward.function, or use easier prompts or a supervised warm-up (kind: sft)"
    else:
        causes = "every prompt is solved already, or the reward does not look at the completion"
        remedy = f"{look}; if the answers are right, use harder prompts, else correct reward.function"
    return Finding("no_learning_signal", seen, causes, remedy)


def _equal_groups(history: History) -> Finding:
    means = history.window("reward/mean")
    return Finding(
        "no_learning_signal",
        f"in the last {WINDOW_STEPS} steps all completions of a prompt got the same reward, for every prompt (mean "
        f"reward {min(means):.3g} to {max(means):.3g}), so all advantages are zero",
        "each prompt is either too easy or too hard, the reward does not depend on the completion, or the completions "
        "of a prompt are all alike",
        "raise algorithm.group_size or sampling.temperature, use prompts of medium difficulty (data.curriculum), or "
        "set algorithm.resample to replace such prompts",
    )


def many_groups_dropped(history: History, job: JobFacts) -> Finding | None:
    """Return a finding if a large part of the groups could not be generated or scored."""
    return _many_failed(history, job, "many_groups_dropped", "groups", "dropped")


def many_conversations_lost(history: History, job: JobFacts) -> Finding | None:
    """Return a finding if a fault of the environment ended a large part of the conversations."""
    return _many_failed(history, job, "many_conversations_lost", "conversations", "lost")


def _many_failed(history: History, job: JobFacts, rule: str, things: str, how: str) -> Finding | None:
    rows = list(history.last)[-2:]
    ratios = [row.get(f"{things}/{how}_ratio", 0.0) for row in rows]
    if not ratios or (ratios[-1] < MOST_DROPPED and (len(ratios) < 2 or min(ratios) < MANY_DROPPED)):
        return None
    prefix, n_by_reason = f"{things}/{how}/", Counter[str]()
    for row in rows:
        n_by_reason.update({name.removeprefix(prefix): int(n) for name, n in row.items() if name.startswith(prefix)})
    reasons = ", ".join(f"{reason} ({n})" for reason, n in n_by_reason.most_common(3))
    where = "the last step" if len(rows) == 1 else "the last two steps"
    top_reason = n_by_reason.most_common(1)[0][0] if n_by_reason else ""
    causes, remedy = _advice_on_dropped(top_reason, job.job_id)
    seen = f"{ratios[-1]:.0%} of the last step's {things} were {how}; reasons in {where}: {reasons or 'unknown'}"
    return Finding(rule, seen, causes, remedy)


def _advice_on_dropped(reason: str, job_id: str) -> tuple[str, str]:
    events = f"'rlboost logs {job_id}' has the reason of each"
    if reason == "stale":
        causes = "workers generated with weights older than elastic.max_staleness allows"
        return causes, "raise elastic.max_staleness, or look for workers that load new weights slowly"
    if reason == "generation":
        return "the workers' engines reject or fail on these prompts", f"correct the prompts or sampling; {events}"
    if reason == "timeout":
        return "reward.function is too slow", "make it faster, or raise reward.timeout_s or reward.workers"
    if reason == "agent_infrastructure":
        return "the hosts of agents report faults of their own", f"look at their logs; {events}"
    if reason.startswith(("environment", "agent")):
        return f"{reason.partition('_')[0]}.function fails", f"correct it; {events}"
    return "reward.function fails on these completions", f"correct it; {events}"


def completions_clipped(history: History, job: JobFacts) -> Finding | None:
    """Return a finding if nearly no completion ends by itself."""
    ratios = history.window("completions/clipped_ratio")
    if not ratios or min(ratios) < CLIPPED_RATIO or completions_masked(history, job):  # which says more
        return None
    share = "all" if min(ratios) == 1.0 else f"{min(ratios):.1%} or more of the"
    seen = f"{share} completions of each of the last {WINDOW_STEPS} steps were cut ({job.limits})"
    before = history.first[0].get("completions/clipped_ratio", 1.0)
    if before < CLIPPED_BEFORE:
        seen += f", {before:.0%} in the first step"
        causes = "answers grew beyond the limit, or updates damaged the model (optimizer.lr is too high)"
        remedy = f"look at them with 'rlboost samples {job.job_id}'; raise the limit, or lower optimizer.lr"
    else:
        causes = (
            "the limit is too low for an answer, or the model does not write its end token (a base model, or a prompt "
            "without the chat template)"
        )
        remedy = "raise the limit, or teach the model to end first (kind: sft); ignore this if the cut is intended"
    return Finding("completions_clipped", seen, causes, remedy)


def completions_masked(history: History, job: JobFacts) -> Finding | None:
    """Return a finding if no completion is left to train on."""
    ratios = history.window("completions/masked_ratio")
    if not ratios or min(ratios) < 1:
        return None
    return Finding(
        "completions_masked",
        f"in each of the last {WINDOW_STEPS} steps every completion of the groups in the loss was cut ({job.limits}), "
        "and algorithm.mask_truncated leaves those out, so the weights do not change",
        "the limit is too low for an answer, or the model does not write its end token",
        "raise the limit, or remove algorithm.mask_truncated",
    )


def entropy_collapsed(history: History, _: JobFacts) -> Finding | None:
    """Return a finding if the completions of a prompt have become alike while the task is not solved."""
    entropies, lengths = history.window("entropy"), history.window("completions/mean_length")
    began = [row["entropy"] for row in history.first if "entropy" in row]
    if not entropies or not lengths or not began or history.n_steps < 2 * WINDOW_STEPS:
        return None
    nats = max(entropy * n for entropy, n in zip(entropies, lengths, strict=True))
    is_solved = history.score(_mean(history.window("reward/mean"))) >= SOLVED_SCORE
    if nats >= COLLAPSED_NATS or max(entropies) >= COLLAPSED_RATIO * _mean(began) or is_solved:
        return None
    return Finding(
        "entropy_collapsed",
        f"entropy fell from {_mean(began):.3g} to {entropies[-1]:.3g} nats per token, so a prompt's completions are "
        f"nearly all alike, at a mean reward of {history.last[-1]['reward/mean']:.3g}",
        "optimizer.lr is too high, or the updates went on after there was nothing left to learn",
        "restart from an earlier checkpoint with a lower optimizer.lr, a higher algorithm.clip_high, or "
        "algorithm.kl_coef above 0",
    )


def reward_fell(history: History, job: JobFacts) -> Finding | None:
    """Return a finding if the mean reward has lost half of its best value."""
    means = history.window("reward/mean")
    spread = history.highest - history.lowest
    if not means or spread <= 0 or job.has_curriculum:  # a curriculum removes what is solved, so rewards fall
        return None
    now, best = _mean(means), history.best_window_mean
    error = 0.5 * spread / math.sqrt(WINDOW_STEPS * job.prompts_per_step)
    if best - now < max(FALL_RATIO * (best - history.lowest), FALL_ERRORS * error):
        return None
    return Finding(
        "reward_fell",
        f"the mean reward of {WINDOW_STEPS} steps fell from its best, {best:.3g}, to {now:.3g}",
        "optimizer.lr is too high, or the reward or its environment changed during the run",
        "restart from the checkpoint before the fall with a lower optimizer.lr, or with algorithm.kl_coef above 0",
    )


def kl_exploded(history: History, job: JobFacts) -> Finding | None:
    """Return a finding if the weights are far from those that the job started from."""
    kl = history.window("kl")
    if not kl or min(kl) <= KL_NATS or job.has_teacher:
        return None
    return Finding(
        "kl_exploded",
        f"the KL to the starting weights is {kl[-1]:.3g} nats per token, and was above {KL_NATS:g} in each of the last "
        f"{WINDOW_STEPS} steps",
        "optimizer.lr is too high, or algorithm.kl_coef is too low to keep the model near its start",
        "restart from an earlier checkpoint with a lower optimizer.lr or a higher algorithm.kl_coef",
    )


def engine_differs(history: History, _: JobFacts) -> Finding | None:
    """Return a finding if the engine samples from another distribution than the one that is trained."""
    mismatch, staleness = history.window("mismatch_kl"), history.window("off_policy/staleness_max")
    limit = STALE_MISMATCH_KL if any(staleness) else MISMATCH_KL
    if not mismatch or min(mismatch) <= limit:
        return None
    began = _mean([row.get("mismatch_kl", 0.0) for row in history.first])
    return Finding(
        "engine_differs",
        f"mismatch_kl, the KL of the workers' to the trainer's distribution, is {mismatch[-1]:.3g} nats per token, and "
        f"was above {limit:g} in each of the last {WINDOW_STEPS} steps ({began:.3g} in the first)",
        "workers compute in a lower precision than the trainer (quantized weights or KV cache, another dtype), or a "
        "mixture of experts routes differently there" + (", or tokens are of much older weights" * any(staleness)),
        "keep algorithm.tis_cap, set RLBOOST_WORKER_DTYPE to trainer.dtype without quantization, use "
        "trainer.router_replay with experts" + (", lower elastic.max_staleness" * any(staleness)),
    )


def gradient_zero(history: History, _: JobFacts) -> Finding | None:
    """Return a finding if tokens were trained while the weights cannot have changed."""
    norms, tokens = history.window("grad_norm"), history.window("tokens/trained")
    equal = [row.get("frac_reward_zero_std", 0.0) for row in history.last]
    if not tokens or not norms or any(norms) or min(equal) >= 1:  # with equal rewards a zero gradient is right
        return None
    return Finding(
        "gradient_zero",
        f"the gradient was 0 in each of the last {WINDOW_STEPS} steps, though {tokens[-1]:.0f} tokens were trained in "
        "the last, so the weights do not change",
        "the loss does not depend on the trained weights (an algorithm.loss of your own), or it is already 0",
        "check algorithm.loss, or the completions in the data of a job of kind sft, dpo or reward",
    )


def eval_reward_zero(history: History, job: JobFacts) -> Finding | None:
    """Return a finding if evaluations on one of the sets give no reward though training does."""
    if len(history.evaluations) < 2 or history.lowest < 0 or history.highest <= 0:
        return None
    return next(filter(None, (_reward_zero(history, job, held_out) for held_out in job.held_out)), None)


def _reward_zero(history: History, job: JobFacts, held_out: HeldOutSet) -> Finding | None:
    rows, metric = history.evaluations, f"{held_out.prefix}reward_mean"
    if not all(metric in row and is_equal(row[metric], 0.0) for row in rows):
        return None
    expected = [row.get("reward/mean", 0.0) / history.highest * held_out.samples for row in rows]
    expected = [n for row, n in zip(rows, expected, strict=True) if "reward/mean" in row]
    if not expected or min(expected) < EXPECTED_REWARDS:
        return None
    return Finding(
        "eval_reward_zero",
        f"{metric} was 0 in the last two evaluations, at a mean training reward of {_last_reward(rows):.3g}",
        f"the rows of {held_out.rows.field} have other columns or another prompt format than those of data.train, or "
        "the model does not generalize at all",
        f"compare 'rlboost samples {job.job_id} --eval' with 'rlboost samples {job.job_id}'",
    )


def nothing_passes(history: History, job: JobFacts) -> Finding | None:
    """Return a finding if no completion of one of the sets passes, however much the rewards of training differ."""
    if no_learning_signal(history, job) or eval_reward_zero(history, job):  # which say more
        return None
    return next(filter(None, (_unpassed(history, job, held_out) for held_out in job.held_out)), None)


def _unpassed(history: History, job: JobFacts, held_out: HeldOutSet) -> Finding | None:
    rows, prefix, n_samples = history.evaluations, held_out.prefix, len(history.evaluations) * held_out.samples
    passed = any(value for row in rows for name, value in row.items() if name.startswith(f"{prefix}pass@"))
    if passed or not all(f"{prefix}pass@1" in row for row in rows) or n_samples < UNPASSED:
        return None
    which = "the last evaluation" if len(rows) == 1 else f"the last {len(rows)} evaluations"
    where = f" on {held_out.name}" if held_out.name else ""
    limit = f"{held_out.section}.pass_reward"
    return Finding(
        "nothing_passes",
        f"none of the {n_samples} completions of {which}{where} got a reward of {held_out.pass_reward:g} "
        f"({limit}) or more; their mean is {rows[-1][f'{prefix}reward_mean']:.3g}",
        "the model cannot do the task yet, because a supervised warm-up did not suffice or the prompts are too hard, "
        f"so training can only raise partial rewards; or {limit} is more than the reward gives",
        f"look at them with 'rlboost samples {job.job_id} --eval'; train longer on examples first (kind: sft, until "
        f"'rlboost eval' of its model has a pass@k above 0), use easier prompts, or set {limit}",
    )


def loss_rose(history: History, _: JobFacts) -> Finding | None:
    """Return a finding if the loss of a job that learns from completions in the data is worse than at the start."""
    losses = history.window("loss")
    if history.window("reward/mean") or not losses or history.n_steps < 2 * WINDOW_STEPS:
        return None
    began, now = _mean([row["loss"] for row in history.first]), _mean(losses)
    if now <= LOSS_RATIO * began:
        return None
    return Finding(
        "loss_rose",
        f"the loss rose from {began:.3g} in the first {WINDOW_STEPS} steps to {now:.3g} in the last {WINDOW_STEPS}",
        "optimizer.lr is too high",
        "start again with a tenth of optimizer.lr, and optimizer.warmup_steps above 0",
    )


RULES: Sequence[Rule] = (
    no_learning_signal,
    many_groups_dropped,
    many_conversations_lost,
    completions_clipped,
    completions_masked,
    entropy_collapsed,
    reward_fell,
    kl_exploded,
    engine_differs,
    gradient_zero,
    eval_reward_zero,
    nothing_passes,
    loss_rose,
)


def _last_reward(rows: Sequence[Row]) -> float:
    return next(row["reward/mean"] for row in reversed(rows) if "reward/mean" in row)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# --- Tracks which warnings about a job's learning hold after each step, from the metrics of its steps -----------------


CLEAR_STEPS = 4
"""Steps in a row without a finding that end a warning. One more than the rules' window: a single good step among bad
ones does not end a warning only to raise it again."""


@dataclass(frozen=True, slots=True)
class Change:
    """A warning that begins, or ends."""

    finding: Finding
    """The finding with which the warning began."""
    since_step: int
    """The step after which it began."""
    holds: bool


@dataclass(slots=True)
class _Held:
    finding: Finding
    since_step: int
    n_without: int = 0
    """Steps since the rule last found something."""


class WarningTracker:
    """The warnings of one job. The state depends on the observed rows alone, so replaying recorded rows restores it."""

    def __init__(self, facts: JobFacts) -> None:
        self._facts = facts
        self._history = History()
        self._held: dict[str, _Held] = {}
        self._last_step = -1

    @property
    def warnings(self) -> list[str]:
        """Return the text of each warning that holds."""
        return [held.finding.text for held in self._held.values()]

    def observe(self, step: int, row: Row) -> list[Change]:
        """Take the metrics of a step; return what changes. A step that was observed before changes nothing."""
        if step <= self._last_step:
            return []
        self._last_step = step
        n_steps = self._history.n_steps
        self._history.add(row)
        found = {finding.name: finding for rule in RULES if (finding := rule(self._history, self._facts)) is not None}
        changes = []
        for name, finding in found.items():
            if name not in self._held:
                self._held[name] = _Held(finding, step)
                changes.append(Change(finding, step, holds=True))
            self._held[name].n_without = 0
        if self._history.n_steps == n_steps:
            return changes  # an evaluation after the last step ends no warning about training
        for name in [name for name in self._held if name not in found]:
            held = self._held[name]
            held.n_without += 1
            if held.n_without >= CLEAR_STEPS:
                del self._held[name]
                changes.append(Change(held.finding, held.since_step, holds=False))
        return changes
