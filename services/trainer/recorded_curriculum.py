"""A job's curriculum, with its decisions in Redis before anything is asked for by them.

A group's id says its step and its number in the step, not its prompt. So a step's prompts must never be others than
those that were asked for once: they are recorded first, beside the requests, and a successor reads the record.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from services.trainer.domain.curriculum import Chosen, Curriculum, Means
from services.trainer.link import PatientBus
from services.trainer.ports import Workshop
from shared import names
from shared.bus import Fence, HashSet
from shared.errors import Fatal, Timeout
from shared.jobspec import GeneratingJob
from shared.waiting import Waits

PLAN_LIMIT_S = 300.0
T = TypeVar("T")


class KeptCurriculum:
    """The curriculum of one job."""

    def __init__(
        self, bus: PatientBus, waits: Waits, job_id: str, curriculum: Curriculum, fence: Fence | None = None
    ) -> None:
        """Keep what `curriculum` decides, while `fence` stands; `load` makes it."""
        self._bus = bus
        self._waits = waits
        self._fence = fence
        self._key = names.job_curriculum(job_id)
        self._curriculum = curriculum
        self._one_at_a_time = asyncio.Lock()
        """What it knows is changed by planning a step, and groups of other steps are scored meanwhile."""

    @classmethod
    async def load(
        cls, bus: PatientBus, waits: Waits, job_id: str, spec: GeneratingJob, workshop: Workshop, fence: Fence | None
    ) -> KeptCurriculum | None:
        """Return a job's curriculum as far as it was recorded, None where it has none; `fence` is the job's lease's."""
        if spec.data.curriculum is None:
            return None
        records = await bus(lambda raw: raw.hash_all(names.job_curriculum(job_id)))
        return cls(bus, waits, job_id, Curriculum(spec, len(workshop.data.train), workshop.judge, records), fence)

    async def prepare(self, step: int) -> None:
        """Choose the prompts of a step, which may run the user's function on all of them, beside the event loop.

        Raises:
            Fatal: see `Curriculum.plan`; or it took too long.

        """
        await self._ask(lambda: self._curriculum.plan(step), f"it chooses the prompts of step {step}")

    async def find(self, step: int, find: Callable[[Callable[[int], bool]], T]) -> T:
        """Return what is found for a planned step by what is given `Curriculum.skips`; see `prepare`."""
        because = f"it chooses prompts in place of others of step {step}"
        return await self._ask(lambda: find(partial(self._curriculum.skips, step)), because)

    async def _ask(self, call: Callable[[], T], because: str) -> T:
        try:
            async with self._waits.on("the curriculum", because=because, limit_s=PLAN_LIMIT_S), self._one_at_a_time:
                return await _aside(call)
        except Timeout as error:
            raise Fatal(f"{error}: make data.curriculum.function faster, it is asked about each prompt") from error

    def plan(self, step: int) -> Chosen:
        """Return the prompts of a step that was prepared."""
        return self._curriculum.plan(step)

    async def keep(self, step: int) -> None:
        """Record what is known of a planned step.

        Raises:
            Fenced: another trainer has taken the job over, and what it recorded stays.

        """
        ops = [HashSet(self._key, {str(step): self._curriculum.record(step)})]
        await self._bus(lambda bus: bus.transact(ops, self._fence))

    async def score(self, step: int, means: Means) -> None:
        """Take in how a step's groups were scored, and record it; see `Curriculum.score`."""
        self._curriculum.score(step, means)
        await self.keep(step)


async def _aside(call: Callable[[], T]) -> T:
    """Return what a call returns that may never do so: neither a cancelled job nor the process's end waits for it."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            outcome.set_exception(error)

    threading.Thread(target=run, name="curriculum", daemon=True).start()
    return await asyncio.wrap_future(outcome)
