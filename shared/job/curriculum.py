"""The section of a job file about skipping prompts because of the rewards of their earlier groups."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from rlboost.shared.validation import FunctionPath, Section


class CurriculumSpec(Section):
    """Which prompts are skipped, by the mean rewards of their last groups."""

    skip_solved_above: float | None = Field(None, allow_inf_nan=False)
    """Skip a prompt whose mean is at least this; with a reward of 0 or 1, 1.0 skips what is always solved."""
    skip_failed_below: float | None = Field(None, allow_inf_nan=False)
    """Skip a prompt whose mean is at most this; with a reward of 0 or 1, 0.0 skips what is never solved."""
    window: int = Field(1, ge=1)
    """How many groups count; a prompt with fewer groups is never skipped by the two limits above."""
    retry_steps: int | None = Field(None, ge=1)
    """A prompt whose last group is at least this many steps old is not skipped."""
    function: FunctionPath | None = None
    """`package.module:function`: gets the means of all earlier groups, oldest first, and returns True to skip."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        low, high = self.skip_failed_below, self.skip_solved_above
        if low is None and high is None and self.function is None:
            raise ValueError("give skip_solved_above, skip_failed_below or function, or remove curriculum")
        if low is not None and high is not None and low >= high:
            raise ValueError("skip_failed_below is not below skip_solved_above, so every prompt would be skipped")
        return self
