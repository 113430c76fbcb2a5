"""Records what a plan for another fleet needs to know of a run: lengths, training and publishing times, throughput."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from rlboost.services.trainer.domain.metrics import StepTally
from rlboost.shared.job.run_profile import RunProfile
from rlboost.shared.messages import EngineProfile
from rlboost.shared.wire import I32, length

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
            waited_s = times.seeding_s + times.wait_s
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
            engines=tuple(_mean(seen) for _, seen in sorted(self._engines.items())),
            prompt_tokens=(min(prompts), max(prompts)),
            completion_quantiles=tuple(zip(_PROBABILITIES, quantiles, strict=True)),
            train_s_per_token=train_s_per_token,
            slowdowns=tuple(step.train_s / step.tokens / train_s_per_token for step in steps),
            reward_s=float(np.mean([step.reward_s for step in steps])),
            update_s=float(np.mean([step.update_s for step in steps])),
        )


def _mean(seen: Collection[EngineProfile]) -> EngineProfile:
    """Return the newest profile with the mean times of all: a machine's speed may vary from step to step."""
    *_, newest = seen
    names = ("step_s", "per_sample_s", "per_kv_token_s", "update_s", "update_pause_s")
    return newest.model_copy(update={name: float(np.mean([getattr(one, name) for one in seen])) for name in names})
