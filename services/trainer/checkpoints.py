"""A job's checkpoints: found at its beginning, captured between two steps, written beside those that follow.

Consumes: the newest checkpoint, of this job or of the one that it begins with; then where the job stands between two
steps, and a copy of the engine's state, taken on the device's thread.
Produces: a checkpoint in its store; then, once it is durable, a shorter `rollouts.finished`.
Waits for: the checkpoint before, should it still be written when the next one is due, or the job is done.
Ends when: the job does. What is being written then is left to its thread: it will be there whole or not at all.
"""

from __future__ import annotations

import asyncio

from services.trainer.device import DeviceThread
from services.trainer.domain.fingerprint import fingerprint
from services.trainer.link import JobLink
from services.trainer.ports import Snapshot, TrainState, Workshop
from shared.bus import START
from shared.errors import ConfigError, Fatal
from shared.jobspec import JobSpec
from shared.waiting import Waits

WRITE_LIMIT_S = 3600.0
"""How long the next checkpoint, or the job's end, waits for one that is being written."""


class Checkpoints:
    """The checkpoints of one job, one at a time."""

    def __init__(
        self, spec: JobSpec, workshop: Workshop, device: DeviceThread, waits: Waits, link: JobLink, finished: str
    ) -> None:
        """Prepare.

        Args:
            spec: the job.
            workshop: what it works with; the store and the engine are in it.
            device: the thread of the engine.
            waits: where waits are listed.
            link: for what people are told.
            finished: the stream that is trimmed behind them.

        """
        self._spec = spec
        self._workshop = workshop
        self._device = device
        self._waits = waits
        self._link = link
        self._finished = finished
        self._writing: asyncio.Task[None] | None = None
        self._data_digest = ""
        self._began_elsewhere = False
        self.covered_step = 0
        """Nothing of the steps before it is needed any more: the step of the older of two durable checkpoints."""

    async def restore(self, head: int) -> TrainState:
        """Load the newest checkpoint, if there is one, and return where the job stands.

        Args:
            head: the newest committed version of the job's weights, -1 for none.

        Raises:
            ConfigError: the job may not go on with it, or with this data.
            Corrupt: it does not fit the model, or there are checkpoints of which none is whole.

        """
        data, resume = self._workshop.data, self._spec.trainer.resume
        self._data_digest = await self._device(
            lambda: fingerprint((row.tokens, row.completion, row.columns) for row in data.train)
        )
        found = await self._device(self._workshop.checkpoints.newest)
        if resume == "never" and (found is not None or head > 0):
            raise ConfigError("the trainer was restarted in the middle of this job, and trainer.resume is 'never'")
        if found is not None:
            state, directory = found
            self._check_data(state)
        elif self._workshop.predecessor is not None:
            state, directory = await self._device(self._workshop.predecessor)
            state = self._as_beginning(state)
        else:
            return self.state(0)
        await self._device(lambda: self._workshop.engine.load(directory))
        if (fallback := await self._device(self._workshop.checkpoints.fallback)) is not None:
            self.covered_step = fallback.step
        begins = {"begins_with": resume} if self._began_elsewhere else {}
        await self._link.tell("resumed", step=state.step, head=head, **begins)
        return state

    def state(self, step: int, finished_cursor: str = START, read_cursor: str = START) -> TrainState:
        """Return where the job stands before a step; see `TrainState` for the positions."""
        n_rows = len(self._workshop.data.train)
        return TrainState(step, finished_cursor, n_rows, read_cursor, self._data_digest)

    def _check_data(self, state: TrainState) -> None:
        mend = "restore data.train, or go on with other data in a new job whose trainer.resume names this checkpoint"
        if state.train_rows != (n_rows := len(self._workshop.data.train)):
            raise ConfigError(
                f"data.train has {n_rows} prompts, but had {state.train_rows} when the job was interrupted: {mend}"
            )
        if state.data_digest not in ("", self._data_digest):
            raise ConfigError(
                f"data.train has {n_rows} prompts as when the job was interrupted, but they, their order or the "
                f"columns that rewards get are others: {mend}"
            )

    def _as_beginning(self, state: TrainState) -> TrainState:
        """Return where this job begins with a checkpoint of another job, whose samples are not its own."""
        if state.step >= self._spec.steps:
            raise ConfigError(
                f"trainer.resume names a checkpoint of step {state.step}, and steps is {self._spec.steps}: nothing is "
                "left to train; raise steps"
            )
        self._began_elsewhere = True
        return self.state(state.step)

    async def keep_beginning(self, state: TrainState) -> None:
        """Keep a checkpoint of where the job begins, if that is another's, and return once it is durable.

        A restart before would look at the other job again, which may have gone on or be gone: so before anything is
        asked for or published.

        Raises:
            Fatal, Timeout: see `begin`, `settle`.

        """
        if self._began_elsewhere:
            await self.begin(state)
            await self.settle()

    async def begin(self, state: TrainState) -> None:
        """Capture a checkpoint and begin to write it; the engine is free again when this returns.

        Raises:
            Fatal: there is no room for the copy, or the checkpoint before it could not be written.
            Timeout: the one before takes too long.

        """
        await self.settle()
        write = await self._device(self._workshop.engine.snapshot)
        self._writing = asyncio.create_task(self._write(state, write), name=f"checkpoint of step {state.step}")
        self._writing.add_done_callback(_noticed)

    async def settle(self) -> None:
        """Return once no checkpoint is being written.

        Raises:
            Fatal: it could not be written.
            Timeout: it takes too long.

        """
        if self._writing is None:
            return
        name = f"the {self._writing.get_name()}"
        async with self._waits.on(name, because="it is still being written", limit_s=WRITE_LIMIT_S):
            await asyncio.shield(self._writing)
        self._writing = None

    def abandon(self) -> None:
        """Wait for nothing any more."""
        if self._writing is not None:
            self._writing.cancel()

    async def _write(self, state: TrainState, write: Snapshot) -> None:
        store = self._workshop.checkpoints
        try:
            await asyncio.to_thread(store.save, state, write)
        except Fatal as error:
            # At once, for people; the job learns it when it next asks.
            await self._link.tell("checkpoint_failed", step=state.step, reason=str(error))
            raise
        await self._link.tell("checkpoint_saved", step=state.step)
        if (fallback := await asyncio.to_thread(store.fallback)) is not None:
            # Should the newest checkpoint turn out broken, the samples behind the one before it are still there.
            self.covered_step = fallback.step
            await self._link.bus(lambda bus: bus.trim(self._finished, fallback.finished_cursor))


def _noticed(task: asyncio.Task[None]) -> None:
    """Look at how it ended: nobody else may, where the job ends first."""
    if not task.cancelled():
        task.exception()
