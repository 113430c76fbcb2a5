"""One step of supervised fine-tuning: trains on completions from the data, without workers or rewards.

The job's seed and the step's number determine the rows of a step, and their lengths the order, so a trainer that
resumes from a checkpoint computes the same bits.
"""

from __future__ import annotations

import time
from functools import partial

from rlboost.services.trainer.domain.batches.batching import pack, select
from rlboost.services.trainer.domain.batches.training_row import SequenceRow, TrainingRow, constant
from rlboost.services.trainer.domain.loss import sums
from rlboost.services.trainer.domain.plan import prompt_indices
from rlboost.services.trainer.domain.schedule import learning_rate
from rlboost.services.trainer.domain.sft import SftStep
from rlboost.services.trainer.ports.data import Prompt
from rlboost.services.trainer.ports.engine import NotFinite
from rlboost.services.trainer.ports.resources import JobResources
from rlboost.services.trainer.runtime.device import DeviceThread
from rlboost.shared.errors import Fatal
from rlboost.shared.job.spec import SftJob
from rlboost.shared.wire.columns import I32, length


async def sft_step(spec: SftJob, resources: JobResources, device: DeviceThread, step: int) -> SftStep:
    """Train on the rows of step `step`: forward and backward over its micro-batches, and one update.

    Raises:
        Fatal: a loss or the gradients are not finite; the weights are unchanged.

    """
    began = time.monotonic()
    data, engine, numbers = resources.data.train, resources.engine, dict[str, float]()
    rows = [_row(data[i]) for i in prompt_indices(spec.trainer.seed, step, spec.data.prompts_per_step, len(data))]
    rate = learning_rate(spec.optimizer, step, spec.steps)
    try:
        for batch in select(rows, pack(rows, spec.trainer.micro_batch_tokens)):
            # One call per micro-batch: a cancelled job waits for one only.
            sums.add(numbers, await device(partial(engine.accumulate, [batch], resources.loss)))
        norm = await device(partial(engine.step, rate))
    except NotFinite as error:
        path = await device(partial(resources.folder.dump_batch, f"not-finite-step-{step}.jsonl", rows))
        raise Fatal(
            f"step {step + 1}: {error}. Look for bad data among the {len(rows)} rows in {path}, or lower optimizer.lr"
        ) from error
    lengths = [length(row.completion, I32) for row in rows]
    return SftStep(numbers, lengths, norm, rate, train_s=time.monotonic() - began)


def _row(example: Prompt) -> TrainingRow:
    """Return an example as a training row, with log-probabilities 0: no policy generated it."""
    row = SequenceRow(example.tokens, example.completion, bytes(len(example.completion)))
    return TrainingRow.of(row, constant(1.0, row))
