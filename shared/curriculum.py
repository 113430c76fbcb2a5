"""The section of a job file about prompts that are left out for what became of their groups before."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from shared.validation import FunctionPath, Section


class CurriculumSpec(Section):
    """When a prompt's turn comes, whether it is skipped: judged by the mean rewards of its last groups."""

    skip_solved_above: float | None = Field(None, allow_inf_nan=False)
    """Skipped if their mean is this or more: always solved, with 1.0 and a reward of 0 or 1."""
    skip_failed_below: float | None = Field(None, allow_inf_nan=False)
    """Skipped if it is this or less: never solved, with 0.0."""
    window: int = Field(1, ge=1)
    """How many groups are looked at; a prompt that has had fewer is never skipped by the two above."""
    retry_steps: int | None = Field(None, ge=1)
    """A prompt whose last group is so many steps ago or more is not skipped."""
    function: FunctionPath | None = None
    """`package.module:function`, which gets the means of all groups so far, oldest first, and says whether to skip."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        low, high = self.skip_failed_below, self.skip_solved_above
        if low is None and high is None and self.function is None:
            raise ValueError("give skip_solved_above, skip_failed_below or function, or remove curriculum")
        if low is not None and high is not None and low >= high:
            raise ValueError("skip_failed_below is not below skip_solved_above, so every prompt would be skipped")
        return self
