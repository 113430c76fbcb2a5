"""Jobs whose groups are replaced by others, on the trainer's rig, and what they should come to by the rule."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlboost.services.trainer.domain.plan import Replacements, plan_step, training_group
from rlboost.services.trainer.ports.samples import RewardBatch, Scores
from rlboost.services.trainer.ports.storage import JobResources
from rlboost.shared.job.spec import JobSpec, RlJob
from rlboost.shared.messages import GroupRequested
from rlboost.shared.wire import I32, unpack
from tests.support.scripted_manager import scripted
from tests.support.trainer_fakes import FakeRewards
from tests.support.trainer_rig import Rig, spec

PLACES, TRIES, ROWS = 3, 2, 10
EQUAL = frozenset({0, 2, 3, 5, 6, 8, 9})
"""Rows whose groups teach nothing, in most tests."""


def job(tries: int = TRIES, **changes: Any) -> RlJob:
    raw = {
        "data": {"train": "t.jsonl", "prompts_per_step": PLACES},
        "algorithm": {"group_size": 2, "resample": tries},
        "steps": 4,
    }
    made = spec(**{**raw, **changes})
    assert isinstance(made, RlJob)
    return made


def by_row(equal: frozenset[int] = EQUAL) -> Callable[[RewardBatch], Scores]:
    def reward(batch: RewardBatch) -> Scores:
        n = len(batch.completion_ids)
        return Scores((1.0,) * n if batch.columns["row"][0] in equal else tuple(float(i) for i in range(n)))

    return reward


def rig_of(folder: Path, what: JobSpec | None = None, equal: frozenset[int] = EQUAL) -> Rig:
    rig = Rig(folder, what or job())
    rig.reward = by_row(equal)
    return rig


class Dawdling(FakeRewards):
    """Takes a different number of turns of the event loop for each group."""

    def __init__(self, function: Callable[[RewardBatch], Scores], seed: int) -> None:
        super().__init__(function)
        self._random = random.Random(seed)

    async def score(self, batch: RewardBatch) -> Scores:
        for _ in range(self._random.randrange(30)):
            await asyncio.sleep(0)
        return await super().score(batch)


def dawdling(rig: Rig, seed: int) -> None:
    """Let groups be scored in an order of chance."""
    build = rig.build

    def building(*of: Any, **_: Any) -> JobResources:
        return replace(build(*of), rewards=Dawdling(rig.reward, seed))

    rig.build = building  # type: ignore[method-assign]


async def completed(rig: Rig, *, create: bool = True) -> Rig:
    report = await (rig.run() if create else rig.resume())
    assert (report.state, report.error) == ("completed", "")
    return rig


def asked(rig: Rig) -> dict[int, int]:
    """Group -> the second token of its prompt, which is its row."""
    return {request.group: int(unpack(request.prompt, I32)[1]) for request in rig.manager.requests}


def in_places(what: RlJob, equal: frozenset[int]) -> tuple[dict[int, int], dict[int, int]]:
    """Return all groups of a job by the rule, and those that teach; each with its row."""
    groups, teaching = {}, {}
    for step in range(what.steps):
        first = plan_step(what, 1, step, ROWS, ())
        rule = Replacements.of(what, step, ROWS)
        rows = rule.replacement_rows([group.row for group in first])
        for initial in first:
            group = initial
            groups[group.id] = group.row
            while group.row in equal and (number := rule.replacement_number(group.number)) is not None:
                group = training_group(what, 1, step, number, rule.row(number, rows))
                groups[group.id] = group.row
            if group.row not in equal:
                teaching[group.id] = group.row
    return groups, teaching


def rows_of(requests: Sequence[GroupRequested], groups: dict[int, int]) -> Counter[tuple[bytes, bytes]]:
    """Return what is trained on of some groups: prompts and completions."""
    return Counter(
        (request.prompt, scripted(request, request.group + member).tokens)
        for request in {request.group: request for request in requests}.values()
        if request.group in groups
        for member in range(request.n)
    )
