"""The section of a job file about skipping prompts because of the rewards of their earlier groups."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from rlboost.shared.validation import FunctionPath, Section


class CurriculumSpec(Section):
    """Which prompts are skipped, by the mean rewards of their last groups."""

    skip_solved_above: float | None = Field(None, allow_inf_nan=False)
    """Skip a prompt whose mean reward is at least this; with rewards of 0 and 1, 1.0 skips prompts that are always
    solved."""
    skip_failed_below: float | None = Field(None, allow_inf_nan=False)
    """Skip a prompt whose mean reward is at most this; with rewards of 0 and 1, 0.0 skips prompts that are never
    solved."""
    window: int = Field(1, ge=1)
    """Number of last groups that count; the two limits never skip a prompt with fewer groups."""
    retry_steps: int | None = Field(None, ge=1)
    """A skipped prompt returns after this many steps without a group; by default never."""
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
