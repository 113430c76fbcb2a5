"""The step being trained and up to `elastic.max_staleness` after it, which are generated meanwhile.

Consumes: `rollouts.finished`, in its one order for all steps.
Produces: the requests of each step's groups, and the groups that came, whose scoring begins at once.
Waits for: the next entry, for as long as the step being trained lacks something.
Ends when: the job does. No entry is taken of a step that was not asked for yet, so what is kept is bounded.
"""

from __future__ import annotations

from services.trainer.domain.window import StepWindow
from services.trainer.intake import JobContext, StepIntake
from services.trainer.link import FinishedLog
from shared.errors import Fatal, Timeout


class Steps:
    """All steps that are asked for."""

    def __init__(self, job: JobContext, log: FinishedLog, read_until: str) -> None:
        """Read `log` for a job; what is late up to the position `read_until` was late for a predecessor already."""
        self._job = job
        self._log = log
        self._window = StepWindow(read_until)
        self._intakes: dict[int, StepIntake] = {}

    async def enter(self, step: int, head: int) -> StepIntake:
        """Begin step `step` and return its intake, which has what came ahead.

        Args:
            step: the one to train, or to evaluate.
            head: the newest committed version; samples of steps before it were shown to people already.

        Raises:
            Fatal: a curriculum cannot choose its prompts.

        """
        spec, curriculum = self._job.spec, self._job.curriculum
        for number in range(step, max(step, min(step + spec.elastic.max_staleness, spec.steps - 1)) + 1):
            if number not in self._intakes:
                if curriculum is not None and number < spec.steps:
                    await curriculum.prepare(number)
                intake = self._intakes[number] = StepIntake(self._job, number, seen_before=number < head)
                self._window.open(number, intake.collector)
        self._window.enter(step)
        self._intakes = {number: intake for number, intake in self._intakes.items() if number >= step}
        return self._intakes[step]

    async def request(self) -> None:
        """Ask for everything of the step being trained, and for the training groups of those after it."""
        first = min(self._intakes)
        for number, intake in sorted(self._intakes.items()):
            await intake.request(evaluation=number == first)

    @property
    def needed_from(self) -> str:
        """Position behind which everything lies that the step being trained and those after it need."""
        return self._window.needed_from(self._log.cursor)

    @property
    def read_until(self) -> str:
        """Position of the last entry that was taken."""
        return self._log.cursor

    async def read(self, what: str, because: str) -> None:
        """Take the next entry for whichever step it is, waiting for `what`.

        Raises:
            Fatal: none came for too long, or the stream broke a promise.

        """
        try:
            await self._log.wait(what, because)
        except Timeout as error:
            raise Fatal(f"{error}: is a worker there that can generate? Ask with 'rlboost worker list'") from error
        self._take()

    async def read_on(self) -> None:
        """Take entries for the steps ahead, until there is one that no step asked for yet. Cancel it at any time.

        Raises:
            Fatal: the stream broke a promise.

        """
        if len(self._intakes) > 1:
            while self._window.holds((await self._log.peek()).message):
                self._take()
            self._answer()

    def _take(self) -> None:
        before, entry = self._log.cursor, self._log.take()
        if (decided := self._window.fold(before, entry)) is not None:
            step, outcome = decided
            self._intakes[step].take(outcome)
        if self._log.drained:
            self._answer()

    def _answer(self) -> None:
        for intake in self._intakes.values():
            intake.answer()
