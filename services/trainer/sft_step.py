"""One step of supervised fine-tuning: no worker, no sample, no reward; rows of data are imitated.

Which rows a step takes follows from the job's seed and the step's number, and their order from their lengths, so a
trainer that was killed and starts again from a checkpoint ends with the same bits.
"""

from __future__ import annotations

import time
from functools import partial

from services.trainer.device import DeviceThread
from services.trainer.domain import sums
from services.trainer.domain.batching import pack
from services.trainer.domain.plan import training_rows
from services.trainer.domain.schedule import learning_rate
from services.trainer.domain.sft import SftStep
from services.trainer.ports import NotFinite, Prompt, Row, Workshop
from shared.columns import I32, length
from shared.errors import Fatal
from shared.jobspec import SftJob


async def sft_step(spec: SftJob, workshop: Workshop, device: DeviceThread, step: int) -> SftStep:
    """Train on the rows of step `step`: forward and backward over its micro-batches, and one update.

    Raises:
        Fatal: a loss or the gradients are not finite; the weights are as they were.

    """
    began = time.monotonic()
    data, engine, numbers = workshop.data.train, workshop.engine, dict[str, float]()
    rows = [_row(data[i]) for i in training_rows(spec.trainer.seed, step, spec.data.prompts_per_step, len(data))]
    rate = learning_rate(spec.optimizer, step, spec.steps)
    try:
        for batch in pack(rows, spec.trainer.micro_batch_tokens):
            # One at a time: a job that is cancelled need not wait for the others.
            sums.add(numbers, await device(partial(engine.accumulate, [batch], workshop.loss)))
        norm = await device(partial(engine.step, rate))
    except NotFinite as error:
        kept = await device(partial(workshop.folder.keep_batch, f"not-finite-step-{step}.jsonl", rows))
        raise Fatal(
            f"step {step}: {error}; the {len(rows)} rows of the step are in {kept}: look for bad data there, or lower "
            "optimizer.lr"
        ) from error
    lengths = [length(row.completion, I32) for row in rows]
    return SftStep(numbers, lengths, norm, rate, train_s=time.monotonic() - began)


def _row(example: Prompt) -> Row:
    """Return an example as a row to train on: nobody drew it, so nothing is known of the probability that it had."""
    return Row(example.tokens, example.completion, bytes(len(example.completion)), advantage=1.0)
