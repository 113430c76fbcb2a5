"""Requests the groups of one step.

Consumes: planned groups.
Produces: one `GroupRequested` per group in the job's `rollouts.requested`; for a job with an environment also one
`GroupOpened` per group in `rollouts.finished`.
Waits for: the `reset` of a group's environment (`Environments.reset`), within a time limit.
Ends when: all groups are requested. Repeating a request is harmless: the manager knows each group by its id.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlboost.services.trainer.domain.plan import PlannedGroup
from rlboost.services.trainer.step.context import JobContext
from rlboost.services.trainer.step.multi_turn import Conversations
from rlboost.shared.messages import GroupRequested, Sampling
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Append

_GROUPS_PER_TRANSACTION = 64
"""Bounds the size of a transaction with long prompts, and lets workers start while other environments are reset."""


class GroupRequests:
    """The requests of one step's groups."""

    def __init__(
        self, job: JobContext, step: int, planned: Sequence[PlannedGroup], conversations: Conversations | None
    ) -> None:
        """Bind to the job; `send` requests a step's groups.

        Args:
            job: the step's job.
            step: weight version that generates the groups.
            planned: the groups.
            conversations: of the step, if the job has an environment.

        """
        self._job = job
        self._step = step
        self._conversations = conversations
        self._unstarted = list(planned)
        self._unsent: list[tuple[PlannedGroup, GroupRequested]] = []
        """Groups whose environment, if there is one, is reset."""

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
            self._unsent += await self._start(some)
            await self._send_unsent(evaluation=evaluation)
        if self._conversations is not None:
            self._conversations.check_started()
        await self._send_unsent(evaluation=evaluation)

    async def send_replacement(self, group: PlannedGroup) -> None:
        """Request one more group while the others are generated.

        Raises:
            Fatal: its environment took too long.

        """
        await self._append([request for _, request in await self._start([group])])

    async def _start(self, groups: Sequence[PlannedGroup]) -> list[tuple[PlannedGroup, GroupRequested]]:
        """Return the requests of groups; with an environment, of those whose conversations can start."""
        spec = self._job.spec
        sampling = Sampling(
            temperature=spec.sampling.temperature,
            top_p=spec.sampling.top_p,
            max_tokens=spec.sampling.max_tokens,
            stop_token_ids=self._job.resources.data.stop_token_ids,
        )
        replayed = sampling.model_copy(update={"routed_experts": tuple(self._job.resources.replayed or ())})
        if self._conversations is None:
            prompts = {group.id: self._job.prompt(group).tokens for group in groups}
        else:
            prompts = await self._conversations.start(groups)
        requests = [
            (
                group,
                GroupRequested(
                    job_id=self._job.id,
                    group=group.id,
                    n=group.n,
                    prompt=prompts[group.id],
                    sampling=sampling if group.is_eval else replayed,
                    version=self._step,
                    seed=group.seed,
                    max_staleness=0 if group.is_eval else spec.elastic.max_staleness,
                    vocab_size=self._job.resources.data.vocab_size,
                ),
            )
            for group in groups
            if group.id in prompts
        ]
        if self._conversations is not None:
            self._conversations.note_requests([request for _, request in requests])
        return requests

    async def _send_unsent(self, *, evaluation: bool) -> None:
        due = [request for group, request in self._unsent if evaluation or not group.is_eval]
        for start in range(0, len(due), _GROUPS_PER_TRANSACTION):
            await self._append(due[start : start + _GROUPS_PER_TRANSACTION])
        self._unsent = [(group, request) for group, request in self._unsent if group.is_eval and not evaluation]

    async def _append(self, requests: Sequence[GroupRequested]) -> None:
        stream = names.rollouts_requested(self._job.id)
        await self._job.streams.bus.transact([Append(stream, request) for request in requests])
