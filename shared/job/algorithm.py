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
    "group_std", "group_mean", "leave_one_out", "batch_std", "group_mean_batch_std", "gae", "best_worst"
]
RatioLevel = Literal["token", "sequence"]
Clip = Literal["ppo", "cispo", "none"]
Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]
Importance = Literal["truncate", "mask"]


class CriticSpec(Section):
    """A value model, trained beside the policy by AdamW, and what is made of its values."""

    lr: float = Field(1e-5, gt=0)
    """Its warm-up and decay are those of `optimizer`."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip: float = Field(1.0, gt=0)
    gamma: float = Field(1.0, gt=0, le=1)
    """What a reward is worth one token earlier."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """Generalised advantage estimation, arXiv 1506.02438: 0 trusts the critic alone, 1 the rewards alone."""
    value_clip: Annotated[float, Field(gt=0, allow_inf_nan=False)] | Literal["off"] = 0.2
    """How far a value may move in one step before moving further brings nothing."""

    @field_validator("value_clip", mode="before")
    @classmethod
    def _off_is_no_boolean(cls, value: object) -> object:
        return off_is_no_boolean(value)


class PreferenceSpec(Section):
    """How the best of a group is preferred to its worst."""

    variant: Literal["sigmoid", "ipo"] = "sigmoid"
    """DPO, arXiv 2305.18290; or IPO, arXiv 2310.12036, which aims at a margin of 1 / (2 beta) and goes no further."""
    beta: float = Field(0.1, gt=0, allow_inf_nan=False)
    """How much the distance to the starting weights costs."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """With `sigmoid`: how often the worst is taken to be the better one after all."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.variant == "ipo" and self.label_smoothing:
            raise ValueError("label_smoothing does not apply, ipo has none: remove it, or set variant to sigmoid")
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
}
"""Algorithm -> what it chooses where the job file says nothing."""


BEFORE: Mapping[str, Any] = {"resample": 0}
"""Setting that is younger than some stored jobs -> what these ran with, whatever their preset chooses today."""

Chosen = Mapping[str, Any]


class _Reason(NamedTuple):
    """Why some settings have no meaning, and what to change so that they have one."""

    holds: Callable[[Chosen], bool]
    text: str


class _Rule(NamedTuple):
    """Settings that have a meaning only where none of the reasons holds."""

    settings: tuple[str, ...]
    reasons: tuple[_Reason, ...]

    def against(self, chosen: Chosen) -> str:
        """Say why they do not apply, nothing if they do."""
        return next((reason.text for reason in self.reasons if reason.holds(chosen)), "")


_PAIRS = _Reason(
    lambda a: a.get("advantage") == "best_worst",
    "pairs have a loss of their own: set algorithm.advantage to something else than best_worst",
)
_OWN_LOSS = _Reason(lambda a: bool(a.get("loss")), "algorithm.loss takes the place of ratio and clip")

_RULES = (
    _Rule(("ratio", "clip"), (_PAIRS, _OWN_LOSS)),
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
    _Rule(("aggregation", "equal_groups", "old_logprobs", "tis_cap"), (_PAIRS,)),
    _Rule(
        ("resample",),
        (
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
        ("importance",),
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

GROUPLESS: frozenset[str] = frozenset({"batch_std", "gae"})
"""Advantage estimators that compare a sample with others of the step, or with a critic's value; not with its group."""


class AlgorithmSpec(Section):
    """What is made of rewards: see `PRESETS` for what each name chooses, and the fields for what may be chosen.

    The default is GRPO (DeepSeekMath, arXiv 2402.03300) with the clip and the token mean of DAPO (arXiv 2503.14476).
    """

    name: Literal[
        "grpo", "dr_grpo", "dapo", "gspo", "rloo", "reinforce++", "reinforce++-baseline", "cispo", "ppo", "dpo"
    ] = "grpo"
    group_size: int = Field(8, ge=1, le=MAX_GROUP_SIZE)
    updates_per_step: int = Field(1, ge=1)
    advantage: Advantage = "group_std"
    """What a sample's reward is compared with; `best_worst` makes a pair of each group and takes nothing else of it."""
    equal_groups: Literal["drop", "keep"] | None = "drop"
    """Whether groups whose rewards are all equal are left out of the loss, or count in its denominator."""
    resample: Annotated[int, Field(ge=0, le=64)] | None = 0
    """How many groups of other prompts may replace one that is left out, each if the one before is left out, too.

    Dynamic sampling: DAPO, arXiv 2503.14476, section 3.2.
    """
    loss: FunctionPath | None = None
    """`module:function`: the tokens' losses by a function of yours, in place of `ratio` and `clip`."""
    ratio: RatioLevel | None = "token"
    """Of what the ratio of new to old probability is: each token, or the whole completion (a geometric mean)."""
    clip: Clip | None = "ppo"
    """`ppo`: clipped tokens have no gradient; `cispo`: the ratio is a clipped weight, all have one; `none`."""
    clip_low: Annotated[float, Field(gt=0, le=1)] | None = 0.2
    """The ratio is clipped at 1 - this; 1 is no bound."""
    clip_high: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = 0.28
    """And at 1 + this."""
    aggregation: Aggregation | None = "token_mean"
    """What the update's loss is: the mean over tokens; or the mean over completions of their tokens' mean, of their
    sum, or of their sum divided by `sampling.max_tokens`."""
    old_logprobs: Literal["auto", "sampled", "recomputed"] | None = "auto"
    """What the ratio compares with: what the engine said when it drew a token, or what the step's first weights say.

    The second is the decoupled objective: what lies between the two is an importance weight (`tis_cap`). `auto` is
    `sampled` without staleness and `recomputed` with it.
    """
    tis_cap: Annotated[float, Field(gt=0, allow_inf_nan=False)] | Literal["off"] | None = 2.0
    """With the decoupled objective: where the importance weight of a token of older weights is cut.

    `off` leaves such tokens unweighted. Otherwise there is nothing to weigh.
    """
    importance: Importance | None = "truncate"
    """What becomes of weights beyond `tis_cap`: cut to it, or tokens with one beyond it or below 1 / it masked."""
    kl_coef: float = Field(0.0, ge=0, allow_inf_nan=False)
    """How much the distance to the starting weights costs; above 0 the trainer keeps a copy of these."""
    kl_estimator: KlEstimator | None = None
    """Estimator of that distance in the loss."""
    overlong_penalty: float = Field(0.0, ge=0, allow_inf_nan=False)
    """What is taken off the reward of a completion of `sampling.max_tokens`."""
    overlong_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """The last part of `sampling.max_tokens`, in which the penalty rises from 0."""
    critic: CriticSpec | None = None
    """With `advantage: gae`."""
    preference: PreferenceSpec | None = None
    """With `advantage: best_worst`."""

    @property
    def needs_reference(self) -> bool:
        """Return True if the starting weights are asked about the tokens."""
        return self.kl_coef > 0 or self.preference is not None

    def is_decoupled(self, max_staleness: int) -> bool:
        """Return True if the ratio is to what the trainer itself says of the tokens under the step's first weights."""
        return self.old_logprobs == "recomputed" or (self.old_logprobs == "auto" and max_staleness > 0)

    @model_validator(mode="before")
    @classmethod
    def _choose(cls, raw: object) -> object:
        """Fill in what the preset chooses, as far as it applies to what the job file chooses."""
        if not isinstance(raw, dict) or (name := raw.get("name", "grpo")) not in list(PRESETS):
            return raw
        chosen = {**PRESETS[name], **raw}
        for rule in _RULES:
            if rule.against(chosen):
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
            against = rule.against(chosen)
            for setting in rule.settings:
                if not against and chosen[setting] is None:
                    raise ValueError(f"{setting} is missing: give it, or leave the key out for {self.name}'s own")
                if against and chosen[setting] is not None:
                    raise ValueError(f"{setting} does not apply, {against}, or remove {setting}")
        if self.preference is not None and (self.loss is not None or self.kl_coef > 0):
            asked = "loss" if self.loss is not None else "kl_coef"
            raise ValueError(
                f"{asked} does not apply, pairs have a loss of their own, which preference.beta holds to the starting "
                f"weights: remove {asked}, or set algorithm.advantage to something else than best_worst"
            )
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


def with_former_defaults(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the algorithm of a stored job, which has all settings that there were, with those that there were not."""
    useless = {name for rule in _RULES if rule.against(stored) for name in rule.settings}
    return {name: value for name, value in BEFORE.items() if name not in useless} | dict(stored)


def _is_above_zero(value: object) -> bool:
    try:
        return float(value) > 0  # type: ignore[arg-type]  # whatever a file holds; its field refuses the rest
    except (TypeError, ValueError):
        return False
