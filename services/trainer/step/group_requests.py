"""Requests the groups of one step.

Consumes: planned groups.
Produces: one `GroupRequested` per group in the job's `rollouts.requested`.
Waits for: `Rollouts.start`, which with an environment waits for the `reset` of a group's environment.
Ends when: all groups are requested. Repeating a request is harmless: the manager knows each group by its id.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlboost.services.trainer.domain.plan import PlannedGroup
from rlboost.services.trainer.step.context import JobContext
from rlboost.services.trainer.step.rollouts import Rollouts
from rlboost.shared.ids import SampleId
from rlboost.shared.messages import GroupRequested
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Append

_GROUPS_PER_TRANSACTION = 64
"""Bounds the size of a transaction with long prompts, and lets workers start while other environments are reset."""


class GroupRequests:
    """The requests of one step's groups."""

    def __init__(self, job: JobContext, rollouts: Rollouts, planned: Sequence[PlannedGroup]) -> None:
        """Bind to the job; `send` requests the groups `planned`, which `rollouts` starts."""
        self._job = job
        self._rollouts = rollouts
        self._unstarted = list(planned)
        self._unsent: list[GroupRequested] = []
        """The requests of started groups."""

    @property
    def all_started(self) -> bool:
        """Return True if the requests of all groups were built."""
        return not self._unstarted

    async def send(self, *, evaluation: bool) -> None:
        """Request the groups that are not requested yet; evaluation groups only if `evaluation`.

        Raises:
            Fatal: no conversation of the step can start, or the environments took too long.

        """
        # Evaluation groups start with the others: a predecessor that was killed may have requested them, and their
        # samples are in the log then.
        while self._unstarted:
            some, self._unstarted = self._unstarted[:_GROUPS_PER_TRANSACTION], self._unstarted[_GROUPS_PER_TRANSACTION:]
            self._unsent += await self._rollouts.start(some)
            await self._send_unsent(evaluation=evaluation)
        self._rollouts.check_started()
        await self._send_unsent(evaluation=evaluation)

    async def send_replacement(self, group: PlannedGroup) -> None:
        """Request one more group while the others are generated.

        Raises:
            Fatal: its environment took too long.

        """
        await self._append(await self._rollouts.start([group]))

    async def _send_unsent(self, *, evaluation: bool) -> None:
        due = [request for request in self._unsent if evaluation or not _is_eval(request)]
        for start in range(0, len(due), _GROUPS_PER_TRANSACTION):
            await self._append(due[start : start + _GROUPS_PER_TRANSACTION])
        self._unsent = [request for request in self._unsent if _is_eval(request) and not evaluation]

    async def _append(self, requests: Sequence[GroupRequested]) -> None:
        stream = names.rollouts_requested(self._job.id)
        await self._job.streams.bus.transact([Append(stream, request) for request in requests])


def _is_eval(request: GroupRequested) -> bool:
    return SampleId.unpack(request.group).is_eval
