"""Runs the sessions of one step: an agent for each sample, whose calls of the model are its turns.

A trainer opens a session in Redis, and runs the agent with the manager's URL and a key. The manager writes each turn
into `rollouts.finished`, first that it was opened and then its end; the trainer appends the end of the session. So a
trainer that resumes after a kill reads ended sessions from the log. It runs the agents of the others again: the manager
answers calls that an agent repeats with the turns of its earlier start, and other turns of that start are not trained.

The sessions of a remote agent are offered to hosts in the transaction that opens them, and the manager writes into the
log how a host has ended one. A trainer that resumes offers none again that is offered, and reads how the others ended.

A job with other policies has one agent for all. The jobs of the others have the same groups, and open the same
sessions, but run no agent: this job's trainer waits until they are open, gives its agent a key of each, and appends
what the agent returned for them to their logs in the transaction that ends its own session. So a session ends for all
policies or for none, whichever trainer dies.

Consumes: planned groups (`start`), and what begins again, from `SessionCollector` (`answer_turns`).
Produces: the hash of each session, offers, and a `SessionEnded` in `rollouts.finished`; a `SessionRewarded` in those of
    other policies.
Waits for: `Environments.step`, which runs an agent for at most `agent.timeout_s`; the leading manager, in `_url`; the
    end of a remote session or of one of another policy's agent, and the sessions of other policies, for which the job
    waits as for samples.
Ends when: each session has ended or was lost, or its group was dropped.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from rlboost.services.trainer.domain.conversations import StepTurnIds
from rlboost.services.trainer.domain.plan import PlannedGroup
from rlboost.services.trainer.domain.sessions import Session, SessionCollector
from rlboost.services.trainer.job.job import Job, job_record
from rlboost.services.trainer.ports.samples import EnvironmentFault
from rlboost.services.trainer.step.turns import check_budget, columns_of, report_lost, request_of
from rlboost.shared.errors import Fatal, WaitTimedOut
from rlboost.shared.ids import JOB_SHIFT, SampleId, group_of, within_job
from rlboost.shared.job.agent import REWARDED, SESSION, TASK, SessionId, SessionRecord, SessionTask, turn_of_answer
from rlboost.shared.job.base import served_id
from rlboost.shared.job.reward import AgentSpec
from rlboost.shared.job.spec import RlJob
from rlboost.shared.messages import ENDED_JOB_RETENTION_S, GroupRequested, SessionEnded, SessionRewarded, TurnRewards
from rlboost.shared.model.tool_call_formats import Tools
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Append, Delete, Expire, HashDelete, HashSet, Op

MAX_OPENING_S = 30 * 24 * 3600.0
RETENTION_S = 3600.0
"""How long Redis has the end of a session."""
_MANAGER_EVERY_S = 0.5
_OPEN_EVERY_S = 0.2
"""How often a session of another policy is looked for."""
_POLICIES_EVERY_S = 5.0
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
    policies: Mapping[str, tuple[float, TurnRewards, float]] = {}
    """Other policy -> reward, rewards of answers and cost of its session."""
    over: Literal["done", "cut"] = "done"


class OtherPolicy(NamedTuple):
    """The job of another policy that this job's agent calls, or of the agent that calls this policy."""

    name: str
    """Empty for the job with the agent."""
    job_id: str
    no: int

    def session(self, sample: int) -> SessionId:
        """Return its session that belongs to a sample of this job."""
        return SessionId(self.job_id, self.no << JOB_SHIFT | within_job(sample))


async def other_policies(job: Job) -> list[OtherPolicy]:
    """Return the jobs whose sessions are those of this one.

    Raises:
        Fatal: one of them is unknown.

    """
    spec = job.generating_spec
    named = {name: served_id(job.id, name) for name in spec.policies} if isinstance(spec, RlJob) else {}
    if spec.agent is not None and spec.agent.leader:
        named[""] = spec.agent.leader
    found = []
    for name, job_id in named.items():
        if (record := await job_record(job.bus, job_id)) is None:
            raise Fatal(f"there is no job {job_id}, whose sessions are those of this one: create the job again")
        found.append(OtherPolicy(name, job_id, int(record["no"])))
    return found


async def watch_policies(job: Job, others: Sequence[OtherPolicy]) -> None:
    """Look at the jobs of other policies until cancelled.

    Raises:
        Fatal: one of them failed or was cancelled.

    """
    while others:
        await asyncio.sleep(_POLICIES_EVERY_S)
        for other in others:
            record = await job_record(job.bus, other.job_id) or {}
            if record.get("state") in {"failed", "cancelled"} and not job.cancelled.is_set():
                raise Fatal(f"job {other.job_id}, which learns with this one, {record['state']}: {record.get('error')}")


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
        others: Sequence[OtherPolicy] = (),
    ) -> None:
        """Begin no session yet; the arguments are those of `StepTurns`, and the `other_policies`."""
        self._policies = [other for other in others if other.name]
        self._opening = asyncio.Lock()
        """Where another policy is late, one session looks for it at a time."""
        self._job = job
        self._step = step
        self._planned = planned
        self._groups = groups
        self._ids = ids
        self._tasks = tasks
        self.awaited = ""
        """Another policy's job that has not come to this step; empty if there is none."""
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
        for sample in dict.fromkeys([*due, *self._groups.take_begun_again()]):  # of an earlier process, it is in both
            session = self._groups.session(sample)
            # Where another job's agent calls this policy, that job waits for a session, even of a dropped group.
            if self._groups.is_awaited(session) or (self._spec.leader and session.rewarded is None):
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

    async def report_dropped(self, group: int) -> None:
        """End the sessions of a dropped group for other policies; what has ended there stays."""
        lost = {"reason": "infrastructure", "detail": f"job {self._job.id} dropped its group"}
        sessions = [self._groups.session(group + member) for member in range(self._planned[group].n)]
        open_ones = [session for session in sessions if session.end is None or session.end.reason]
        if ops := [op for session in open_ones for op in self._ends_of_others(session, lambda _: lost)]:
            await self._job.bus.transact(ops)

    def _end_remote(self, session: int, end: SessionRewarded | None) -> None:
        if (future := self._ends.get(session)) is not None and not future.done():
            future.set_result(end)

    async def _run(self, session: Session) -> None:
        """Run the agent of a session, and record how it ended."""
        session_id = SessionId(self._job.id, session.id)
        record, opened_at = await self._open(session_id, session), time.monotonic()
        end, others = await self._ended(session_id, session, record)
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
            ops += others
        await self._job.bus.transact(ops)

    def _ends_of_others(self, session: Session, end_of: Callable[[str], dict[str, Any]]) -> list[Op]:
        """Return what ends a session for other policies, each with the fields that `end_of` returns for its name."""
        ops = list[Op]()
        for other in self._policies:
            of_other = other.session(session.sample)
            end = SessionRewarded(session=of_other.sample, **end_of(other.name))
            ops.append(Append(names.rollouts_finished(other.job_id), end))
        return ops

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
            n_ids=ids.max_turns - 1,
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

    async def _ended(
        self, session_id: SessionId, session: Session, record: SessionRecord
    ) -> tuple[SessionEnded | None, list[Op]]:
        """Run an agent; return how its session ended, None if it was stopped, and what ends it for other policies."""
        if not self._groups.is_awaited(session):
            return None, []
        try:
            end = await (self._here(session_id, session) if self._spec.runs_here else self._elsewhere(session))
            if not end.raised:
                fields = _fields(end, end.reward, end.rewards, end.cost)
                ended = SessionEnded(session=record.sample, **fields)
                return ended, self._ends_of_others(session, partial(_rewarded, end))
            if await self._is_at_limit(session_id, session, end.start):
                # A model has used up its turns, and its agent could not go on: this is a result, not a fault.
                end = end._replace(over="cut")
                cut = SessionEnded(session=record.sample, **_fields(end, 0.0, (), end.cost))
                return cut, self._ends_of_others(session, partial(_rewarded, end))
            raise EnvironmentFault(end.reason, end.raised)  # noqa: TRY301 - one way to lose a session
        except EnvironmentFault as error:
            check_budget(error)
            if error.reason == _STOPPED or not self._groups.is_awaited(session):
                return None, []
            again = self._groups.reserve_replacement(session.sample) if error.may_pass else None
            reason = f"agent_{error.reason.removeprefix('environment_')}"
            lost = SessionEnded(session=record.sample, reason=reason, detail=error.detail, replaced_by=again or 0)
            await report_lost(self._job, self._step, session.sample, len(session.nodes), lost)
            fields = {"reason": "infrastructure", "detail": error.detail}
            return lost, [] if again else self._ends_of_others(session, lambda _: fields)

    async def _here(self, session_id: SessionId, session: Session) -> _End:
        """Run an agent in a process of this trainer."""
        environments = self._job.resources.environments
        assert environments is not None, "built without the job's agent"
        group = self._planned[group_of(session.sample)]
        row = columns_of(self._job.prompt(group))
        try:
            (result,) = await environments.step(session.id, row, group.seed, [await self._text_of(session_id, session)])
            start, raised, rewards, policies = json.loads(str(result.observation))
            others = {name: (reward, _of_turns(given), cost) for name, (reward, given, cost, _) in policies.items()}
            return _End(start, raised, result.reward, _of_turns(rewards), result.cost, policies=others)
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
        raised = rewarded.detail or rewarded.reason  # who ended it may have nothing to say about it
        ended = rewarded.start, raised, rewarded.reward, rewarded.rewards, rewarded.cost
        return _End(*ended, rewarded.reason or "raised", over=rewarded.over)

    async def _text_of(self, session_id: SessionId, session: Session) -> str:
        session_key = self._job.resources.session_key
        assert session_key is not None, "built without the keys of sessions"
        sample = SampleId.unpack(session.sample)
        others = {other.name: other.session(session.sample) for other in self._policies}
        for other in others.values():
            await self._until_open(other, session)
        return json.dumps(
            {
                "policies": {name: session_key(other) for name, other in others.items()},
                "base_url": f"{await self._url()}/v1",
                "key": session_key(session_id),
                "sample": str(sample),
                "step": self._step,
                "is_eval": sample.is_eval,
            }
        )

    async def _until_open(self, other: SessionId, session: Session) -> None:
        """Wait until another policy's trainer has opened a session; `Intake.read` limits this wait, too.

        Raises:
            EnvironmentFault: the session that needs it is not awaited any more.

        """
        because = f"job {other.job_id} has not come to step {self._step + 1}"
        async with self._opening, self._job.waits.on("another policy", because=because, limit_s=MAX_OPENING_S):
            self.awaited = other.job_id
            try:
                while self._groups.is_awaited(session):
                    if await self._job.bus.retry(lambda bus: bus.hash_get(other.redis_key, SESSION)) is not None:
                        return
                    await asyncio.sleep(_OPEN_EVERY_S)
            finally:
                self.awaited = ""
        raise EnvironmentFault("released", "its group is complete or dropped")

    async def _is_at_limit(self, session_id: SessionId, session: Session, start: str) -> bool:
        """Return True if a further call of this start, to any policy, was refused since it had used its turns."""
        limited = names.session_limited(start)
        for one in (session_id, *(other.session(session.sample) for other in self._policies)):
            if await self._job.bus.retry(lambda bus: bus.hash_get(one.redis_key, limited)) is not None:  # noqa: B023
                return True
        return False

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


def _of_turns(rewards: Mapping[str, float]) -> TurnRewards:
    return tuple((turn_of_answer(answer), reward) for answer, reward in rewards.items())


def _rewarded(end: _End, policy: str) -> dict[str, Any]:
    """Return what another policy's session gets of an agent's end; nothing without a reward."""
    return _fields(end, *end.policies.get(policy, (0.0, (), 0.0)))


def _fields(end: _End, reward: float, rewards: TurnRewards, cost: float) -> dict[str, Any]:
    return {"start": end.start, "reward": reward, "rewards": rewards, "cost": cost, "over": end.over}
