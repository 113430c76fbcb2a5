"""The manager keeps nothing of a job that has ended but its record, and for a while its audit."""

from __future__ import annotations

import pytest

from rlboost.services.rollout_manager.domain.apply_messages import apply_message
from rlboost.services.rollout_manager.domain.decide import AUDIT_OPEN_S, decide, forget_ended
from rlboost.services.rollout_manager.domain.effects import Effect, Now, Record, Send, one_turn, operations
from rlboost.services.rollout_manager.domain.tokens import FrameOutcome
from rlboost.services.rollout_manager.domain.wait_status import job_wait_status
from rlboost.services.rollout_manager.domain.world import World
from rlboost.shared.messages import (
    ENDED_JOB_RETENTION_S,
    Admitted,
    Assign,
    Closed,
    JobCommand,
    Message,
    Restated,
)
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Delete
from tests.support.builders import group_id, group_requested, heartbeat, job_running, placed, token_frame, worker_joined

N = 2
"""Samples of the group."""


class Rig:
    """A running job, a worker that is ready for it, and the manager's own records, which are read back later."""

    def __init__(self) -> None:
        self.world = World(lease_s=1e9)
        self.now = Now(mono=0.0, wall=1000.0)
        self.sent: list[Message] = []
        self.turn(*job_running(), worker_joined())
        self.turn()
        self.turn(heartbeat(state="ready", job_id="j", version=0))

    def turn(self, *messages: Message) -> list[Message]:
        """Take one turn; return the records that it appends to the token log."""
        self.now = Now(self.now.mono + 0.02, self.now.wall + 0.02)
        effects: list[Effect] = []
        for i, message in enumerate(messages):
            effects += apply_message(self.world, message, f"{int(self.now.mono * 1000)}-{i}", self.now)
        effects = one_turn([*effects, *decide(self.world, self.now)])
        self.sent += [effect.message for effect in effects if isinstance(effect, Send)]
        return [effect.message for effect in effects if isinstance(effect, Record)]

    def cancel(self) -> list[Message]:
        """Cancel the job; return the records of the turn."""
        return self.turn(JobCommand(command_id="c", action="cancel", job_id="j", job_no=1))

    @property
    def n_assigned(self) -> int:
        """How many samples workers were assigned so far."""
        return sum(len(message.samples) for message in self.sent if isinstance(message, Assign))

    def assert_nothing_left(self) -> None:
        """No sample is in flight or queued, and no count of any says otherwise."""
        assert not self.world.ledger.samples
        assert not self.world.queues
        assert not self.world.queues.in_flight.by_requirement
        assert not self.world.queues.in_flight.requested
        assert self.world.jobs.get_active("j") is None


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_admission_that_is_read_after_the_job_ended_admits_nothing(rig: Rig) -> None:
    """The worker would be assigned the samples, and never hear that they are closed: it would be dismissed for that."""
    (admitted, *_) = rig.turn(group_requested(n=N))
    assert isinstance(admitted, Admitted)
    before = rig.n_assigned
    (closed,) = rig.cancel()
    assert isinstance(closed, Closed)
    assert not rig.turn(admitted)
    assert rig.n_assigned == before
    rig.assert_nothing_left()
    assert not rig.turn(closed)
    assert rig.n_assigned == before
    rig.assert_nothing_left()


def test_admission_that_is_read_in_the_turn_of_the_cancellation_admits_nothing(rig: Rig) -> None:
    admitted = rig.turn(group_requested(n=N))[0]
    cancel = JobCommand(command_id="c", action="cancel", job_id="j", job_no=1)
    before = rig.n_assigned
    rig.turn(cancel, admitted)
    assert rig.n_assigned == before
    rig.assert_nothing_left()


def test_restatement_that_is_read_after_the_job_ended_adds_no_sample(rig: Rig) -> None:
    rig.turn(group_requested(n=N))
    restated = rig.world.ledger.restatement_of(rig.world.ledger.samples[group_id()])
    assert isinstance(restated, Restated)
    before = rig.n_assigned
    (closed,) = rig.cancel()
    assert not rig.turn(restated)
    rig.turn(closed)
    assert rig.n_assigned == before
    rig.assert_nothing_left()


def test_late_records_of_an_ended_job_are_audited_and_change_nothing_else(rig: Rig) -> None:
    records = rig.turn(group_requested(n=N))
    rig.cancel()
    rig.turn(*records, placed(group_id(), attempt=2), token_frame([(group_id(), 1, 0, 3, 0, 0)]))
    rig.assert_nothing_left()
    audit = rig.world.jobs["j"].audit
    assert (audit.requested, audit.dropped.total(), audit.tokens_generated) == (N, N, 3)
    assert audit.tokens_regenerated == {"sample_over": 3, "dropped": 0}


def test_late_frame_without_tokens_is_no_cause_of_regenerated_ones(rig: Rig) -> None:
    rig.world.jobs.count_frames(FrameOutcome(refused=[(1, "late", 0), (1, "gap", 2)]))
    assert rig.world.jobs["j"].audit.tokens_regenerated == {"gap": 2}


@pytest.mark.parametrize("record", ["closed", "restated", "admitted"])
def test_records_of_a_job_that_was_forgotten_change_nothing(rig: Rig, record: str) -> None:
    (admitted, *_) = rig.turn(group_requested(n=N))
    restated = rig.world.ledger.restatement_of(rig.world.ledger.samples[group_id()])
    (closed,) = rig.cancel()
    forget_ended(rig.world.jobs, rig.now.wall + ENDED_JOB_RETENTION_S + 1.0)
    rig.turn({"admitted": admitted, "restated": restated, "closed": closed}[record])
    rig.assert_nothing_left()
    assert not rig.world.jobs
    assert rig.world.jobs.audit_of(1) is None


def test_keys_that_are_new_after_the_end_are_deleted_with_the_record(rig: Rig) -> None:
    """A trainer that has not read yet that its job was cancelled may write them."""
    rig.cancel()
    ops = operations(forget_ended(rig.world.jobs, rig.now.wall + ENDED_JOB_RETENTION_S + 1.0))
    keys = (names.rollouts_requested, names.rollouts_finished, names.job_samples, names.job_metrics, names.job_audit)
    assert {Delete(key("j")) for key in keys} <= {op for op in ops if isinstance(op, Delete)}


def test_reading_about_a_job_creates_nothing(rig: Rig) -> None:
    rig.cancel()
    forget_ended(rig.world.jobs, rig.now.wall + AUDIT_OPEN_S + 1.0)
    assert job_wait_status(rig.world.jobs, rig.world.fleet, rig.world.jobs["j"]) is None
    assert rig.world.jobs.committed_version("j") == rig.world.jobs.committed_version("unknown") == -1
    assert rig.world.jobs.audit_of(1) is rig.world.jobs.audit_of(2) is None
    assert rig.world.jobs.get_active("j") is rig.world.jobs.get_active("unknown") is None
    assert list(rig.world.jobs) == ["j"]
