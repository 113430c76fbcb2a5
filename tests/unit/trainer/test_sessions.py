"""The pure part of sessions: a tree of calls becomes rows, and sessions become whole groups."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlboost.services.trainer.domain.conversations import Row, StepTurnIds, TurnIds
from rlboost.services.trainer.domain.groups import DroppedGroup, GroupOutcome, ScoredGroup, WholeGroup
from rlboost.services.trainer.domain.metrics import RolloutTally, StepTally
from rlboost.services.trainer.domain.sessions import NO_CALL, UNKNOWN_ANSWER, Branches, SessionCollector
from rlboost.services.trainer.ports.samples import EnvironmentFault, StepResult
from rlboost.services.trainer.step import sessions as sessions_module
from rlboost.services.trainer.step.intake import Intake, StepIntake
from rlboost.services.trainer.step.run import TrainingRows
from rlboost.services.trainer.step.sessions import OtherPolicy, StepSessions, watch_policies
from rlboost.shared.errors import Fatal, Unprocessable, WaitTimedOut
from rlboost.shared.ids import SampleId
from rlboost.shared.job.agent import AgentEnd, Rewards, SessionId
from rlboost.shared.job.spec import parse
from rlboost.shared.messages import Message, SampleDropped, SampleFinished, SessionEnded, SessionRewarded, TurnOpened
from rlboost.shared.process.waiting import Waits
from rlboost.shared.streams.bus import START, Append
from rlboost.shared.wire import F32, I32, floats, ints, pack

IDS = TurnIds(n_groups=2, group_size=2, max_turns=10, replacements=1)
GROUP = SampleId(1, False, 4, 0, 0).pack()


def turn_id(first: int, number: int) -> int:
    return IDS.id_of(first, number + 1)


def opened(number: int, *tokens: int, parent: int | None = None, start: str = "a", first: int = GROUP) -> TurnOpened:
    return TurnOpened(
        session=first,
        sample=turn_id(first, number),
        parent=0 if parent is None else turn_id(first, parent),
        tokens=pack(tokens, I32),
        start=start,
    )


def made(number: int, *tokens: int, first: int = GROUP) -> SampleFinished:
    return SampleFinished(
        sample=turn_id(first, number),
        tokens=pack(tokens, I32),
        logprobs=pack([-0.5 * token for token in tokens], F32),
        finish="stop",
        spans=[("w", 4, len(tokens))],
        attempts=1,
        group_done=True,
    )


def ended(reward: float = 1.0, start: str = "a", first: int = GROUP) -> SessionEnded:
    return SessionEnded(session=first, start=start, reward=reward)


def lost(first: int = GROUP, replaced_by: int = 0) -> SessionEnded:
    return SessionEnded(session=first, reason="agent_raised", detail="no", replaced_by=replaced_by)


def collector(n: int = 2) -> SessionCollector:
    return SessionCollector(1, 4, {GROUP: n}, 0, StepTurnIds(IDS, None), 1)


def folded(collecting: SessionCollector, *messages: Message) -> list[GroupOutcome]:
    return [outcome for message in messages if (outcome := collecting.apply(message)) is not None]


def rows_of(*messages: Message) -> list[Row]:
    (whole,) = folded(collector(1), *messages)
    assert isinstance(whole, WholeGroup)
    (session,) = whole.conversations
    return session.rows(b"")


def shown(row: Row) -> tuple[list[int], list[int], list[int], list[float]]:
    return ints(row.prompt), ints(row.completion), list(row.loss_mask), list(floats(row.logprobs))


def test_linear_session_is_one_row_as_a_conversation_is() -> None:
    messages = [opened(0, 1, 2), made(0, 5, 6), opened(1, 7, parent=0), made(1, 8), ended(0.5)]
    (row,) = rows_of(*messages)
    assert shown(row) == ([1, 2], [5, 6, 7, 8], [1, 1, 0, 1], [-2.5, -3.0, -4.0])
    (whole,) = folded(collector(1), *messages)
    assert isinstance(whole, WholeGroup)
    (session,), (sample,) = whole.conversations, whole.samples
    assert isinstance(session, Branches)
    assert (session.reward, sample.sample, sample.finish) == (0.5, GROUP, "stop")
    assert (ints(session.prompt), ints(session.completion), list(session.loss_mask)) == (*shown(row)[:2], shown(row)[2])
    assert ints(sample.tokens) == [5, 6, 8]


@pytest.mark.parametrize(
    ("first", "last", "over", "finish"),
    [
        ("length", "stop", "done", "stop"),
        ("stop", "length", "done", "length"),
        ("stop", "stop", "cut", "length"),
    ],
)
def test_session_is_truncated_if_its_last_turn_or_a_limit_ended_it(
    first: str, last: str, over: str, finish: str
) -> None:
    turns = [made(number, 5).model_copy(update={"finish": how}) for number, how in enumerate((first, last))]
    end = ended().model_copy(update={"over": over})
    messages = [opened(0, 1, 2), turns[0], opened(1, 7, parent=0), turns[1], end]
    (whole,) = folded(collector(1), *messages)
    assert isinstance(whole, WholeGroup)
    assert whole.samples[0].finish == finish


def test_session_counts_the_time_in_the_model_once_for_parallel_calls_and_the_rest_as_outside() -> None:
    collecting = collector(1)
    timed = [
        *((3.0, opened(0, 1)), (5.0, made(0, 5)), (8.0, opened(1, 2, parent=0)), (9.0, opened(2, 3, parent=0))),
        *((11.0, made(1, 6)), (13.0, made(2, 7)), (14.0, ended().model_copy(update={"duration_s": 12.0}))),
    ]
    (whole,) = (outcome for at, message in timed if (outcome := collecting.apply(message, at)) is not None)
    assert isinstance(whole, WholeGroup)
    (session,) = whole.conversations
    assert session.lifetime == (2.0, 14.0)
    assert session.generation == [(3.0, 5.0), (8.0, 11.0), (9.0, 13.0)]
    assert (session.model_s, session.outside_s) == (2.0 + 5.0, 1.0 + 3.0 + 1.0)


def test_session_that_a_restarted_trainer_opened_again_began_with_its_first_call() -> None:
    collecting = collector(1)
    timed = [(3.0, opened(0, 1)), (5.0, made(0, 5)), (6.0, ended().model_copy(update={"duration_s": 0.1}))]
    (whole,) = (outcome for at, message in timed if (outcome := collecting.apply(message, at)) is not None)
    assert isinstance(whole, WholeGroup)
    assert (whole.conversations[0].lifetime, whole.conversations[0].outside_s) == ((3.0, 6.0), 1.0)


def test_branches_are_rows_that_train_each_turn_once() -> None:
    rows = rows_of(
        *(opened(0, 1), made(0, 5), opened(1, 2, parent=0), made(1, 6)),
        *(opened(2, 3, parent=0), made(2, 7), opened(3, 9, 9), made(3, 8), ended()),
    )
    assert [shown(row) for row in rows] == [
        ([1], [5, 2, 6], [1, 0, 1], [-2.5, -3.0]),
        ([1], [5, 3, 7], [0, 0, 1], [-3.5]),
        ([9, 9], [8], [1], [-4.0]),
    ]


def test_turns_of_an_earlier_start_are_not_trained_unless_their_calls_are_repeated() -> None:
    rows = rows_of(
        *(opened(0, 1), made(0, 5), opened(1, 2, parent=0), made(1, 6)),
        *(opened(0, 1, start="b"), opened(2, 3, parent=0, start="b"), made(2, 7), ended(start="b")),
    )
    assert [shown(row)[1] for row in rows] == [[5, 3, 7]]


def test_session_is_complete_with_its_end_and_the_ends_of_its_turns() -> None:
    collecting = collector(1)
    assert folded(collecting, opened(0, 1), ended()) == []
    assert folded(collecting, opened(1, 2, parent=0), made(1, 9)) == [], "opened after the end"
    assert len(folded(collecting, made(0, 5), made(0, 5), ended())) == 1
    assert collecting.complete


def test_lost_session_begins_again_with_turns_of_its_own() -> None:
    collecting = collector(1)
    folded(collecting, opened(0, 1), made(0, 5))
    again = collecting.reserve_replacement(GROUP)
    assert again is not None
    folded(collecting, lost(replaced_by=again), made(0, 5), opened(1, 2, parent=0))
    assert collecting.take_begun_again() == [GROUP]
    assert collecting.session(GROUP).id == again
    messages = [opened(0, 3, first=again), made(0, 6, first=again), ended(first=again)]
    (whole,) = folded(collecting, *messages)
    assert isinstance(whole, WholeGroup)
    assert [shown(row)[:2] for row in whole.conversations[0].rows(b"")] == [([3], [6])]
    assert [sample.sample for sample in whole.samples] == [GROUP]
    assert (dict(collecting.lost), collecting.n_begun_again) == ({"agent_raised": 1}, 1)


def test_agent_that_makes_no_call_is_left_out() -> None:
    collecting = collector(2)
    assert folded(collecting, opened(0, 1), made(0, 5), ended(), ended(first=GROUP + 1)) != []
    assert collecting.complete
    collecting = collector(1)
    (dropped,) = folded(collecting, ended())
    assert isinstance(dropped, DroppedGroup)
    assert dropped.reason == NO_CALL
    assert collecting.lost == {NO_CALL: 1}


def test_turn_that_cannot_be_generated_is_no_turn_of_the_session() -> None:
    rows = rows_of(
        *(opened(0, 1), made(0, 5), opened(1, 2, parent=0)),
        *(SampleDropped(sample=turn_id(GROUP, 1), reason="failed 3 times", group_done=True), ended()),
    )
    assert [shown(row)[1] for row in rows] == [[5]]


def test_session_with_a_turn_that_continues_an_unknown_one_is_left_out() -> None:
    collecting = collector(1)
    messages = [opened(0, 1), made(0, 5), opened(1, 2, parent=0), made(1, 6), opened(0, 1, start="b"), ended()]
    (dropped,) = folded(collecting, *messages)
    assert isinstance(dropped, DroppedGroup), "its row would lack the beginning of its prompt"


def test_session_is_awaited_until_it_ends_or_is_replaced() -> None:
    collecting = collector(2)
    session, other = collecting.session(GROUP), collecting.session(GROUP + 1)
    assert collecting.is_awaited(session)
    again = collecting.reserve_replacement(GROUP)
    assert again is not None
    folded(collecting, lost(replaced_by=again))
    assert not collecting.is_awaited(session)
    assert collecting.is_awaited(collecting.session(GROUP))
    folded(collecting, opened(0, 1, first=GROUP + 1), made(0, 5, first=GROUP + 1), ended(first=GROUP + 1))
    assert not collecting.is_awaited(other)


def test_turn_that_no_call_opened_is_rejected() -> None:
    with pytest.raises(Unprocessable, match="no call of its agent opened"):
        collector().apply(made(0, 5))


@given(st.integers(0, 10_000), st.integers(1, 9))
def test_rows_of_any_tree_have_each_turn_once_after_what_it_was_given(seed: int, n: int) -> None:
    random, token = Random(seed), iter(range(1, 1000))
    contexts: dict[int, list[int]] = {}
    messages: list[Message] = []
    for number in range(n):
        parent = random.choice([None, *contexts]) if contexts else None
        prompt, tokens = [next(token), next(token)], [next(token) for _ in range(random.randint(1, 3))]
        contexts[number] = [*([] if parent is None else contexts[parent]), *prompt, *tokens]
        messages += [opened(number, *prompt, parent=parent), made(number, *tokens)]
    rows = rows_of(*messages, ended())
    trained: list[int] = []
    for row in rows:
        prompt, completion, mask, logprobs = shown(row)
        assert [*prompt, *completion] in contexts.values(), "a row is what the model saw and made"
        of_row = [token for token, is_trained in zip(completion, mask, strict=True) if is_trained]
        assert logprobs == [-0.5 * token for token in of_row]
        trained += of_row
    assert sorted(trained) == sorted(
        token for m in messages if isinstance(m, SampleFinished) for token in ints(m.tokens)
    )


def test_rewards_of_hosts_are_taken_once_and_of_the_present_session() -> None:
    collecting = collector()
    first = SessionRewarded(session=GROUP, start="a", reward=0.5)
    folded(collecting, first, SessionRewarded(session=GROUP, start="b", reward=1.0))
    (session,) = collecting.take_rewarded()
    assert (session.sample, session.rewarded) == (GROUP, first)
    assert collecting.take_rewarded() == []
    # One that another has replaced, or that has ended, waits for nothing.
    again = collecting.reserve_replacement(GROUP)
    assert again is not None
    folded(collecting, lost(replaced_by=again), SessionRewarded(session=GROUP, reward=1.0))
    assert collecting.take_rewarded() == []
    folded(collecting, SessionRewarded(session=again, start="c", reason="infrastructure", detail="no disk"))
    (session,) = collecting.take_rewarded()
    assert (session.sample, session.id) == (GROUP, again)


SECOND = GROUP + 1


def scored_with_own_rewards() -> ScoredGroup:
    """Return a group of a session with three rows, two with rewards of their own, and of one with a single row."""
    own = {turn_id(GROUP, 1): 0.25, turn_id(GROUP, 0): 3.0, turn_id(GROUP, 3): -1.0}
    messages = [
        *(opened(0, 1), made(0, 5), opened(1, 2, parent=0), made(1, 6), opened(2, 3, parent=0), made(2, 7)),
        *(opened(3, 4), made(3, 8), ended(2.0).model_copy(update={"rewards": tuple(own.items())})),
        *(opened(0, 1, first=SECOND), made(0, 9, first=SECOND), ended(0.5, first=SECOND)),
    ]
    (whole,) = folded(collector(2), *messages)
    assert isinstance(whole, WholeGroup)
    # A function of the job adds 1 to the rewards of both sessions.
    return ScoredGroup(GROUP, whole.samples, (3.0, 1.5), conversations=whole.conversations)


def test_row_has_the_reward_of_its_last_rewarded_answer_or_of_its_session() -> None:
    group = scored_with_own_rewards()
    assert group.has_row_rewards
    assert group.shaped_rewards == [3.0, 1.5]
    assert group.compared_rewards == [1.25, 4.0, 0.0, 1.5]
    equal = dataclasses.replace(group, rewards=(3.0, 3.0))
    assert StepTally(rollouts=RolloutTally(scored=[equal])).metrics()["frac_reward_zero_std"] == 0.0, "rows differ"


async def test_rows_with_rewards_of_their_own_are_compared_with_each_other() -> None:
    spec: Any = parse({"model": "m", "data": {"train": "t"}, "agent": {"function": "a:b"}, "steps": 1})
    spec = spec.model_copy(update={"algorithm": spec.algorithm.model_copy(update={"advantage": "group_mean"})})
    engine = SimpleNamespace(engine=None, critic=None)
    job: Any = SimpleNamespace(generating_spec=spec, spec=spec, resources=engine)

    async def run(call: Any) -> Any:
        return call()

    (rows,) = await TrainingRows.of(job, StepTally(), run).build([scored_with_own_rewards()])
    mean = (1.25 + 4.0 + 0.0 + 1.5) / 4
    assert [ints(row.completion) for row in rows] == [[5, 2, 6], [5, 3, 7], [8], [9]]
    expected = [1.25 - mean, 4.0 - mean, -mean, 1.5 - mean]
    assert [floats(row.advantages)[-1] for row in rows] == pytest.approx(expected)
    assert [len(set(floats(row.advantages))) for row in rows] == [1, 1, 1, 1]


def test_reward_of_an_answer_that_the_session_has_not_loses_it() -> None:
    end = ended().model_copy(update={"rewards": ((turn_id(GROUP, 7), 1.0),)})
    collecting = collector(1)
    (dropped,) = folded(collecting, opened(0, 1), made(0, 5), end)
    assert isinstance(dropped, DroppedGroup)
    assert dropped.reason == UNKNOWN_ANSWER
    assert collecting.lost == {UNKNOWN_ANSWER: 1}
    assert f"cmpl-{turn_id(GROUP, 7):016x}" in dropped.detail


async def test_session_that_is_cut_at_its_limit_has_the_cost_of_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    raised = StepResult(json.dumps(AgentEnd("a", "no turn is left", {})), 0.0, done=True, cost=0.25)
    session = SimpleNamespace(id=GROUP, sample=GROUP, nodes={})

    async def given(*_: Any) -> Any:
        return [raised]

    environments = SimpleNamespace(step=given, release=lambda _: None)
    plan = SimpleNamespace(seed=0)
    job: Any = SimpleNamespace(
        resources=SimpleNamespace(environments=environments),
        generating_spec=SimpleNamespace(agent=SimpleNamespace(runs_here=True)),
        prompt=lambda _: SimpleNamespace(given="p", columns={}),
    )
    groups: Any = SimpleNamespace(is_awaited=lambda _: True)
    sessions = StepSessions(job, 4, {GROUP: plan}, groups, StepTurnIds(IDS, None), None)  # type: ignore[arg-type, dict-item]
    monkeypatch.setattr(sessions, "_text_of", given)
    monkeypatch.setattr(sessions, "_is_at_limit", given)
    end, ops = await sessions._ended(SessionId("job", GROUP), session, SimpleNamespace(sample=GROUP))  # type: ignore[arg-type]
    assert end is not None
    assert not ops
    assert (end.over, end.reward, end.cost) == ("cut", 0.0, 0.25)


async def test_session_with_an_unusable_end_is_reported_once() -> None:
    events = list[dict[str, Any]]()

    async def emit(kind: str, **fields: Any) -> None:
        events.append({"kind": kind, **fields})

    async def warn(_: str) -> None:
        pass

    job: Any = SimpleNamespace(emit_event=emit, warn=warn, faults=SimpleNamespace(on_conversation_lost=lambda *_: ""))
    collecting = collector(2)
    folded(collecting, ended(), opened(0, 1, first=SECOND), made(0, 5, first=SECOND), ended(first=SECOND))
    async with asyncio.TaskGroup() as tasks:
        sessions = StepSessions(job, 4, {}, collecting, StepTurnIds(IDS, None), tasks)
        for _ in range(2):
            sessions.answer_turns()
    assert [(event["kind"], event["sample"], event["reason"]) for event in events] == [
        ("conversation_lost", str(SampleId.unpack(GROUP)), NO_CALL)
    ]


class Team:
    """A job whose agent calls a second policy; the agent's ends are given."""

    OTHER = SampleId(2, False, 4, 0, 0).pack()

    def __init__(self, *ends: AgentEnd) -> None:
        self.transactions = list[list[Any]]()
        self.opened = list[int]()
        self._ends = iter(ends)
        agent = SimpleNamespace(runs_here=True, remote=False, max_turns=9, max_tokens=None, leader="")
        self.job: Any = SimpleNamespace(
            id="job",
            resources=SimpleNamespace(environments=self),
            generating_spec=SimpleNamespace(agent=agent),
            prompt=lambda _: SimpleNamespace(given="p", columns={}),
            bus=self,
            emit_event=self._ignore,
            warn=self._ignore,
            faults=SimpleNamespace(on_conversation_lost=lambda *_: ""),
        )

    async def _ignore(self, *_: Any, **__: Any) -> None:
        pass

    async def retry(self, _: Any) -> None:
        return None

    async def transact(self, ops: list[Any]) -> None:
        self.transactions.append(ops)

    async def step(self, *_: Any) -> list[StepResult]:
        return [StepResult(json.dumps(next(self._ends)), 1.0, done=True)]

    def release(self, _: int) -> None:
        pass

    async def run(self, collecting: SessionCollector, monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
        """Run the sessions that are due; return the messages of each transaction."""
        plan: Any = {GROUP: SimpleNamespace(seed=0, n=1)}
        async with asyncio.TaskGroup() as tasks:
            others = [OtherPolicy("verifier", "job.verifier", 2)]
            sessions = StepSessions(self.job, 4, plan, collecting, StepTurnIds(IDS, None), tasks, others)

            async def opened(_: SessionId, session: Any) -> Any:
                self.opened.append(session.id)
                return SimpleNamespace(sample=session.id, model_copy=lambda **_: ended())

            async def text(*_: Any) -> str:
                return ""

            monkeypatch.setattr(sessions, "_open", opened)
            monkeypatch.setattr(sessions, "_text_of", text)
            await sessions.start([SimpleNamespace(id=GROUP, n=1)])  # type: ignore[list-item]
            sessions.answer_turns()
        appended = [[op for op in ops if isinstance(op, Append)] for ops in self.transactions]
        self.transactions.clear()
        return [[(op.stream, op.message) for op in ops] for ops in appended]


MINE, THEIRS = "rlboost:job:job:rollouts.finished", "rlboost:job:job.verifier:rollouts.finished"


async def test_session_ends_for_all_policies_in_one_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = f"cmpl-{7:016x}"
    end = AgentEnd("a", "", {}, {"verifier": Rewards(0.25, {answer: 0.5}, 0.1)})
    ((own, theirs),) = await Team(end).run(collector(1), monkeypatch)
    assert (own[0], own[1].session, own[1].reward) == (MINE, GROUP, 1.0)
    rewarded = SessionRewarded(session=Team.OTHER, start="a", reward=0.25, rewards=((7, 0.5),), cost=0.1)
    assert theirs == (THEIRS, rewarded)


async def test_other_policy_loses_a_session_only_if_it_does_not_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    team, collecting = Team(*[AgentEnd("a", "no", {})] * 2), collector(1)
    ((own,),) = await team.run(collecting, monkeypatch)
    assert own[1].replaced_by
    folded(collecting, own[1])
    ((own, theirs),) = await team.run(collecting, monkeypatch)
    assert own[1].replaced_by == 0
    assert theirs == (THEIRS, SessionRewarded(session=Team.OTHER, reason="infrastructure", detail="no"))


async def test_other_policy_loses_the_sessions_of_a_dropped_group_before_the_step_ends() -> None:
    team, collecting = Team(), collector(2)
    plan: Any = {GROUP: SimpleNamespace(id=GROUP, n=2)}
    others = [OtherPolicy("verifier", "job.verifier", 2)]
    sessions = StepSessions(team.job, 4, plan, collecting, StepTurnIds(IDS, None), asyncio.TaskGroup(), others)
    folded(collecting, opened(0, 1), made(0, 5), ended())
    dropped = collecting.drop(GROUP, "generation", "no")
    assert dropped is not None
    intake: Any = SimpleNamespace(
        turns=sessions,
        _drop=team._ignore,
        _job=SimpleNamespace(generating_spec=None, resources=SimpleNamespace(data=0)),
    )
    assert await StepIntake._score(intake, dropped, plan[GROUP]) is None
    ((lost_there,),) = team.transactions
    assert (lost_there.stream, lost_there.message.session) == (THEIRS, Team.OTHER + 1)
    assert lost_there.message.reason == "infrastructure"


async def test_job_fails_once_another_policy_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "_POLICIES_EVERY_S", 0.0)
    states = iter(["running", "failed"])

    async def retry(_: Any) -> str:
        return json.dumps({"state": next(states), "error": "no disk"})

    job: Any = SimpleNamespace(cancelled=asyncio.Event(), bus=SimpleNamespace(retry=retry))
    with pytest.raises(Fatal, match=r"job job\.verifier, which learns with this one, failed: no disk"):
        await watch_policies(job, [OtherPolicy("verifier", "job.verifier", 2)])


async def test_agent_waits_for_no_session_of_another_policy_once_its_group_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions_module, "_OPEN_EVERY_S", 0.0)
    team, collecting = Team(), collector(1)
    team.job.waits = Waits()
    sessions = StepSessions(team.job, 4, {}, collecting, StepTurnIds(IDS, None), asyncio.TaskGroup())
    waiting = asyncio.create_task(
        sessions._until_open(SessionId("job.verifier", Team.OTHER), collecting.session(GROUP))
    )
    await asyncio.sleep(0)
    assert sessions.awaited == "job.verifier"
    collecting.drop(GROUP, "generation", "no")
    with pytest.raises(EnvironmentFault, match="its group is complete or dropped"):
        await waiting
    assert not sessions.awaited


async def test_session_of_a_dropped_group_is_over_for_the_job_whose_agent_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    team, collecting = Team(), collector(1)
    team.job.generating_spec.agent.leader = "leader"
    collecting.drop(GROUP, "generation", "no")
    await team.run(collecting, monkeypatch)
    assert team.opened == [GROUP]
    collecting.apply(SessionRewarded(session=GROUP, reason="infrastructure"))
    await team.run(collecting, monkeypatch)
    assert team.opened == [GROUP]


async def test_session_that_another_job_lost_without_a_detail_is_lost() -> None:
    team, collecting = (
        Team(),
        SessionCollector(1, 4, {GROUP: 1}, 0, StepTurnIds(dataclasses.replace(IDS, replacements=0), None), 1),
    )
    team.job.generating_spec.agent = SimpleNamespace(runs_here=False)
    collecting.apply(SessionRewarded(session=GROUP, reason="infrastructure"))
    sessions = StepSessions(team.job, 4, {}, collecting, StepTurnIds(IDS, None), asyncio.TaskGroup())
    end, _ = await sessions._ended(SessionId("job", GROUP), collecting.session(GROUP), SimpleNamespace(sample=GROUP))  # type: ignore[arg-type]
    assert end is not None
    assert end.reason == "agent_infrastructure"


async def test_job_waits_for_samples_while_it_and_the_other_policies_are_paused() -> None:
    async def wait(*_: Any) -> None:
        raise WaitTimedOut("waited 1 s")

    job: Any = SimpleNamespace(id="job", unpaused=asyncio.Event(), generating_spec=SimpleNamespace(agent=None))
    others = [OtherPolicy("verifier", "job.verifier", 2)]
    state: Any = SimpleNamespace(finished_cursor=START, read_cursor=START)
    intake = Intake(job, state, asyncio.TaskGroup(), None, None, None, others)
    intake._finished = SimpleNamespace(wait=wait, all_taken=False)  # type: ignore[assignment]
    await intake.read("samples", "none came", str)
    job.unpaused.set()
    with pytest.raises(Fatal, match=r"that a trainer runs job job\.verifier"):
        await intake.read("samples", "none came", str)


async def test_session_that_is_cut_is_truncated_for_all_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    team = Team(AgentEnd("a", "no turn is left", {}))
    monkeypatch.setattr(StepSessions, "_is_at_limit", lambda *_: asyncio.sleep(0, result=True))
    ((_, (stream, theirs)),) = await team.run(collector(1), monkeypatch)
    assert (stream, theirs.over, theirs.reason) == (THEIRS, "cut", "")
    collecting = collector(1)
    team.job.generating_spec.agent = SimpleNamespace(runs_here=False)
    collecting.apply(theirs.model_copy(update={"session": GROUP}))
    sessions = StepSessions(team.job, 4, {}, collecting, StepTurnIds(IDS, None), asyncio.TaskGroup())
    end, _ = await sessions._ended(SessionId("job", GROUP), collecting.session(GROUP), SimpleNamespace(sample=GROUP))  # type: ignore[arg-type]
    assert end is not None
    assert (end.over, end.start, end.reward) == ("cut", "a", 0.0)
