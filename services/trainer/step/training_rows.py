"""What becomes of a complete group: what reward functions get, what people see, and training rows once it is scored.

One of three estimators turns rewards into advantages: from rewards alone, with a critic, or for preference pairs.
`domain` has the rules; this module calls the engine for their inputs when the trainer has the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate, pairwise
from operator import attrgetter
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from rlboost.services.trainer.domain import advantages
from rlboost.services.trainer.domain.advantages import NEED_THE_STEP, all_equal, group_advantages, total
from rlboost.services.trainer.domain.batches import Accumulate, SequenceRow, TrainingRow, constant, pack, select
from rlboost.services.trainer.domain.conversations import Conversation, messages_of
from rlboost.services.trainer.domain.groups import ScoredGroup, WholeGroup
from rlboost.services.trainer.domain.loss import preference
from rlboost.services.trainer.domain.loss.function import add_sums
from rlboost.services.trainer.domain.metrics import StepTally
from rlboost.services.trainer.job.job import Job
from rlboost.services.trainer.ports.samples import Data, Prompt, RewardBatch, Scores, Verdict
from rlboost.services.trainer.ports.storage import LoggedSample
from rlboost.shared.ids import SampleId
from rlboost.shared.messages.codec import Span
from rlboost.shared.model.tool_call_formats import Tools
from rlboost.shared.wire import F32, ints, unpack

# --- What reward functions get of a complete group, and what people see of it -----------------------------------------


_TEXT_CHARS = 4_000
"""Published prompts and completions are cut to this length, in their middle: questions and answers are at the ends."""
_MESSAGE_CHARS = 600
"""Maximum characters that are published of each message of a long conversation."""


def reward_batch(group: WholeGroup, prompt: Prompt, data: Data) -> RewardBatch:
    """Return the arguments of the reward function for a group, in TRL's form.

    Completions are without special tokens: texts for a text prompt, lists with one assistant message for chat messages.
    For a conversation, a text is everything after the prompt, including the environment's answers; a list has the
    model's turns. `completions_raw` are texts of everything after the prompt, with special tokens.
    """
    ids = [ints(sample.tokens) for sample in group.samples]
    whole = [ints(completion) for completion in group.completions]
    solutions = [data.decode(tokens, skip_special_tokens=True) for tokens in ids]
    completions: list[str | list[dict[str, Any]]]
    if isinstance(prompt.given, str):
        completions = [data.decode(tokens, skip_special_tokens=True) for tokens in whole]
    elif group.conversations:
        completions = [
            [_assistant(data.decode(ints(turn.tokens), skip_special_tokens=True)) for turn in conversation.turns]
            for conversation in group.conversations
        ]
    else:
        completions = [[_assistant(text)] for text in solutions]
    columns = {name: [value] * len(ids) for name, value in prompt.columns.items()}
    raw = [data.decode(tokens, skip_special_tokens=False) for tokens in whole]
    return RewardBatch([prompt.given] * len(ids), completions, ids, columns, solutions, raw)


def add_conversation_rewards(scores: Scores, group: WholeGroup, *, name: str = "") -> Scores:
    """Return scores plus rewards and costs of the environment or agent; with a name, its rewards are also a part."""
    if scores.rewards is None or not group.conversations:
        return scores
    given = tuple(conversation.reward for conversation in group.conversations)
    rewards = tuple(total((reward, more)) for reward, more in zip(scores.rewards, given, strict=True))
    costs = scores.costs or (0.0,) * len(rewards)
    costs = tuple(total((cost, one.cost)) for cost, one in zip(costs, group.conversations, strict=True))
    parts = {**scores.parts, name: given} if name else scores.parts
    return replace(scores, rewards=rewards, parts=parts, costs=costs if any(costs) else ())


def verdict_fields(verdict: Verdict) -> dict[str, Any]:
    """Return the published fields of what a model on workers says of a completion."""
    fields = asdict(verdict) | {"answer": _without_middle(verdict.answer, _TEXT_CHARS)}
    return fields | {"spans": [list(span) for span in verdict.spans]}


def _shown(part: str, verdict: Verdict) -> tuple[str, dict[str, Any]]:
    """Return the name of a part of the reward, that of its model if it has none, and the fields of its verdict."""
    return part or verdict.job_id.rpartition(".")[2], verdict_fields(verdict)


def sample_summaries(
    group: WholeGroup,
    prompt: bytes,
    scores: Scores,
    data: Data,
    tools: Tools = (),
    verdicts: Mapping[str, Sequence[Verdict]] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Return the published fields of each sample, texts without special tokens; `prompt` is an int32 column."""
    rewards = scores.rewards or (None,) * len(group.samples)
    rows = []
    for i, (sample, completion, reward) in enumerate(zip(group.samples, group.completions, rewards, strict=True)):
        sample_id, tokens = SampleId.unpack(sample.sample), ints(completion)
        own = group.conversations[i].prompt if group.conversations else b""
        prompt_text = _without_middle(data.decode(ints(own or prompt), skip_special_tokens=True), _TEXT_CHARS)
        rows.append(
            {
                "sample": str(sample_id),
                "step": sample_id.step,
                "is_eval": sample_id.is_eval,
                "prompt": prompt_text,
                "completion": _without_middle(data.decode(tokens, skip_special_tokens=True), _TEXT_CHARS),
                "reward": reward,
                **({"rewards": {name: values[i] for name, values in scores.parts.items()}} if scores.parts else {}),
                **({"cost": scores.costs[i]} if scores.costs else {}),
                **({"reward_models": dict(scores.models)} if scores.models else {}),
                **({"verdicts": dict(_shown(part, given[i]) for part, given in verdicts.items())} if verdicts else {}),
                "reason": scores.reason,
                "finish": sample.finish,
                "n_tokens": len(ints(sample.tokens)),
                "spans": [list(span) for span in sample.spans],
                **(
                    conversation_fields(group.conversations[i], data, prompt, tools)
                    if group.conversations
                    else span_characters(tokens, sample.spans, data)
                ),
                "attempts": sample.attempts,
            }
        )
    return rows


def logged_samples(tally: StepTally, data: Data, n: int) -> list[LoggedSample]:
    """Return the first sample of each of the first `n` groups, training groups if there are any; long texts are cut."""
    groups = sorted(tally.rollouts.scored or tally.rollouts.evaluated, key=attrgetter("group"))[:n]
    found = []
    for group in groups:
        first = WholeGroup(group.group, group.samples[:1], group.conversations[:1])
        (shown,) = sample_summaries(first, group.prompt, Scores(group.rewards[:1]), data)
        found.append(LoggedSample(tally.step, shown["prompt"], shown["completion"], group.rewards[0]))
    return found


def conversation_fields(
    conversation: Conversation, data: Data, start: bytes = b"", tools: Tools = ()
) -> dict[str, Any]:
    """Return the number of turns, when they began (Unix seconds), how many seconds they took, and `messages_of`.

    Each text is cut in its middle.
    """
    messages = messages_of(conversation, data.decode, data.call_style, start, tools)
    limit = max(_MESSAGE_CHARS, _TEXT_CHARS // len(messages))
    for message in messages:
        message["content"] = _without_middle(message["content"], limit)
        if "tool_calls" in message:
            message["tool_calls"] = [_without_middle(call, limit) for call in message["tool_calls"]]
    times = {"began_at": round(conversation.lifetime.start, 3)}
    times |= {"duration_s": round(conversation.lifetime.seconds, 3), "outside_s": round(conversation.outside_s, 3)}
    return {"turns": len(conversation.turns), **times, "messages": messages}


def span_characters(tokens: Sequence[int], spans: Sequence[Span], data: Data) -> dict[str, list[int]]:
    """Return how many characters of a completion's whole text each span generated; empty for a single span."""
    if len(spans) < 2:
        return {}
    n_tokens = accumulate(n for _, _, n in spans)
    ends = [len(data.decode(tokens[:n], skip_special_tokens=True)) for n in n_tokens]
    return {"span_characters": [end - start for start, end in pairwise([0, *ends])]}


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _without_middle(text: str, limit: int) -> str:
    half, n_cut = limit // 2, len(text) - limit
    return text if n_cut <= 0 else f"{text[:half]}\n[{n_cut:,} characters cut]\n{text[-half:]}"


# --- The training rows of scored groups -------------------------------------------------------------------------------


T = TypeVar("T")
EngineCall = Callable[[Sequence[Sequence[SequenceRow]]], list[bytes]]
"""Returns a float32 column per row."""
Run = Callable[[Callable[[], list[bytes]]], Awaitable[list[bytes]]]
"""Runs a call on the device once the trainer has it: `DeviceTurn.run`."""


async def engine_columns(rows: Sequence[SequenceRow], call: EngineCall, max_tokens: int, run: Run) -> list[bytes]:
    """Return the engine's column of each row, computed in micro-batches of at most `max_tokens` tokens."""
    columns = [b""] * len(rows)
    for batch in pack(rows, max_tokens):
        # One call per micro-batch: the turn may end between two, and a cancelled job waits for one only.
        found = await run(partial(call, select(rows, [batch])))
        for index, column in zip(batch, found, strict=True):
            columns[index] = column
    return columns


class TrainingRows(ABC):
    """Builds the training rows of one step; a subclass turns the rewards of groups into the advantages of rows."""

    def __init__(self, job: Job, tally: StepTally, run: Run) -> None:
        """Count into `tally`; call the engine through `run`. Create it with `of`."""
        self._algorithm = job.generating_spec.algorithm
        self._engine = job.resources.engine
        self._critic = job.resources.critic
        self._tally = tally
        self._run = run
        self._micro_batch_tokens = job.spec.trainer.micro_batch_tokens
        # The weights at the start of the step are gone after its first update.
        decoupled = self._algorithm.is_decoupled(job.generating_spec.elastic.max_staleness)
        self._needs_proximal = decoupled and self._algorithm.updates_per_step * self._algorithm.epochs > 1
        self._is_served = bool(job.spec.served_teacher)
        self._keeps_reference = self._algorithm.needs_reference and self._algorithm.epochs > 1
        """True if each row gets its column of the reference once, for all epochs."""
        self.needs_all_groups = self._needs_proximal or self._algorithm.advantage in NEED_THE_STEP
        """True if rows can be built only from all groups of the step."""

    @staticmethod
    def of(job: Job, tally: StepTally, run: Run) -> TrainingRows:
        """Return the builder of a step of the job's algorithm."""
        algorithm = job.generating_spec.algorithm
        if algorithm.preference is not None:
            return _PreferencePairs(job, tally, run)
        return (_FromRewards if algorithm.critic is None else _WithCritic)(job, tally, run)

    async def build(self, groups: Sequence[ScoredGroup | None]) -> list[list[TrainingRow]]:
        """Return the rows of each group, an empty list for a group that was dropped or is excluded.

        Args:
            groups: some groups of the step; all of them if it `needs_all_groups`.

        """
        scored = [group for group in groups if group is not None]
        rows = await self._estimate(scored, [group.compared_rewards for group in scored])
        if self._needs_proximal:
            columns = iter(await self._columns(_flat(rows), self._engine.logprobs))
            rows = [[replace(row, proximal=next(columns)) for row in group] for group in rows]
        if self._keeps_reference and not all(row.reference for row in _flat(rows)):
            columns = iter(await self._columns(_flat(rows), self._engine.reference_logprobs))
            rows = [[replace(row, reference=next(columns)) for row in group] for group in rows]
        following = iter(rows)
        return [[] if group is None else next(following) for group in groups]

    async def micro_batches(self, work: Accumulate[TrainingRow]) -> list[list[TrainingRow]]:
        """Return micro-batches ready to accumulate: the weights of preference pairs depend on the current weights."""
        return select(await self._weigh(work.rows), work.indices)

    @abstractmethod
    async def _estimate(self, groups: Sequence[ScoredGroup], rewards: Sequence[list[float]]) -> list[list[TrainingRow]]:
        """Return the rows of each group, an empty list for a group that is excluded.

        Args:
            groups: some groups of the step, or all.
            rewards: the `compared_rewards` of each group.

        """

    async def _weigh(self, rows: Sequence[TrainingRow]) -> Sequence[TrainingRow]:
        """Return rows of whole groups with the advantages that depend on the current weights."""
        return rows

    async def _columns(self, rows: Sequence[SequenceRow], call: EngineCall) -> list[bytes]:
        return await engine_columns(rows, call, self._micro_batch_tokens, self._run)

    def _trainable(self, group: ScoredGroup, scalars: Sequence[float]) -> list[tuple[SequenceRow, float]]:
        """Return the rows of each sample that has a token and is not masked, with their scalars; none without scalars.

        The scalars are of samples, or of rows if the group `has_row_rewards`.
        """
        found: list[tuple[SequenceRow, float]] = []
        given = iter(scalars)
        for i, sample in enumerate(group.samples if scalars else ()):
            rows = group.conversations[i].rows(group.prompt) if group.conversations else []
            of_rows = [next(given) for _ in rows] if group.has_row_rewards else [next(given)] * max(1, len(rows))
            if not sample.tokens:
                continue
            if self._algorithm.mask_truncated:
                is_masked = sample.finish == "length"
                self._tally.masked[is_masked] += 1
                if is_masked:
                    continue
            experts = sample.routed_experts
            if not group.conversations:
                row = SequenceRow(
                    group.prompt, sample.tokens, sample.logprobs, routed_experts=experts, images=group.images
                )
                found.append((row, of_rows[0]))
                continue
            found += [
                (SequenceRow(row.prompt, row.completion, row.logprobs, row.loss_mask, experts), scalar)
                for row, scalar in zip(rows, of_rows, strict=True)
                if row.logprobs
            ]
        return found

    @property
    def _drops_equal_groups(self) -> bool:
        return self._algorithm.equal_groups == "drop"

    def _exclude(self, n_groups: int) -> None:
        if n_groups:
            self._tally.excluded["equal_rewards"] += n_groups


class _FromRewards(TrainingRows):
    """Compares rewards, which gives all tokens of a sample one advantage; a teacher scores each token."""

    async def _estimate(self, groups: Sequence[ScoredGroup], rewards: Sequence[list[float]]) -> list[list[TrainingRow]]:
        advantages = group_advantages(self._algorithm.advantage, rewards, drop_equal=self._drops_equal_groups)
        self._exclude(advantages.count(None))
        found = [
            [TrainingRow.of(row, constant(value, row)) for row, value in self._trainable(group, values or [])]
            for group, values in zip(groups, advantages, strict=True)
        ]
        if (teacher := self._algorithm.teacher) is None:
            return found
        if self._is_served:
            pairs = zip(found, groups, strict=True)
            columns = iter([_of_loss(row, group.taught) for rows, group in pairs for row in rows])
        else:
            columns = iter(await self._columns(_flat(found), self._engine.reference_logprobs))
        return [[_taught(row, next(columns), teacher.coef) for row in group] for group in found]


class _WithCritic(TrainingRows):
    """Compares rewards with a critic's values; each token has an advantage, and the critic a target there."""

    async def _estimate(self, groups: Sequence[ScoredGroup], rewards: Sequence[list[float]]) -> list[list[TrainingRow]]:
        excluded = [self._drops_equal_groups and all_equal(one) for one in rewards]
        self._exclude(sum(excluded))
        samples = [
            [] if is_excluded else self._trainable(group, one)
            for group, one, is_excluded in zip(groups, rewards, excluded, strict=True)
        ]
        rows = iter(await self._rows(_flat(samples)))
        return [[next(rows) for _ in group] for group in samples]

    async def _rows(self, samples: Sequence[tuple[SequenceRow, float]]) -> list[TrainingRow]:
        """Return the rows of samples with their rewards, and add the estimate's metrics to the tally."""
        if not samples:
            return []  # no rows, so no critic metrics
        critic, spec, kl_coef = self._critic, self._algorithm.critic, self._algorithm.kl_coef
        assert critic is not None, "the engine was built without the job's critic"
        assert spec is not None
        rows = [row for row, _ in samples]
        values = await self._columns(rows, critic.values)
        reference = await self._columns(rows, self._engine.reference_logprobs) if kl_coef else [b""] * len(rows)
        completions = [
            advantages.Experience(
                reward, _array(value), kl_coef * (_array(row.sampled) - _array(reference_column)) if kl_coef else None
            )
            for (row, reward), value, reference_column in zip(samples, values, reference, strict=True)
        ]
        estimate = advantages.gae_advantages(completions, spec.gamma, spec.gae_lambda)
        self._tally.measured |= advantages.metrics(estimate)
        columns = zip(rows, estimate.advantages, reference, values, estimate.returns, strict=True)
        return [
            TrainingRow.of(row, _column(advantages), reference=reference_column, values=value, returns=_column(returns))
            for row, advantages, reference_column, value, returns in columns
        ]


class _PreferencePairs(TrainingRows):
    """Prefers the best sample of a group to the worst; a pair's weight depends on the current weights."""

    async def _estimate(self, groups: Sequence[ScoredGroup], rewards: Sequence[list[float]]) -> list[list[TrainingRow]]:
        pairs = [self._pair(self._trainable(group, one)) for group, one in zip(groups, rewards, strict=True)]
        self._exclude(pairs.count([]))
        return pairs

    @staticmethod
    def _pair(samples: Sequence[tuple[SequenceRow, float]]) -> list[TrainingRow]:
        """Return the best and the worst row, without weights; an empty list if all rewards are equal."""
        places = preference.best_and_worst([reward for _, reward in samples]) if samples else None
        return [TrainingRow.of(samples[place][0], b"") for place in places or ()]

    async def _weigh(self, rows: Sequence[TrainingRow]) -> Sequence[TrainingRow]:
        """Return the rows of pairs with their weights, and add the pairs' losses to the tally.

        Args:
            rows: best and worst of a pair, then of the next.

        """
        spec = self._algorithm.preference
        assert spec is not None
        trained = await self._columns(rows, self._engine.logprobs)
        reference = [row.reference for row in rows]
        if not all(reference):
            reference = await self._columns(rows, self._engine.reference_logprobs)
        weighted, found = preference.weighted(rows, trained, reference, spec)
        add_sums(self._tally.loss_sums, found)
        return weighted


def _of_loss(row: SequenceRow, taught: Mapping[tuple[bytes, bytes], bytes]) -> bytes:
    """Return the teacher's log-probability of each loss token of a row, a float32 column."""
    column = taught[row.prompt, row.completion]
    return unpack(column, F32)[np.array(list(row.loss_mask), bool)].tobytes() if row.loss_mask else column


def _taught(row: TrainingRow, column: bytes, coef: float) -> TrainingRow:
    """Return a row whose tokens' advantages also grow by coef x (log p of the teacher - log p of the engine)."""
    scored = coef * (_array(column) - _array(row.sampled))
    return replace(row, advantages=_column(_array(row.advantages) + scored), reference=column)


def _flat(groups: Sequence[Sequence[T]]) -> list[T]:
    return [one for group in groups for one in group]


def _array(column: bytes) -> advantages.Array:
    return unpack(column, F32).astype(np.float64)


def _column(values: advantages.Array) -> bytes:
    return values.astype(F32).tobytes()
