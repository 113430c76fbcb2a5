"""The algorithm of a job: a named preset of choices, each of which a job file may override.

The choices are an advantage estimator, the level of the ratio, the rule that clips it, and how the tokens' losses are
added up; `docs/algorithms.md` has the table. A setting that does not apply to what is chosen is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from rlboost.shared.ids import MAX_GROUP_SIZE
from rlboost.shared.validation import FunctionPath, Section, off_is_no_boolean

Advantage = Literal[
    "group_std", "group_mean", "leave_one_out", "batch_std", "group_mean_batch_std", "gae", "best_worst", "none"
]
RatioLevel = Literal["token", "sequence"]
Clip = Literal["ppo", "cispo", "none"]
Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]
Importance = Literal["truncate", "mask"]
ImportanceLevel = Literal["token", "sequence"]
RejectionLevel = Literal["token", "sequence", "geometric"]


class CriticSpec(Section):
    """The critic of PPO: a value model that AdamW trains alongside the policy."""

    lr: float = Field(1e-5, gt=0)
    """Learning rate of the critic's AdamW; warm-up and decay are those of `optimizer`."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moments."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's weight decay."""
    grad_clip: float = Field(1.0, gt=0)
    """Maximum norm of the critic's gradient."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount factor per token."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """Lambda of generalized advantage estimation (arXiv 1506.02438): 0 relies on the critic only, 1 on the rewards
    only."""
    value_clip: Annotated[float, Field(gt=0)] | Literal["off"] = 0.2
    """Bound on a value's change in one step; `off` removes it."""

    @field_validator("value_clip", mode="before")
    @classmethod
    def _off_is_no_boolean(cls, value: object) -> object:
        return off_is_no_boolean(value)


class PreferenceSpec(Section):
    """The loss of pairs of completions: one is preferred to the other."""

    variant: Literal["sigmoid", "robust", "ipo"] = "sigmoid"
    """Loss of a pair: DPO (arXiv 2305.18290), robust DPO (arXiv 2403.00409) or IPO (arXiv 2310.12036), which stops at a
    margin of 1 / (2 beta) a token."""
    beta: float = Field(0.1, gt=0)
    """Weight of the distance to the starting weights."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """With `sigmoid` and `robust`: assumed probability that the preference is wrong."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.variant == "ipo" and self.label_smoothing:
            raise ValueError("label_smoothing does not apply, ipo has none: remove it, or set variant to sigmoid")
        return self


TEACHER = "algorithm.teacher.model"
"""The key that names a teacher, for errors."""


class TeacherSpec(Section):
    """On-policy distillation (arXiv 2306.13649): a larger or a trained model scores each token that was generated.

    The token's advantage grows by `coef` x (log p of the teacher - log p of the engine), whose mean is the negative
    reverse KL divergence.
    """

    model: str = Field(min_length=1)
    """Name of one of `models`, which workers serve; or folder or Hugging Face id of a model that the trainer's devices
    hold in `trainer.dtype`. It has the tokenizer of the job's `model`."""
    coef: float = Field(1.0, gt=0)
    """Weight of the teacher next to advantages from rewards."""


class PairsSpec(Section):
    """How a job of kind `dpo` learns from pairs."""

    preference: PreferenceSpec = PreferenceSpec()
    """The loss of pairs."""


class ScoresSpec(Section):
    """How a job of kind `reward` learns from pairs."""

    center_rewards_coefficient: float = Field(0.0, ge=0)
    """Weight of the squared sum of a pair's scores, which keeps scores around 0 (arXiv 2312.09244); such as 0.01."""


class RejectionSpec(Section):
    """Tokens that are left out of the loss, by the ratio of the trainer's probabilities to the engine's."""

    level: RejectionLevel | None = None
    """Ratio that must be within the thresholds: of each token; or of the whole completion, as the product of its
    tokens' ratios (`sequence`) or their geometric mean."""
    threshold: Annotated[float, Field(gt=1)] | None = None
    """Highest ratio, by default 2. Use about 1.001 for `geometric`."""
    threshold_lower: Annotated[float, Field(gt=0, le=1)] | None = None
    """Lowest ratio, by default 1 / `threshold`."""
    token_veto: Annotated[float, Field(gt=0, lt=1)] | None = None
    """A completion with a token whose ratio is below this, such as 1e-4, is left out."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the lowest and the highest ratio."""
        highest = self.threshold or 2.0
        return self.threshold_lower or 1 / highest, highest

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.level is None and (self.threshold is not None or self.threshold_lower is not None):
            raise ValueError("threshold does not apply, no ratio is bounded: set level, or remove it")
        if self.level is None and self.token_veto is None:
            raise ValueError("nothing is rejected: set level or token_veto, or remove the section")
        return self


_GRPO: dict[str, Any] = {
    "advantage": "group_std",
    "ratio": "token",
    "clip": "ppo",
    "clip_low": 0.2,
    "clip_high": 0.28,
    "aggregation": "token_mean",
    "equal_groups": "drop",
    "resample": 0,
    "kl_coef": 0.0,
    "kl_estimator": "k3",
    "overlong_penalty": 0.0,
    "overlong_fraction": 0.2,
    "old_logprobs": "auto",
    "tis_cap": 2.0,
    "importance": "truncate",
    "rollout_is": "token",
    "critic": CriticSpec(),
    "preference": PreferenceSpec(),
}
_REINFORCE: dict[str, Any] = {**_GRPO, "clip_high": 0.2, "equal_groups": "keep", "kl_estimator": "k2"}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "grpo": _GRPO,
    "dr_grpo": {
        **_GRPO,
        "advantage": "group_mean",
        "clip_high": 0.2,
        "aggregation": "constant",
        "equal_groups": "keep",
    },
    "dapo": {**_GRPO, "resample": 8, "overlong_penalty": 1.0},
    "gspo": {
        **_GRPO,
        "ratio": "sequence",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "aggregation": "sequence_mean",
        "equal_groups": "keep",
    },
    "rloo": {
        **_GRPO,
        "advantage": "leave_one_out",
        "clip": "none",
        "aggregation": "sequence_sum",
        "equal_groups": "keep",
    },
    "reinforce++": {**_REINFORCE, "advantage": "batch_std"},
    "reinforce++-baseline": {**_REINFORCE, "advantage": "group_mean_batch_std"},
    "cispo": {**_GRPO, "clip": "cispo", "clip_low": 1.0, "clip_high": 4.0},
    "ppo": {**_GRPO, "advantage": "gae", "clip_high": 0.2, "equal_groups": "keep"},
    "dpo": {**_GRPO, "advantage": "best_worst"},
    "distill": {**_GRPO, "advantage": "none"},
}
"""Algorithm -> what it chooses where the job file says nothing."""


FORMER_DEFAULTS: Mapping[str, Any] = {"resample": 0}
"""Setting added after jobs were stored -> the value that those jobs ran with, whatever their preset chooses today."""

Chosen = Mapping[str, Any]


class _Reason(NamedTuple):
    """Why some settings have no meaning, and what to change so that they have one."""

    holds: Callable[[Chosen], bool]
    text: str


class _Rule(NamedTuple):
    """Settings that have a meaning only where none of the reasons holds."""

    settings: tuple[str, ...]
    reasons: tuple[_Reason, ...]

    def reason(self, chosen: Chosen) -> str:
        """Return why the settings do not apply, empty if they do."""
        return next((reason.text for reason in self.reasons if reason.holds(chosen)), "")


_PAIRS = _Reason(
    lambda a: a.get("advantage") == "best_worst",
    "pairs have a loss of their own: set algorithm.advantage to something else than best_worst",
)
_TAUGHT = _Reason(
    lambda a: a.get("teacher") is not None,
    "a teacher scores every token, also those of groups of equal rewards: remove algorithm.teacher",
)
_CUSTOM_LOSS = _Reason(lambda a: bool(a.get("loss")), "algorithm.loss takes the place of ratio and clip")

_RULES = (
    _Rule(("ratio", "clip"), (_PAIRS, _CUSTOM_LOSS)),
    _Rule(
        ("clip_low", "clip_high"),
        (
            _PAIRS,
            _Reason(
                lambda a: bool(a.get("loss")) or a.get("clip") == "none",
                "nothing is clipped: set algorithm.clip to ppo or cispo",
            ),
        ),
    ),
    _Rule(("aggregation", "old_logprobs", "tis_cap"), (_PAIRS,)),
    _Rule(("equal_groups",), (_PAIRS, _TAUGHT)),
    _Rule(
        ("resample",),
        (
            _TAUGHT,
            _Reason(
                lambda a: a.get("equal_groups") == "keep",
                "no group is left out, so none is replaced: set algorithm.equal_groups to drop",
            ),
        ),
    ),
    _Rule(
        ("kl_estimator",),
        (
            _Reason(
                lambda a: not _is_above_zero(a.get("kl_coef")),
                "no KL penalty is taken: set algorithm.kl_coef above 0",
            ),
            _Reason(
                lambda a: a.get("advantage") == "gae",
                "with a critic the penalty is log p - log p_start of each token, taken off its reward: set "
                "algorithm.advantage to another",
            ),
        ),
    ),
    _Rule(
        ("overlong_fraction",),
        (
            _Reason(
                lambda a: not _is_above_zero(a.get("overlong_penalty")),
                "long completions are not punished: set algorithm.overlong_penalty above 0",
            ),
        ),
    ),
    _Rule(
        ("importance", "rollout_is"),
        (
            _PAIRS,
            _Reason(lambda a: a.get("tis_cap") in ("off", False), "importance weights are off: set algorithm.tis_cap"),
        ),
    ),
    _Rule(
        ("critic",),
        (_Reason(lambda a: a.get("advantage") != "gae", "there is no critic: set algorithm.advantage to gae"),),
    ),
    _Rule(
        ("preference",),
        (
            _Reason(
                lambda a: a.get("advantage") != "best_worst",
                "nothing is preferred: set algorithm.advantage to best_worst",
            ),
        ),
    ),
)

GROUPLESS: frozenset[str] = frozenset({"batch_std", "gae", "none"})
"""Advantage estimators that do not compare a sample with its group: with others of the step, with a critic's value, or
not at all."""


class AlgorithmSpec(Section):
    """The algorithm: `name` is a preset of the other keys, each of which a job file may override.

    `PRESETS` has the choices of each name. The default is GRPO (DeepSeekMath, arXiv 2402.03300) with the clip and the
    token mean of DAPO (arXiv 2503.14476).
    """

    name: Literal[
        "grpo",
        "dr_grpo",
        "dapo",
        "gspo",
        "rloo",
        "reinforce++",
        "reinforce++-baseline",
        "cispo",
        "ppo",
        "dpo",
        "distill",
    ] = "grpo"
    """Preset of the choices below."""
    group_size: int = Field(8, ge=1, le=MAX_GROUP_SIZE)
    """Samples per prompt."""
    updates_per_step: int = Field(1, ge=1)
    """Optimizer updates per epoch of a step; the step's groups are divided among them."""
    epochs: int = Field(1, ge=1)
    """How often each step's samples are trained on, in the same order, with the old policy of the step's start."""
    advantage: Advantage = "group_std"
    """Baseline and scale of a sample's reward; `best_worst` trains on one pair per group and nothing else, `none` on
    the scores of `teacher`: rewards are only logged, and the job needs none."""
    teacher: TeacherSpec | None = None
    """A model that scores each token."""
    equal_groups: Literal["drop", "keep"] | None = "drop"
    """Whether groups of equal rewards are left out of the loss, or count in its denominator."""
    resample: Annotated[int, Field(ge=0, le=64)] | None = 0
    """Maximum number of groups of other prompts that replace a group of equal rewards, one after the other (DAPO's
    dynamic sampling, arXiv 2503.14476)."""
    loss: FunctionPath | None = None
    """`module:function` with a custom loss per token, in place of `ratio` and `clip`."""
    ratio: RatioLevel | None = "token"
    """Ratio of new to old probability: of each token, or of the whole completion (geometric mean)."""
    clip: Clip | None = "ppo"
    """`ppo`: clipped tokens have no gradient; `cispo`: the ratio is a clipped weight and every token has a gradient."""
    clip_low: Annotated[float, Field(gt=0, le=1)] | None = 0.2
    """The ratio is clipped below at 1 minus this; 1 removes the bound."""
    clip_high: Annotated[float, Field(gt=0)] | None = 0.28
    """The ratio is clipped above at 1 plus this, also with `cispo`, where TRL's `epsilon_high` is the bound itself."""
    aggregation: Aggregation | None = "token_mean"
    """Loss of an update: mean over tokens; or mean over completions of their token mean, of their token sum, or of
    that sum divided by `sampling.max_tokens`."""
    old_logprobs: Literal["auto", "sampled", "recomputed"] | None = "auto"
    """Old policy of the ratio: the engine's log-probabilities, or the trainer's under the weights at the start of the
    step. `auto` is `sampled` with `elastic.max_staleness: 0`, else `recomputed`."""
    tis_cap: Annotated[float, Field(gt=0)] | Literal["off"] | None = 2.0
    """With `recomputed`: upper bound of importance weights (trainer / engine); `off` disables these weights."""
    importance: Importance | None = "truncate"
    """`truncate`: importance weights above `tis_cap` become `tis_cap`. `mask`: tokens with a weight above `tis_cap` or
    below 1 / `tis_cap` are left out of the loss."""
    rollout_is: ImportanceLevel | None = "token"
    """Importance weight of a token: its own ratio, or the product of the ratios over its completion (`sequence`)."""
    rollout_rs: RejectionSpec | None = None
    """Leaves tokens out of the loss whose probabilities differ between trainer and engine; they still count in the
    divisor of `aggregation`."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL penalty to the starting weights; above 0 the trainer stores a copy of them."""
    kl_estimator: KlEstimator | None = None
    """Estimator of that KL."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus: of each token's whole distribution, exact, at the job's temperature."""
    mask_truncated: bool = False
    """Leave completions that ended at `sampling.max_tokens`, and conversations that ended at a limit, out of the loss;
    their rewards still count in the baseline."""
    overlong_penalty: float = Field(0.0, ge=0, le=1e15)
    """Amount subtracted from the reward of a completion that is `sampling.max_tokens` long; shorter ones lose less
    (`overlong_fraction`)."""
    overlong_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """The last fraction of `sampling.max_tokens`, over which the amount of `overlong_penalty` rises from 0."""
    cost_coef: float = Field(0.0, ge=0, le=1e15)
    """The trained reward is the reward minus this times the sample's cost, which environments, agents and reward
    functions name; 0 only logs costs."""
    critic: CriticSpec | None = None
    """The critic, with `advantage: gae`."""
    preference: PreferenceSpec | None = None
    """The loss of pairs, with `advantage: best_worst` or kind `dpo`."""

    @property
    def needs_reference(self) -> bool:
        """Return True if losses need log-probabilities under the starting weights, or a teacher's."""
        return self.kl_coef > 0 or self.preference is not None or self.teacher is not None

    def is_decoupled(self, max_staleness: int) -> bool:
        """Return True if the ratio is to the trainer's own log-probabilities under the weights at the step's start."""
        return self.old_logprobs == "recomputed" or (self.old_logprobs == "auto" and max_staleness > 0)

    @model_validator(mode="before")
    @classmethod
    def _choose(cls, raw: object) -> object:
        """Fill in what the preset chooses, as far as it applies to what the job file chooses."""
        if not isinstance(raw, dict) or (name := raw.get("name", "grpo")) not in list(PRESETS):
            return raw
        chosen = {**PRESETS[name], **raw}
        for rule in _RULES:
            if rule.reason(chosen):
                chosen |= {setting: raw.get(setting) for setting in rule.settings}
        return chosen

    @field_validator("tis_cap", mode="before")
    @classmethod
    def _off_is_no_boolean(cls, value: object) -> object:
        return off_is_no_boolean(value)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        chosen = dict(self)
        for rule in _RULES:
            reason = rule.reason(chosen)
            for setting in rule.settings:
                if not reason and chosen[setting] is None:
                    raise ValueError(f"{setting} is missing: give it, or leave the key out for {self.name}'s own")
                if reason and chosen[setting] is not None:
                    raise ValueError(f"{setting} does not apply, {reason}, or remove {setting}")
        if self.group_size < 2 and self.advantage not in GROUPLESS:
            raise ValueError(
                f"group_size: a group of one has nothing to compare with, and {self.name} ({self.advantage}) compares "
                "within the group: give 2 or more, or take name reinforce++ or ppo"
            )
        if self.group_size < 2 and self.resample:
            raise ValueError(
                "resample: the rewards of a group of one are always equal, so all prompts would be asked for again and "
                "again: remove resample, set equal_groups to keep, or give group_size 2 or more"
            )
        if self.importance == "mask" and isinstance(self.tis_cap, float) and self.tis_cap <= 1:
            raise ValueError("tis_cap: with importance mask, weights from 1 / tis_cap on are kept: give more than 1")
        return self

    @model_validator(mode="after")
    def _has_one_reference(self) -> Self:
        others = {name: getattr(self, name) for name in ("loss", "rollout_rs", "kl_coef", "entropy_coef")}
        if self.preference is not None and (asked := next((name for name, given in others.items() if given), "")):
            raise ValueError(
                f"{asked} does not apply, pairs have a loss of their own, which preference.beta holds to the starting "
                f"weights: remove {asked}, or set algorithm.advantage to something else than best_worst"
            )
        if self.advantage == "none" and self.teacher is None:
            raise ValueError("teacher: missing, and advantage none learns from nothing else: give teacher.model")
        if self.advantage == "none" and self.cost_coef:
            raise ValueError(
                "cost_coef: advantage none trains on no reward, so on no cost: remove cost_coef, or choose another "
                "advantage such as group_std"
            )
        if self.teacher is not None and (other := self._other_than_a_teacher()):
            raise ValueError(
                f"teacher: not supported with {other}: remove teacher, or choose another advantage such as none (name: "
                "distill) without kl_coef"
            )
        return self

    def _other_than_a_teacher(self) -> str:
        """Return what needs the starting weights as the reference, or has losses of its own."""
        if self.advantage in ("gae", "best_worst"):
            return f"advantage: {self.advantage}"
        return "kl_coef, the penalty to the starting weights" if self.kl_coef else ""


def with_former_defaults(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored job's algorithm.

    Settings that did not exist when it was stored get the values that keep its behavior.
    """
    useless = {name for rule in _RULES if rule.reason(stored) for name in rule.settings}
    return {name: value for name, value in FORMER_DEFAULTS.items() if name not in useless} | dict(stored)


def _is_above_zero(value: object) -> bool:
    try:
        return float(value) > 0  # type: ignore[arg-type]  # whatever a file holds; its field refuses the rest
    except (TypeError, ValueError):
        return False
