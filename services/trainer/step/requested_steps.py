"""The step being trained and up to `elastic.max_staleness` steps after it, which are generated at the same time.

Consumes: `rollouts.finished`, in its one order for all steps.
Produces: the requests of each step's groups; the outcomes of groups, passed to `GroupIntake.take`, which starts to
score them.
Waits for: the next entry (`FinishedLog.wait`), which the rollout manager, or an environment's answer, appends.
Ends when: the job does. Entries of a step that is not requested yet stay in the stream, so memory is bounded.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from rlboost.services.trainer.domain.open_steps import OpenSteps
from rlboost.services.trainer.runtime.job_streams import FinishedLog
from rlboost.services.trainer.step.context import JobContext
from rlboost.services.trainer.step.group_intake import GroupIntake
from rlboost.shared.errors import Fatal, Unprocessable, WaitTimedOut

log = structlog.get_logger(__name__)


class RequestedSteps:
    """All requested steps."""

    def __init__(self, job: JobContext, finished: FinishedLog, read_until: str) -> None:
        """Read `finished` for a job; an earlier process has counted late samples up to the position `read_until`."""
        self._job = job
        self._finished = finished
        self._open = OpenSteps(read_until)
        self._intakes: dict[int, GroupIntake] = {}

    async def enter(self, step: int, head: int) -> GroupIntake:
        """Start step `step` and return its intake, which has the groups that were completed ahead.

        Args:
            step: the one to train, or to evaluate.
            head: the newest committed version; samples of steps before it were published before.

        Raises:
            Fatal: a curriculum cannot choose its prompts.

        """
        spec, curriculum = self._job.spec, self._job.curriculum
        for number in range(step, max(step, min(step + spec.elastic.max_staleness, spec.steps - 1)) + 1):
            if number not in self._intakes:
                if curriculum is not None and number < spec.steps:
                    await curriculum.prepare(number)
                intake = self._intakes[number] = GroupIntake(self._job, number, was_trained=number < head)
                self._open.open(number, intake.rollouts)
        self._open.enter(step)
        self._intakes = {number: intake for number, intake in self._intakes.items() if number >= step}
        return self._intakes[step]

    async def request(self) -> None:
        """Request all groups of the step being trained, and the training groups of the steps after it."""
        first = min(self._intakes)
        for number, intake in sorted(self._intakes.items()):
            await intake.request(evaluation=number == first)

    @property
    def needed_from(self) -> str:
        """Position before the first entry that an open step needs."""
        return self._open.needed_from(self._finished.cursor)

    @property
    def read_until(self) -> str:
        """Position of the last entry that was read."""
        return self._finished.cursor

    async def read(self, what: str, because: str, progress: Callable[[], str]) -> None:
        """Read the next entry, of any step, waiting for `what`; the arguments are those of `Waits.on`.

        Raises:
            Fatal: no entry came within the limit, or the stream is inconsistent.

        """
        try:
            await self._finished.wait(what, because, progress)
        except WaitTimedOut as error:
            raise Fatal(f"{error}: check that a worker is ready to generate: 'rlboost worker list'") from error
        self._take()

    async def read_ahead(self) -> None:
        """Read entries of later steps until one belongs to a step that is not requested. Cancel it at any time.

        Raises:
            Fatal: the stream is inconsistent.

        """
        if len(self._intakes) > 1:
            while self._open.holds((await self._finished.peek()).message):
                self._take()
            self._answer_turns()

    def _take(self) -> None:
        before, entry = self._finished.cursor, self._finished.take()
        try:
            decided = self._open.apply(before, entry)
        except Unprocessable as error:
            log.warning("finished_entry_skipped", stream=entry.stream, entry=entry.id, reason=str(error))
            decided = None
        if decided is not None:
            step, outcome = decided
            self._intakes[step].take(outcome)
        if self._finished.all_taken:
            self._answer_turns()

    def _answer_turns(self) -> None:
        # Only once all entries at hand, which may contain answers, were read.
        for intake in self._intakes.values():
            intake.rollouts.answer_turns()
