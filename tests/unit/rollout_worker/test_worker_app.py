"""The worker's loops on an in-memory bus, with a fake engine and fake weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterator
from typing import Any

import pytest

from rlboost.services.rollout_worker import app as worker_app
from rlboost.services.rollout_worker import manager_connection
from rlboost.services.rollout_worker.api import missing_weights
from rlboost.services.rollout_worker.domain import frames
from rlboost.services.rollout_worker.domain.load import KvCapacity
from rlboost.services.rollout_worker.domain.preemption import Notice, RebalanceRecommendation
from rlboost.services.rollout_worker.domain.session import Effect, Session
from rlboost.services.rollout_worker.life import Watchdog
from rlboost.shared.errors import Corrupt, Fatal, UnsuitableWeights
from rlboost.shared.messages import (
    FINISH_LENGTH,
    FINISH_RELEASED,
    Assign,
    Dismissed,
    Drain,
    Event,
    InFlightPolicy,
    Message,
    PreemptionNotice,
    Resume,
    SampleFailed,
    Siblings,
    StoreCredential,
    Suspend,
    TokenFrame,
    UseVersion,
    WorkerHeartbeat,
    WorkerJoined,
    WorkerLeft,
)
from rlboost.shared.streams.bus import Delete
from rlboost.shared.streams.names import DEAD_LETTERS, WORKER_HEARTBEATS, job_events, worker_lease, worker_reports
from rlboost.shared.wire import I32, U32, U64, ints, pack
from tests.support.eventually import eventually
from tests.support.stopwatch import Stopwatch
from tests.support.worker_fakes import FakeEngine, FakeStagedWeights, FakeWeights
from tests.support.worker_manager import JOB, assign, release, revoke
from tests.support.worker_rig import Rig

ENDLESS = 1_000_000
"""Tokens of a sample that still runs at the end of a test, however slow the machine is."""


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    running = asyncio.create_task(rig.worker.run({}), name="worker")
    yield rig
    rig.down = rig.log_refuses = False
    rig.weights.may_pull.set()
    rig.stop.set()
    await running


async def test_join_sends_joined_then_a_heartbeat_with_a_lease(rig: Rig) -> None:
    worker = await rig.manager.joined()
    await rig.manager.until(worker, "joining")
    (joined,) = await rig.manager.received(WorkerJoined)
    assert (joined.role, joined.kind, joined.slots, joined.price_per_hour) == ("preemptible", "fake", 4, 0.5)
    assert (joined.trainer, joined.kv_tokens) == ("t", 0)
    assert await rig.lease_values([worker_lease(worker)]) != [None]
    beat = await rig.manager.last_heartbeat(worker)
    assert (beat.resident_bytes, beat.device_used_bytes, beat.device_total_bytes) == (1, 2, 3)


async def test_worker_pulls_loads_and_generates_assigned_samples(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, 2, 3, max_tokens=40))
    made = await rig.manager.until_finished((1, 1), (2, 1), (3, 1))
    assert [len(row.tokens) for row in made.values()] == [40, 40, 40]
    assert {version for row in made.values() for version in row.versions} == {0}


async def test_siblings_of_assigned_samples_reach_the_engine(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    siblings = Siblings(samples=pack([1, 7], U64), lengths=pack([2, 1], U32), tokens=pack([5, 6, 7], I32))
    await rig.manager.send(worker, assign(1, max_tokens=ENDLESS), siblings)
    await eventually(lambda: rig.engine.hints == [(1, [5, 6])])


async def test_heartbeats_and_flushes_continue_during_a_pull(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, max_tokens=ENDLESS))
    rig.weights.may_pull.clear()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=1))
    await rig.manager.until(worker, "pulling", 0)
    before = len((await rig.manager.until_generated((1, 1), tokens=1))[1, 1].tokens)
    beats = len(await rig.manager.received(WorkerHeartbeat, worker))
    await rig.manager.until_generated((1, 1), tokens=before + 50)
    await eventually(lambda: _more_beats(rig, worker, beats + 3))
    rig.weights.may_pull.set()
    await rig.manager.until(worker, "ready", 1)
    made = await rig.manager.until_generated((1, 1), tokens=len((await rig.manager.generated())[1, 1].tokens) + 50)
    assert made[1, 1].versions == sorted(made[1, 1].versions)
    assert set(made[1, 1].versions) == {0, 1}


async def _more_beats(rig: Rig, worker: str, n: int) -> bool:
    return len(await rig.manager.received(WorkerHeartbeat, worker)) >= n


async def test_load_with_one_mismatch_is_repeated(rig: Rig) -> None:
    rig.weights.versions[JOB, 0] = FakeStagedWeights(wrong_loads=1)
    await rig.manager.ready_worker()
    assert (rig.weights.pulled.count((JOB, 0)), rig.weights.verified_again, rig.engine.loads) == (2, 1, 2)


async def test_load_with_two_mismatches_fails_and_is_never_served() -> None:
    rig = Rig()
    rig.weights.versions[JOB, 0] = FakeStagedWeights(wrong_loads=2)
    running = asyncio.create_task(rig.worker.run({}), name="worker")
    worker = await rig.manager.joined()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=0), assign(1))
    assert "not what was published" in await _failure(running)
    assert all(beat.version == -1 for beat in await rig.manager.received(WorkerHeartbeat))
    assert await rig.manager.generated() == {}
    (left,) = await rig.manager.received(WorkerLeft)
    assert "not what was published" in left.reason


class DamagedOnce(FakeStagedWeights):
    """Cannot be read before the cache is verified again."""

    def __init__(self, source: FakeWeights, on_read: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._source = source
        self._on_read = on_read

    def tensors(self, names: Container[str] | None = None) -> Iterator[tuple[str, Any]]:
        self._on_read()
        if not self._source.verified_again:
            raise Corrupt("bytes are not the published ones")
        return super().tensors(names)


async def test_damaged_cache_is_verified_pulled_again_and_served(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    rig.weights.versions[JOB, 1] = DamagedOnce(rig.weights)
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=1), assign(1, version=1, max_tokens=5))
    made = await rig.manager.until_finished((1, 1))
    assert set(made[1, 1].versions) == {1}
    assert (rig.weights.pulled.count((JOB, 1)), rig.weights.verified_again) == (2, 1)


async def test_damaged_version_that_was_deleted_is_reported_unavailable(rig: Rig) -> None:
    """Its second pull finds that the store has removed it."""
    worker = await rig.manager.ready_worker()
    rig.weights.versions[JOB, 1] = DamagedOnce(rig.weights, on_read=lambda: rig.weights.versions.pop((JOB, 1)))
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=1))
    event = await eventually(lambda: _event(rig))
    assert event is not None
    assert event.fields["version"] == 1
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=2))
    await rig.manager.until(worker, "ready", 2)


async def test_cache_that_stays_damaged_fails_the_worker() -> None:
    rig = Rig()
    rig.weights.versions[JOB, 0] = DamagedOnce(FakeWeights())
    running = asyncio.create_task(rig.worker.run({}), name="worker")
    worker = await rig.manager.joined()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=0))
    assert "not the published ones" in await _failure(running)
    assert rig.weights.pulled == [(JOB, 0)] * 2


async def _failure(running: asyncio.Task[None]) -> str:
    with pytest.raises(ExceptionGroup) as caught:
        await running
    error: BaseException = caught.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error)


async def test_unavailable_version_is_reported_and_old_one_still_served(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=9))
    event = await eventually(lambda: _event(rig))
    assert event is not None
    assert (event.kind, event.fields["version"]) == ("weights_unavailable", 9)
    await rig.manager.until(worker, "ready", 0)
    await rig.manager.send(worker, assign(1))
    await rig.manager.until_finished((1, 1))


class Unsuitable(FakeStagedWeights):
    """Does not fit the engine."""

    def tensors(self, names: Container[str] | None = None) -> Iterator[tuple[str, Any]]:
        raise UnsuitableWeights("the model has no tensor 'w'")


async def test_version_that_does_not_load_is_refused_and_the_next_one_served(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    rig.weights.versions[JOB, 1] = Unsuitable()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=1))
    event = await eventually(lambda: _event(rig))
    assert event is not None
    assert (event.kind, event.fields) == (
        "weights_refused",
        {"version": 1, "reason": "the model has no tensor 'w'"},
    )
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=2))
    await rig.manager.until(worker, "ready", 2)
    await rig.manager.send(worker, assign(1, version=2))
    await rig.manager.until_finished((1, 1))


async def test_samples_of_a_worker_whose_new_version_does_not_load_resume_elsewhere(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, max_tokens=4000))
    await rig.manager.until_generated((1, 1), tokens=3)
    rig.weights.versions[JOB, 1] = Unsuitable()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=1))
    (left,) = await eventually(lambda: rig.manager.received(WorkerLeft))
    assert "no tensor 'w'" in left.reason
    assert rig.connection.incarnation.worker != worker


async def test_model_that_the_engine_cannot_be_built_for_is_refused(rig: Rig) -> None:
    worker, build = await rig.manager.ready_worker(), rig.factory.build

    def refuse(config_json: str, tokenizer_json: str = "") -> FakeEngine:
        if "nonsense" in config_json:
            raise UnsuitableWeights("nonsense is no model")
        return build(config_json, tokenizer_json)

    rig.factory.build = refuse  # type: ignore[method-assign]
    rig.weights.versions[JOB, 1] = FakeStagedWeights('{"model_type": "nonsense"}')
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=1))
    event = await eventually(lambda: _event(rig))
    assert event is not None
    assert (event.kind, event.fields["reason"]) == ("weights_refused", "nonsense is no model")
    assert not rig.generator.exists, "the engine of the old model had to make room"
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=2))
    await rig.manager.until(worker, "ready", 2)


async def test_unsigned_version_is_reported_and_the_next_one_served(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    rig.weights.unsigned = {(JOB, 1)}
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=1))
    event = await eventually(lambda: _event(rig))
    assert event is not None
    assert (event.kind, event.fields["version"]) == ("weights_unavailable", 1)
    await rig.manager.until(worker, "ready", 0)
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=2))
    await rig.manager.until(worker, "ready", 2)


async def test_new_credential_is_used_during_a_blocked_pull(rig: Rig) -> None:
    worker = await rig.manager.joined()
    rig.weights.may_pull.clear()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=1))
    await rig.manager.until(worker, "pulling")
    await rig.manager.send(worker, StoreCredential(credential="new"))
    await eventually(lambda: rig.weights.credential == "new")
    rig.weights.may_pull.set()
    await rig.manager.until(worker, "ready", 1)


async def _event(rig: Rig) -> Event | None:
    entries = await rig.manager.entries(job_events(JOB))
    found = [entry.message for entry in entries if isinstance(entry.message, Event)]
    return found[0] if found else None


async def test_newer_version_replaces_a_blocked_pull(rig: Rig) -> None:
    worker = await rig.manager.joined()
    rig.weights.may_pull.clear()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=1))
    await rig.manager.until(worker, "pulling")
    rig.weights.may_pull = asyncio.Event()
    rig.weights.may_pull.set()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=2))
    await rig.manager.until(worker, "ready", 2)
    assert rig.weights.pulled == [(JOB, 1), (JOB, 2)]


async def test_return_to_the_loaded_version_resumes_the_engine(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    rig.weights.may_pull.clear()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=1), UseVersion(job_id=JOB, version=0), assign(1))
    await rig.manager.until_finished((1, 1))


async def test_cancelled_load_is_not_served_when_it_ends(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, max_tokens=ENDLESS))
    await rig.manager.until_generated((1, 1), tokens=5)
    rig.engine.may_load.clear()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=1))
    await eventually(lambda: rig.engine.loads == 2)
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=2))
    await rig.manager.until(worker, "pulling", -1)
    rig.engine.may_load.set()
    await rig.manager.until(worker, "ready", 2)
    made = await rig.manager.until_generated((1, 1), tokens=len((await rig.manager.generated())[1, 1].tokens) + 50)
    assert set(made[1, 1].versions) == {0, 2}


async def test_in_flight_finish_delays_the_load_until_samples_end(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, max_tokens=3000), assign(2, max_tokens=4000))
    await rig.manager.until_generated((1, 1), tokens=5)
    command = UseVersion(job_id=JOB, version=1, in_flight="finish")
    await rig.manager.send(worker, command, assign(3, version=1, max_tokens=20))
    await rig.manager.until(worker, "pulling", 0)
    await eventually(lambda: [wait.subject for wait in rig.waits.current()] == ["the samples in flight"])
    made = await rig.manager.until_finished((1, 1), (2, 1), (3, 1))
    assert [set(made[sample, 1].versions) for sample in (1, 2, 3)] == [{0}, {0}, {1}]
    await rig.manager.until(worker, "ready", 1)


async def test_newer_version_replaces_one_that_waits_for_samples(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, max_tokens=3000))
    await rig.manager.until_generated((1, 1), tokens=5)
    for version in (1, 2):
        await rig.manager.send(worker, UseVersion(job_id=JOB, version=version, in_flight="finish"))
    await rig.manager.until(worker, "ready", 2)
    made = await rig.manager.until_finished((1, 1))
    assert set(made[1, 1].versions) == {0}
    assert rig.engine.loads == 2


async def test_in_flight_finish_waits_no_longer_than_its_limit() -> None:
    rig = Rig(finish_limit_s=0.05)
    running = asyncio.create_task(rig.worker.run({}), name="worker")
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, max_tokens=ENDLESS))
    await rig.manager.until_generated((1, 1), tokens=5)
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=1, in_flight="finish"))
    await rig.manager.until(worker, "ready", 1)
    made = await rig.manager.until_generated((1, 1), tokens=len((await rig.manager.generated())[1, 1].tokens) + 50)
    assert set(made[1, 1].versions) == {0, 1}
    rig.stop.set()
    await running


@pytest.mark.parametrize(("in_flight", "kept"), [("recompute", False), ("keep", True)])
async def test_in_flight_keep_preserves_the_kv_cache(rig: Rig, in_flight: InFlightPolicy, kept: bool) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, max_tokens=ENDLESS))
    await rig.manager.until_generated((1, 1), tokens=5)
    rig.engine.kept_kv.clear()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=1, in_flight=in_flight))
    await rig.manager.until(worker, "ready", 1)
    assert rig.engine.kept_kv == [kept, kept]


async def test_suspension_during_a_load_frees_the_preserved_kv_cache(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, max_tokens=4000))
    await rig.manager.until_generated((1, 1), tokens=5)
    rig.engine.may_load.clear()
    rig.engine.kept_kv.clear()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=1, in_flight="keep"))
    await eventually(lambda: rig.engine.kept_kv == [True, True])
    await rig.manager.send(worker, Suspend(step=1))
    await eventually(lambda: "suspended" in rig.generator.pause_reasons)
    rig.engine.may_load.set()
    await rig.manager.until(worker, "suspended")
    assert rig.engine.kept_kv == [True, True, False]


async def test_worker_without_weights_names_why_its_engine_is_paused(rig: Rig) -> None:
    def missing() -> str | None:
        return missing_weights(rig.connection.session, rig.generator)

    assert missing() is None, "nothing is assigned"
    worker = await rig.manager.ready_worker()
    assert missing() is None
    rig.engine.may_load.clear()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=1))
    await eventually(lambda: missing() == "verified weights; the worker is pulling, its engine paused (loading)")
    await rig.manager.send(worker, Suspend(step=1))
    await eventually(lambda: str(missing()).endswith("paused (loading, suspended)"))
    rig.engine.may_load.set()
    await rig.manager.until(worker, "suspended")
    await eventually(lambda: missing() is None)


async def test_next_load_reads_only_changed_tensors(rig: Rig) -> None:
    for version, content in enumerate(({"a": 0, "b": 0}, {"a": 0, "b": 1}, {"a": 2, "b": 1})):
        rig.weights.versions[JOB, version] = FakeStagedWeights(contents=content, wrong_loads=int(version == 2))
    worker = await rig.manager.ready_worker()
    for version in (1, 2):
        await rig.manager.send(worker, UseVersion(job_id=JOB, version=version))
        await rig.manager.until(worker, "ready", version)
    read = [rig.weights.versions[JOB, version].read for version in range(3)]
    assert read == [[{"a", "b"}], [{"b"}], [{"a"}, {"a", "b"}]], "after a load that went wrong, all is loaded"


async def test_load_after_a_cancelled_load_reads_changes_a_new_engine_all(rig: Rig) -> None:
    contents = {"a": 0, "b": 0}
    rig.weights.versions = {(JOB, version): FakeStagedWeights(contents=contents) for version in range(3)}
    rig.weights.versions["other", 0] = FakeStagedWeights('{"other": 1}', contents=contents)
    worker = await rig.manager.ready_worker()
    rig.engine.may_load.clear()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=1))
    await eventually(lambda: rig.engine.loads == 2)
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=2))
    await rig.manager.until(worker, "pulling", -1)
    rig.engine.may_load.set()
    await rig.manager.until(worker, "ready", 2)
    await rig.manager.send(worker, UseVersion(job_id="other", version=0))
    await eventually(lambda: rig.connection.session.serving == ("other", 0))
    assert [weights.read for weights in rig.weights.versions.values()] == [
        [{"a", "b"}],
        [set()],
        [set()],
        [{"a", "b"}],
    ]


async def test_another_model_replaces_the_engine(rig: Rig) -> None:
    rig.weights.versions["other", 0] = FakeStagedWeights('{"other": 1}')
    worker = await rig.manager.ready_worker()
    first = rig.engine
    await rig.manager.send(worker, UseVersion(job_id="other", version=0))
    await eventually(lambda: rig.factory.built == ["{}", '{"other": 1}'])
    await eventually(lambda: rig.connection.session.serving == ("other", 0))
    assert rig.engine is not first
    with pytest.raises(Fatal, match="closed"):
        first.submit([])


async def test_suspended_state_implies_every_token_is_in_the_log(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, 2, max_tokens=4000))
    await rig.manager.until_generated((1, 1), (2, 1), tokens=20)
    await rig.manager.send(worker, Suspend(step=1))
    beat = await rig.manager.until(worker, "suspended")
    assert (beat.running, beat.pending) == (0, 0)
    made = await rig.manager.generated()
    assert sum(len(row.tokens) for row in made.values()) == rig.engine.stats().tokens_generated_total
    await rig.manager.send(worker, assign(3), Resume(step=2), assign(4))
    made = await rig.manager.until_finished((4, 1))
    assert (3, 1) not in made


async def test_suspension_is_reported_only_after_the_flush(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, max_tokens=4000))
    await rig.manager.until_generated((1, 1), tokens=20)
    rig.log_refuses = True
    n_tokens = rig.engine.stats().tokens_generated_total
    await eventually(lambda: rig.engine.stats().tokens_generated_total > n_tokens)  # one that is not flushed
    await rig.manager.send(worker, Suspend(step=1))
    await eventually(lambda: any("suspension" in wait.because for wait in rig.waits.current()))
    assert (await rig.manager.last_heartbeat(worker)).state == "ready"
    rig.log_refuses = False
    await rig.manager.until(worker, "suspended")
    made = await rig.manager.generated()
    assert len(made[1, 1].tokens) == rig.engine.stats().tokens_generated_total


async def test_load_while_suspended_does_not_resume_the_engine(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, Suspend(step=0), UseVersion(job_id=JOB, version=1))
    await rig.manager.until(worker, "suspended", 1)
    rig.engine.submit([])
    await rig.manager.send(worker, Resume(step=1), assign(1, version=1))
    made = await rig.manager.until_finished((1, 1))
    assert set(made[1, 1].versions) == {1}


def takes_device(rig: Rig) -> Callable[[], Awaitable[bool]]:
    async def attempt() -> bool:
        await rig.worker.take_device()
        return not rig.connection.session.yields

    return attempt


async def test_yielded_worker_has_sent_every_token_and_returns_what_it_is_assigned(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, 2, max_tokens=ENDLESS))
    await rig.manager.until_generated((1, 1), (2, 1), tokens=20)
    await rig.worker.yield_device()
    await rig.manager.until(worker, "suspended")
    made = await rig.manager.generated()
    assert sum(len(row.tokens) for row in made.values()) == rig.engine.stats().tokens_generated_total
    await rig.manager.send(worker, assign(3))
    made = await rig.manager.until_finished((3, 1))
    assert (made[3, 1].finish, made[3, 1].tokens) == (FINISH_RELEASED, [])
    await eventually(takes_device(rig))
    await rig.manager.until(worker, "ready")
    await rig.manager.send(worker, assign(3, attempt=2))
    await rig.manager.until_finished((3, 2))


async def test_samples_above_the_seats_are_released_with_their_tokens(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, 2, 3, max_tokens=ENDLESS))
    await rig.manager.until_generated((1, 1), (2, 1), (3, 1), tokens=5)
    async with rig.worker._commands._executing:  # a command waits, such as one that needs Redis
        fewer = asyncio.create_task(rig.worker.use_seats(1), name="seats")
        await eventually(lambda: rig.engine.running() == {(1, 1)})
    await fewer
    made = await rig.manager.until_finished((2, 1), (3, 1))
    assert {made[key].finish for key in ((2, 1), (3, 1))} == {FINISH_RELEASED}
    assert all(len(made[key].tokens) >= 5 for key in ((2, 1), (3, 1)))

    async def is_reported() -> bool:
        return (await rig.manager.last_heartbeat(worker)).slots == 1

    await eventually(is_reported)
    assert list(rig.connection.session.held) == [1]


async def test_yielded_worker_pulls_versions_and_loads_them_once_it_has_the_device(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.worker.yield_device()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=1))
    await eventually(lambda: any("leaves it idle" in wait.because for wait in rig.waits.current()))
    assert (rig.engine.loads, rig.weights.pulled[-1]) == (1, (JOB, 1))
    await eventually(takes_device(rig))
    await rig.manager.until(worker, "ready", 1)
    assert rig.engine.loads == 2


async def test_device_is_taken_only_after_the_yield_was_reported(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = await rig.manager.ready_worker()
    sent, is_silent = rig.connection.send_heartbeat, True

    async def send_heartbeat() -> None:
        if not is_silent:
            await sent()

    monkeypatch.setattr(rig.connection, "send_heartbeat", send_heartbeat)
    await rig.worker.yield_device()
    await rig.worker.take_device()
    assert rig.connection.session.state == "suspended"
    is_silent = False
    await rig.manager.until(worker, "suspended")
    await eventually(takes_device(rig))
    await rig.manager.until(worker, "ready")


async def test_worker_that_joins_again_while_it_yields_yields_again(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.worker.yield_device()
    await rig.manager.send(worker, Dismissed(reason="lost"))
    again = await rig.manager.joined(2)
    await rig.worker.yield_device()
    await rig.manager.until(again, "suspended")
    assert rig.generator.is_paused
    await eventually(takes_device(rig))
    await rig.manager.send(again, UseVersion(job_id=JOB, version=0), assign(2))
    await rig.manager.until_finished((2, 1))


async def test_revoked_sample_stops(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, 2, max_tokens=ENDLESS))
    await rig.manager.until_generated((1, 1), (2, 1), tokens=5)
    await rig.manager.send(worker, revoke((1, 1)))
    await eventually(lambda: _running(rig, 1))
    # The other sample alone has more tokens than both at the end of this one: the log has all of this one's.
    made = await rig.manager.until_generated((2, 1), tokens=rig.engine.stats().tokens_generated_total + 1)
    later = await rig.manager.until_generated((2, 1), tokens=len(made[2, 1].tokens) + 100)
    assert len(later[1, 1].tokens) == len(made[1, 1].tokens)
    assert later[1, 1].finish == 0


async def test_released_sample_resumes_as_another_attempt_without_loss(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, 2, max_tokens=400))
    await rig.manager.until_generated((1, 1), (2, 1), tokens=5)
    await rig.manager.send(worker, release((1, 1), (2, 7), (55, 1)))
    part = (await rig.manager.until_finished((1, 1)))[1, 1]
    assert part.finish == FINISH_RELEASED
    await rig.manager.send(worker, assign(1, attempt=2, max_tokens=400, tokens=part.tokens))
    made = await rig.manager.until_finished((1, 2), (2, 1))
    assert (made[1, 2].first_offset, made[1, 2].end, made[1, 2].finish) == (len(part.tokens), 400, FINISH_LENGTH)
    assert made[2, 1].finish == FINISH_LENGTH
    assert rig.engine.stats().tokens_generated_total == 800, "no token was lost or made again"
    assert (55, 1) not in made


async def test_release_of_a_sample_awaiting_weights_answers_at_its_offset(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    rig.weights.may_pull.clear()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=1), assign(1, version=1, tokens=[4, 5, 6]))
    await rig.manager.send(worker, release((1, 1)))
    row = (await rig.manager.until_finished((1, 1)))[1, 1]
    assert (row.first_offset, row.tokens, row.finish) == (3, [], FINISH_RELEASED)
    rig.weights.may_pull.set()
    await rig.manager.until(worker, "ready", 1)
    assert rig.engine.stats().tokens_generated_total == 0


async def test_release_of_a_queued_sample_is_answered(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(*range(5), max_tokens=4000))
    await rig.manager.until_generated((3, 1), tokens=5)
    await rig.manager.send(worker, release((4, 1)))
    row = (await rig.manager.until_finished((4, 1)))[4, 1]
    assert (row.first_offset, row.tokens, row.finish) == (0, [], FINISH_RELEASED)


async def test_another_jobs_model_releases_the_held_samples_first(rig: Rig) -> None:
    rig.weights.versions["other", 0] = FakeStagedWeights('{"other": 1}')
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, 2, max_tokens=4000))
    await rig.manager.until_generated((1, 1), (2, 1), tokens=20)
    first = rig.engine
    rig.log_refuses = True
    await rig.manager.send(worker, UseVersion(job_id="other", version=0))
    await eventually(lambda: rig.connection.session.serving == ("other", 0))
    rig.log_refuses = False
    made = await rig.manager.until_finished((1, 1), (2, 1))
    assert [row.finish for row in made.values()] == [FINISH_RELEASED] * 2
    assert sum(len(row.tokens) for row in made.values()) == first.stats().tokens_generated_total


async def test_samples_of_two_versions_continue_under_a_third(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, max_tokens=4000))
    await rig.manager.until_generated((1, 1), tokens=5)
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=1), assign(2, version=1, max_tokens=4000))
    await rig.manager.until_generated((2, 1), tokens=5)
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=2))
    await rig.manager.until(worker, "ready", 2)
    lengths = {key: len(row.tokens) for key, row in (await rig.manager.generated()).items()}
    made = await rig.manager.until_generated((1, 1), (2, 1), tokens=max(lengths.values()) + 50)
    assert [sorted(set(made[key].versions)) for key in ((1, 1), (2, 1))] == [[0, 1, 2], [1, 2]]
    assert all(row.versions == sorted(row.versions) for row in made.values())


async def _running(rig: Rig, n: int) -> bool:
    return rig.engine.stats().running == n


async def test_invalid_sample_fails_with_the_reason(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, prompt=()))
    failed = await eventually(lambda: _failed(rig))
    assert failed is not None
    assert (failed.sample, failed.attempt) == (1, 1)
    assert "empty" in failed.reason


async def _failed(rig: Rig) -> SampleFailed | None:
    found = [entry.message for entry in await rig.manager.log() if isinstance(entry.message, SampleFailed)]
    return found[0] if found else None


async def test_redis_outage_leaves_every_token_in_order(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, 2, max_tokens=800))
    await rig.manager.until_generated((1, 1), tokens=5)
    rig.down = True
    await eventually(lambda: rig.connection.incarnation.unsent.unsent_bytes > 0)
    rig.down = False
    made = await rig.manager.until_finished((1, 1), (2, 1))
    assert [len(row.tokens) for row in made.values()] == [800, 800]
    assert len(await rig.manager.received(WorkerJoined)) == 1


async def test_frame_with_a_lost_reply_is_resent_with_the_same_number(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    rig.sent_twice = 2
    await rig.manager.send(worker, assign(1, max_tokens=300))
    made = await rig.manager.until_finished((1, 1))
    assert len(made[1, 1].tokens) == 300
    numbers = [entry.message.seq for entry in await rig.manager.log() if isinstance(entry.message, TokenFrame)]
    assert len(numbers) > len(set(numbers))
    assert sorted(set(numbers)) == list(range(max(numbers) + 1))


async def test_full_unsent_queue_pauses_the_engine(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "UNSENT_BYTES", 1000)
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, max_tokens=500))
    await rig.manager.until_generated((1, 1), tokens=5)
    rig.log_refuses = True
    await eventually(lambda: rig.connection.incarnation.unsent.is_full)
    await eventually(lambda: rig.engine._suspended)
    rig.log_refuses = False
    made = await rig.manager.until_finished((1, 1))
    assert len(made[1, 1].tokens) == 500


async def test_dismissed_worker_rejoins_and_is_ready_without_a_pull(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, max_tokens=4000))
    await rig.manager.until_generated((1, 1), tokens=5)
    await rig.manager.send(worker, Dismissed(reason="lost"))
    again = await rig.manager.ready_worker(nth=2)
    assert again != worker
    assert rig.weights.pulled == [(JOB, 0)]
    assert (await rig.manager.last_heartbeat(again)).running == 0
    length = len((await rig.manager.generated())[1, 1].tokens)
    await rig.manager.send(again, assign(2))
    made = await rig.manager.until_finished((2, 1))
    assert len(made[1, 1].tokens) == length


async def test_pause_of_the_engine_is_in_no_measured_decode_step(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, max_tokens=ENDLESS))
    await rig.manager.until_generated((1, 1), tokens=50)
    await rig.generator.pause("suspended")
    n_before = len(await rig.manager.received(WorkerHeartbeat, worker))

    async def paused_long() -> bool:
        beats = await rig.manager.received(WorkerHeartbeat, worker)
        return beats[-1].at - beats[n_before - 1].at > 0.6

    await eventually(paused_long)
    await rig.generator.resume("suspended")

    async def measured() -> list[float]:
        beats = await rig.manager.received(WorkerHeartbeat, worker)
        return [beat.step_s for beat in beats[n_before:] if beat.step_s]

    await eventually(measured)
    assert max(await measured()) < 0.3, "a step of this engine takes 1 ms"


async def test_worker_dismissed_while_suspended_generates_after_rejoining(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, Suspend(step=0))
    await rig.manager.until(worker, "suspended")
    await rig.manager.send(worker, Dismissed(reason="lost"))
    again = await rig.manager.ready_worker(nth=2)
    await rig.manager.send(again, assign(2))
    await rig.manager.until_finished((2, 1))


async def test_assignment_for_a_wrong_version_is_dead_lettered_and_rejoins(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, version=7))
    again = await rig.manager.joined(2)
    assert again != worker
    (left,) = await rig.manager.received(WorkerLeft, worker)
    assert "version 7" in left.reason
    (entry,) = await rig.manager.entries(DEAD_LETTERS)
    assert "version 7" in str(entry.message)
    assert Assign.__name__ in str(entry.message)


async def test_command_that_fails_unexpectedly_is_dead_lettered_and_rejoins(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await rig.manager.ready_worker()
    on_command = Session.on_command

    def failing(session: Session, command: Message) -> list[Effect]:
        if isinstance(command, Resume):
            raise KeyError("a bug")
        return on_command(session, command)

    monkeypatch.setattr(Session, "on_command", failing)
    await rig.manager.send(worker, Resume(step=0))
    again = await rig.manager.ready_worker(nth=2)
    (entry,) = await rig.manager.entries(DEAD_LETTERS)
    assert "a bug" in str(entry.message)
    await rig.manager.send(again, assign(1))
    await rig.manager.until_finished((1, 1))


async def test_worker_that_redis_rejects_for_long_joins_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_app, "REJECTION_LIMIT_S", 0.1)
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, max_tokens=ENDLESS))
    await rig.manager.until_generated((1, 1), tokens=5)
    rig.rejected = worker
    again = await rig.manager.ready_worker(nth=2)
    assert again != worker
    await rig.manager.send(again, assign(2))
    made = await rig.manager.until_finished((2, 1))
    assert not made[1, 1].finish
    assert await rig.manager.received(WorkerLeft) == []


@pytest.mark.parametrize(
    "command", [Suspend(step=0), assign(1, version=7)], ids=["flush before a suspension", "leave before rejoining"]
)
async def test_worker_rejected_while_it_executes_a_command_joins_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, command: Message
) -> None:
    monkeypatch.setattr(manager_connection, "REJECTION_LIMIT_S", 0.1)
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(2, max_tokens=ENDLESS))
    await rig.manager.until_generated((2, 1), tokens=5)
    rig.rejected = worker
    await rig.manager.send(worker, command)
    again = await rig.manager.ready_worker(nth=2)
    await rig.manager.send(again, assign(3))
    await rig.manager.until_finished((3, 1))


async def test_worker_rejected_as_weights_are_unavailable_joins_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_connection, "REJECTION_LIMIT_S", 0.1)
    worker = await rig.manager.ready_worker()
    rig.weights.may_pull.clear()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=9), assign(1, version=9))
    await rig.manager.until(worker, "pulling", 0)
    rig.rejected = worker
    rig.weights.may_pull.set()
    again = await rig.manager.ready_worker(nth=2)
    await rig.manager.send(again, assign(3))
    await rig.manager.until_finished((3, 1))


async def test_stop_while_an_update_rejoins_ends_the_worker(rig: Rig) -> None:
    """The update rejoins as its own outcome: the samples that waited for its weights go back."""
    worker = await rig.manager.ready_worker()
    rig.may_join.clear()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=9), assign(1, version=9))
    (left,) = await eventually(lambda: rig.manager.received(WorkerLeft, worker))
    assert "version 9" in left.reason
    rig.stop.set()
    async with asyncio.timeout(3.0):
        await rig.worker.wait_handed_off()
    rig.may_join.set()
    assert len(await rig.manager.received(WorkerJoined)) == 1


async def test_worker_that_redis_rejects_for_a_moment_continues(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, max_tokens=ENDLESS))
    await rig.manager.until_generated((1, 1), tokens=5)
    rig.rejected = worker
    await eventually(lambda: rig.connection.incarnation.unsent.unsent_bytes)
    rig.rejected = ""
    await rig.manager.send(worker, release((1, 1)))
    await rig.manager.until_finished((1, 1))
    assert len(await rig.manager.received(WorkerJoined)) == 1


async def test_worker_sends_no_heartbeats_while_none_are_read(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = await rig.manager.ready_worker()
    monkeypatch.setattr(manager_connection, "_MAX_UNREAD", 0)
    beats = len(await rig.manager.received(WorkerHeartbeat, worker))
    await rig.manager.send(worker, assign(1, max_tokens=400))
    await rig.manager.until_finished((1, 1))
    assert len(await rig.manager.received(WorkerHeartbeat, worker)) <= beats + 1, "one may have been on its way"
    assert await rig.lease_values([worker_lease(worker)]) != [None]
    await rig.transact([Delete(worker_reports(worker))])  # a manager has relayed all
    await eventually(lambda: _more_beats(rig, worker, 1))


async def test_stop_sends_notice_flushes_and_leaves_in_this_order(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, 2, max_tokens=4000))
    await rig.manager.until_generated((1, 1), tokens=5)
    rig.stop.set()
    await eventually(lambda: _left(rig))
    words = [type(entry.message) for entry in await rig.manager.entries(WORKER_HEARTBEATS)]
    assert words[-1] is WorkerLeft
    assert PreemptionNotice in words
    made = await rig.manager.generated()
    assert sum(len(row.tokens) for row in made.values()) == rig.engine.stats().tokens_generated_total


async def _left(rig: Rig) -> bool:
    return bool(await rig.manager.received(WorkerLeft))


async def test_preemption_notice_is_forwarded_and_hands_off_at_once(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, 2, max_tokens=4000))
    await rig.manager.until_generated((1, 1), tokens=5)
    rig.worker.on_preemption_notice(Notice("aws: terminate", 120.0))
    rig.worker.on_preemption_notice(Notice("another", 1.0))
    await rig.worker.wait_handed_off()
    (notice,), (left,) = await rig.manager.received(PreemptionNotice), await rig.manager.received(WorkerLeft)
    assert (notice.worker, notice.lead_s, notice.reason) == (worker, 120.0, "aws: terminate")
    assert (left.reason, rig.stop.is_set()) == ("aws: terminate", True)
    made = await rig.manager.generated()
    assert sum(len(row.tokens) for row in made.values()) == rig.engine.stats().tokens_generated_total


async def test_notice_without_lead_time_reports_the_grace(rig: Rig) -> None:
    await rig.manager.ready_worker()
    rig.worker.on_preemption_notice(Notice("gcp: preempted"))
    await rig.worker.wait_handed_off()
    (notice,) = await rig.manager.received(PreemptionNotice)
    assert notice.lead_s == 5.0


async def test_shutdown_does_not_wait_for_a_stuck_engine(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*, keep_kv: bool = False) -> None:
        await asyncio.Event().wait()

    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, max_tokens=4000))
    await rig.manager.until_generated((1, 1), tokens=5)
    monkeypatch.setattr(rig.engine, "suspend", never)
    rig.worker.on_preemption_notice(Notice("aws: terminate", 2.0))
    await asyncio.wait_for(rig.worker.wait_handed_off(), 4.0)
    made = await rig.manager.generated()
    assert len(made[1, 1].tokens) == rig.engine.stats().tokens_generated_total, "it made none of what it has forgotten"


async def test_rebalance_recommendation_emits_an_event_and_worker_stays(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.worker.on_rebalance_recommendation(RebalanceRecommendation("aws: rebalance"))
    (event,) = [entry.message for entry in await rig.manager.entries(job_events(JOB))]
    assert isinstance(event, Event)
    assert (event.kind, event.source) == ("rebalance_recommended", worker)
    assert event.fields["reason"] == "aws: rebalance"
    assert not rig.stop.is_set()


async def test_rebalance_recommendation_without_redis_is_only_logged(rig: Rig) -> None:
    await rig.manager.ready_worker()
    rig.down = True
    await rig.worker.on_rebalance_recommendation(RebalanceRecommendation("aws: rebalance"))
    assert not rig.stop.is_set()


async def test_rebalance_recommendation_drains_if_configured() -> None:
    rig = Rig(drain_on_rebalance=True)
    running = asyncio.create_task(rig.worker.run({}), name="worker")
    await rig.manager.ready_worker()
    await rig.worker.on_rebalance_recommendation(RebalanceRecommendation("aws: rebalance"))
    await running
    (left,) = await rig.manager.received(WorkerLeft)
    assert left.reason == "aws: rebalance"
    assert await rig.manager.received(PreemptionNotice) == []


async def test_drained_worker_leaves_without_notice(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, max_tokens=4000), Drain(reason="scaled down"))
    await eventually(lambda: _left(rig))
    (left,) = await rig.manager.received(WorkerLeft)
    assert left.reason == "scaled down"
    assert await rig.manager.received(PreemptionNotice) == []
    assert rig.stop.is_set()


async def test_stop_during_a_pull_is_quick(rig: Rig) -> None:
    worker = await rig.manager.joined()
    rig.weights.may_pull.clear()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=0))
    await rig.manager.until(worker, "pulling")
    rig.stop.set()
    stopwatch = Stopwatch()
    await eventually(lambda: _left(rig))
    assert stopwatch.read() < 1.0


@pytest.mark.parametrize("suspended", [False, True])
async def test_stop_during_a_load_is_quick(rig: Rig, *, suspended: bool) -> None:
    worker = await rig.manager.ready_worker()
    rig.engine.may_load.clear()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=1))
    await eventually(lambda: rig.engine.loads == 2)
    if suspended:
        await rig.manager.send(worker, Suspend(step=1))
        await eventually(lambda: "suspended" in rig.generator.pause_reasons)
    rig.stop.set()
    stopwatch = Stopwatch()
    await eventually(lambda: _left(rig))
    assert stopwatch.read() < 1.0


async def test_dead_engine_fails_the_worker_with_a_report() -> None:
    rig = Rig()
    running = asyncio.create_task(rig.worker.run({}), name="worker")
    await rig.manager.ready_worker()
    rig.engine.fail(RuntimeError("out of memory"))
    assert "out of memory" in await _failure(running)
    (left,) = await rig.manager.received(WorkerLeft)
    assert "out of memory" in left.reason
    assert not left.running_at_failure


async def test_heartbeat_says_what_the_engine_accepts_once_there_is_one() -> None:
    rig = Rig(capacity=KvCapacity(slots=4, max_len=4096, tokens=9000))
    running = asyncio.create_task(rig.worker.run({}), name="worker")
    worker = await rig.manager.ready_worker()
    beats = await rig.manager.received(WorkerHeartbeat)
    assert {(beat.kv_tokens, beat.max_request_tokens) for beat in beats if beat.state == "joining"} == {(0, 0)}
    beat = await rig.manager.last_heartbeat(worker)
    assert (beat.state, beat.kv_tokens, beat.max_request_tokens) == ("ready", 9000, 0)
    assert not beat.returns_routed_experts
    rig.stop.set()
    await running


async def test_dead_engine_report_names_running_samples_not_queued_ones() -> None:
    rig = Rig(capacity=KvCapacity(slots=4, max_len=4096, tokens=2 * 4096))
    running = asyncio.create_task(rig.worker.run({}), name="worker")
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, 2, 3, max_tokens=4000))
    await rig.manager.until_generated((1, 1), (2, 1), tokens=5)
    assert rig.engine.stats().pending == 1, "there are slots, but no capacity"
    rig.engine.fail(RuntimeError("out of memory"))
    assert "out of memory" in await _failure(running)
    (left,) = await rig.manager.received(WorkerLeft)
    assert ints(left.running_at_failure, U64) == [1, 2]


async def test_hung_engine_fails_the_worker_with_tokens_flushed_and_report() -> None:
    rig = Rig()
    watchdog = Watchdog(rig.generator, limit_s=0.2)
    running = asyncio.create_task(rig.worker.run({"progress": watchdog.run}), name="worker")
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, 2, max_tokens=4000))
    await rig.manager.until_generated((1, 1), (2, 1), tokens=5)
    rig.engine.hangs = True
    assert "no token has come for" in await _failure(running)
    (left,) = await rig.manager.received(WorkerLeft)
    assert "the inference engine hangs" in left.reason
    assert ints(left.running_at_failure, U64) == [1, 2]
    made = await rig.manager.generated()
    assert sum(len(row.tokens) for row in made.values()) == rig.engine.stats().tokens_generated_total


async def test_paused_engine_does_not_count_as_hung() -> None:
    rig = Rig()
    watchdog = Watchdog(rig.generator, limit_s=0.05)
    running = asyncio.create_task(rig.worker.run({"progress": watchdog.run}), name="worker")
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, max_tokens=500))
    await rig.manager.until_generated((1, 1), tokens=5)
    rig.engine.may_load.clear()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=1))
    await rig.manager.until(worker, "pulling", -1)
    beats = len(await rig.manager.received(WorkerHeartbeat, worker))
    await eventually(lambda: _more_beats(rig, worker, beats + 25))  # half a second: ten times the limit
    rig.engine.may_load.set()
    await rig.manager.until_finished((1, 1))
    rig.stop.set()
    await running


async def test_hand_off_without_redis_fails() -> None:
    rig = Rig(grace_s=0.5)
    running = asyncio.create_task(rig.worker.run({}), name="worker")
    await rig.manager.ready_worker()
    rig.down = True
    rig.stop.set()
    failure = await _failure(running)
    assert "the hand-off" in failure
    assert "the last try failed: the fake broker is down" in failure
