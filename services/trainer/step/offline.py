"""One step, or one evaluation, of a job that learns from completions in the data, without workers or rewards.

The job's seed and the step's number determine the rows of a step, and their lengths the order, so a trainer that
resumes from a checkpoint computes the same bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial

from rlboost.services.trainer.domain import plan
from rlboost.services.trainer.domain.loss import preference
from rlboost.services.trainer.domain.loss.function import add_sums
from rlboost.services.trainer.domain.metrics import OfflineStep, perplexity
from rlboost.services.trainer.domain.plan import SequenceRow, TrainingRow, constant, pack, select
from rlboost.services.trainer.job.job import Job
from rlboost.services.trainer.ports.engine import NotFinite
from rlboost.services.trainer.ports.samples import Prompt
from rlboost.services.trainer.step.run import EngineCall, engine_columns
from rlboost.shared.data.examples import LABEL, MARGIN
from rlboost.shared.errors import Fatal
from rlboost.shared.job.offline import DpoJob, OfflineJob, RewardJob
from rlboost.shared.wire import I32, floats, length

_HELD_OUT = {
    "dpo": ("rewards/accuracies", "rewards/margins"),
    "reward": ("accuracy", "margin", "mean_reward"),
}
"""Kind of job -> the metrics of held-out pairs or labelled rows, next to the loss."""


async def train_step(job: Job, spec: OfflineJob, step: int) -> dict[str, float]:
    """Train on the rows of step `step`, forward and backward over its micro-batches and one update; return its metrics.

    Raises:
        Fatal: a loss or the gradients are not finite; the weights are unchanged.

    """
    device, resources = job.device, job.resources
    began, waited_s = time.monotonic(), device.waited_s
    data, engine, numbers = resources.data.train, resources.engine, dict[str, float]()
    indices = plan.prompt_indices(spec.trainer.seed, step, spec.data.prompts_per_step, len(data))
    examples = [data[i] for i in indices]
    rows = _rows(spec, examples)
    rate = plan.learning_rate(spec.optimizer, step, spec.steps)
    try:
        if isinstance(spec, DpoJob | RewardJob):
            rows, numbers = await _weighted(job, spec, examples, rows)
        for batch in select(rows, pack(rows, spec.trainer.micro_batch_tokens)):
            # One call per micro-batch: a cancelled job waits for one only.
            add_sums(numbers, await device.compute(partial(engine.accumulate, [batch], resources.loss)))
        norm = await device.compute(partial(engine.step, rate))
    except NotFinite as error:
        path = await device.run(partial(resources.folder.dump_batch, f"not-finite-step-{step}.jsonl", rows))
        raise Fatal(
            f"step {step + 1}: {error}. Look for bad data among the {len(rows)} rows in {path}, or lower optimizer.lr"
        ) from error
    lengths = [length(completion, I32) for example in examples for completion in example.completions]
    waited_s = device.waited_s - waited_s
    train_s, wait_s = time.monotonic() - began - waited_s, waited_s if device.is_shared else None
    return OfflineStep(numbers, lengths, norm, rate, train_s=train_s, device_wait_s=wait_s).metrics()


async def evaluate(job: Job, spec: OfflineJob) -> dict[str, float]:
    """Return the metrics of the present weights on each held-out set: means over all its tokens, or all its pairs."""
    data, first, metrics = job.resources.data, 0, dict[str, float]()
    for held_out, n_rows in zip(spec.held_out, data.n_evaluation, strict=True):
        found = await _evaluate(job, spec, data.evaluation[first : first + n_rows])
        metrics |= {held_out.prefix + name: value for name, value in found.items()}
        first += n_rows
    return metrics


async def _evaluate(job: Job, spec: OfflineJob, examples: Sequence[Prompt]) -> dict[str, float]:
    rows = _rows(spec, examples)
    if isinstance(spec, DpoJob | RewardJob):
        _, found = await _weighted(job, spec, examples, rows)
        means = preference.pair_metrics(found) | preference.score_metrics(found)
        shown = {name: means[name] for name in _HELD_OUT[spec.kind] if name in means}
        return {"loss": found["loss"] / len(rows), **shown}
    columns = [floats(column) for column in await _columns(job, rows, job.resources.engine.logprobs)]
    loss = -math.fsum(math.fsum(column) for column in columns) / sum(map(len, columns))
    return {"loss": loss, "perplexity": perplexity(loss)}


async def _weighted(
    job: Job, spec: DpoJob | RewardJob, examples: Sequence[Prompt], rows: Sequence[TrainingRow]
) -> tuple[list[TrainingRow], dict[str, float]]:
    """Return the rows with weights that depend on the current weights of the model, and the sums of pairs or labels."""
    engine = job.resources.engine
    trained = await _columns(job, rows, engine.logprobs)
    if isinstance(spec, RewardJob):
        if not examples[0].rejected:
            return preference.weighted_labels(rows, trained, [example.columns[LABEL] for example in examples])
        margins = [example.columns.get(MARGIN, 0.0) for example in examples]
        return preference.weighted_scores(rows, trained, margins, spec.algorithm.center_rewards_coefficient)
    reference = await _columns(job, rows, engine.reference_logprobs)
    return preference.weighted(rows, trained, reference, spec.algorithm.preference)


async def _columns(job: Job, rows: Sequence[SequenceRow], call: EngineCall) -> list[bytes]:
    return await engine_columns(rows, call, job.spec.trainer.micro_batch_tokens, job.device.compute)


def _rows(spec: OfflineJob, examples: Sequence[Prompt]) -> list[TrainingRow]:
    """Return examples as training rows, of a pair the better one first; no policy generated them, so `sampled` is 0.

    A reward model trains on one number for each row: the score at its last token.
    """
    rows = []
    for example in examples:
        for completion in example.completions:
            given, trained = example.tokens, completion
            if isinstance(spec, RewardJob):
                whole = given + completion
                given, trained = whole[: -I32.itemsize], whole[-I32.itemsize :]
            row = SequenceRow(given, trained, bytes(len(trained)), images=[image.digest for image in example.images])
            rows.append(TrainingRow.of(row, constant(1.0, row)))
    return rows
