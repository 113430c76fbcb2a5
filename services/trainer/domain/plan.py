"""The plan of a step: the groups that it requests, its learning rate, and the updates that their rows are trained in.

The groups and the learning rate are pure functions of the job, the step and the sizes of the data; the updates, of the
order in which groups are complete. A restarted trainer derives the same, so none of this is stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Generic, Protocol, TypeVar

from rlboost.services.trainer.domain.advantages import all_equal
from rlboost.services.trainer.domain.conversations import StepTurnIds, TurnIds
from rlboost.shared.errors import ConfigError
from rlboost.shared.ids import MAX_GROUP_SIZE, MAX_GROUPS_PER_STEP, SampleId, within_job
from rlboost.shared.job.algorithm import TEACHER
from rlboost.shared.job.fleet import HeldOutSet
from rlboost.shared.job.reward import REPLACEMENTS, SPARE_TURNS
from rlboost.shared.job.spec import GeneratingJob, RlJob
from rlboost.shared.job.training import OptimizerSpec
from rlboost.shared.wire import F32, I32, length
from rlboost.shared.wire import pack as pack_column

# --- The learning rate at each step -----------------------------------------------------------------------------------


def learning_rate(optimizer: OptimizerSpec, step: int, steps: int) -> float:
    """Return the learning rate of `step`: a linear warm-up from 0 to `lr`, then a fall by `decay`.

    As in transformers: with `decay: 1` its schedules `linear` and `cosine` (arXiv 1608.03983, equation 5, without
    restarts), with `decay: 0` its `constant_with_warmup`.
    """
    warmup = optimizer.warmup_steps
    if step < warmup:
        return optimizer.lr * step / warmup
    fallen = (step - warmup) / max(1, steps - warmup)
    if optimizer.schedule == "cosine":
        fallen = (1.0 - math.cos(math.pi * fallen)) / 2
    return optimizer.lr * (1.0 - optimizer.decay * fallen)


# --- The plan of one step ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """One group to generate."""

    id: int
    """Packed id of its sample 0."""
    held_out: HeldOutSet | None
    """The set that it evaluates; None for a training group."""
    row: int
    """Index of its prompt in the training or the evaluation data."""
    n: int
    """Number of completions."""
    seed: int
    """The environment's, and of the samples; the same in any job with the same `trainer.seed`."""
    number: int
    """Its number in the step, from 0, counted separately for training and evaluation groups."""

    @property
    def is_eval(self) -> bool:
        """Return True if it is not trained."""
        return self.held_out is not None


def check(spec: GeneratingJob, n_eval: Sequence[int]) -> None:
    """Check that every step of a job can be planned.

    Args:
        spec: the job.
        n_eval: number of prompts of each held-out set.

    Raises:
        ConfigError: naming the field.

    """
    if n_training_groups(spec) > MAX_GROUPS_PER_STEP:
        raise ConfigError(
            f"algorithm.resample: {spec.data.prompts_per_step} prompts a step, and up to {spec.algorithm.resample} "
            f"more in the place of each, are more than {MAX_GROUPS_PER_STEP}: lower it, or data.prompts_per_step"
        )
    asked = OtherModelIds.of(spec, n_eval)
    if asked.n_numbers > MAX_GROUPS_PER_STEP:
        parts, has_judges = spec.served_parts, any(part.judge for part in spec.served_parts)
        field = "reward.judge.retries" if has_judges else "reward.model" if parts else TEACHER
        raise ConfigError(
            f"{field}: the models that score may be asked {asked.n_numbers} times a step, more than "
            f"{MAX_GROUPS_PER_STEP}: lower {'it, or ' if has_judges else ''}data.prompts_per_step, "
            f"algorithm.group_size, algorithm.resample{', eval.samples' if parts else ''} or agent.max_turns"
        )
    step_ids, section = turn_ids(spec, n_eval), "environment" if spec.agent is None else "agent"
    for ids in step_ids:
        if ids is not None and ids.n_numbers > MAX_GROUPS_PER_STEP:
            resamples = spec.algorithm.resample and ids is step_ids.training
            also = " (with those that algorithm.resample may add)" if resamples else ""
            more = f", and {ids.replacements} that may begin again," if ids.replacements else ""
            raise ConfigError(
                f"{section}.max_turns: {ids.n_groups} prompts{also} with {ids.group_size} samples{more} of "
                f"{ids.max_turns} turns are more than {MAX_GROUPS_PER_STEP} turns a step: lower it, or "
                f"data.prompts_per_step, algorithm.group_size, algorithm.resample, {section}.replacements or "
                "eval.samples"
            )
    for held_out, n_prompts in zip(spec.held_out, n_eval, strict=True):
        most = max(eval_group_sizes(held_out.samples, n_prompts), default=0)
        if most > MAX_GROUP_SIZE:
            raise ConfigError(
                f"{held_out.section}.samples: {held_out.samples} over {n_prompts} evaluation prompts is {most} a "
                f"prompt, more than {MAX_GROUP_SIZE}: lower it, or give more prompts in {held_out.rows.field}"
            )
    if len(_evaluated(spec, n_eval)) >= MAX_GROUPS_PER_STEP:
        raise ConfigError(f"eval.samples: more than {MAX_GROUPS_PER_STEP - 1} evaluation prompts at once: lower it")


def plan_step(
    spec: GeneratingJob, job_no: int, step: int, n_train: int, n_eval: Sequence[int], rows: Sequence[int] | None = None
) -> list[PlannedGroup]:
    """Return the groups of one step: training groups, then evaluation groups if they are due.

    The step numbered `spec.steps` trains nothing and evaluates the final weights.

    Args:
        spec: the job.
        job_no: the job's number.
        step: the step.
        n_train: number of training prompts.
        n_eval: number of prompts of each held-out set.
        rows: the training prompts that a curriculum chose; None: the next ones of the epoch order.

    """
    groups = []
    if isinstance(spec, RlJob) and step < spec.steps:
        if rows is None:
            rows = prompt_indices(spec.trainer.seed, step, spec.data.prompts_per_step, n_train)
        groups = [training_group(spec, job_no, step, g, row) for g, row in enumerate(rows)]
    if spec.eval is not None and spec.eval.is_due(step, spec.steps):
        due = enumerate(_evaluated(spec, n_eval))
        groups += [_planned(spec, job_no, step, number, row, n, held_out) for number, (held_out, row, n) in due]
    return groups


def _evaluated(spec: GeneratingJob, n_eval: Sequence[int]) -> list[tuple[HeldOutSet, int, int]]:
    """Return the held-out set, row and number of completions of each evaluation group.

    Rows are numbered over all sets, groups without the prompts that get no completion.
    """
    found, first = [], 0
    for held_out, n_prompts in zip(spec.held_out, n_eval, strict=True):
        counts = enumerate(eval_group_sizes(held_out.samples, n_prompts), first)
        found += [(held_out, row, n) for row, n in counts if n]
        first += n_prompts
    return found


def training_group(spec: GeneratingJob, job_no: int, step: int, number: int, row: int) -> PlannedGroup:
    """Return a training group of a step by its number in the step, from 0, and its prompt."""
    return _planned(spec, job_no, step, number, row, spec.algorithm.group_size)


def n_training_groups(spec: GeneratingJob) -> int:
    """Return the maximal number of training groups of a step, including replacements."""
    return spec.data.prompts_per_step * (1 + (spec.algorithm.resample or 0))


def turn_ids(spec: GeneratingJob, n_eval: Sequence[int]) -> StepTurnIds:
    """Return the ids of a step's turns; `n_eval` is the number of prompts of each held-out set."""
    training = evaluation = None
    if isinstance(spec, RlJob):
        training = _with_replacements(TurnIds(n_training_groups(spec), spec.algorithm.group_size, 1), spec)
    if spec.eval is not None:
        counts = [n for _, _, n in _evaluated(spec, n_eval)]
        evaluation = _with_replacements(TurnIds(len(counts), max(counts), 1), spec)
    return StepTurnIds(training, evaluation)


def _with_replacements(ids: TurnIds, spec: GeneratingJob) -> TurnIds:
    if (conversation := spec.conversation) is None:
        return ids
    # Each call of an agent is requested alone, as turns after the first are.
    ids = replace(ids, max_turns=conversation.max_turns + (0 if spec.agent is None else 1 + SPARE_TURNS))
    if spec.agent is not None and spec.agent.leader:
        # Its sessions do not begin again: they go on where those of the leader do, whose agent calls anew.
        room = ((MAX_GROUPS_PER_STEP // ids.n_groups - 1) // ids.group_size - SPARE_TURNS) // conversation.max_turns
        more = REPLACEMENTS if conversation.replacements is None else conversation.replacements
        return replace(ids, max_turns=ids.max_turns + max(0, min(more, room - 1)) * conversation.max_turns)
    if conversation.replacements is not None:
        return replace(ids, replacements=conversation.replacements)
    room = (MAX_GROUPS_PER_STEP - ids.n_numbers) // (ids.n_groups * ids.max_turns)
    return replace(ids, replacements=max(0, min(REPLACEMENTS, room)))


@dataclass(frozen=True, slots=True)
class OtherModelIds:
    """The ids of what the models of a reward and the teacher are asked: each a group of one sample of the serving job.

    The parts of the reward that models on workers give are its judges here; a reward model has one try. The teacher
    counts as the last judge, and the rows of a sample as tries. It scores no evaluation.
    """

    n_judges: int
    tries: int
    """Of the judge with the most."""
    group_size: int
    """Completions of a group at most."""
    n_groups: int
    """Groups of a step at most."""

    @classmethod
    def of(cls, spec: GeneratingJob, n_eval: Sequence[int]) -> OtherModelIds:
        """Return the ids of a job; `n_eval` is the number of prompts of each held-out set."""
        sizes = [n for _, _, n in _evaluated(spec, n_eval)] if spec.eval is not None and spec.served_parts else []
        n_groups = len(sizes)
        if isinstance(spec, RlJob):
            sizes.append(spec.algorithm.group_size)
            n_groups = max(n_groups, n_training_groups(spec))
        tries = [1 if part.judge is None else part.judge.tries for part in spec.served_parts]
        if spec.served_teacher:
            turns = turn_ids(spec, n_eval).training
            tries.append(1 if spec.agent is None or turns is None else turns.max_turns)  # at most one row for each
        return cls(len(tries), max(tries, default=0), max(sizes, default=0), n_groups)

    @property
    def n_numbers(self) -> int:
        """Return how many ids a step needs at most."""
        return self.n_groups * self.group_size * self.n_judges * self.tries

    def group(self, job_no: int, planned: PlannedGroup, judge: int, member: int, attempt: int) -> int:
        """Return the packed id of a question, or of a row for the teacher.

        Args:
            job_no: number of the serving job.
            planned: the group that is judged.
            judge: number of the judge.
            member: the completion of the group.
            attempt: how often the judge was asked about it before.

        """
        number = ((planned.number * self.group_size + member) * self.n_judges + judge) * self.tries + attempt
        return SampleId.unpack(planned.id)._replace(job=job_no, group=number, member=0).pack()


def last_step(spec: GeneratingJob) -> int:
    """Return the number of the last step: the final evaluation, if the job evaluates."""
    return spec.steps if spec.eval is not None else spec.steps - 1


def prompt_indices(seed: int, step: int, per_step: int, n_rows: int) -> list[int]:
    """Return the indices of a step's training prompts: epoch after epoch, each shuffled differently."""
    first = step * per_step
    return [epoch_order(seed, p // n_rows, n_rows)[p % n_rows] for p in range(first, first + per_step)]


@lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, n_rows: int) -> tuple[int, ...]:
    """Return the shuffled row indices of one epoch: sorted by a hash, so equal in every process and release."""
    return tuple(sorted(range(n_rows), key=lambda row: _hash(f"{seed}/{epoch}/{row}")))


def eval_group_sizes(samples: int, n_prompts: int) -> list[int]:
    """Return the number of completions of each prompt of a set: as even as possible, the first ones get one more."""
    each, more = divmod(samples, n_prompts)
    return [each + (i < more) for i in range(n_prompts)]


def _planned(
    spec: GeneratingJob, job_no: int, step: int, group: int, row: int, n: int, held_out: HeldOutSet | None = None
) -> PlannedGroup:
    packed = SampleId(job_no, held_out is not None, step, group, 0).pack()
    # Without the job's number: the same job draws the same samples again, and jobs that differ in one setting differ in
    # nothing else.
    seed = int.from_bytes(_hash(f"{spec.trainer.seed}/{within_job(packed)}")[:6], "big")
    return PlannedGroup(packed, held_out, row, n, seed, group)


def _hash(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=8).digest()


# --- Replaces groups without a learning signal by groups of other prompts ---------------------------------------------
# This is the dynamic sampling of DAPO, arXiv 2503.14476, section 3.2.
#
# A step has `data.prompts_per_step` slots. A group whose rewards are all equal is replaced by a group of another
# prompt, up to `algorithm.resample` times per slot. The replacement depends on the replaced group alone, and on the
# state of the curriculum before the step was requested, but not on the order of scoring or on other slots. So each
# group is replaced as soon as it is scored, and a restarted trainer requests the same replacements.


def has_signal(rewards: Sequence[float]) -> bool:
    """Return True if the rewards of a group, after shaping, are not all equal."""
    return not all_equal(rewards)


@dataclass(frozen=True, slots=True)
class Replacements:
    """The rules of one step: which group replaces which, and with which prompt."""

    n: int
    """Number of slots of the step."""
    tries: int
    """Maximal number of replacements per slot."""
    seed: int
    step: int
    n_rows: int
    """Number of training prompts."""

    @classmethod
    def of(cls, spec: GeneratingJob, step: int, n_rows: int) -> Replacements:
        """Return the rules of a step of a job with `n_rows` training prompts."""
        tries = spec.algorithm.resample or 0
        return cls(spec.data.prompts_per_step, tries, spec.trainer.seed, step, n_rows)

    def replacement_number(self, number: int) -> int | None:
        """Return the number of the group that replaces group `number`, None if its slot has no tries left."""
        return number + self.n if number // self.n < self.tries else None

    def replacement_rows(
        self, initial: Sequence[int], is_skipped: Callable[[int], bool] = lambda _: False
    ) -> list[int]:
        """Return the prompts of replacement groups, each once, those that the curriculum skips last.

        They come from a separate shuffled order, so that resampling does not change the initial prompts of later steps.

        Args:
            initial: the initial prompts of the step. They are returned, rotated by one, if the data has no others.
            is_skipped: whether to prefer other prompts to this one.

        """
        most, seen = self.n * self.tries, set(initial)
        found: list[int] = []
        skipped: list[int] = []
        # Two epochs contain a whole one from any starting position.
        for position in range(self.step * most, self.step * most + 2 * self.n_rows):
            if len(found) == most:
                break
            epoch, offset = divmod(position, self.n_rows)
            row = epoch_order(self.seed, -1 - epoch, self.n_rows)[offset]
            if row not in seen:
                seen.add(row)
                (skipped if is_skipped(row) else found).append(row)
        return [*found, *skipped][:most] or list(dict.fromkeys([*initial[1:], *initial[:1]]))

    def row(self, number: int, rows: Sequence[int]) -> int:
        """Return the prompt of replacement group `number`: a different one for each, if `rows` has enough."""
        attempt, slot = divmod(number - self.n, self.n)
        # With too few rows, a slot still gets a different prompt in each attempt, as long as there is one.
        return rows[(slot + attempt * min(self.n, max(1, len(rows) // self.tries))) % len(rows)]


# --- Rows of a batch: a token sequence, and the columns that training it needs ----------------------------------------


@dataclass(frozen=True, slots=True)
class SequenceRow:
    """A prompt and its completion: what a forward pass needs."""

    prompt: bytes
    """int32 column of token ids."""
    completion: bytes
    """int32 column of token ids; `loss_mask` selects those with a loss."""
    sampled: bytes = b""
    """float32 column: log-probability of each loss token when it was generated. Forward passes do not read it."""
    loss_mask: bytes = b""
    """uint8 column aligned with `completion`: 1 for a token with a loss, 0 for a token of an environment; empty if all
    tokens have a loss. The float32 columns have one entry per loss token."""
    routed_experts: bytes = b""
    """Routed experts (`RoutedShape`) with an entry per loss token, which the router replays; empty: not known."""
    images: Sequence[str] = ()
    """Digests of the images of the prompt."""

    @property
    def n_tokens(self) -> int:
        """Number of tokens of prompt and completion."""
        return length(self.prompt, I32) + length(self.completion, I32)

    @property
    def n_loss_tokens(self) -> int:
        """Number of tokens with a loss, at least one."""
        return sum(self.loss_mask) if self.loss_mask else length(self.completion, I32)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRow(SequenceRow):
    """A sequence to train on. Of each column after `advantages` all rows of a micro-batch have one, or none."""

    advantages: bytes
    """float32 column: advantage of each loss token; for a preference pair, the weight of its log-likelihood, and empty
    until that is known."""
    proximal: bytes = b""
    """float32 column: log-probability of each loss token under the weights at the start of the step; empty if these are
    the current weights, or not needed."""
    reference: bytes = b""
    """float32 column: log-probability of each loss token under the initial weights, if already computed."""
    values: bytes = b""
    """float32 column: the critic's value before each loss token, at the start of the step."""
    returns: bytes = b""
    """float32 column: the critic's target at each loss token."""

    @classmethod
    def of(cls, row: SequenceRow, advantages: bytes, **columns: Any) -> TrainingRow:
        """Return a row with these advantages, and with optional columns by name."""
        sequence = (row.prompt, row.completion, row.sampled, row.loss_mask, row.routed_experts, row.images)
        return cls(*sequence, advantages=advantages, **columns)


def constant(value: float, row: SequenceRow) -> bytes:
    """Return a float32 column with the same value at each loss token of a row."""
    return pack_column([value] * row.n_loss_tokens, F32)


# --- Distributes the rows of a micro-batch over data-parallel ranks ---------------------------------------------------


def partition(sizes: Sequence[int], n_parts: int) -> list[list[int]]:
    """Partition items so that the sums of the parts are close; deterministic.

    Longest item first, each to the part with the lowest sum so far (Graham's LPT rule, SIAM J. Appl. Math. 17, 1969:
    never above 4/3 of the best).

    Args:
        sizes: size of each item.
        n_parts: number of parts.

    Returns:
        The items' indices of each part, ascending; empty for some parts if there are fewer items than parts.

    """
    parts: list[list[int]] = [[] for _ in range(n_parts)]
    sums = [0] * n_parts
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        least = min(range(n_parts), key=lambda part: (sums[part], len(parts[part]), part))
        parts[least].append(item)
        sums[least] += sizes[item]
    return [sorted(part) for part in parts]


# --- From groups, in order of completion, to micro-batches and optimizer steps ----------------------------------------
# The computation depends only on that order, never on timing: a step that is trained again from recorded samples gives
# the same bits. Forward and backward start before the last group is complete.


_FLUSH_BATCHES = 4
"""Number of micro-batches to gather before rows are packed. More fills micro-batches better, but means a later start
and more work after the last group."""


class Sized(Protocol):
    """A row of a batch."""

    @property
    def n_tokens(self) -> int:
        """Number of tokens of prompt and completion."""


R = TypeVar("R", bound=Sized)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Accumulate(Generic[R]):
    """Run forward and backward over these micro-batches."""

    rows: list[R]
    """Whole groups, in the order in which they were added."""
    indices: list[list[int]]
    """The rows of each micro-batch."""

    @property
    def batches(self) -> list[list[R]]:
        """The micro-batches."""
        return select(self.rows, self.indices)


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Apply the accumulated gradients."""


class UpdatePlanner(Generic[R]):
    """Splits one step's groups into updates, in order of completion, and an update's rows into micro-batches."""

    def __init__(self, n_groups: int, n_updates: int, micro_batch_tokens: int) -> None:
        """Plan for `n_groups` groups, `n_updates` optimizer steps and `micro_batch_tokens` tokens at most.

        A longer row gets its own micro-batch.
        """
        self._ends = {(i + 1) * n_groups // n_updates for i in range(n_updates)}
        self._budget = micro_batch_tokens
        self._n_added = 0
        self._rows: list[R] = []

    def add(self, rows: Sequence[R]) -> list[Accumulate[R] | OptimizerStep]:
        """Add the rows of the next group (empty if it is not trained on) and return the work that is ready."""
        self._rows += rows
        self._n_added += 1
        update_ends = self._n_added in self._ends
        work: list[Accumulate[R] | OptimizerStep] = []
        if self._rows and (update_ends or sum(row.n_tokens for row in self._rows) >= _FLUSH_BATCHES * self._budget):
            work.append(Accumulate(self._rows, pack(self._rows, self._budget)))
            self._rows = []
        if update_ends:
            work.append(OptimizerStep())
        return work


def pack(rows: Sequence[Sized], max_tokens: int) -> list[list[int]]:
    """Return the indices of micro-batches of at most `max_tokens` tokens, or of one longer row.

    Rows of similar length are together. All micro-batches but the last are more than half full.
    """
    sizes = [row.n_tokens for row in rows]
    batches: list[list[int]] = []
    tokens_left = 0
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        if sizes[index] > tokens_left or not batches:
            batches.append([])
            tokens_left = max_tokens
        batches[-1].append(index)
        tokens_left -= sizes[index]
    return batches


def select(rows: Sequence[T], batches: Sequence[Sequence[int]]) -> list[list[T]]:
    """Return the rows of micro-batches of indices."""
    return [[rows[index] for index in batch] for batch in batches]
