"""What a worker does about each command, whatever was under way."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rollout_worker.domain.actions import (
    Abort,
    Action,
    Complain,
    Continue,
    Halt,
    HandBack,
    Key,
    Leave,
    Pull,
    Rejoin,
    Return,
    StopPulling,
    Submit,
)
from services.rollout_worker.domain.session import Session
from services.rollout_worker.ports import Emission
from shared.columns import U32, U64, pack
from shared.messages import (
    FINISH_RELEASED,
    FINISH_STOP,
    Assign,
    Assignment,
    Dismissed,
    Drain,
    Message,
    Release,
    Resume,
    Revoke,
    Sampling,
    Suspend,
    UseVersion,
    WorkerLeft,
)


def assignment(sample: int, attempt: int = 1) -> Assignment:
    return Assignment(
        sample=sample, attempt=attempt, prompt=pack([1], U32), tokens=b"", sampling=Sampling(), seed=sample
    )


def assign(*keys: Key, version: int = 0, job: str = "j") -> Assign:
    return Assign(job_id=job, version=version, samples=[assignment(*key) for key in keys])


def revoke(*keys: Key) -> Revoke:
    return Revoke(samples=pack([key[0] for key in keys], U64), attempts=pack([key[1] for key in keys], U32))


def release(*keys: Key) -> Release:
    return Release(samples=pack([key[0] for key in keys], U64), attempts=pack([key[1] for key in keys], U32))


def use(version: int, job: str = "j") -> UseVersion:
    return UseVersion(job_id=job, version=version)


def ended(sample: int, attempt: int = 1, error: str = "") -> Emission:
    return Emission(sample, attempt, 0, [5], [-1.0], 0, 0 if error else FINISH_STOP, error)


def submitted(actions: Sequence[Action]) -> list[Key]:
    return [(a.sample, a.attempt) for action in actions if isinstance(action, Submit) for a in action.samples]


def state(session: Session) -> str:
    return session.state


@pytest.fixture
def ready() -> Session:
    session = Session("w")
    assert session.handle(use(0)) == [Pull("j", 0)]
    assert session.loaded(("j", 0)) == []
    return session


def test_a_worker_joins_pulls_and_is_ready() -> None:
    session = Session("w")
    assert state(session) == "joining"
    assert session.handle(use(0)) == [Pull("j", 0)]
    assert state(session) == "pulling"
    session.loaded(("j", 0))
    assert (state(session), session.serving) == ("ready", ("j", 0))


def test_a_repeated_use_version_changes_nothing(ready: Session) -> None:
    assert ready.handle(use(0)) == []
    ready.handle(use(1))
    assert ready.handle(use(1)) == []
    assert state(ready) == "pulling"


def test_a_newer_version_replaces_the_pull_under_way() -> None:
    session = Session("w")
    session.handle(use(0))
    assert session.handle(use(1)) == [Pull("j", 1)]


def test_going_back_to_what_is_loaded_needs_no_pull(ready: Session) -> None:
    ready.handle(use(1))
    assert ready.handle(use(0)) == [StopPulling()]
    assert state(ready) == "ready"


def test_going_back_after_the_engine_was_unloaded_pulls_again(ready: Session) -> None:
    ready.handle(use(1))
    ready.unloaded()
    assert ready.handle(use(0)) == [Pull("j", 0)]
    assert state(ready) == "pulling"


def test_assigned_samples_are_submitted_once(ready: Session) -> None:
    assert submitted(ready.handle(assign((7, 1), (8, 1)))) == [(7, 1), (8, 1)]
    assert ready.handle(assign((7, 1))) == []
    assert ready.held == {7: 1, 8: 1}


def test_a_repeated_assignment_of_a_finished_sample_is_not_generated_again(ready: Session) -> None:
    ready.handle(assign((7, 1)))
    ready.made([ended(7)])
    assert ready.held == {}
    assert ready.handle(assign((7, 1))) == []


def test_a_higher_attempt_replaces_the_held_one_and_a_lower_is_ignored(ready: Session) -> None:
    ready.handle(assign((7, 2)))
    assert ready.handle(assign((7, 1))) == []
    replaced = ready.handle(assign((7, 3)))
    assert replaced[0] == Abort(((7, 2),))
    assert submitted(replaced) == [(7, 3)]
    assert ready.held == {7: 3}


def test_what_an_old_attempt_emits_does_not_end_the_new_one(ready: Session) -> None:
    ready.handle(assign((7, 1)))
    ready.handle(assign((7, 2)))
    ready.made([ended(7, attempt=1)])
    assert ready.held == {7: 2}


def test_a_sample_that_cannot_be_generated_is_not_held_any_more(ready: Session) -> None:
    ready.handle(assign((7, 1)))
    ready.made([ended(7, error="too long")])
    assert ready.held == {}


def test_revoke_forgets_the_named_attempt_and_not_a_later_one(ready: Session) -> None:
    ready.handle(assign((7, 2), (8, 1), (9, 1)))
    assert ready.handle(revoke((7, 1), (8, 1), (55, 1))) == [Abort(((8, 1),))]
    assert ready.held == {7: 2, 9: 1}


def test_released_samples_are_handed_back_by_the_engine_and_held_no_more(ready: Session) -> None:
    ready.handle(assign((7, 1), (8, 1), (9, 1)))
    assert ready.handle(release((7, 1), (9, 1))) == [HandBack(((7, 1), (9, 1)))]
    assert ready.held == {8: 1}
    assert ready.handle(release((7, 1))) == []


def test_a_release_passes_over_what_is_unknown_finished_or_of_another_attempt(ready: Session) -> None:
    ready.handle(assign((7, 2), (8, 1)))
    ready.made([ended(8)])
    assert ready.handle(release((7, 1), (7, 3), (8, 1), (55, 1))) == []
    assert ready.held == {7: 2}


def test_samples_released_before_their_weights_are_there_are_returned_untouched(ready: Session) -> None:
    ready.handle(assign((6, 1)))
    ready.handle(use(1))
    ready.handle(assign((7, 1), (8, 1), version=1))
    assert ready.handle(release((6, 1), (7, 1))) == [HandBack(((6, 1),)), Return((assignment(7),))]
    assert submitted(ready.loaded(("j", 1))) == [(8, 1)]


def test_a_released_sample_may_come_back_with_a_higher_attempt(ready: Session) -> None:
    ready.handle(assign((7, 1)))
    ready.handle(release((7, 1)))
    assert ready.handle(assign((7, 1))) == []
    assert submitted(ready.handle(assign((7, 2)))) == [(7, 2)]


def test_the_last_word_of_a_released_attempt_does_not_end_the_next_one(ready: Session) -> None:
    ready.handle(assign((7, 1)))
    ready.handle(release((7, 1)))
    ready.handle(assign((7, 2)))
    ready.made([Emission(7, 1, 0, [5], [-1.0], 0, FINISH_RELEASED)])
    assert ready.held == {7: 2}


def test_samples_assigned_before_the_weights_are_there_start_with_them(ready: Session) -> None:
    ready.handle(use(1))
    assert ready.handle(assign((7, 1), (8, 1), version=1)) == []
    assert ready.early == 2
    assert ready.handle(revoke((8, 1))) == []
    assert submitted(ready.loaded(("j", 1))) == [(7, 1)]
    assert ready.early == 0


def test_an_assignment_for_a_version_it_was_not_told_to_serve_is_reported_and_handed_back(ready: Session) -> None:
    complain, rejoin = ready.handle(assign((7, 1), version=3))
    assert isinstance(complain, Complain)
    assert isinstance(rejoin, Rejoin)
    assert "version 3 of job j" in complain.reason
    assert "version 0 of job j" in complain.reason
    assert ready.held == {}


def test_an_assignment_before_any_version_is_reported_and_handed_back() -> None:
    complain, _ = Session("w").handle(assign((7, 1)))
    assert isinstance(complain, Complain)
    assert "nothing yet" in complain.reason


def test_suspend_halts_and_forgets_and_only_then_says_so(ready: Session) -> None:
    ready.handle(assign((7, 1), (8, 1)))
    assert ready.handle(Suspend(step=1)) == [Halt(((7, 1), (8, 1)))]
    assert state(ready) == "ready"
    ready.halted()
    assert (state(ready), ready.held) == ("suspended", {})
    assert ready.handle(Suspend(step=1)) == []


def test_an_assignment_that_crosses_the_suspension_is_ignored(ready: Session) -> None:
    ready.handle(Suspend(step=1))
    assert ready.handle(assign((7, 1))) == []
    ready.halted()
    ready.handle(Resume(step=2))
    assert submitted(ready.handle(assign((7, 1)))) == [(7, 1)]


def test_resume_goes_on_with_the_weights_it_has(ready: Session) -> None:
    ready.handle(Suspend(step=1))
    ready.halted()
    assert ready.handle(Resume(step=2)) == [Continue()]
    assert state(ready) == "ready"
    assert ready.handle(Resume(step=2)) == []


def test_a_suspended_worker_pulls_and_stays_suspended(ready: Session) -> None:
    ready.handle(Suspend(step=1))
    ready.halted()
    assert ready.handle(use(1)) == [Pull("j", 1)]
    assert state(ready) == "suspended"
    ready.loaded(("j", 1))
    assert (state(ready), ready.serving) == ("suspended", ("j", 1))


def test_a_suspension_does_not_wait_for_a_pull() -> None:
    session = Session("w")
    session.handle(use(0))
    session.handle(Suspend(step=0))
    session.halted()
    assert state(session) == "suspended"
    session.handle(Resume(step=0))
    assert state(session) == "pulling"


def test_samples_go_on_over_a_new_version_of_their_job(ready: Session) -> None:
    ready.handle(assign((7, 1)))
    assert ready.handle(use(1)) == [Pull("j", 1)]
    ready.unloaded()
    ready.loaded(("j", 1))
    assert ready.held == {7: 1}


def test_a_pull_says_what_becomes_of_the_samples_that_run(ready: Session) -> None:
    ready.handle(assign((7, 1)))
    command = UseVersion(job_id="j", version=1, in_flight="finish")
    assert ready.handle(command) == [Pull("j", 1, "finish")]
    ready.handle(assign((8, 1), version=1))
    assert (ready.started, ready.early) == (1, 1)
    ready.made([ended(7)])
    assert (ready.started, ready.early) == (0, 1)


def test_samples_of_several_versions_of_a_job_are_held_beside_each_other(ready: Session) -> None:
    ready.handle(assign((7, 1)))
    for version in (1, 2):
        ready.handle(use(version))
        assert ready.handle(assign((7 + version, 1), version=version)) == []
        ready.unloaded()
        assert submitted(ready.loaded(("j", version))) == [(7 + version, 1)]
    assert ready.held == {7: 1, 8: 1, 9: 1}


def test_another_jobs_weights_hand_back_the_samples_held(ready: Session) -> None:
    ready.handle(assign((7, 1)))
    ready.handle(use(1))
    ready.handle(assign((8, 1), version=1))
    handed_back = [HandBack(((7, 1),)), Return((assignment(8),)), Pull("k", 0)]
    assert ready.handle(use(0, job="k")) == handed_back
    assert ready.held == {}


def test_weights_that_are_gone_leave_the_worker_with_what_it_has(ready: Session) -> None:
    ready.handle(use(1))
    assert ready.unavailable(("j", 1), "retired") == []
    assert (state(ready), ready.serving) == ("ready", ("j", 0))
    assert ready.handle(use(1)) == [Pull("j", 1)]


def test_a_first_version_that_is_gone_leaves_the_worker_joining() -> None:
    session = Session("w")
    session.handle(use(0))
    session.unavailable(("j", 0), "retired")
    assert state(session) == "joining"


def test_samples_assigned_for_weights_that_are_gone_are_handed_back(ready: Session) -> None:
    ready.handle(use(1))
    ready.handle(assign((7, 1), version=1))
    assert ready.unavailable(("j", 1), "retired") == [Rejoin("retired")]


def test_samples_in_an_engine_without_weights_are_handed_back(ready: Session) -> None:
    ready.handle(assign((7, 1)))
    ready.handle(use(1))
    ready.unloaded()
    assert ready.unavailable(("j", 1), "retired") == [Rejoin("retired")]


def test_old_news_about_weights_changes_nothing(ready: Session) -> None:
    ready.handle(use(1))
    ready.handle(use(2))
    assert ready.unavailable(("j", 1), "retired") == []
    assert ready.loaded(("j", 1)) == []
    assert state(ready) == "pulling"


def test_drain_takes_nothing_new(ready: Session) -> None:
    assert ready.handle(Drain(reason="scaled down")) == [StopPulling(), Leave("scaled down")]
    assert state(ready) == "draining"
    for command in (assign((7, 1)), use(3), Suspend(step=1), Resume(step=1), Drain(), Dismissed(reason="late")):
        assert ready.handle(command) == []


def test_a_dismissed_worker_joins_anew_and_keeps_its_weights(ready: Session) -> None:
    assert ready.handle(Dismissed(reason="lost")) == [Rejoin("lost")]
    again = Session("w2", ready.serving)
    assert (state(again), again.serving) == ("joining", ("j", 0))
    assert again.handle(use(0)) == [StopPulling()]
    assert state(again) == "ready"


def test_a_message_that_is_no_command_is_reported(ready: Session) -> None:
    (action,) = ready.handle(WorkerLeft(worker="w", reason="", at=0.0))
    assert isinstance(action, Complain)


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
steps = st.one_of(commands, st.sampled_from(["pulled", "gone", "unloaded"]), keys)


class Engine:
    """Holds what it was told to, and refuses what no engine would take."""

    def __init__(self) -> None:
        self.keys: set[Key] = set()
        self.returned: set[Key] = set()
        self.halted = False

    def carry_out(self, session: Session, actions: Sequence[Action]) -> bool:
        """Do what was asked for; tell whether the incarnation ends."""
        for action in actions:
            match action:
                case Submit(samples):
                    assert session.serving == session.wanted, "submitted under weights it does not serve"
                    for request in samples:
                        assert (request.sample, request.attempt) not in self.keys, "submitted twice"
                        self.keys.add((request.sample, request.attempt))
                case Abort(keys) | HandBack(keys):
                    assert set(keys) <= self.keys
                    self.keys -= set(keys)
                case Return(samples):
                    returned = {(one.sample, one.attempt) for one in samples}
                    assert not returned & (self.keys | self.returned), "answered for what the engine has, or twice"
                    self.returned |= returned
                case Halt(keys):
                    self.keys -= set(keys)
                    self.halted = True
                    session.halted()
                case Continue():
                    self.halted = False
                case Rejoin() | Leave():
                    return True
                case _:
                    pass
        return False


def take(step: object, session: Session, engine: Engine) -> list[Action]:
    weights = session.wanted
    pulling = weights is not None and session.serving != weights
    if isinstance(step, Message):
        return session.handle(step)
    if isinstance(step, tuple) and step in engine.keys:
        engine.keys.remove(step)
        session.made([ended(*step)])
    elif pulling and weights is not None:
        if step == "unloaded":
            session.unloaded()
        elif step == "pulled":
            return session.loaded(weights)
        elif step == "gone":
            return session.unavailable(weights, "gone")
    return []


@given(st.lists(steps, max_size=40))
def test_the_engine_has_exactly_what_the_session_holds(script: list[object]) -> None:
    session, engine = Session("w"), Engine()
    for step in script:
        if engine.carry_out(session, take(step, session, engine)):
            return
        assert len(engine.keys) + session.early == len(session.held)
        assert engine.keys <= set(session.held.items())
        if session.state == "suspended":
            assert engine.halted
            assert not session.held
        if session.early:
            assert session.serving != session.wanted
