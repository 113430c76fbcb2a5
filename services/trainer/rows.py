"""From scored groups to rows to train on: rewards become advantages, with what the engine must be asked for it.

`domain` decides. Here the engine is asked, on the trainer's turn: for log-probabilities under the weights that the step
begins with, for a critic's values, and for log-probabilities of pairs under the weights of just now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from services.trainer.device import DeviceTurn
from services.trainer.domain import critic, sums
from services.trainer.domain.advantages import NEED_THE_STEP, estimate
from services.trainer.domain.batching import pack
from services.trainer.domain.loss import preference
from services.trainer.domain.metrics import ScoredGroup
from services.trainer.domain.shaping import shaped
from services.trainer.intake import JobContext, StepIntake
from services.trainer.ports import Critic, Row
from shared.algorithm import CriticSpec, PreferenceSpec
from shared.columns import F32, unpack

T = TypeVar("T")
Ask = Callable[[Sequence[Sequence[Row]]], list[bytes]]
"""A question to the engine: a float32 column for each row."""


class RowMaker:
    """Makes the rows of one step."""

    def __init__(self, job: JobContext, intake: StepIntake, turn: DeviceTurn) -> None:
        """Make them for the step of `intake`; the engine is asked when it is our `turn`."""
        self._job = job
        self._algorithm = job.spec.algorithm
        self._engine = job.workshop.engine
        self._intake = intake
        self._turn = turn
        self._pairs: list[tuple[Row, Row]] = []
        """Best and worst of the groups whose rows were made, but not weighed."""

    @property
    def needs_the_step(self) -> bool:
        """Tell whether no row is known before the last group of the step is there."""
        return self._asks_first or self._algorithm.advantage in NEED_THE_STEP

    async def make(self, groups: Sequence[ScoredGroup | None]) -> list[list[Row]]:
        """Return the rows of each group, none for one that was dropped or is left out.

        Args:
            groups: some of the step, or all where it `needs_the_step`.

        """
        workshop, spec, most = self._job.workshop, self._algorithm, self._job.spec.sampling.max_tokens
        rewards = [[] if group is None else shaped(group, spec, most) for group in groups]
        if spec.preference is not None:
            return [self._pair(*both) for both in zip(groups, rewards, strict=True)]
        if spec.critic is not None:
            assert workshop.critic is not None, "the engine was made without the job's critic"
            made = await self._criticised(groups, rewards, spec.critic, workshop.critic)
        else:
            made = self._compared(groups, rewards)
        if self._asks_first:
            rows = _flat(made)
            columns = await self._asked(rows, self._engine.logprobs)
            made = _grouped(made, [replace(row, proximal=one) for row, one in zip(rows, columns, strict=True)])
        return made

    async def weigh(self, batches: list[list[Row]]) -> list[list[Row]]:
        """Return micro-batches as they are to be accumulated now: a pair's weights depend on the weights of now.

        Args:
            batches: all rows that were made and not weighed, however they are cut.

        """
        spec, pairs = self._algorithm.preference, self._pairs
        if spec is None:
            return batches
        self._pairs = []
        trained: dict[int, bytes] = {}
        start: dict[int, bytes] = {}
        for batch in batches:
            trained |= await self._asked_of(batch, self._engine.logprobs)
            start |= await self._asked_of(batch, self._engine.reference_logprobs)
        weights = self._judged(spec, pairs, trained, start)
        return [
            [replace(row, advantage=weights[id(row)], reference=start[id(row)]) for row in batch] for batch in batches
        ]

    @property
    def _asks_first(self) -> bool:
        # The weights that the step begins with are gone after its first update: what they say is asked before.
        decoupled = self._algorithm.is_decoupled(self._job.spec.elastic.max_staleness)
        return decoupled and self._algorithm.updates_per_step > 1

    def _rows(self, group: ScoredGroup, advantages: Sequence[float]) -> list[Row]:
        """Return a row for each sample that has a token."""
        prompt = self._intake.prompt_of(group)
        talks = group.talks or (None,) * len(group.samples)
        return [
            Row(prompt, sample.tokens, sample.logprobs, advantage)
            if talk is None
            else Row(prompt, talk.completion, sample.logprobs, advantage, trained=talk.trained)
            for sample, talk, advantage in zip(group.samples, talks, advantages, strict=True)
            if sample.tokens
        ]

    # --- rewards compared with each other ---

    def _compared(self, groups: Sequence[ScoredGroup | None], rewards: Sequence[list[float]]) -> list[list[Row]]:
        scored = [one for one in rewards if one]
        drops = self._algorithm.equal_groups == "drop"
        found = iter(estimate(self._algorithm.advantage, scored, drop_equal=drops))
        advantages = [next(found) if one else None for one in rewards]
        self._leave_out(sum(bool(one) and value is None for one, value in zip(rewards, advantages, strict=True)))
        return [
            [] if group is None or values is None else self._rows(group, values)
            for group, values in zip(groups, advantages, strict=True)
        ]

    def _leave_out(self, n_groups: int) -> None:
        if n_groups:
            self._intake.tally.left_out["equal_rewards"] += n_groups

    # --- rewards compared with what a critic expects ---

    async def _criticised(
        self, groups: Sequence[ScoredGroup | None], rewards: Sequence[list[float]], spec: CriticSpec, engine: Critic
    ) -> list[list[Row]]:
        """Return rows with an advantage for each token, and with what the critic is to learn."""
        drops = self._algorithm.equal_groups == "drop"
        left_out = [bool(one) and drops and min(one) == max(one) for one in rewards]
        self._leave_out(sum(left_out))
        made = [
            [] if group is None or out else self._rows(group, one)
            for group, one, out in zip(groups, rewards, left_out, strict=True)
        ]
        rows = _flat(made)
        if not rows:
            return made  # nothing to learn from, and nothing to be said of it
        values = await self._asked(rows, engine.values)
        penalties: list[critic.Array | None] = [None] * len(rows)
        if self._algorithm.kl_coef:
            start = await self._asked(rows, self._engine.reference_logprobs)
            rows = [replace(row, reference=column) for row, column in zip(rows, start, strict=True)]
            penalties = [self._algorithm.kl_coef * (_array(row.logprobs) - _array(row.reference)) for row in rows]
        step = [
            critic.Experience(row.advantage, _array(expected), penalty)
            for row, expected, penalty in zip(rows, values, penalties, strict=True)
        ]
        found = critic.estimate(step, spec.gamma, spec.gae_lambda)
        self._intake.tally.measured |= critic.metrics(found)
        columns = zip(rows, found.advantages, values, found.returns, strict=True)
        return _grouped(
            made,
            [
                replace(row, advantage=0.0, advantages=_column(advantages), values=expected, returns=_column(returns))
                for row, advantages, expected, returns in columns
            ],
        )

    # --- pairs ---

    def _pair(self, group: ScoredGroup | None, rewards: list[float]) -> list[Row]:
        """Return the best and the worst of a group, nothing where none is better than another."""
        if group is None:
            return []
        rows = self._rows(group, rewards)
        places = preference.best_and_worst([row.advantage for row in rows]) if rows else None
        if places is None:
            self._leave_out(1)
            return []
        pair = rows[places[0]], rows[places[1]]
        self._pairs.append(pair)
        return list(pair)

    def _judged(
        self,
        spec: PreferenceSpec,
        pairs: Sequence[tuple[Row, Row]],
        trained: dict[int, bytes],
        start: dict[int, bytes],
    ) -> dict[int, float]:
        """Return what each row's log-likelihood is weighed by, and count the pairs' losses."""

        def moved(row: Row) -> float:
            return preference.moved(_array(trained[id(row)]), _array(start[id(row)]))

        margins = np.array([moved(best) - moved(worst) for best, worst in pairs])
        judged = preference.judge(margins, spec)
        sums.add(self._intake.tally.loss_sums, preference.numbers(margins, judged, spec))
        weighed = zip(pairs, judged.weights.tolist(), strict=True)
        return {id(row): weight for (best, worst), by in weighed for row, weight in ((best, by), (worst, -by))}

    # --- the engine ---

    async def _asked(self, rows: Sequence[Row], ask: Ask) -> list[bytes]:
        """Return what the engine says of each row."""
        found: dict[int, bytes] = {}
        for batch in pack(rows, self._job.spec.trainer.micro_batch_tokens):
            found |= await self._asked_of(batch, ask)
        return [found[id(row)] for row in rows]

    async def _asked_of(self, batch: Sequence[Row], ask: Ask) -> dict[int, bytes]:
        # One micro-batch at a time: the turn may end between two.
        columns = await self._turn.run(partial(ask, [batch]))
        return {id(row): column for row, column in zip(batch, columns, strict=True)}


def _flat(groups: Sequence[Sequence[T]]) -> list[T]:
    return [one for group in groups for one in group]


def _grouped(like: Sequence[Sequence[Any]], rows: Sequence[Row]) -> list[list[Row]]:
    """Return rows in groups as large as those of `like`."""
    following = iter(rows)
    return [[next(following) for _ in group] for group in like]


def _array(column: bytes) -> critic.Array:
    return unpack(column, F32).astype(np.float64)


def _column(values: critic.Array) -> bytes:
    return values.astype(F32).tobytes()
