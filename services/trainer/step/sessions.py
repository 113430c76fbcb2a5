"""Runs the sessions of one step: an agent for each sample, whose calls of the model are its turns.

A trainer opens a session in Redis, and runs the agent with the manager's URL and a key. The manager writes each turn
into `rollouts.finished`, first that it was opened and then its end; the trainer appends the end of the session. So a
trainer that resumes after a kill reads ended sessions from the log. It runs the agents of the others again: the manager
answers calls that an agent repeats with the turns of its earlier start, and other turns of that start are not trained.

The sessions of a remote agent are offered to hosts in the transaction that opens them, and the manager writes into the
log how a host has ended one. A trainer that resumes offers none again that is offered, and reads how the others ended.

Consumes: planned groups (`start`), and what begins again, from `SessionCollector` (`answer_turns`).
Produces: the hash of each session, offers, and a `SessionEnded` in `rollouts.finished`.
Waits for: `Environments.step`, which runs an agent for at most `agent.timeout_s`; the leading manager, in `_url`; the
    end of a remote session, for which the job waits as for samples.
Ends when: each session has ended or was lost, or its group was dropped.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rlboost.services.trainer.domain.conversations import StepTurnIds
from rlboost.services.trainer.domain.plan import PlannedGroup
from rlboost.services.trainer.domain.sessions import Session, SessionCollector
from rlboost.services.trainer.job.job import Job
from rlboost.services.trainer.ports.samples import EnvironmentFault
from rlboost.services.trainer.step.turns import check_budget, columns_of, report_lost, request_of
from rlboost.shared.errors import Fatal, WaitTimedOut
from rlboost.shared.ids import SampleId, group_of
from rlboost.shared.job.agent import REWARDED, SESSION, TASK, SessionId, SessionRecord, SessionTask, turn_of_answer
from rlboost.shared.job.reward import SPARE_TURNS, AgentSpec
from rlboost.shared.messages import ENDED_JOB_RETENTION_S, GroupRequested, SessionEnded, SessionRewarded, TurnRewards
from rlboost.shared.model.tool_call_formats import Tools
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Append, Delete, Expire, HashDelete, HashSet, Op

RETENTION_S = 3600.0
"""How long Redis has the end of a session."""
_MANAGER_EVERY_S = 0.5
_STOPPED = "environment_released"


class _End(NamedTuple):
    """How one start of an agent ended."""

    start: str
    raised: str
    """What it raised; empty if it has a reward."""
    reward: float
    rewards: TurnRewards
    cost: float
    reason: str = "raised"


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
        self._running: dict[int, Session] = {}
        """Sample -> its session, whose agent runs."""
        self._ends: dict[int, asyncio.Future[SessionRewarded | None]] = {}
        """Session that hosts may take or have taken -> how it ends; None if it was stopped."""
        self._has_begun = False
        """Whether the log was read to its end once, so that further groups are in no log."""

    async def start(self, groups: Sequence[PlannedGroup]) -> list[GroupRequested]:
        """Note the samples of these groups; their sessions begin once the log shows which have ended."""
        self._waiting += [group.id + member for group in groups for member in range(group.n)]
        if self._has_begun:
            self.answer_turns()
        return []

    def check_started(self) -> None:
        """Check nothing: see `StepTurns.check_started`."""

    def prompt_of(self, group: int) -> bytes:
        """Return an empty column: each session has a prompt of its own."""
        del group
        return b""

    def answer_turns(self) -> None:
        """Begin the sessions of samples that have none here, and those that begin again."""
        self._has_begun = True
        for session, reason, detail in self._groups.take_unusable():
            lost = SessionEnded(session=session.id, reason=reason, detail=detail)
            report = report_lost(self._job, self._step, session.sample, len(session.nodes), lost)
            self._tasks.create_task(report, name=f"lost-{SampleId.unpack(session.sample)}")
        for rewarded in self._groups.take_rewarded():
            self._end_remote(rewarded.id, rewarded.rewarded)
        due = [sample for sample in self._waiting if self.evaluates or not SampleId.unpack(sample).is_eval]
        self._waiting = [sample for sample in self._waiting if SampleId.unpack(sample).is_eval and not self.evaluates]
        for sample in [*due, *self._groups.take_begun_again()]:
            session = self._groups.session(sample)
            if self._groups.is_awaited(session):
                self._running[sample] = session
                self._tasks.create_task(self._run(session), name=f"session-{SampleId.unpack(sample)}")

    def release(self, group: int) -> None:
        """Stop the agents of a group that is complete or dropped."""
        environments = self._job.resources.environments
        for member in range(self._planned[group].n):
            if (session := self._running.get(group + member)) is None:
                continue
            if environments is not None:
                environments.stop(session.id)
            self._end_remote(session.id, None)

    def _end_remote(self, session: int, end: SessionRewarded | None) -> None:
        if (future := self._ends.get(session)) is not None and not future.done():
            future.set_result(end)

    async def _run(self, session: Session) -> None:
        """Run the agent of a session, and record how it ended."""
        session_id = SessionId(self._job.id, session.id)
        record, opened_at = await self._open(session_id, session), time.monotonic()
        end = await self._ended(session_id, session, record)
        if self._running.get(session.sample) is session:
            del self._running[session.sample]
        # Its turns are in the log: what is left refuses further calls.
        over = {SESSION: record.model_copy(update={"is_over": True}).model_dump_json()}
        if session.rewarded is not None:  # its host may not know yet
            over[REWARDED] = session.rewarded.model_dump_json()
        key = session_id.redis_key
        ops: list[Op] = [Delete(key), HashSet(key, over), Expire(key, RETENTION_S)]
        if self._spec.remote:
            ops.append(HashDelete(names.job_offers(self._job.id), (f"{session.id:x}",)))
        if end is not None and self._groups.is_awaited(session):
            end = end.model_copy(update={"duration_s": time.monotonic() - opened_at})
            ops.insert(0, Append(names.rollouts_finished(self._job.id), end))
        await self._job.bus.transact(ops)

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
            n_ids=self._spec.max_turns + SPARE_TURNS,
            seed=request.seed,
            sampling=request.sampling,
            vocab_size=request.vocab_size,
            max_tokens=self._spec.max_tokens or 0,
        )
        fields, ops = {SESSION: record.model_dump_json()}, list[Op]()
        if self._spec.remote and session.rewarded is None:
            fields[TASK] = self._task(session, group).model_dump_json()
            offers, field = names.job_offers(self._job.id), f"{session.id:x}"
            if await self._job.bus.retry(lambda bus: bus.hash_get(offers, field)) is None:
                ops = [HashSet(offers, {field: ""}), Expire(offers, ENDED_JOB_RETENTION_S)]
        # For as long as the log may be read again.
        await self._job.bus.transact([HashSet(key, fields), Expire(key, ENDED_JOB_RETENTION_S), *ops])
        return record

    def _task(self, session: Session, group: PlannedGroup) -> SessionTask:
        sample, spec = SampleId.unpack(session.sample), self._spec
        return SessionTask(
            row=columns_of(self._job.prompt(group)),
            arguments=spec.arguments,
            sample=str(sample),
            step=self._step,
            is_eval=sample.is_eval,
            timeout_s=spec.timeout_s,
        )

    async def _ended(self, session_id: SessionId, session: Session, record: SessionRecord) -> SessionEnded | None:
        """Run an agent; return how its session ended, None if it was stopped."""
        if not self._groups.is_awaited(session):
            return None
        try:
            end = await (self._elsewhere(session) if self._spec.remote else self._here(session_id, session))
            if not end.raised:
                return SessionEnded(
                    session=record.sample, start=end.start, reward=end.reward, rewards=end.rewards, cost=end.cost
                )
            if await self._is_at_limit(session_id, end.start):
                # The model has used up its turns, and its agent could not go on: this is a result, not a fault.
                return SessionEnded(session=record.sample, start=end.start, over="cut", cost=end.cost)
            raise EnvironmentFault(end.reason, end.raised)  # noqa: TRY301 - one way to lose a session
        except EnvironmentFault as error:
            check_budget(error)
            if error.reason == _STOPPED or not self._groups.is_awaited(session):
                return None
            again = self._groups.reserve_replacement(session.sample) if error.may_pass else None
            reason = f"agent_{error.reason.removeprefix('environment_')}"
            lost = SessionEnded(session=record.sample, reason=reason, detail=error.detail, replaced_by=again or 0)
            await report_lost(self._job, self._step, session.sample, len(session.nodes), lost)
            return lost

    async def _here(self, session_id: SessionId, session: Session) -> _End:
        """Run an agent in a process of this trainer."""
        environments = self._job.resources.environments
        assert environments is not None, "built without the job's agent"
        group = self._planned[group_of(session.sample)]
        row = columns_of(self._job.prompt(group))
        try:
            (result,) = await environments.step(session.id, row, group.seed, [await self._text_of(session_id, session)])
            start, raised, rewards = json.loads(str(result.observation))
            of_turns = tuple((turn_of_answer(answer), reward) for answer, reward in rewards.items())
            return _End(start, raised, result.reward, of_turns, result.cost)
        finally:
            environments.release(session.id)

    async def _elsewhere(self, session: Session) -> _End:
        """Wait until a host has ended a session."""
        end = self._ends[session.id] = asyncio.get_running_loop().create_future()
        if session.rewarded is not None:
            end.set_result(session.rewarded)
        try:
            rewarded = await end
        finally:
            del self._ends[session.id]
        if rewarded is None:
            raise EnvironmentFault("released", "its group is complete or dropped")
        ended = rewarded.start, rewarded.detail, rewarded.reward, rewarded.rewards, rewarded.cost
        return _End(*ended, rewarded.reason or "raised")

    async def _text_of(self, session_id: SessionId, session: Session) -> str:
        session_key = self._job.resources.session_key
        assert session_key is not None, "built without the keys of sessions"
        sample = SampleId.unpack(session.sample)
        return json.dumps(
            {
                "base_url": f"{await self._url()}/v1",
                "key": session_key(session_id),
                "sample": str(sample),
                "step": self._step,
                "is_eval": sample.is_eval,
            }
        )

    async def _is_at_limit(self, session_id: SessionId, start: str) -> bool:
        """Return True if a further call of this start was refused since it had used its turns."""
        limited = names.session_limited(start)
        return await self._job.bus.retry(lambda bus: bus.hash_get(session_id.redis_key, limited)) is not None

    async def _url(self) -> str:
        """Return where the leading manager is reached."""
        limit_s = self._job.limit_s
        try:
            async with self._job.waits.on("the rollout manager", because="an agent needs its address", limit_s=limit_s):
                while True:
                    (held,) = await self._job.bus.retry(lambda bus: bus.lease_values([names.MANAGER_LEASE]))
                    if held is not None and (url := json.loads(held).get("url")):
                        return str(url)
                    await asyncio.sleep(_MANAGER_EVERY_S)
        except WaitTimedOut as error:
            raise Fatal(f"{error}: check that a rollout manager runs") from error

    @property
    def _spec(self) -> AgentSpec:
        agent = self._job.generating_spec.agent
        if agent is None:
            raise Fatal("the job has no agent")
        return agent
