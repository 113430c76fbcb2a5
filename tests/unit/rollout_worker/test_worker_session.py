"""What a worker does about each command, whatever was under way."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlboost.services.rollout_worker.domain.requests import Emission, RequestKey
from rlboost.services.rollout_worker.domain.session import (
    AbortRequests,
    CancelPull,
    DeadLetterCommand,
    DrainWorker,
    Effect,
    HintSiblings,
    PullWeights,
    Rejoin,
    ReleaseRequests,
    ReleaseUnstarted,
    ResumeEngine,
    Session,
    SubmitSamples,
    SuspendEngine,
    UnloadAdapter,
)
from rlboost.shared.ids import JOB_SHIFT, WeightsRef
from rlboost.shared.messages import (
    FINISH_RELEASED,
    FINISH_STOP,
    Alongside,
    Assign,
    Assignment,
    Dismissed,
    Drain,
    Message,
    Release,
    Resume,
    Revoke,
    Sampling,
    Siblings,
    Suspend,
    UseVersion,
    WorkerLeft,
)
from rlboost.shared.messages.command_digest import command_digest
from rlboost.shared.wire import I32, U32, U64, pack


def assignment(sample: int, attempt: int = 1) -> Assignment:
    return Assignment(
        sample=sample, attempt=attempt, prompt=pack([1], U32), tokens=b"", sampling=Sampling(), seed=sample
    )


def assign(*keys: RequestKey, version: int = 0, job: str = "j") -> Assign:
    return Assign(job_id=job, version=version, samples=[assignment(*key) for key in keys])


def revoke(*keys: RequestKey) -> Revoke:
    return Revoke(samples=pack([key[0] for key in keys], U64), attempts=pack([key[1] for key in keys], U32))


def release(*keys: RequestKey) -> Release:
    return Release(samples=pack([key[0] for key in keys], U64), attempts=pack([key[1] for key in keys], U32))


def use(version: int, job: str = "j") -> UseVersion:
    return UseVersion(job_id=job, version=version)


def ended(sample: int, attempt: int = 1, error: str = "") -> Emission:
    return Emission(sample, attempt, 0, [5], [-1.0], 0, 0 if error else FINISH_STOP, error)


def submitted(actions: Sequence[Effect]) -> list[RequestKey]:
    return [(a.sample, a.attempt) for action in actions if isinstance(action, SubmitSamples) for a in action.samples]


def state(session: Session) -> str:
    return session.state


@pytest.fixture
def ready() -> Session:
    session = Session("w")
    assert session.on_command(use(0)) == [PullWeights("j", 0)]
    assert session.on_weights_loaded(WeightsRef("j", 0)) == []
    return session


def test_a_worker_joins_pulls_and_is_ready() -> None:
    session = Session("w")
    assert state(session) == "joining"
    assert session.on_command(use(0)) == [PullWeights("j", 0)]
    assert state(session) == "pulling"
    session.on_weights_loaded(WeightsRef("j", 0))
    assert (state(session), session.serving) == ("ready", ("j", 0))


def test_a_repeated_use_version_changes_nothing(ready: Session) -> None:
    assert ready.on_command(use(0)) == []
    ready.on_command(use(1))
    assert ready.on_command(use(1)) == []
    assert state(ready) == "pulling"


def test_a_newer_version_replaces_the_pull_under_way() -> None:
    session = Session("w")
    session.on_command(use(0))
    assert session.on_command(use(1)) == [PullWeights("j", 1)]


def test_return_to_the_loaded_version_needs_no_pull(ready: Session) -> None:
    ready.on_command(use(1))
    assert ready.on_command(use(0)) == [CancelPull()]
    assert state(ready) == "ready"


def test_going_back_after_the_engine_was_unloaded_pulls_again(ready: Session) -> None:
    ready.on_command(use(1))
    ready.on_weights_unloaded()
    assert ready.on_command(use(0)) == [PullWeights("j", 0)]
    assert state(ready) == "pulling"


def test_assigned_samples_are_submitted_once(ready: Session) -> None:
    assert submitted(ready.on_command(assign((7, 1), (8, 1)))) == [(7, 1), (8, 1)]
    assert ready.on_command(assign((7, 1))) == []
    assert ready.held == {7: 1, 8: 1}


def test_repeated_assignment_of_a_finished_sample_is_ignored(ready: Session) -> None:
    ready.on_command(assign((7, 1)))
    ready.on_emissions([ended(7)])
    assert ready.held == {}
    assert ready.on_command(assign((7, 1))) == []


def test_a_higher_attempt_replaces_the_held_one_and_a_lower_is_ignored(ready: Session) -> None:
    ready.on_command(assign((7, 2)))
    assert ready.on_command(assign((7, 1))) == []
    replaced = ready.on_command(assign((7, 3)))
    assert replaced[0] == AbortRequests(((7, 2),))
    assert submitted(replaced) == [(7, 3)]
    assert ready.held == {7: 3}


def test_emission_of_an_old_attempt_does_not_end_the_new_one(ready: Session) -> None:
    ready.on_command(assign((7, 1)))
    ready.on_command(assign((7, 2)))
    ready.on_emissions([ended(7, attempt=1)])
    assert ready.held == {7: 2}


def test_invalid_sample_is_not_held_any_more(ready: Session) -> None:
    ready.on_command(assign((7, 1)))
    ready.on_emissions([ended(7, error="too long")])
    assert ready.held == {}


def test_siblings_are_hints_for_a_held_sample_and_change_nothing_else(ready: Session) -> None:
    ready.on_command(assign((7, 1)))
    before = ready.command_digest()
    samples, lengths = pack([8, 7, 7, 7], U64), pack([1, 2, 0, 9], U32)
    command = Siblings(samples=samples, lengths=lengths, tokens=pack([4, 5, 6, 7], I32))
    assert ready.on_command(command) == [HintSiblings(((7, (5, 6)), (7, ()), (7, (7,))))]
    assert ready.on_command(Siblings(samples=samples[:8], lengths=lengths, tokens=b"")) == []
    assert ready.command_digest() == before


def test_revoke_forgets_the_named_attempt_and_not_a_later_one(ready: Session) -> None:
    ready.on_command(assign((7, 2), (8, 1), (9, 1)))
    assert ready.on_command(revoke((7, 1), (8, 1), (55, 1))) == [AbortRequests(((8, 1),))]
    assert ready.held == {7: 2, 9: 1}


def test_release_ends_requests_in_the_engine_and_stops_holding(ready: Session) -> None:
    ready.on_command(assign((7, 1), (8, 1), (9, 1)))
    assert ready.on_command(release((7, 1), (9, 1))) == [ReleaseRequests(((7, 1), (9, 1)))]
    assert ready.held == {8: 1}
    assert ready.on_command(release((7, 1))) == []


def test_release_ignores_unknown_finished_and_other_attempts(ready: Session) -> None:
    ready.on_command(assign((7, 2), (8, 1)))
    ready.on_emissions([ended(8)])
    assert ready.on_command(release((7, 1), (7, 3), (8, 1), (55, 1))) == []
    assert ready.held == {7: 2}


def test_release_of_samples_awaiting_weights_reports_them_unstarted(ready: Session) -> None:
    ready.on_command(assign((6, 1)))
    ready.on_command(use(1))
    ready.on_command(assign((7, 1), (8, 1), version=1))
    assert ready.on_command(release((6, 1), (7, 1))) == [ReleaseRequests(((6, 1),)), ReleaseUnstarted((assignment(7),))]
    assert submitted(ready.on_weights_loaded(WeightsRef("j", 1))) == [(8, 1)]


def test_a_released_sample_may_come_back_with_a_higher_attempt(ready: Session) -> None:
    ready.on_command(assign((7, 1)))
    ready.on_command(release((7, 1)))
    assert ready.on_command(assign((7, 1))) == []
    assert submitted(ready.on_command(assign((7, 2)))) == [(7, 2)]


def test_last_emission_of_a_released_attempt_does_not_end_the_next(ready: Session) -> None:
    ready.on_command(assign((7, 1)))
    ready.on_command(release((7, 1)))
    ready.on_command(assign((7, 2)))
    ready.on_emissions([Emission(7, 1, 0, [5], [-1.0], 0, FINISH_RELEASED)])
    assert ready.held == {7: 2}


def test_samples_do_not_start_with_weights_that_were_replaced_meanwhile(ready: Session) -> None:
    ready.on_command(use(1))
    ready.on_command(use(2))
    ready.on_command(assign((7, 1), version=2))
    assert ready.on_weights_loaded(WeightsRef("j", 1)) == []
    assert submitted(ready.on_weights_loaded(WeightsRef("j", 2))) == [(7, 1)]


def test_samples_assigned_before_the_weights_are_there_start_with_them(ready: Session) -> None:
    ready.on_command(use(1))
    assert ready.on_command(assign((7, 1), (8, 1), version=1)) == []
    assert ready.n_awaiting_weights == 2
    assert ready.on_command(revoke((8, 1))) == []
    assert submitted(ready.on_weights_loaded(WeightsRef("j", 1))) == [(7, 1)]
    assert ready.n_awaiting_weights == 0


def test_assign_for_an_unassigned_version_dead_letters_and_rejoins(ready: Session) -> None:
    complain, rejoin = ready.on_command(assign((7, 1), version=3))
    assert isinstance(complain, DeadLetterCommand)
    assert isinstance(rejoin, Rejoin)
    assert "version 3 of job j" in complain.reason
    assert "version 0 of job j" in complain.reason
    assert ready.held == {}


def test_assign_before_any_version_dead_letters_and_rejoins() -> None:
    complain, _ = Session("w").on_command(assign((7, 1)))
    assert isinstance(complain, DeadLetterCommand)
    assert "nothing yet" in complain.reason


def test_suspend_drops_samples_and_reports_after_the_engine(ready: Session) -> None:
    ready.on_command(assign((7, 1), (8, 1)))
    assert ready.on_command(Suspend(step=1)) == [SuspendEngine(((7, 1), (8, 1)))]
    assert state(ready) == "ready"
    ready.on_engine_suspended()
    assert (state(ready), ready.held) == ("suspended", {})
    assert ready.on_command(Suspend(step=1)) == []


def test_assign_that_crosses_the_suspension_is_ignored(ready: Session) -> None:
    ready.on_command(Suspend(step=1))
    assert ready.on_command(assign((7, 1))) == []
    ready.on_engine_suspended()
    ready.on_command(Resume(step=2))
    assert submitted(ready.on_command(assign((7, 1)))) == [(7, 1)]


def test_resume_continues_with_the_loaded_weights(ready: Session) -> None:
    ready.on_command(Suspend(step=1))
    ready.on_engine_suspended()
    assert ready.on_command(Resume(step=2)) == [ResumeEngine()]
    assert state(ready) == "ready"
    assert ready.on_command(Resume(step=2)) == []


def test_a_suspended_worker_pulls_and_stays_suspended(ready: Session) -> None:
    ready.on_command(Suspend(step=1))
    ready.on_engine_suspended()
    assert ready.on_command(use(1)) == [PullWeights("j", 1)]
    assert state(ready) == "suspended"
    ready.on_weights_loaded(WeightsRef("j", 1))
    assert (state(ready), ready.serving) == ("suspended", ("j", 1))


def test_a_suspension_does_not_wait_for_a_pull() -> None:
    session = Session("w")
    session.on_command(use(0))
    session.on_command(Suspend(step=0))
    session.on_engine_suspended()
    assert state(session) == "suspended"
    session.on_command(Resume(step=0))
    assert state(session) == "pulling"


def test_yield_hands_all_samples_back_and_is_no_command(ready: Session) -> None:
    ready.on_command(assign((7, 1), (8, 1)))
    assert ready.yield_device() == [SuspendEngine(((7, 1), (8, 1)))]
    ready.on_engine_suspended()
    assert (state(ready), ready.held, ready.yields) == ("suspended", {}, True)
    assert ready.command_digest() == command_digest([], [], ("j", 0), suspended=False)
    assert ready.yield_device() == []
    assert ready.take_device() == [ResumeEngine()]
    assert (state(ready), ready.yields) == ("ready", False)
    assert ready.take_device() == []


def test_samples_assigned_during_a_yield_go_back_at_once(ready: Session) -> None:
    ready.yield_device()
    assert ready.on_command(assign((7, 1))) == [ReleaseUnstarted((assignment(7),))]
    assert ready.on_command(assign((7, 1))) == []
    assert ready.held == {}
    ready.take_device()
    assert submitted(ready.on_command(assign((7, 2)))) == [(7, 2)]


def test_fewer_seats_hand_the_newest_samples_back_and_refuse_more(ready: Session) -> None:
    ready.on_command(assign((7, 1), (8, 1), (9, 1)))
    assert ready.use_seats(2) == [ReleaseRequests(((9, 1),))]
    assert ready.on_command(assign((10, 1))) == [ReleaseUnstarted((assignment(10),))]
    assert list(ready.held) == [7, 8]
    assert ready.use_seats(3) == []
    effects = ready.on_command(assign((9, 2), (10, 2)))
    assert effects == [ReleaseUnstarted((assignment(10, 2),)), SubmitSamples((assignment(9, 2),))]
    assert state(ready) == "ready"


def test_samples_that_await_weights_are_handed_back_by_a_yield() -> None:
    session = Session("w")
    session.on_command(use(0))
    session.on_command(assign((7, 1)))
    session.yield_device()
    assert session.on_weights_loaded(WeightsRef("j", 0)) == []
    assert (session.held, session.n_awaiting_weights) == ({}, 0)


@pytest.mark.parametrize("trainer_first", [True, False])
def test_device_is_free_again_when_trainer_and_serving_have_returned_it(ready: Session, *, trainer_first: bool) -> None:
    def suspend(*, trainer: bool) -> list[Effect]:
        return ready.on_command(Suspend(step=0)) if trainer else ready.yield_device()

    def resume(*, trainer: bool) -> list[Effect]:
        return ready.on_command(Resume(step=1)) if trainer else ready.take_device()

    assert suspend(trainer=trainer_first) == [SuspendEngine(())]
    ready.on_engine_suspended()
    assert suspend(trainer=not trainer_first) == []
    assert resume(trainer=trainer_first) == []
    assert state(ready) == "suspended"
    assert resume(trainer=not trainer_first) == [ResumeEngine()]
    assert state(ready) == "ready"


def test_draining_worker_neither_yields_nor_takes_its_device(ready: Session) -> None:
    ready.on_command(assign((7, 1)))
    ready.drain()
    assert (ready.yield_device(), ready.take_device(), ready.held) == ([], [], {7: 1})


def test_new_version_of_the_same_job_keeps_held_samples(ready: Session) -> None:
    ready.on_command(assign((7, 1)))
    assert ready.on_command(use(1)) == [PullWeights("j", 1)]
    ready.on_weights_unloaded()
    ready.on_weights_loaded(WeightsRef("j", 1))
    assert ready.held == {7: 1}


def test_pull_carries_the_in_flight_policy(ready: Session) -> None:
    ready.on_command(assign((7, 1)))
    command = UseVersion(job_id="j", version=1, in_flight="finish")
    assert ready.on_command(command) == [PullWeights("j", 1, "finish")]
    ready.on_command(assign((8, 1), version=1))
    assert (ready.n_submitted("j"), ready.n_awaiting_weights) == (1, 1)
    ready.on_emissions([ended(7)])
    assert (ready.n_submitted("j"), ready.n_awaiting_weights) == (0, 1)


def test_samples_of_several_versions_are_held_together(ready: Session) -> None:
    ready.on_command(assign((7, 1)))
    for version in (1, 2):
        ready.on_command(use(version))
        assert ready.on_command(assign((7 + version, 1), version=version)) == []
        ready.on_weights_unloaded()
        assert submitted(ready.on_weights_loaded(WeightsRef("j", version))) == [(7 + version, 1)]
    assert ready.held == {7: 1, 8: 1, 9: 1}


def test_another_jobs_version_releases_held_samples(ready: Session) -> None:
    ready.on_command(assign((7, 1)))
    ready.on_command(use(1))
    ready.on_command(assign((8, 1), version=1))
    handed_back = [ReleaseRequests(((7, 1),)), ReleaseUnstarted((assignment(8),)), PullWeights("k", 0)]
    assert ready.on_command(use(0, job="k")) == handed_back
    assert ready.held == {}


def test_unavailable_weights_leave_the_loaded_ones(ready: Session) -> None:
    ready.on_command(use(1))
    assert ready.on_weights_unavailable(WeightsRef("j", 1), "retired") == []
    assert (state(ready), ready.serving) == ("ready", ("j", 0))
    assert ready.on_command(use(1)) == [PullWeights("j", 1)]


def test_unavailable_first_version_leaves_the_worker_joining() -> None:
    session = Session("w")
    session.on_command(use(0))
    session.on_weights_unavailable(WeightsRef("j", 0), "retired")
    assert state(session) == "joining"


def test_unavailable_weights_with_waiting_samples_rejoin(ready: Session) -> None:
    ready.on_command(use(1))
    ready.on_command(assign((7, 1), version=1))
    assert ready.on_weights_unavailable(WeightsRef("j", 1), "retired") == [Rejoin("retired")]


def test_unavailable_weights_with_an_unloaded_engine_rejoin(ready: Session) -> None:
    ready.on_command(assign((7, 1)))
    ready.on_command(use(1))
    ready.on_weights_unloaded()
    assert ready.on_weights_unavailable(WeightsRef("j", 1), "retired") == [Rejoin("retired")]


def test_outdated_weight_outcome_changes_nothing(ready: Session) -> None:
    ready.on_command(use(1))
    ready.on_command(use(2))
    assert ready.on_weights_unavailable(WeightsRef("j", 1), "retired") == []
    assert ready.on_weights_loaded(WeightsRef("j", 1)) == []
    assert state(ready) == "pulling"


def test_drain_takes_nothing_new(ready: Session) -> None:
    assert ready.on_command(Drain(reason="scaled down")) == [CancelPull(), DrainWorker("scaled down")]
    assert state(ready) == "draining"
    for command in (assign((7, 1)), use(3), Suspend(step=1), Resume(step=1), Drain(), Dismissed(reason="late")):
        assert ready.on_command(command) == []


def test_dismissed_rejoins_with_its_weights(ready: Session) -> None:
    assert ready.on_command(Dismissed(reason="lost")) == [Rejoin("lost")]
    again = Session("w2", ready.serving)
    assert (state(again), again.serving) == ("joining", ("j", 0))
    assert again.on_command(use(0)) == [CancelPull()]
    assert state(again) == "ready"


def test_message_other_than_a_command_is_dead_lettered(ready: Session) -> None:
    (action,) = ready.on_command(WorkerLeft(worker="w", reason="", at=0.0))
    assert isinstance(action, DeadLetterCommand)


@pytest.mark.parametrize("command", [Revoke, Release])
def test_columns_of_unequal_length_are_refused_and_change_nothing(
    command: type[Revoke] | type[Release], ready: Session
) -> None:
    ready.on_command(assign((7, 1), (8, 1)))
    with pytest.raises(ValueError, match="shorter"):
        ready.on_command(command(samples=pack([7, 8], U64), attempts=pack([1], U32)))
    assert ready.held == {7: 1, 8: 1}


keys = st.tuples(st.integers(0, 4), st.integers(1, 4))
commands: st.SearchStrategy[Message] = st.one_of(
    st.builds(use, st.integers(0, 2), st.sampled_from(["j", "k"])),
    st.builds(
        lambda chosen, version, job: assign(*chosen, version=version, job=job),
        st.lists(keys, min_size=1, max_size=3),
        st.integers(0, 2),
        st.sampled_from(["j", "k"]),
    ),
    st.builds(lambda chosen: revoke(*chosen), st.lists(keys, min_size=1, max_size=3)),
    st.builds(lambda chosen: release(*chosen), st.lists(keys, min_size=1, max_size=3)),
    st.just(Suspend(step=0)),
    st.just(Resume(step=0)),
)
steps = st.one_of(commands, st.sampled_from(["pulled", "gone", "on_weights_unloaded", "yield", "take"]), keys)


class Engine:
    """Holds what it was told to, and refuses what no engine would take."""

    def __init__(self) -> None:
        self.keys: set[RequestKey] = set()
        self.returned: set[RequestKey] = set()
        self.on_engine_suspended = False

    def carry_out(self, session: Session, actions: Sequence[Effect]) -> bool:
        """Do what was asked for; return True if the incarnation ends."""
        for action in actions:
            match action:
                case SubmitSamples(samples):
                    assert session.serving == session.target, "submitted under weights it does not serve"
                    for request in samples:
                        assert (request.sample, request.attempt) not in self.keys, "submitted twice"
                        self.keys.add((request.sample, request.attempt))
                case AbortRequests(keys) | ReleaseRequests(keys):
                    assert set(keys) <= self.keys
                    self.keys -= set(keys)
                case ReleaseUnstarted(samples):
                    returned = {(one.sample, one.attempt) for one in samples}
                    assert not returned & (self.keys | self.returned), "answered for what the engine has, or twice"
                    self.returned |= returned
                case SuspendEngine(keys):
                    self.keys -= set(keys)
                    self.on_engine_suspended = True
                    session.on_engine_suspended()
                case ResumeEngine():
                    self.on_engine_suspended = False
                case Rejoin() | DrainWorker():
                    return True
                case _:
                    pass
        return False


def take(step: object, session: Session, engine: Engine) -> list[Effect]:
    weights = session.target
    pulling = weights is not None and session.serving != weights
    if isinstance(step, Message):
        return session.on_command(step)
    if step == "yield":
        return session.yield_device()
    if step == "take":
        return session.take_device()
    if isinstance(step, tuple) and step in engine.keys:
        engine.keys.remove(step)
        session.on_emissions([ended(*step)])
    elif pulling and weights is not None:
        if step == "on_weights_unloaded":
            session.on_weights_unloaded()
        elif step == "pulled":
            return session.on_weights_loaded(weights)
        elif step == "gone":
            return session.on_weights_unavailable(weights, "gone")
    return []


@given(st.lists(steps, max_size=40))
def test_engine_keys_match_the_samples_held_by_the_session(script: list[object]) -> None:
    session, engine = Session("w"), Engine()
    for step in script:
        if engine.carry_out(session, take(step, session, engine)):
            return
        assert len(engine.keys) + session.n_awaiting_weights == len(session.held)
        assert engine.keys <= set(session.held.items())
        if session.state == "suspended":
            assert engine.on_engine_suspended
            assert not session.held
        if session.n_awaiting_weights:
            assert session.serving != session.target


# --- several jobs on one model ----------------------------------------------------------------------------------------


def use_all(*targets: tuple[str, int]) -> UseVersion:
    (job, version), *others = targets
    alongside = tuple(Alongside(job_id=other, version=number) for other, number in others)
    return UseVersion(job_id=job, version=version, alongside=alongside)


def of_job(number: int, sample: int) -> int:
    return number << JOB_SHIFT | sample


@pytest.fixture
def shared() -> Session:
    """A session that serves version 1 of a, and 5 of b next to it."""
    session = Session("w")
    assert session.on_command(use_all(("a", 1), ("b", 5))) == [PullWeights("a", 1)]
    assert session.on_weights_loaded(WeightsRef("a", 1)) == [PullWeights("b", 5, alongside=True)]
    assert session.on_weights_loaded(WeightsRef("b", 5)) == []
    assert (session.serving, session.alongside) == (("a", 1), {"b": 5})
    return session


def test_samples_of_each_shared_job_are_submitted_at_its_own_version(shared: Session) -> None:
    a, b = of_job(1, 7), of_job(2, 7)
    assert submitted(shared.on_command(assign((a, 1), job="a", version=1))) == [(a, 1)]
    assert submitted(shared.on_command(assign((b, 1), job="b", version=5))) == [(b, 1)]
    assert (shared.job_of(a), shared.job_of(b)) == ("a", "b")
    assert (shared.n_submitted("a"), shared.n_submitted("b"), shared.n_submitted("c")) == (1, 1, 0)
    complaint, rejoin = shared.on_command(assign((b, 2), job="b", version=1))
    assert isinstance(complaint, DeadLetterCommand)
    assert isinstance(rejoin, Rejoin)


def test_new_version_of_one_shared_job_leaves_the_other_as_it_is(shared: Session) -> None:
    a, b = of_job(1, 7), of_job(2, 7)
    shared.on_command(assign((a, 1), job="a", version=1))
    shared.on_command(assign((b, 1), job="b", version=5))
    assert shared.on_command(use_all(("a", 1), ("b", 6))) == [PullWeights("b", 6, alongside=True)]
    assert shared.on_command(use_all(("a", 1), ("b", 6))) == []
    assert submitted(shared.on_command(assign((a + 1, 1), job="a", version=1))) == [(a + 1, 1)]
    shared.on_weights_unloaded("b")
    assert (shared.serving, shared.alongside) == (("a", 1), {})
    assert shared.on_weights_loaded(WeightsRef("b", 6)) == []
    assert shared.alongside == {"b": 6}
    assert set(shared.held) == {a, b, a + 1}


def test_job_that_is_dropped_releases_its_samples_and_frees_its_adapter(shared: Session) -> None:
    a, b = of_job(1, 7), of_job(2, 7)
    shared.on_command(assign((a, 1), job="a", version=1))
    shared.on_command(assign((b, 3), job="b", version=5))
    assert shared.on_command(use_all(("a", 1), ("c", 0))) == [
        ReleaseRequests(((b, 3),)),
        UnloadAdapter("b"),
        PullWeights("c", 0, alongside=True),
    ]
    assert shared.held == {a: 1}


def test_first_of_the_shared_jobs_changes_without_a_load(shared: Session) -> None:
    b = of_job(2, 7)
    shared.on_command(assign((b, 1), job="b", version=5))
    assert shared.on_command(use_all(("b", 5))) == [CancelPull()]
    assert (shared.state, shared.serving, shared.held) == ("ready", ("b", 5), {b: 1})
    assert shared.on_command(use_all(("b", 6))) == [PullWeights("b", 6)]
    assert shared.on_weights_loaded(WeightsRef("b", 6)) == [UnloadAdapter("a")]


def test_adapter_that_cannot_be_shared_leaves_the_others_served(shared: Session) -> None:
    assert shared.on_command(use_all(("a", 1), ("b", 5), ("c", 2))) == [PullWeights("c", 2, alongside=True)]
    assert shared.on_weights_unavailable(WeightsRef("c", 2), "its rank 99 is above 64") == []
    assert (shared.state, shared.serving, shared.alongside) == ("ready", ("a", 1), {"b": 5})
    before = shared.command_digest()
    assert before == command_digest([], [], ("a", 1), suspended=False, alongside={"b": 5, "c": 2})
    shared.on_command(use_all(("a", 1), ("b", 5)))
    assert shared.command_digest() != before


def test_lost_version_of_a_shared_job_leaves_its_older_one_served(shared: Session) -> None:
    b = of_job(2, 7)
    shared.on_command(assign((b, 1), job="b", version=5))
    shared.on_command(use_all(("a", 1), ("b", 6)))
    assert shared.on_weights_unavailable(WeightsRef("b", 6), "deleted") == []
    assert (shared.alongside, shared.held) == ({"b": 5}, {b: 1})
    shared.on_command(use_all(("a", 1), ("b", 7)))
    shared.on_weights_unloaded("b")
    assert shared.on_weights_unavailable(WeightsRef("b", 7), "damaged") == [Rejoin("damaged")]


def test_adapters_wait_for_the_weights_that_they_belong_to() -> None:
    session = Session("w")
    session.on_command(use_all(("a", 1), ("b", 5)))
    assert session.on_weights_unavailable(WeightsRef("a", 1), "gone") == []
    assert session.state == "joining"


def test_pull_under_way_continues_when_another_job_changes(shared: Session) -> None:
    shared.on_command(use_all(("a", 1), ("b", 6)))
    assert shared.on_command(use_all(("a", 1), ("b", 6), ("c", 2))) == []
    assert shared.on_weights_loaded(WeightsRef("b", 6)) == [PullWeights("c", 2, alongside=True)]
    assert shared.on_command(use_all(("a", 1), ("b", 6))) == [CancelPull(), UnloadAdapter("c")]
    assert shared.on_command(use_all(("a", 1), ("b", 6), ("c", 2))) == [PullWeights("c", 2, alongside=True)]


def test_pull_restarts_when_its_job_becomes_the_first(shared: Session) -> None:
    assert shared.on_command(use_all(("a", 1), ("b", 6))) == [PullWeights("b", 6, alongside=True)]
    assert shared.on_command(use_all(("b", 6), ("a", 1))) == [PullWeights("b", 6)]


def test_samples_that_lost_the_adapter_of_the_first_job_are_not_kept(shared: Session) -> None:
    shared.on_command(assign((of_job(1, 7), 1), job="a", version=1))
    shared.on_command(use_all(("a", 2), ("b", 5)))
    shared.on_weights_unloaded("a")
    assert shared.on_weights_unavailable(WeightsRef("a", 2), "unsuitable") == [Rejoin("unsuitable")]


def test_requests_whose_adapter_was_dropped_with_the_weights_are_released(shared: Session) -> None:
    a, b = of_job(1, 7), of_job(2, 7)
    shared.on_command(assign((a, 1), job="a", version=1))
    shared.on_command(assign((b, 1), job="b", version=5))
    assert shared.on_command(use_all(("c", 1), ("a", 1), ("b", 5))) == [PullWeights("c", 1)]
    shared.on_weights_unloaded()
    assert shared.on_weights_loaded(WeightsRef("c", 1)) == [
        ReleaseRequests(((a, 1), (b, 1))),
        PullWeights("a", 1, alongside=True),
    ]
    assert shared.held == {}


def test_merged_adapter_is_served_alone(shared: Session) -> None:
    a, b = of_job(1, 7), of_job(2, 7)
    shared.on_command(assign((a, 1), job="a", version=1))
    shared.on_command(use_all(("c", 1), ("a", 1), ("b", 6)))
    shared.on_command(assign((b, 1), job="b", version=6))
    shared.on_weights_unloaded()
    released = shared.on_weights_loaded(WeightsRef("c", 1), alone=True)
    assert [type(one) for one in released] == [ReleaseRequests, ReleaseUnstarted]
    assert (shared.serving, shared.alongside, shared.held) == (("c", 1), {}, {})
