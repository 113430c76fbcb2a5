"""A job's checkpoints: loaded at its start, captured between two steps, and written while the next steps train.

Consumes: the newest checkpoint, of this job or of the job that it starts from; then the job's position between two
steps, and a copy of the engine's state, captured on the device's thread.
Produces: a checkpoint in the store; once it is durable, `rollouts.finished` is trimmed.
Waits for: the previous checkpoint, if it is still being written when the next one is due or when the job ends
(`wait_until_saved`), and disk space.
Ends when: the job does. A write in progress is left to its daemon thread, which the end of the process does not
wait for: a checkpoint is stored whole or not at all.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from rlboost.services.trainer.job.job import Job
from rlboost.services.trainer.ports.engine import Snapshot
from rlboost.services.trainer.ports.storage import TrainState
from rlboost.shared.errors import ConfigError, Fatal
from rlboost.shared.process.system import run_in_thread
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START, Op, Trim, position

WRITE_LIMIT_S = 3600.0
"""How long the next checkpoint, or the job's end, waits for a checkpoint that is being written."""
READ_LIMIT_S = 3600.0
"""How long the newest checkpoint may take to be found, downloaded and verified."""


class Checkpoints:
    """The checkpoints of one job, one at a time."""

    def __init__(self, job: Job) -> None:
        """Bind to the folder or bucket; `restore` reads it, `start_save` writes to it."""
        self._job = job
        self._store = job.resources.checkpoints
        self._writing: asyncio.Task[None] | None = None
        self._data_digest = ""
        self._starts_from_another_job = False
        self.covered_step = 0
        """Step of the older of two durable checkpoints: entries of earlier steps are no longer needed."""
        self.more_trims: Callable[[int], Sequence[Op]] = lambda _: ()
        """Returns what else to trim once the steps before this one are no longer needed."""

    async def restore(self, head: int) -> TrainState:
        """Load the newest checkpoint, if there is one, and return the job's position.

        Args:
            head: the newest committed version of the job's weights, -1 for none.

        Raises:
            ConfigError: `trainer.resume` does not allow it, the data has changed, or Redis is of another time.
            Corrupt: the checkpoint does not fit the model, or no checkpoint verifies.
            WaitTimedOut: it takes too long to read.

        """
        job, resume = self._job, self._job.spec.trainer.resume
        self._data_digest = await job.device.run(
            lambda: fingerprint(
                (row.tokens, completion, row.columns)
                for row in job.resources.data.train
                for completion in row.completions
            )
        )
        async with job.waits.on(
            "the newest checkpoint", because="it is read", limit_s=READ_LIMIT_S, progress=self._store.progress
        ):
            found = await job.device.run(self._store.newest)
        if resume == "never" and (found is not None or head > 0):
            raise ConfigError(
                "the trainer was restarted during this job, and trainer.resume is 'never': create a new job"
            )
        if found is not None:
            state, directory = found
            self._check_data(state)
            await self._check_redis(state)
        elif job.resources.predecessor is not None:
            state, directory = await job.device.run(job.resources.predecessor)
            state = self._as_initial(state)
        else:
            return self.state(0)
        await job.device.compute(lambda: job.resources.engine.load(directory))
        if (fallback := await job.device.run(self._store.fallback)) is not None:
            self.covered_step = fallback.step
        begins = {"begins_with": resume} if self._starts_from_another_job else {}
        await job.emit_event("job_resumed", step=state.step, head=head, **begins)
        return state

    def state(self, step: int, finished_cursor: str = START, read_cursor: str = START) -> TrainState:
        """Return the job's position before a step; see `TrainState`."""
        n_rows = len(self._job.resources.data.train)
        return TrainState(step, finished_cursor, n_rows, read_cursor, self._data_digest)

    def is_due(self, first: int, step: int) -> bool:
        """Return True if a checkpoint is due before a step, or after the last one; `first` was the first step here."""
        every, end = self._job.spec.trainer.checkpoint_every, self._job.spec.steps
        return step > first and (step % every == 0 or step == end)

    def _check_data(self, state: TrainState) -> None:
        remedy = "restore data.train, or create a job with the new data whose trainer.resume names this checkpoint"
        if state.train_rows != (n_rows := len(self._job.resources.data.train)):
            raise ConfigError(
                f"data.train has {n_rows} prompts, but had {state.train_rows} when the job was interrupted: {remedy}"
            )
        if state.data_digest not in ("", self._data_digest):
            raise ConfigError(
                f"data.train has {n_rows} prompts as when the job was interrupted, but their content, order or columns "
                f"have changed: {remedy}"
            )

    async def _check_redis(self, state: TrainState) -> None:
        """Check that Redis has the entries after which the job continues: a backup of another time does not."""
        for cursor in {state.finished_cursor, state.read_cursor} - {START}:
            if not await self._is_in_redis(cursor):
                raise ConfigError(
                    f"the checkpoint of step {state.step} continues after entry {cursor} of "
                    f"{names.rollouts_finished(self._job.id)}, which Redis does not have: they are of different times. "
                    "Restore Redis, weights and runs from one backup, or create a job whose trainer.resume names this "
                    "checkpoint"
                )

    async def _is_in_redis(self, cursor: str) -> bool:
        ms, seq = position(cursor)
        before = {names.rollouts_finished(self._job.id): f"{ms}-{seq - 1}" if seq else f"{ms - 1}-{2**64 - 1}"}
        return [entry.id for entry in await self._job.bus.retry(lambda bus: bus.read(before, count=1))] == [cursor]

    def _as_initial(self, state: TrainState) -> TrainState:
        """Return this job's position when it starts from a checkpoint of another job, without that job's samples."""
        if state.step >= self._job.spec.steps:
            raise ConfigError(
                f"trainer.resume names a checkpoint of step {state.step}, and steps is {self._job.spec.steps}, so "
                "nothing is left to train: raise steps"
            )
        self._starts_from_another_job = True
        return self.state(state.step)

    async def save_initial(self, state: TrainState) -> None:
        """If the job starts from another job's checkpoint, save its own copy, and return once that is durable.

        Call it before anything is requested or published: a restart before would load the other job's checkpoint again,
        which may be newer by then, or deleted.

        Raises:
            Fatal, WaitTimedOut: see `start_save`, `wait_until_saved`.

        """
        if self._starts_from_another_job:
            await self.start_save(state)
            await self.wait_until_saved()

    async def start_save(self, state: TrainState) -> None:
        """Capture a checkpoint and start to write it; the engine is free again when this returns.

        Raises:
            Fatal: not enough memory or disk space for the copy, or the previous checkpoint could not be written.
            WaitTimedOut: the previous checkpoint takes too long.

        """
        await self.wait_until_saved()
        name, job = f"checkpoint of step {state.step}", self._job
        write = await job.until_space(f"the {name}", lambda: job.device.run(job.resources.engine.snapshot))
        self._writing = asyncio.create_task(self._write(name, state, write), name=name)
        self._writing.add_done_callback(_retrieve_exception)

    async def wait_until_saved(self) -> None:
        """Return once no checkpoint is being written.

        Raises:
            Fatal: the checkpoint could not be written.
            WaitTimedOut: it takes too long.

        """
        if self._writing is None:
            return
        name = f"the {self._writing.get_name()}"
        because = "it is still being written"
        async with self._job.waits.on(name, because=because, limit_s=WRITE_LIMIT_S, progress=self._store.progress):
            await asyncio.shield(self._writing)
        self._writing = None

    def cancel(self) -> None:
        """Stop waiting for a checkpoint that is being written."""
        if self._writing is not None:
            self._writing.cancel()

    async def _write(self, name: str, state: TrainState, write: Snapshot) -> None:
        engine = self._job.resources.engine  # the thread below may outlive the job

        def save() -> None:
            self._store.save(state, write)
            engine.drop_snapshot()

        try:
            await self._job.until_space(f"the {name}", lambda: run_in_thread("checkpoint-write", save))
        except Fatal as error:
            # People see it now; the job fails at its next `wait_until_saved`.
            await self._job.emit_event("checkpoint_failed", step=state.step, reason=str(error))
            raise
        await self._job.emit_event("checkpoint_saved", step=state.step)
        if (fallback := await run_in_thread("checkpoint-fallback", self._store.fallback)) is not None:
            # If the newest checkpoint turns out corrupt, the entries after the previous one are still in the stream.
            self.covered_step = fallback.step
            finished = names.rollouts_finished(self._job.id)
            trims = self.more_trims(fallback.step)
            await self._job.bus.transact([Trim(finished, fallback.finished_cursor), *trims])


def _retrieve_exception(task: asyncio.Task[None]) -> None:
    """Retrieve the exception, so that asyncio does not warn if the job ends before `wait_until_saved`."""
    if not task.cancelled():
        task.exception()


def fingerprint(rows: Iterable[tuple[bytes, bytes, Mapping[str, Any]]]) -> str:
    """Return a digest of rows in their order, as hexadecimal digits.

    Args:
        rows: the prompt's token ids, the target completion, and the columns for the reward function, of each row.

    """
    whole = blake2b(digest_size=16)
    for tokens, completion, columns in rows:
        text = json.dumps(columns, sort_keys=True, default=repr).encode()
        for part in (tokens, completion, text):
            # Length-prefixed, so that different rows never give the same bytes.
            whole.update(len(part).to_bytes(8, "big"))
            whole.update(part)
    return whole.hexdigest()
