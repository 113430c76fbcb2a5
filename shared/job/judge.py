"""The judge of a reward: the section of a job file, how it is asked, and how its verdict is read."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from string import Formatter
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from rlboost.shared.user_code.functions import MAX_REWARD
from rlboost.shared.validation import Section

MAX_RETRIES = 15
PROMPT, COMPLETION = "prompt", "completion"
"""What a judge's prompt may name besides the columns of the data."""


class JudgeSpec(Section):
    """A generating model of `models` that reads each completion and writes a verdict."""

    model: str = Field(min_length=1)
    """Name of the model under `models`."""
    prompt: str = Field(min_length=1)
    """What the judge is asked, as a user's message: text with `{prompt}`, `{completion}` and columns of the data, such
    as `{answer}`. A brace is written twice."""
    parse: str = Field(r"-?\d+(?:\.\d+)?", min_length=1)
    """Regular expression that finds the verdict: its last match in the answer counts, or that match's first group. By
    default a number."""
    values: dict[str, float] = Field(default_factory=dict)
    """Verdict -> its reward, such as `{"yes": 1, "no": 0}`, upper case or lower; without it the verdict is a number."""
    retries: int = Field(2, ge=0, le=MAX_RETRIES)
    """How often the judge is asked again, with another seed, after an answer without a verdict. Then the reward of the
    completion is missing."""
    temperature: float = Field(1.0, ge=0, le=10)
    """Sampling temperature of its answers; 0 is greedy, and needs `retries: 0`."""
    max_tokens: int = Field(256, ge=1)
    """Maximum tokens of an answer."""

    @field_validator("prompt")
    @classmethod
    def _shows_the_completion(cls, value: str) -> str:
        if COMPLETION not in placeholders(value):
            raise ValueError("shows the judge no completion: write {completion} where it belongs")
        return value

    @field_validator("parse")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"is no regular expression: {error}") from error
        return value

    @field_validator("values")
    @classmethod
    def _are_rewards(cls, value: dict[str, float]) -> dict[str, float]:
        for verdict, reward in value.items():
            if not abs(reward) <= MAX_REWARD:
                raise ValueError(f"{verdict!r} is worth {reward}: give a number up to {MAX_REWARD:g}")
        return {verdict.lower(): reward for verdict, reward in value.items()}

    @model_validator(mode="after")
    def _retries_can_differ(self) -> Self:
        if self.temperature == 0 and self.retries:
            raise ValueError("at temperature 0 each answer is the same: set judge.retries to 0")
        return self

    @property
    def tries(self) -> int:
        """Return how often a completion is judged at most."""
        return 1 + self.retries

    def reward_in(self, answer: str) -> float | None:
        """Return the reward that the judge's answer means, None if it has no verdict."""
        matches = list(re.finditer(self.parse, answer))
        if not matches:
            return None
        text = (matches[-1].group(1) if matches[-1].re.groups else matches[-1].group()) or ""
        if self.values:
            return self.values.get(text.strip().lower())
        try:
            reward = float(text)
        except ValueError:
            return None
        return reward if math.isfinite(reward) and abs(reward) <= MAX_REWARD else None


def placeholders(template: str) -> set[str]:
    """Return the names in braces in a judge's prompt.

    Raises:
        ValueError: a brace is alone, or what is between two is no plain name.

    """
    names = set()
    try:
        parsed = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{error}: write a brace that is meant as text twice") from error
    for _, name, form, conversion in parsed:
        if name is None:
            continue
        if not name or form or conversion or re.search(r"[.\[\]]", name):
            raise ValueError(f"{{{name}}} is no name of a column: write a brace that is meant as text twice")
        names.add(name)
    return names


def column_problem(template: str, columns: Collection[str], where: str) -> str:
    """Return what is wrong with the names in a judge's prompt, empty if `columns` has them; `where` these are."""
    missing = sorted(placeholders(template) - {PROMPT, COMPLETION, *columns})
    if not missing:
        return ""
    return (
        f"reward.judge.prompt: names {', '.join(missing)}, and {where} has "
        f"{', '.join(sorted(columns)) or 'no columns besides the prompt'}: correct the name, or write a brace that is "
        "meant as text twice"
    )


def question(template: str, prompt: object, completion: object, columns: Mapping[str, Any]) -> str:
    """Return what a judge is asked about one completion; chat messages become text.

    Raises:
        KeyError: the template names a column that the row does not have.

    """
    values = {**columns, PROMPT: _text(prompt), COMPLETION: _text(completion)}
    parts = Formatter().parse(template)
    return "".join(text + ("" if name is None else str(values[name])) for text, name, _, _ in parts)


def _text(given: object) -> str:
    """Return text, or chat messages as text: a single one's content, or `role: content` lines."""
    if not isinstance(given, list):
        return str(given)
    if len(given) == 1:
        return str(given[0].get("content") or "")
    return "\n".join(f"{message.get('role')}: {message.get('content') or ''}" for message in given)
