"""Runs one job, from its newest checkpoint to its end.

Consumes: the job file, the newest checkpoint, and the entries of `rollouts.finished` after its position.
Produces: weight versions, step reports, checkpoints (one at the end), and the final model.
Waits for: the job's lease, which `Trainer.renew_lease` acquires; while the job is paused, the resume command, which
`Trainer.follow_commands` applies; disk space; and what each step waits for (see `step.run`).
Ends when: the last step is done, or an error ends the job.

After a kill, a trainer repeats the steps since the newest checkpoint. Their samples are in the stream, so none is
generated twice, and committed versions are not published twice: see `publishing`. Entries that a later step needs stay
after the position of the checkpoint.
"""

from __future__ import annotations

from rlboost.services.trainer.domain import plan
from rlboost.services.trainer.job.active import LEASE_WAIT_LIMIT_S, ActiveJob, JobHost, JobStateReporter
from rlboost.services.trainer.job.generating import run_generating_steps
from rlboost.services.trainer.job.parts import JobParts
from rlboost.services.trainer.job.sft import run_sft_steps
from rlboost.services.trainer.ports.resources import JobResourcesFactory
from rlboost.services.trainer.ports.storage import TrainState
from rlboost.shared.job.spec import JobSpec, to_json

BUILD_LIMIT_S = 4 * 3600.0


async def run_job(active: ActiveJob, spec: JobSpec, host: JobHost, build: JobResourcesFactory) -> None:
    """Train to the end.

    Args:
        active: state shared with the trainer's loops.
        spec: the job file.
        host: the trainer.
        build: builds the job's resources; called on the device's thread.

    Raises:
        RLBoostError: why the job failed; `Retryable`: another process can continue the job.
        ExceptionGroup: of such errors.

    """
    await JobStateReporter(active, host).report("running", active.step)
    because = "they are being loaded, or downloaded if the model is an id"
    async with host.waits.on("the job's model and data", because=because, limit_s=BUILD_LIMIT_S):
        resources = await host.device(lambda: build(spec, active.job_id))
    job = JobParts.of(active, spec, host, resources)
    try:
        await _load(spec, job)
        state = await _restore(spec, job)
        if spec.kind == "sft":
            await run_sft_steps(spec, job, state.step)
        else:
            await run_generating_steps(spec, job, state)
        await job.checkpoints.wait_until_saved()
        if spec.kind != "eval":
            job.active.enter("finishing", spec.steps)
            await _export(job)
    finally:
        await job.close()


async def _load(spec: JobSpec, job: JobParts) -> None:
    """Load the model, start user-code processes, and emit warnings about settings and filtered prompts."""
    resources, data = job.resources, job.resources.data
    if spec.kind != "sft":
        plan.check(spec, len(data.evaluation))
    if resources.machines is not None:
        await resources.machines.gather()
    await job.host.device(lambda: resources.engine.load_hf(resources.model))
    await resources.rewards.start()
    if resources.environments is not None:
        await resources.environments.start()
    if spec.kind == "rl" and spec.sampling.top_p < 1:
        text = "sampling.top_p below 1 biases the ratio: it compares the truncated distribution with the whole one"
        await job.streams.emit_event("warning", text=text)
    if data.n_too_long or data.n_too_long_eval:
        await job.streams.emit_event(
            "prompts_filtered",
            reason=spec.data.limits,
            train_filtered=data.n_too_long,
            train_remaining=len(data.train),
            eval_filtered=data.n_too_long_eval,
            eval_remaining=len(data.evaluation),
        )


async def _restore(spec: JobSpec, job: JobParts) -> TrainState:
    """Return the position that the job continues from, once this trainer holds the job's lease."""
    # First, since another process of this trainer may still write checkpoints and metrics.
    await job.active.wait_for_lease(job.host.waits, LEASE_WAIT_LIMIT_S)
    await job.versions.refresh_head()
    state = await job.checkpoints.restore(job.versions.head)
    await job.write(lambda: job.resources.folder.begin(to_json(spec), state.step))
    await job.checkpoints.save_initial(state)
    await job.learning.restore(job.host.bus)
    return state


async def _export(job: JobParts) -> None:
    """Write the final model into the job's folder."""
    engine, folder = job.resources.engine, job.resources.folder
    model = await job.write(lambda: folder.export(engine.export_shards()))
    await job.streams.emit_event("model_saved", path=str(model))
    if text := engine.adapter_json:
        adapter = await job.write(lambda: folder.export_adapter(engine.export_shards("adapter"), text))
        await job.streams.emit_event("adapter_saved", path=str(adapter))
