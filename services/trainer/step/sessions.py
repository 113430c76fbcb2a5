"""Runs the sessions of one step: an agent for each sample, whose calls of the model are its turns.

A trainer opens a session in Redis, and runs the agent with the manager's URL and a key. The manager writes each turn
into `rollouts.finished`, first that it was opened and then its end; the trainer appends the end of the session. So a
trainer that resumes after a kill reads ended sessions from the log. It runs the agents of the others again: the manager
answers calls that an agent repeats with the turns of its earlier start, and other turns of that start are not trained.

Consumes: planned groups (`start`), and what begins again, from `SessionCollector` (`answer_turns`).
Produces: the hash of each session, and a `SessionEnded` in `rollouts.finished`.
Waits for: `Environments.step`, which runs an agent for at most `agent.timeout_s`; the leading manager, in `_url`.
Ends when: each session has ended or was lost, or its group was dropped.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlboost.services.trainer.domain.conversations import StepTurnIds
from rlboost.services.trainer.domain.plan import PlannedGroup
from rlboost.services.trainer.domain.sessions import Session, SessionCollector
from rlboost.services.trainer.job.job import Job
from rlboost.services.trainer.ports.samples import EnvironmentFault
from rlboost.services.trainer.step.turns import request_of
from rlboost.shared.errors import Fatal
from rlboost.shared.ids import SampleId, group_of
from rlboost.shared.job.reward import AgentSpec
from rlboost.shared.job.sessions import SESSION, SessionId, SessionRecord
from rlboost.shared.messages import GroupRequested, SessionEnded
from rlboost.shared.model.tool_call_formats import Tools
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Append, Expire, HashSet

RETENTION_S = 3600.0
"""How long a session is kept in Redis after its end, and after twice the time that its agent may take."""
_MANAGER_EVERY_S = 0.5


class StepSessions:
    """The sessions of one step."""

    def __init__(
        self,
        job: Job,
        step: int,
        planned: Mapping[int, PlannedGroup],
        groups: SessionCollector,
        ids: StepTurnIds,
        tasks: asyncio.TaskGroup,
    ) -> None:
        """Begin no session yet; the arguments are those of `StepTurns`."""
        self._job = job
        self._step = step
        self._planned = planned
        self._groups = groups
        self._ids = ids
        self._tasks = tasks
        self.evaluates = False
        """Whether sessions of evaluation groups may begin, too."""
        self.tools: dict[int, Tools] = {}
        """Empty: agents have their tools themselves."""
        self._waiting: list[int] = []
        """Samples whose session has not begun in this process."""
        self._running: dict[int, asyncio.Task[None]] = {}
        """Sample -> the task that runs its agent."""

    async def start(self, groups: Sequence[PlannedGroup]) -> list[GroupRequested]:
        """Note the samples of these groups; their sessions begin once the log shows which have ended."""
        self._waiting += [group.id + member for group in groups for member in range(group.n)]
        return []

    def check_started(self) -> None:
        """Check nothing: see `StepTurns.check_started`."""

    def prompt_of(self, group: int) -> bytes:
        """Return an empty column: each session has a prompt of its own."""
        del group
        return b""

    def answer_turns(self) -> None:
        """Begin the sessions of samples that have none here, and those that begin again."""
        due = [sample for sample in self._waiting if self.evaluates or not SampleId.unpack(sample).is_eval]
        self._waiting = [sample for sample in self._waiting if SampleId.unpack(sample).is_eval and not self.evaluates]
        for sample in [*due, *self._groups.take_begun_again()]:
            if self._groups.is_awaited(sample):
                session = self._groups.session(sample)
                name = f"session-{SampleId.unpack(sample)}"
                self._running[sample] = self._tasks.create_task(self._run(session), name=name)

    def release(self, group: int) -> None:
        """Stop the agents of a dropped group."""
        for member in range(self._planned[group].n):
            if (task := self._running.pop(group + member, None)) is not None:
                task.cancel()

    async def _run(self, session: Session) -> None:
        """Run the agent of a session, and record how it ended."""
        id_of = SessionId(self._job.id, session.id)
        record = await self._open(id_of, session)
        end = await self._ended(id_of, session, record)
        if not self._groups.is_awaited(session.sample):
            return
        record = record.model_copy(update={"is_over": True})
        key = id_of.redis_key
        await self._job.bus.transact(
            [
                Append(names.rollouts_finished(self._job.id), end),
                HashSet(key, {SESSION: record.model_dump_json()}),
                Expire(key, RETENTION_S),
            ]
        )

    async def _open(self, session_id: SessionId, session: Session) -> SessionRecord:
        """Store a session; one that an earlier trainer has opened keeps its turns."""
        key, group = session_id.redis_key, self._planned[group_of(session.sample)]
        request = request_of(self._job, self._step, group, b"")
        ids = self._ids.of(session.sample)
        first, stride = ids.later_turns(session.id)
        record = SessionRecord(
            sample=session.id,
            version=request.version,
            max_staleness=request.max_staleness,
            first=first,
            stride=stride,
            max_turns=self._spec.max_turns,
            seed=request.seed,
            sampling=request.sampling,
            vocab_size=request.vocab_size,
        )
        kept_s = RETENTION_S + 2 * self._spec.timeout_s
        await self._job.bus.transact([HashSet(key, {SESSION: record.model_dump_json()}), Expire(key, kept_s)])
        return record

    async def _ended(self, session_id: SessionId, session: Session, record: SessionRecord) -> SessionEnded:
        environments, session_key = self._job.resources.environments, self._job.resources.session_key
        assert environments is not None, "built without the job's agent"
        assert session_key is not None, "built without the keys of sessions"
        group = self._planned[group_of(session.sample)]
        prompt = self._job.prompt(group)
        text = json.dumps(
            {
                "base_url": f"{await self._url()}/v1",
                "key": session_key(session_id),
                "sample": str(SampleId.unpack(session.sample)),
                "step": self._step,
                "is_eval": group.is_eval,
            }
        )
        row: dict[str, Any] = {"prompt": prompt.given, **prompt.columns}
        try:
            (result,) = await environments.step(session.id, row, group.seed, [text])
            return SessionEnded(session=session.id, start=str(result.observation), reward=result.reward)
        except EnvironmentFault as error:
            reason = f"agent_{error.reason.removeprefix('environment_')}"
            if (start := await self._start_at_limit(session_id, record)) is not None:
                # The model has used up its turns, and its agent could not go on: this is a result, not a fault.
                return SessionEnded(session=session.id, start=start, over="cut")
            again = self._groups.reserve_replacement(session.sample) if error.may_pass else None
            end = SessionEnded(session=session.id, reason=reason, detail=error.detail, replaced_by=again or 0)
            await self._report_lost(session, end)
            return end
        finally:
            environments.release(session.id)

    async def _start_at_limit(self, session_id: SessionId, record: SessionRecord) -> str | None:
        """Return the start of the agent that used the last turn of a session, None if there are turns left."""
        last = names.session_opened(record.turn_id(record.max_turns - 1))
        stored = await self._job.bus.retry(lambda bus: bus.hash_get(session_id.redis_key, last))
        return None if stored is None else str(json.loads(stored)["start"])

    async def _report_lost(self, session: Session, end: SessionEnded) -> None:
        name, reason, detail = str(SampleId.unpack(session.sample)), end.reason, end.detail
        turn, again = len(session.nodes), end.replaced_by > 0
        await self._job.emit_event(
            "conversation_lost", sample=name, turn=turn, reason=reason, detail=detail, begins_again=again
        )
        await self._job.warn(self._job.faults.on_conversation_lost(self._step, reason, detail))

    async def _url(self) -> str:
        """Return where the leading manager is reached."""
        limit_s = self._job.limit_s
        async with self._job.waits.on("the rollout manager", because="an agent needs its address", limit_s=limit_s):
            while True:
                (held,) = await self._job.bus.retry(lambda bus: bus.lease_values([names.MANAGER_LEASE]))
                if held is not None and (url := json.loads(held).get("url")):
                    return str(url)
                await asyncio.sleep(_MANAGER_EVERY_S)

    @property
    def _spec(self) -> AgentSpec:
        agent = self._job.generating_spec.agent
        if agent is None:
            raise Fatal("the job has no agent")
        return agent
