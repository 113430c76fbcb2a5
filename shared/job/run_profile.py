"""What a run measured, in `runs/JOB/profile.json`: from it `rlboost plan` predicts other fleets."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveFloat, PositiveInt

from rlboost.shared.messages import EngineProfile


class RunProfile(BaseModel):
    """Means over the recent steps of a run.

    Later releases may add fields: a reader keeps those that it does not know in `model_extra`, and does not use them.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    format: Literal[1] = 1
    """Raised when the meaning of a field changes, so that earlier releases refuse the profile."""
    steps: PositiveInt
    """How many steps were measured."""
    step_s: NonNegativeFloat
    engines: tuple[EngineProfile, ...]
    """One for each role and kind of worker."""
    prompt_tokens: tuple[int, int]
    """Shortest and longest prompt."""
    completion_quantiles: tuple[tuple[float, float], ...]
    """(probability, tokens) of the completions' lengths, both rising, from probability 0 to 1."""
    train_s_per_token: PositiveFloat
    """Computing on the trainer's device, for each token of the step's samples, prompts included."""
    slowdowns: tuple[PositiveFloat, ...] = ()
    """The same of each step, oldest first, relative to `train_s_per_token`: the speed of a shared machine varies."""
    reward_s: NonNegativeFloat = 0.0
    """Scoring a group: from its last sample to its rewards, with the wait for a free reward process."""
    update_s: NonNegativeFloat
    """From the last micro-batch of a step to its end: committing the weights, and what the trainer does besides."""
