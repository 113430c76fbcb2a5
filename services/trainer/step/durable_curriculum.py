"""Records a job's curriculum in Redis, before the groups that follow from it are requested.

A group's id contains its step and its number in the step, but not its prompt. So the prompts of a requested step must
never change: they are recorded before the requests, and a restarted trainer reads the record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from rlboost.services.trainer.domain.curriculum import Curriculum, Means, PromptSelection
from rlboost.services.trainer.ports.resources import JobResources
from rlboost.services.trainer.runtime.job_streams import RetryingBus
from rlboost.shared.errors import Fatal, WaitTimedOut
from rlboost.shared.job.spec import GeneratingJob
from rlboost.shared.process.threads import run_in_thread
from rlboost.shared.process.waiting import Waits
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Fence, HashSet

PLAN_LIMIT_S = 300.0
T = TypeVar("T")


class DurableCurriculum:
    """The curriculum of one job."""

    def __init__(
        self, bus: RetryingBus, waits: Waits, job_id: str, curriculum: Curriculum, fence: Fence | None = None
    ) -> None:
        """Record the decisions of `curriculum` under the job's `fence`; create it with `load`."""
        self._bus = bus
        self._waits = waits
        self._fence = fence
        self._key = names.job_curriculum(job_id)
        self._curriculum = curriculum
        self._lock = asyncio.Lock()
        """Planning a step changes `curriculum`, while groups of other steps are scored concurrently."""

    @classmethod
    async def load(
        cls,
        bus: RetryingBus,
        waits: Waits,
        job_id: str,
        spec: GeneratingJob,
        resources: JobResources,
        fence: Fence | None,
    ) -> DurableCurriculum | None:
        """Return a job's curriculum from its records, None if it has none; `fence` is that of the job's lease."""
        if spec.data.curriculum is None:
            return None
        records = await bus(lambda raw: raw.hash_all(names.job_curriculum(job_id)))
        return cls(
            bus, waits, job_id, Curriculum(spec, len(resources.data.train), resources.skip_function, records), fence
        )

    async def prepare(self, step: int) -> None:
        """Choose the prompts of a step in a thread: this may call the user's function for every prompt.

        Raises:
            Fatal: see `Curriculum.plan`; or the user's function took too long.

        """
        await self._ask(lambda: self._curriculum.plan(step), f"it chooses the prompts of step {step + 1}")

    async def find(self, step: int, find: Callable[[Callable[[int], bool]], T]) -> T:
        """Return the result of `find`, called in a thread with `Curriculum.skips` of a planned step; see `prepare`."""
        because = f"it chooses replacement prompts of step {step + 1}"
        return await self._ask(lambda: find(partial(self._curriculum.skips, step)), because)

    async def _ask(self, call: Callable[[], T], because: str) -> T:
        try:
            async with self._waits.on("the curriculum", because=because, limit_s=PLAN_LIMIT_S), self._lock:
                return await run_in_thread("curriculum", call)
        except WaitTimedOut as error:
            raise Fatal(f"{error}: make data.curriculum.function faster, it is called for each prompt") from error

    def plan(self, step: int) -> PromptSelection:
        """Return the prompts of a prepared step."""
        return self._curriculum.plan(step)

    async def persist(self, step: int) -> None:
        """Record the prompts and scores of a planned step.

        Raises:
            Fenced: another trainer has taken over the job; its records stay.

        """
        ops = [HashSet(self._key, {str(step): self._curriculum.record(step)})]
        await self._bus(lambda bus: bus.transact(ops, self._fence))

    async def record_scores(self, step: int, means: Means) -> None:
        """Add and record the mean rewards of a step's groups; see `Curriculum.score`."""
        self._curriculum.score(step, means)
        await self.persist(step)
