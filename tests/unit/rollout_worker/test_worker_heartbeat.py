"""A heartbeat says what the session serves and holds, and what the meters have measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlboost.services.rollout_worker.domain.load import EngineStats, Load, LoadMeters, Memory, build_heartbeat
from rlboost.services.rollout_worker.domain.requests import Emission
from rlboost.services.rollout_worker.domain.session import Session
from rlboost.shared.ids import WeightsRef
from rlboost.shared.messages import UseVersion, WorkerHeartbeat
from rlboost.shared.messages.command_digest import command_digest
from tests.support.worker_manager import JOB, assign

IDLE = EngineStats(running=0, pending=0, tokens_generated_total=0, version=-1)


def heartbeat_of(
    session: Session, stats: EngineStats = IDLE, load: Load | None = None, **known: Any
) -> WorkerHeartbeat:
    return build_heartbeat(
        session, stats, load or Load(), capabilities=known, last_command="5-0", waiting=None, at=100.0
    )


@pytest.fixture
def session() -> Session:
    session = Session("w-1", serving=WeightsRef(JOB, 3))
    session.on_command(UseVersion(job_id=JOB, version=3))
    return session


def test_heartbeat_before_the_first_weights_names_no_version() -> None:
    beat = heartbeat_of(Session("w-1"))
    assert (beat.worker, beat.state, beat.job_id, beat.version) == ("w-1", "joining", "", -1)
    assert (beat.last_command, beat.at, beat.waiting) == ("5-0", 100.0, None)


def test_heartbeat_names_the_version_that_is_served_while_another_is_pulled(session: Session) -> None:
    assert (heartbeat_of(session).state, heartbeat_of(session).version) == ("ready", 3)
    session.on_command(UseVersion(job_id=JOB, version=4))
    beat = heartbeat_of(session)
    assert (beat.state, beat.job_id, beat.version) == ("pulling", JOB, 3)


def test_heartbeat_counts_no_aborted_request_as_running(session: Session) -> None:
    session.on_command(assign(1, 2, version=3))
    stats = EngineStats(running=4, pending=1, tokens_generated_total=9, version=3)
    beat = heartbeat_of(session, stats)
    assert (beat.running, beat.pending) == (2, 1)
    assert beat.command_digest == command_digest([1, 2], [1, 1], WeightsRef(JOB, 3), suspended=False)


def test_samples_that_await_weights_count_as_pending(session: Session) -> None:
    session.on_command(UseVersion(job_id=JOB, version=4))
    session.on_command(assign(1, 2, version=4))
    assert heartbeat_of(session, EngineStats(0, 1, 0, 3)).pending == 3


def test_heartbeat_carries_measurements_and_capabilities(session: Session) -> None:
    load = Load(12.0, Memory(1, 2, 3), batch=4.0, step_s=0.5, update_s=2.0, update_pause_s=0.25, tokens_per_pass=1.5)
    beat = heartbeat_of(session, load=load, kv_tokens=7, returns_routed_experts=False)
    assert (beat.tokens_per_s, beat.batch, beat.step_s, beat.tokens_per_pass) == (12.0, 4.0, 0.5, 1.5)
    assert (beat.resident_bytes, beat.device_used_bytes, beat.device_total_bytes) == (1, 2, 3)
    assert (beat.update_s, beat.update_pause_s) == (2.0, 0.25)
    assert (beat.kv_tokens, beat.returns_routed_experts) == (7, False)


def test_meters_measure_speed_steps_updates_and_flushes() -> None:
    meters = LoadMeters(slots=4)
    assert meters.measure(IDLE, Memory(), 10.0) == Load()
    for n in range(3):
        meters.on_emissions([Emission(1, 1, n, [5], [0.0], 3)], running=1, now=10.0 + n / 2)
    meters.on_flushed(0.25)
    meters.on_flushed(0.5)
    meters.on_weights_replaced(2.0, 0.5)
    stats = replace(IDLE, tokens_generated_total=30)
    assert meters.measure(stats, Memory(1), 11.0) == Load(30.0, Memory(1), 1.0, 0.5, 2.0, 0.5)
    assert (meters.flush_times.count, meters.flush_times.sum_s) == (2, 0.75)
    later = meters.measure(stats, Memory(2), 12.0)
    assert (later.batch, later.step_s) == (0.0, 0.0), "no step since"
    assert (later.update_s, meters.last) == (2.0, later)


def test_tokens_per_pass_count_drafted_tokens_of_the_same_engine() -> None:
    meters = LoadMeters(slots=4)
    before = replace(IDLE, tokens_generated_total=100, drafted_total=80, accepted_total=50)
    assert meters.measure(before, Memory(), 0.0).tokens_per_pass == 2.0
    idle = meters.measure(before, Memory(), 1.0)
    assert idle.tokens_per_pass == 0.0
    after = replace(before, tokens_generated_total=120, accepted_total=65)
    assert meters.measure(after, Memory(), 2.0).tokens_per_pass == 4.0
    other_engine = replace(IDLE, tokens_generated_total=90, drafted_total=4, accepted_total=1)
    assert meters.measure(other_engine, Memory(), 3.0).tokens_per_pass == 0.0
    assert meters.measure(replace(other_engine, tokens_generated_total=91), Memory(), 4.0).tokens_per_pass == 1.0
