"""The steps of a job of supervised fine-tuning."""

from __future__ import annotations

from rlboost.services.trainer.job.parts import JobParts
from rlboost.services.trainer.step.sft import sft_step
from rlboost.shared.job.spec import SftJob


async def run_sft_steps(spec: SftJob, job: JobParts, first: int) -> None:
    """Train on completions from the data. No worker needs the weights, so only the last version is published."""
    checkpoints, versions = job.checkpoints, job.versions
    for step in range(first, spec.steps):
        await job.reporter.wait_while_paused(step)
        job.active.enter("training", step)
        if checkpoints.is_due(first, step):
            await checkpoints.start_save(checkpoints.state(step))
        done = await sft_step(spec, job.resources, job.host.device, step)
        await job.log.record(step, done.metrics(), wait_s=0.0, train_s=done.train_s)
    if checkpoints.is_due(first, spec.steps):
        await checkpoints.start_save(checkpoints.state(spec.steps))
    job.active.enter("publishing", spec.steps)
    was_committed = versions.head >= spec.steps
    await versions.ensure_published(spec.steps)
    if was_committed:
        await versions.publish(spec.steps)  # load the committed bits, which may differ on another machine
