"""Builds training rows from scored groups: turns rewards into advantages.

`domain` has the rules. This module calls the engine for their inputs when the trainer has the device: log-probabilities
under the weights at the start of the step, a critic's values, and log-probabilities of preference pairs under the
current weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from rlboost.services.trainer.device import DeviceTurn
from rlboost.services.trainer.domain.advantages import gae
from rlboost.services.trainer.domain.advantages.group_estimators import NEED_THE_STEP, group_advantages
from rlboost.services.trainer.domain.batches.batching import pack
from rlboost.services.trainer.domain.batches.training_row import TrainingRow
from rlboost.services.trainer.domain.groups.scored_group import ScoredGroup
from rlboost.services.trainer.domain.loss import preference, sums
from rlboost.services.trainer.domain.metrics import StepTally
from rlboost.services.trainer.domain.rewards.shaping import shaped_rewards
from rlboost.services.trainer.ports.engine import Critic
from rlboost.services.trainer.step.context import JobContext
from rlboost.shared.job.algorithm import CriticSpec, PreferenceSpec
from rlboost.shared.wire.columns import F32, unpack

T = TypeVar("T")
EngineCall = Callable[[Sequence[Sequence[TrainingRow]]], list[bytes]]
"""Returns a float32 column per row."""


class TrainingRowBuilder:
    """Builds the training rows of one step."""

    def __init__(self, job: JobContext, tally: StepTally, turn: DeviceTurn) -> None:
        """Count into `tally`; call the engine through `turn`."""
        self._job = job
        self._algorithm = job.spec.algorithm
        self._engine = job.resources.engine
        self._tally = tally
        self._turn = turn
        self._pairs: list[tuple[TrainingRow, TrainingRow]] = []
        """(best, worst) of the groups whose rows are built and have no weights yet."""

    @property
    def needs_all_groups(self) -> bool:
        """Return True if rows can be built only from all groups of the step."""
        return self._needs_proximal or self._algorithm.advantage in NEED_THE_STEP

    async def build(self, groups: Sequence[ScoredGroup | None]) -> list[list[TrainingRow]]:
        """Return the rows of each group, an empty list for a group that was dropped or is left out.

        Args:
            groups: some groups of the step; all of them if it `needs_all_groups`.

        """
        resources, spec, max_tokens = self._job.resources, self._algorithm, self._job.spec.sampling.max_tokens
        rewards = [[] if group is None else shaped_rewards(group, spec, max_tokens) for group in groups]
        if spec.preference is not None:
            return [self._pair(*both) for both in zip(groups, rewards, strict=True)]
        if spec.critic is not None:
            assert resources.critic is not None, "the engine was built without the job's critic"
            rows_by_group = await self._rows_with_critic(groups, rewards, spec.critic, resources.critic)
        else:
            rows_by_group = self._rows_with_estimator(groups, rewards)
        if self._needs_proximal:
            rows = _flat(rows_by_group)
            columns = await self._columns(rows, self._engine.logprobs)
            rows_by_group = _grouped(
                rows_by_group, [replace(row, proximal=one) for row, one in zip(rows, columns, strict=True)]
            )
        return rows_by_group

    async def with_pair_weights(self, batches: list[list[TrainingRow]]) -> list[list[TrainingRow]]:
        """Return micro-batches ready to accumulate: the weights of preference pairs depend on the current weights.

        Args:
            batches: all rows built since the last call, in any micro-batches.

        """
        spec, pairs = self._algorithm.preference, self._pairs
        if spec is None:
            return batches
        self._pairs = []
        trained: dict[int, bytes] = {}
        start: dict[int, bytes] = {}
        for batch in batches:
            trained |= await self._columns_of(batch, self._engine.logprobs)
            start |= await self._columns_of(batch, self._engine.reference_logprobs)
        weights = self._pair_weights(spec, pairs, trained, start)
        return [
            [replace(row, advantage=weights[id(row)], reference=start[id(row)]) for row in batch] for batch in batches
        ]

    @property
    def _needs_proximal(self) -> bool:
        # The weights at the start of the step are gone after its first update.
        decoupled = self._algorithm.is_decoupled(self._job.spec.elastic.max_staleness)
        return decoupled and self._algorithm.updates_per_step > 1

    def _rows(self, group: ScoredGroup, scalars: Sequence[float]) -> list[TrainingRow]:
        """Return a row for each sample that has a token.

        Args:
            group: the samples.
            scalars: advantages, or rewards that `_pair` and the critic replace.

        """
        conversations = group.conversations or (None,) * len(group.samples)
        return [
            TrainingRow(
                group.prompt,
                sample.tokens if conversation is None else conversation.completion,
                sample.logprobs,
                scalar,
                loss_mask=b"" if conversation is None else conversation.loss_mask,
                routed_experts=sample.routed_experts,
            )
            for sample, conversation, scalar in zip(group.samples, conversations, scalars, strict=True)
            if sample.tokens
        ]

    # --- advantages from rewards alone ---

    def _rows_with_estimator(
        self, groups: Sequence[ScoredGroup | None], rewards: Sequence[list[float]]
    ) -> list[list[TrainingRow]]:
        scored = [one for one in rewards if one]
        drops = self._algorithm.equal_groups == "drop"
        found = iter(group_advantages(self._algorithm.advantage, scored, drop_equal=drops))
        advantages = [next(found) if one else None for one in rewards]
        self._leave_out(sum(bool(one) and value is None for one, value in zip(rewards, advantages, strict=True)))
        return [
            [] if group is None or values is None else self._rows(group, values)
            for group, values in zip(groups, advantages, strict=True)
        ]

    def _leave_out(self, n_groups: int) -> None:
        if n_groups:
            self._tally.left_out["equal_rewards"] += n_groups

    # --- advantages with a critic ---

    async def _rows_with_critic(
        self, groups: Sequence[ScoredGroup | None], rewards: Sequence[list[float]], spec: CriticSpec, engine: Critic
    ) -> list[list[TrainingRow]]:
        """Return rows with an advantage per token, and with the critic's targets."""
        drops = self._algorithm.equal_groups == "drop"
        left_out = [bool(one) and drops and min(one) == max(one) for one in rewards]
        self._leave_out(sum(left_out))
        rows_by_group = [
            [] if group is None or out else self._rows(group, one)
            for group, one, out in zip(groups, rewards, left_out, strict=True)
        ]
        rows = _flat(rows_by_group)
        if not rows:
            return rows_by_group  # no rows, so no critic metrics
        values = await self._columns(rows, engine.values)
        penalties: list[gae.Array | None] = [None] * len(rows)
        if self._algorithm.kl_coef:
            start = await self._columns(rows, self._engine.reference_logprobs)
            rows = [replace(row, reference=column) for row, column in zip(rows, start, strict=True)]
            penalties = [self._algorithm.kl_coef * (_array(row.logprobs) - _array(row.reference)) for row in rows]
        step = [
            gae.Experience(row.advantage, _array(expected), penalty)
            for row, expected, penalty in zip(rows, values, penalties, strict=True)
        ]
        found = gae.gae_advantages(step, spec.gamma, spec.gae_lambda)
        self._tally.measured |= gae.metrics(found)
        columns = zip(rows, found.advantages, values, found.returns, strict=True)
        return _grouped(
            rows_by_group,
            [
                replace(row, advantage=0.0, advantages=_column(advantages), values=expected, returns=_column(returns))
                for row, advantages, expected, returns in columns
            ],
        )

    # --- pairs ---

    def _pair(self, group: ScoredGroup | None, rewards: list[float]) -> list[TrainingRow]:
        """Return the best and the worst row of a group, an empty list if all rewards are equal."""
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

    def _pair_weights(
        self,
        spec: PreferenceSpec,
        pairs: Sequence[tuple[TrainingRow, TrainingRow]],
        trained: dict[int, bytes],
        start: dict[int, bytes],
    ) -> dict[int, float]:
        """Return the weight of each row's log-likelihood, and add the pairs' losses to the tally."""

        def moved(row: TrainingRow) -> float:
            return preference.sequence_log_ratio(_array(trained[id(row)]), _array(start[id(row)]))

        margins = np.array([moved(best) - moved(worst) for best, worst in pairs])
        losses = preference.pair_losses(margins, spec)
        sums.add(self._tally.loss_sums, preference.numbers(margins, losses, spec))
        weighed = zip(pairs, losses.weights.tolist(), strict=True)
        return {id(row): weight for (best, worst), by in weighed for row, weight in ((best, by), (worst, -by))}

    # --- the engine ---

    async def _columns(self, rows: Sequence[TrainingRow], call: EngineCall) -> list[bytes]:
        """Return the engine's column for each row."""
        found: dict[int, bytes] = {}
        for batch in pack(rows, self._job.spec.trainer.micro_batch_tokens):
            found |= await self._columns_of(batch, call)
        return [found[id(row)] for row in rows]

    async def _columns_of(self, batch: Sequence[TrainingRow], call: EngineCall) -> dict[int, bytes]:
        # One call per micro-batch: the turn may end between two.
        columns = await self._turn.run(partial(call, [batch]))
        return {id(row): column for row, column in zip(batch, columns, strict=True)}


def _flat(groups: Sequence[Sequence[T]]) -> list[T]:
    return [one for group in groups for one in group]


def _grouped(like: Sequence[Sequence[Any]], rows: Sequence[TrainingRow]) -> list[list[TrainingRow]]:
    """Return rows in groups of the same sizes as those of `like`."""
    following = iter(rows)
    return [[next(following) for _ in group] for group in like]


def _array(column: bytes) -> gae.Array:
    return unpack(column, F32).astype(np.float64)


def _column(values: gae.Array) -> bytes:
    return values.astype(F32).tobytes()
