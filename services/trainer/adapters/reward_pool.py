"""Runs the user's reward functions in a pool of processes.

Each process scores one group at a time; a free process takes the next group.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from rlboost.services.trainer.adapters.user_code import (
    IMPORT_LIMIT_S,
    UserCodeFault,
    UserCodeLog,
    UserCodeProcess,
    UserProgram,
    start_all,
)
from rlboost.services.trainer.domain.advantages import combine, total
from rlboost.services.trainer.ports.samples import RewardBatch, Scores, Verdict
from rlboost.shared.http.server_url import origin_of
from rlboost.shared.job.reward import RewardPart, RewardSpec
from rlboost.shared.process.waiting import Waits
from rlboost.shared.user_code import MAX_REWARD, describe_row

# --- The reward function of jobs without one --------------------------------------------------------------------------


class NoReward:
    """`RewardFunction` that returns 0 for each completion."""

    async def start(self) -> None:
        """See `RewardFunction.start`."""

    async def score(self, batch: RewardBatch) -> Scores:
        return Scores((0.0,) * len(batch.completions))

    async def close(self) -> None:
        """See `RewardFunction.close`."""


# --- The pool of processes --------------------------------------------------------------------------------------------


_DETAIL_CHARS = 500
_LOAD_LIMIT_S = 1800.0
"""How long the weights of a reward model may take to load."""
_ANSWER_CHARS = 200
_SCORER = "rlboost.services.trainer.adapters.torch.reward_model:RewardModel"


class RewardModelSource(NamedTuple):
    """A reward model that the processes load."""

    scorer: dict[str, Any]
    """The arguments of `RewardModel`."""
    digest: str
    """Of its weights."""


class RewardPool:
    """`RewardFunction` over `reward.workers` processes, none if models on workers give all rewards."""

    def __init__(
        self,
        spec: RewardSpec,
        waits: Waits,
        log: UserCodeLog | None = None,
        *,
        token_origins: Collection[str] = (),
        columns: Collection[str] = (),
        models: Mapping[str, RewardModelSource] = MappingProxyType({}),
        served: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Describe the processes; `start` starts them.

        Args:
            spec: the reward.
            waits: where the start is listed.
            log: where the output of the processes goes.
            token_origins: services that may get `REWARD_TOKEN`, as `origin_of` names them.
            columns: those of the data, without the prompt.
            models: the reward models that the processes hold, as the job file names them.
            served: those that workers serve, with the digests of their weights.

        """
        self._models = {**{name: model.digest for name, model in models.items()}, **served}
        self._spec = spec
        self._waits = waits
        self._log = log
        self._functions = [part for part in spec.parts if not part.judge and (not part.model or part.model in models)]
        program = _program(spec, self._functions, token_origins, columns, models)
        self._processes = [UserCodeProcess(program, log) for _ in range(spec.workers if self._functions else 0)]
        self._idle: asyncio.LifoQueue[UserCodeProcess] = asyncio.LifoQueue()

    async def start(self) -> None:
        await start_all(self._processes, self._waits, "the reward function")
        for process in self._processes:
            self._idle.put_nowait(process)

    async def score(self, batch: RewardBatch) -> Scores:
        """See `RewardFunction.score`. The time limit starts when a process takes the group."""
        answer = await self._call(batch) if self._functions else {"rewards": [], "costs": []}
        if isinstance(answer, Scores):
            return answer
        return replace(_scores(answer, batch, self._spec.parts), models=self._models)

    async def _call(self, batch: RewardBatch) -> dict[str, Any] | Scores:
        """Return the answer of the functions; scores without rewards if they failed."""
        request = {
            "prompts": batch.prompts,
            "completions": batch.completions,
            "completion_ids": batch.completion_ids,
            "completions_raw": batch.completions_raw,
            "columns": batch.columns,
            "solutions": batch.solutions,
        }
        process = await self._idle.get()
        try:
            await process.restart_if_ended()
            return await process.call(request, self._spec.timeout_s)
        except UserCodeFault as fault:
            return Scores(None, fault.reason, fault.detail)
        finally:
            self._idle.put_nowait(process)

    async def close(self) -> None:
        await asyncio.gather(*(process.kill() for process in self._processes))
        if self._log is not None:
            self._log.close()


def _program(
    spec: RewardSpec,
    functions: Sequence[RewardPart],
    token_origins: Collection[str],
    columns: Collection[str],
    models: Mapping[str, RewardModelSource],
) -> UserProgram:
    parts = json.dumps(
        [
            {
                **part.model_dump(exclude={"judge"}),
                "timeout_s": spec.timeout_s,
                "scorer": {"class": _SCORER, "arguments": models[part.model].scorer} if part.model else None,
                "hidden": [name for name in part.arguments if name in columns],
                "gets_token": part.url is not None and origin_of(part.url) in token_origins,
            }
            for part in functions
        ]
    )
    sources = ", ".join(part.source for part in functions)
    field = "reward.function" if any(part.function for part in functions) else "reward.model"
    limit_s = _LOAD_LIMIT_S if models else IMPORT_LIMIT_S
    return UserProgram("rlboost.services.trainer.children.reward", parts, field, sources, limit_s)


def _scores(answer: dict[str, Any], batch: RewardBatch, parts: Sequence[RewardPart]) -> Scores:
    """Check the answer of the reward functions for a group, and combine their rewards with those of served models."""
    if "unusable" in answer:
        reason, detail = answer["unusable"]
        return Scores(None, str(reason), str(detail))
    of_functions = iter(answer["rewards"])
    given: list[Sequence[float | None]] = [
        [verdict.reward for verdict in batch.verdicts[part.name]] if part.name in batch.verdicts else next(of_functions)
        for part in parts
    ]
    for part, values in zip(parts, given, strict=True):
        if problem := _problem(values, len(batch.completions)):
            reason, detail = problem
            return Scores(None, reason, f"{part.name}: {detail}" if part.name else detail)
    by_part = {part.name: tuple(values) for part, values in zip(parts, given, strict=True) if part.name}
    rewards = combine(given, [part.weight for part in parts])
    # A function returns None where it does not apply; a reward model that gives no score has failed.
    needed = [rewards, *(values for part, values in zip(parts, given, strict=True) if part.model and part.weight)]
    missing = next((i for i, values in enumerate(zip(*needed, strict=True)) if None in values), None)
    if missing is not None:
        why = [_without_verdict(part[missing]) for part in batch.verdicts.values() if part[missing].reward is None]
        because = why[0] if why else "functions returned None for it"
        detail = f"no reward for completion {missing} of the group: {because}"
        return Scores(None, "missing", f"{detail}\n{describe_row(_row(batch))}", by_part)
    found = tuple(reward for reward in rewards if reward is not None)
    if problem := _problem(found, len(found)):
        return Scores(None, *problem, by_part)
    costs = tuple(total(of_completion) for of_completion in zip(*answer["costs"], strict=True))
    return Scores(found, parts=by_part, costs=costs if any(costs) else ())


def _without_verdict(verdict: Verdict) -> str:
    answer = f"; the last of {verdict.tries} answers: {verdict.answer[:_ANSWER_CHARS]!r}" if verdict.answer else ""
    return f"the model {verdict.job_id} gave none: {verdict.problem}{answer}"


def _problem(values: Sequence[float | None], n: int) -> tuple[str, str] | None:
    """Return the reason and a description if these are no usable rewards of `n` completions."""
    if len(values) != n:
        return "wrong_length", f"{len(values)} rewards for {n} completions"
    shown = f"rewards {list(values)}"[:_DETAIL_CHARS]
    if not all(value is None or math.isfinite(value) for value in values):
        return "not_a_number", shown
    if any(value is not None and abs(value) > MAX_REWARD for value in values):
        return "too_large", f"{shown}: one is beyond {MAX_REWARD:g}, scale them down"
    return None


def _row(batch: RewardBatch) -> dict[str, Any]:
    columns = {name: values[0] for name, values in batch.columns.items()}
    return {"prompt": batch.prompts[0], **columns, "completions": batch.solutions or batch.completions}
