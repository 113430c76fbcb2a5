"""The worker's loops on an in-memory bus, with a fake engine and fake weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.rollout_worker.domain import frames
from services.rollout_worker.domain.kv_room import Room
from services.rollout_worker.domain.notices import Advice, Notice
from services.rollout_worker.fakes import FakeStagedWeights
from services.rollout_worker.watchdog import Watchdog
from shared.columns import U64, ints
from shared.errors import Fatal
from shared.messages import (
    FINISH_LENGTH,
    FINISH_RELEASED,
    Assign,
    Dismissed,
    Drain,
    Event,
    InFlight,
    Resume,
    SampleFailed,
    Suspend,
    TokenFrame,
    UseVersion,
    WorkerBeat,
    WorkerJoined,
    WorkerLeft,
    WorkerNotice,
)
from shared.names import DEAD_LETTERS, WORKER_BEATS, job_events, worker_lease
from tests.support.eventually import eventually
from tests.support.stopwatch import Stopwatch
from tests.support.worker_manager import JOB, assign, release, revoke
from tests.support.worker_rig import Rig


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    running = asyncio.create_task(rig.app.run(rig.stop, {}), name="worker")
    yield rig
    rig.down = rig.log_refuses = False
    rig.weights.may_come.set()
    rig.stop.set()
    await running


async def test_the_first_words_are_joined_then_a_beat_with_a_lease(rig: Rig) -> None:
    worker = await rig.manager.joined()
    await rig.manager.until(worker, "joining")
    (joined,) = await rig.manager.heard(WorkerJoined)
    assert (joined.role, joined.kind, joined.slots, joined.price_per_hour) == ("preemptible", "fake", 4, 0.5)
    assert (joined.trainer, joined.kv_tokens) == ("t", 0)
    assert await rig.holders([worker_lease(worker)]) != [None]
    beat = await rig.manager.last_beat(worker)
    assert (beat.resident_bytes, beat.device_used_bytes, beat.device_total_bytes) == (1, 2, 3)


async def test_it_pulls_loads_and_generates_what_it_is_assigned(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, 2, 3, max_tokens=40))
    made = await rig.manager.until_finished((1, 1), (2, 1), (3, 1))
    assert [len(row.tokens) for row in made.values()] == [40, 40, 40]
    assert {version for row in made.values() for version in row.versions} == {0}


async def test_beats_and_flushes_go_on_during_a_pull(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, max_tokens=4000))
    rig.weights.may_come.clear()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=1))
    await rig.manager.until(worker, "pulling", 0)
    before = len((await rig.manager.until_made((1, 1), tokens=1))[1, 1].tokens)
    beats = len(await rig.manager.heard(WorkerBeat, worker))
    await rig.manager.until_made((1, 1), tokens=before + 50)
    await eventually(lambda: _more_beats(rig, worker, beats + 3))
    rig.weights.may_come.set()
    await rig.manager.until(worker, "ready", 1)
    rows = await rig.manager.until_made((1, 1), tokens=before + 200)
    assert rows[1, 1].versions == sorted(rows[1, 1].versions)
    assert set(rows[1, 1].versions) == {0, 1}


async def _more_beats(rig: Rig, worker: str, n: int) -> bool:
    return len(await rig.manager.heard(WorkerBeat, worker)) >= n


async def test_weights_that_were_loaded_wrongly_once_are_loaded_again(rig: Rig) -> None:
    rig.weights.versions[JOB, 0] = FakeStagedWeights(wrong_loads=1)
    await rig.manager.ready_worker()


async def test_weights_that_are_loaded_wrongly_twice_end_the_process_and_are_never_served() -> None:
    rig = Rig()
    rig.weights.versions[JOB, 0] = FakeStagedWeights(wrong_loads=2)
    running = asyncio.create_task(rig.app.run(rig.stop, {}), name="worker")
    worker = await rig.manager.joined()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=0), assign(1))
    assert "not what was published" in await _failure(running)
    assert all(beat.version == -1 for beat in await rig.manager.heard(WorkerBeat))
    assert await rig.manager.made() == {}
    (left,) = await rig.manager.heard(WorkerLeft)
    assert "not what was published" in left.reason


async def _failure(running: asyncio.Task[None]) -> str:
    with pytest.raises(ExceptionGroup) as caught:
        await running
    error: BaseException = caught.value
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error)


async def test_a_version_that_is_gone_is_reported_and_the_old_one_served_on(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=9))
    event = await eventually(lambda: _event(rig))
    assert (event.kind, event.fields["version"]) == ("weights_unavailable", 9)
    await rig.manager.until(worker, "ready", 0)
    await rig.manager.send(worker, assign(1))
    await rig.manager.until_finished((1, 1))


async def _event(rig: Rig) -> Event | None:
    entries = await rig.read({job_events(JOB): "0-0"})
    found = [entry.message for entry in entries if isinstance(entry.message, Event)]
    return found[0] if found else None


async def test_a_newer_version_takes_the_place_of_a_pull_that_does_not_come(rig: Rig) -> None:
    worker = await rig.manager.joined()
    rig.weights.may_come.clear()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=1))
    await rig.manager.until(worker, "pulling")
    rig.weights.may_come = asyncio.Event()
    rig.weights.may_come.set()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=2))
    await rig.manager.until(worker, "ready", 2)
    assert rig.weights.pulled == [(JOB, 1), (JOB, 2)]


async def test_going_back_to_the_loaded_version_lets_the_engine_go_on(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    rig.weights.may_come.clear()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=1), UseVersion(job_id=JOB, version=0), assign(1))
    await rig.manager.until_finished((1, 1))


async def test_a_load_that_was_given_up_is_not_served_when_it_ends(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, max_tokens=4000))
    await rig.manager.until_made((1, 1), tokens=5)
    rig.engine.may_load.clear()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=1))
    await eventually(lambda: rig.engine.loads == 2)
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=2))
    await rig.manager.until(worker, "pulling", -1)
    rig.engine.may_load.set()
    await rig.manager.until(worker, "ready", 2)
    made = await rig.manager.until_made((1, 1), tokens=len((await rig.manager.made())[1, 1].tokens) + 50)
    assert set(made[1, 1].versions) == {0, 2}


async def test_new_weights_wait_for_samples_that_are_to_end_under_the_old_ones(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, max_tokens=300), assign(2, max_tokens=400))
    await rig.manager.until_made((1, 1), tokens=5)
    command = UseVersion(job_id=JOB, version=1, in_flight="finish")
    await rig.manager.send(worker, command, assign(3, version=1, max_tokens=20))
    await rig.manager.until(worker, "pulling", 0)
    await eventually(lambda: [wait.for_ for wait in rig.waits.current()] == ["the samples in flight"])
    made = await rig.manager.until_finished((1, 1), (2, 1), (3, 1))
    assert [set(made[sample, 1].versions) for sample in (1, 2, 3)] == [{0}, {0}, {1}]
    await rig.manager.until(worker, "ready", 1)


async def test_a_newer_version_takes_the_place_of_the_one_that_waits(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, max_tokens=300))
    await rig.manager.until_made((1, 1), tokens=5)
    for version in (1, 2):
        await rig.manager.send(worker, UseVersion(job_id=JOB, version=version, in_flight="finish"))
    await rig.manager.until(worker, "ready", 2)
    made = await rig.manager.until_finished((1, 1))
    assert set(made[1, 1].versions) == {0}
    assert rig.engine.loads == 2


async def test_samples_in_flight_are_not_waited_for_without_end() -> None:
    rig = Rig(finish_limit_s=0.05)
    running = asyncio.create_task(rig.app.run(rig.stop, {}), name="worker")
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, max_tokens=4000))
    await rig.manager.until_made((1, 1), tokens=5)
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=1, in_flight="finish"))
    await rig.manager.until(worker, "ready", 1)
    made = await rig.manager.until_made((1, 1), tokens=len((await rig.manager.made())[1, 1].tokens) + 50)
    assert set(made[1, 1].versions) == {0, 1}
    rig.stop.set()
    await running


@pytest.mark.parametrize(("in_flight", "kept"), [("recompute", False), ("keep", True)])
async def test_the_cache_is_kept_where_the_manager_says_so(rig: Rig, in_flight: InFlight, kept: bool) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, max_tokens=4000))
    await rig.manager.until_made((1, 1), tokens=5)
    rig.engine.kept_kv.clear()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=1, in_flight=in_flight))
    await rig.manager.until(worker, "ready", 1)
    assert rig.engine.kept_kv == [kept, kept]


async def test_a_suspension_during_a_load_gives_the_kept_cache_back(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, max_tokens=4000))
    await rig.manager.until_made((1, 1), tokens=5)
    rig.engine.may_load.clear()
    rig.engine.kept_kv.clear()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=1, in_flight="keep"))
    await eventually(lambda: rig.engine.kept_kv == [True, True])
    await rig.manager.send(worker, Suspend(step=1))
    await eventually(lambda: "suspended" in rig.generator._holds)
    rig.engine.may_load.set()
    await rig.manager.until(worker, "suspended")
    assert rig.engine.kept_kv == [True, True, False]


async def test_of_the_next_weights_only_what_is_new_is_loaded(rig: Rig) -> None:
    for version, content in enumerate(({"a": 0, "b": 0}, {"a": 0, "b": 1}, {"a": 2, "b": 1})):
        rig.weights.versions[JOB, version] = FakeStagedWeights(contents=content, wrong_loads=int(version == 2))
    worker = await rig.manager.ready_worker()
    for version in (1, 2):
        await rig.manager.send(worker, UseVersion(job_id=JOB, version=version))
        await rig.manager.until(worker, "ready", version)
    read = [rig.weights.versions[JOB, version].read for version in range(3)]
    assert read == [[{"a", "b"}], [{"b"}], [{"a"}, {"a", "b"}]], "after a load that went wrong, all is loaded"


async def test_another_engine_gets_everything_and_one_whose_load_was_given_up_what_is_new_since(rig: Rig) -> None:
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
    await eventually(lambda: rig.link.me.session.serving == ("other", 0))
    assert [weights.read for weights in rig.weights.versions.values()] == [
        [{"a", "b"}],
        [set()],
        [set()],
        [{"a", "b"}],
    ]


async def test_another_model_gets_another_engine(rig: Rig) -> None:
    rig.weights.versions["other", 0] = FakeStagedWeights('{"other": 1}')
    worker = await rig.manager.ready_worker()
    first = rig.engine
    await rig.manager.send(worker, UseVersion(job_id="other", version=0))
    await eventually(lambda: rig.factory.built == ["{}", '{"other": 1}'])
    await eventually(lambda: rig.link.me.session.serving == ("other", 0))
    assert rig.engine is not first
    with pytest.raises(Fatal, match="closed"):
        first.submit([])


async def test_suspended_means_that_everything_made_is_in_the_log(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, 2, max_tokens=4000))
    await rig.manager.until_made((1, 1), (2, 1), tokens=20)
    await rig.manager.send(worker, Suspend(step=1))
    beat = await rig.manager.until(worker, "suspended")
    assert (beat.running, beat.pending) == (0, 0)
    made = await rig.manager.made()
    assert sum(len(row.tokens) for row in made.values()) == rig.engine.stats().tokens_made_total
    await rig.manager.send(worker, assign(3), Resume(step=2), assign(4))
    made = await rig.manager.until_finished((4, 1))
    assert (3, 1) not in made


async def test_a_suspension_waits_for_the_log_before_it_is_announced(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, max_tokens=4000))
    await rig.manager.until_made((1, 1), tokens=20)
    rig.log_refuses = True
    await rig.manager.send(worker, Suspend(step=1))
    await eventually(lambda: any("suspension" in wait.because for wait in rig.waits.current()))
    assert (await rig.manager.last_beat(worker)).state == "ready"
    rig.log_refuses = False
    await rig.manager.until(worker, "suspended")
    made = await rig.manager.made()
    assert len(made[1, 1].tokens) == rig.engine.stats().tokens_made_total


async def test_weights_loaded_while_suspended_do_not_start_the_engine(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, Suspend(step=0), UseVersion(job_id=JOB, version=1))
    await rig.manager.until(worker, "suspended", 1)
    rig.engine.submit([])
    await rig.manager.send(worker, Resume(step=1), assign(1, version=1))
    made = await rig.manager.until_finished((1, 1))
    assert set(made[1, 1].versions) == {1}


async def test_a_revoked_sample_stops(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, 2, max_tokens=4000))
    await rig.manager.until_made((1, 1), (2, 1), tokens=5)
    await rig.manager.send(worker, revoke((1, 1)))
    await eventually(lambda: _running(rig, 1))
    length = len((await rig.manager.made())[1, 1].tokens)
    made = await rig.manager.until_made((2, 1), tokens=length + 100)
    assert len(made[1, 1].tokens) < length + 100
    assert made[1, 1].finish == 0


async def test_a_released_sample_ends_with_all_its_tokens_in_the_log_and_goes_on_as_another_attempt(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, 2, max_tokens=400))
    await rig.manager.until_made((1, 1), (2, 1), tokens=5)
    await rig.manager.send(worker, release((1, 1), (2, 7), (55, 1)))
    part = (await rig.manager.until_finished((1, 1)))[1, 1]
    assert part.finish == FINISH_RELEASED
    await rig.manager.send(worker, assign(1, attempt=2, max_tokens=400, tokens=part.tokens))
    made = await rig.manager.until_finished((1, 2), (2, 1))
    assert (made[1, 2].first_offset, made[1, 2].end, made[1, 2].finish) == (len(part.tokens), 400, FINISH_LENGTH)
    assert made[2, 1].finish == FINISH_LENGTH
    assert rig.engine.stats().tokens_made_total == 800, "no token was lost or made again"
    assert (55, 1) not in made


async def test_a_sample_released_while_it_waits_for_its_weights_is_answered_at_its_offset(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    rig.weights.may_come.clear()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=1), assign(1, version=1, tokens=[4, 5, 6]))
    await rig.manager.send(worker, release((1, 1)))
    row = (await rig.manager.until_finished((1, 1)))[1, 1]
    assert (row.first_offset, row.tokens, row.finish) == (3, [], FINISH_RELEASED)
    rig.weights.may_come.set()
    await rig.manager.until(worker, "ready", 1)
    assert rig.engine.stats().tokens_made_total == 0


async def test_a_sample_released_while_it_waits_for_a_slot_is_answered(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(*range(5), max_tokens=4000))
    await rig.manager.until_made((3, 1), tokens=5)
    await rig.manager.send(worker, release((4, 1)))
    row = (await rig.manager.until_finished((4, 1)))[4, 1]
    assert (row.first_offset, row.tokens, row.finish) == (0, [], FINISH_RELEASED)


async def test_another_jobs_model_takes_over_only_when_what_was_held_is_released_in_the_log(rig: Rig) -> None:
    rig.weights.versions["other", 0] = FakeStagedWeights('{"other": 1}')
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, 2, max_tokens=4000))
    await rig.manager.until_made((1, 1), (2, 1), tokens=20)
    first = rig.engine
    rig.log_refuses = True
    await rig.manager.send(worker, UseVersion(job_id="other", version=0))
    await eventually(lambda: rig.link.me.session.serving == ("other", 0))
    rig.log_refuses = False
    made = await rig.manager.until_finished((1, 1), (2, 1))
    assert [row.finish for row in made.values()] == [FINISH_RELEASED] * 2
    assert sum(len(row.tokens) for row in made.values()) == first.stats().tokens_made_total


async def test_samples_of_two_versions_go_on_over_a_third_with_rows_of_one_version_each(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, max_tokens=4000))
    await rig.manager.until_made((1, 1), tokens=5)
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=1), assign(2, version=1, max_tokens=4000))
    await rig.manager.until_made((2, 1), tokens=5)
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=2))
    await rig.manager.until(worker, "ready", 2)
    lengths = {key: len(row.tokens) for key, row in (await rig.manager.made()).items()}
    made = await rig.manager.until_made((1, 1), (2, 1), tokens=max(lengths.values()) + 50)
    assert [sorted(set(made[key].versions)) for key in ((1, 1), (2, 1))] == [[0, 1, 2], [1, 2]]
    assert all(row.versions == sorted(row.versions) for row in made.values())


async def _running(rig: Rig, n: int) -> bool:
    return rig.engine.stats().running == n


async def test_a_sample_that_cannot_be_generated_fails_with_the_reason(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, prompt=()))
    failed = await eventually(lambda: _failed(rig))
    assert (failed.sample, failed.attempt) == (1, 1)
    assert "empty" in failed.reason


async def _failed(rig: Rig) -> SampleFailed | None:
    found = [entry.message for entry in await rig.manager.log() if isinstance(entry.message, SampleFailed)]
    return found[0] if found else None


async def test_a_broker_that_was_away_gets_every_token_in_order(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, 2, max_tokens=800))
    await rig.manager.until_made((1, 1), tokens=5)
    rig.down = True
    await eventually(lambda: rig.link.me.outbox.unsent_bytes > 0)
    rig.down = False
    made = await rig.manager.until_finished((1, 1), (2, 1))
    assert [len(row.tokens) for row in made.values()] == [800, 800]
    assert len(await rig.manager.heard(WorkerJoined)) == 1


async def test_a_frame_whose_reply_was_lost_is_sent_again_with_the_same_number(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    rig.sent_twice = 2
    await rig.manager.send(worker, assign(1, max_tokens=300))
    made = await rig.manager.until_finished((1, 1))
    assert len(made[1, 1].tokens) == 300
    numbers = [entry.message.seq for entry in await rig.manager.log() if isinstance(entry.message, TokenFrame)]
    assert len(numbers) > len(set(numbers))
    assert sorted(set(numbers)) == list(range(max(numbers) + 1))


async def test_with_too_much_unsent_the_engine_stands_still(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "UNSENT_BYTES", 1000)
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, max_tokens=500))
    await rig.manager.until_made((1, 1), tokens=5)
    rig.log_refuses = True
    await eventually(lambda: rig.link.me.outbox.full)
    await eventually(lambda: rig.engine._suspended)
    rig.log_refuses = False
    made = await rig.manager.until_finished((1, 1))
    assert len(made[1, 1].tokens) == 500


async def test_a_dismissed_worker_joins_anew_and_is_ready_without_a_pull(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, max_tokens=4000))
    await rig.manager.until_made((1, 1), tokens=5)
    await rig.manager.send(worker, Dismissed(reason="lost"))
    again = await rig.manager.ready_worker(nth=2)
    assert again != worker
    assert rig.weights.pulled == [(JOB, 0)]
    assert (await rig.manager.last_beat(again)).running == 0
    length = len((await rig.manager.made())[1, 1].tokens)
    await rig.manager.send(again, assign(2))
    made = await rig.manager.until_finished((2, 1))
    assert len(made[1, 1].tokens) == length


async def test_a_worker_dismissed_while_suspended_generates_in_its_next_life(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, Suspend(step=0))
    await rig.manager.until(worker, "suspended")
    await rig.manager.send(worker, Dismissed(reason="lost"))
    again = await rig.manager.ready_worker(nth=2)
    await rig.manager.send(again, assign(2))
    await rig.manager.until_finished((2, 1))


async def test_samples_for_the_wrong_version_are_reported_and_the_worker_joins_anew(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, version=7))
    again = await rig.manager.joined(2)
    assert again != worker
    (left,) = await rig.manager.heard(WorkerLeft, worker)
    assert "version 7" in left.reason
    (entry,) = await rig.read({DEAD_LETTERS: "0-0"})
    assert "version 7" in str(entry.message)
    assert Assign.__name__ in str(entry.message)


async def test_a_stop_gives_notice_flushes_and_leaves_in_this_order(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, 2, max_tokens=4000))
    await rig.manager.until_made((1, 1), tokens=5)
    rig.stop.set()
    await eventually(lambda: _left(rig))
    words = [type(entry.message) for entry in await rig.manager.entries(WORKER_BEATS)]
    assert words[-1] is WorkerLeft
    assert WorkerNotice in words
    made = await rig.manager.made()
    assert sum(len(row.tokens) for row in made.values()) == rig.engine.stats().tokens_made_total


async def _left(rig: Rig) -> bool:
    return bool(await rig.manager.heard(WorkerLeft))


async def test_a_notice_is_passed_on_and_everything_handed_off_at_once(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, 2, max_tokens=4000))
    await rig.manager.until_made((1, 1), tokens=5)
    rig.app.leaving.take_notice(Notice("aws: terminate", 120.0))
    rig.app.leaving.take_notice(Notice("another", 1.0))
    await rig.app.leaving.handed_off()
    (notice,), (left,) = await rig.manager.heard(WorkerNotice), await rig.manager.heard(WorkerLeft)
    assert (notice.worker, notice.lead_s, notice.reason) == (worker, 120.0, "aws: terminate")
    assert (left.reason, rig.stop.is_set()) == ("aws: terminate", True)
    made = await rig.manager.made()
    assert sum(len(row.tokens) for row in made.values()) == rig.engine.stats().tokens_made_total


async def test_a_notice_that_does_not_tell_the_time_promises_no_more_than_the_grace(rig: Rig) -> None:
    await rig.manager.ready_worker()
    rig.app.leaving.take_notice(Notice("gcp: preempted"))
    await rig.app.leaving.handed_off()
    (notice,) = await rig.manager.heard(WorkerNotice)
    assert notice.lead_s == 5.0


async def test_an_engine_that_does_not_stand_still_is_not_waited_for(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*, keep_kv: bool = False) -> None:
        await asyncio.Event().wait()

    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, max_tokens=4000))
    await rig.manager.until_made((1, 1), tokens=5)
    monkeypatch.setattr(rig.engine, "suspend", never)
    rig.app.leaving.take_notice(Notice("aws: terminate", 2.0))
    await asyncio.wait_for(rig.app.leaving.handed_off(), 4.0)
    made = await rig.manager.made()
    assert len(made[1, 1].tokens) == rig.engine.stats().tokens_made_total, "it made none of what it has forgotten"


async def test_advice_is_told_to_people_and_the_worker_stays(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.app.leaving.take_advice(Advice("aws: rebalance"))
    (event,) = [entry.message for entry in await rig.manager.entries(job_events(JOB))]
    assert isinstance(event, Event)
    assert (event.kind, event.source) == ("worker_likely_to_be_taken", worker)
    assert event.fields["reason"] == "aws: rebalance"
    assert not rig.stop.is_set()


async def test_advice_without_redis_is_only_logged(rig: Rig) -> None:
    await rig.manager.ready_worker()
    rig.down = True
    await rig.app.leaving.take_advice(Advice("aws: rebalance"))
    assert not rig.stop.is_set()


async def test_advice_that_is_heeded_is_a_drain() -> None:
    rig = Rig(heeds_advice=True)
    running = asyncio.create_task(rig.app.run(rig.stop, {}), name="worker")
    await rig.manager.ready_worker()
    await rig.app.leaving.take_advice(Advice("aws: rebalance"))
    await running
    (left,) = await rig.manager.heard(WorkerLeft)
    assert left.reason == "aws: rebalance"
    assert await rig.manager.heard(WorkerNotice) == []


async def test_a_drained_worker_leaves_without_notice(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, max_tokens=4000), Drain(reason="scaled down"))
    await eventually(lambda: _left(rig))
    (left,) = await rig.manager.heard(WorkerLeft)
    assert left.reason == "scaled down"
    assert await rig.manager.heard(WorkerNotice) == []
    assert rig.stop.is_set()


async def test_a_stop_in_the_middle_of_a_pull_is_quick(rig: Rig) -> None:
    worker = await rig.manager.joined()
    rig.weights.may_come.clear()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=0))
    await rig.manager.until(worker, "pulling")
    rig.stop.set()
    stopwatch = Stopwatch()
    await eventually(lambda: _left(rig))
    assert stopwatch.read() < 1.0


@pytest.mark.parametrize("suspended", [False, True])
async def test_a_stop_in_the_middle_of_a_load_is_quick(rig: Rig, *, suspended: bool) -> None:
    worker = await rig.manager.ready_worker()
    rig.engine.may_load.clear()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=1))
    await eventually(lambda: rig.engine.loads == 2)
    if suspended:
        await rig.manager.send(worker, Suspend(step=1))
        await eventually(lambda: "suspended" in rig.generator._holds)
    rig.stop.set()
    stopwatch = Stopwatch()
    await eventually(lambda: _left(rig))
    assert stopwatch.read() < 1.0


async def test_a_dead_engine_ends_the_process_with_a_last_word() -> None:
    rig = Rig()
    running = asyncio.create_task(rig.app.run(rig.stop, {}), name="worker")
    await rig.manager.ready_worker()
    rig.engine.fail(RuntimeError("out of memory"))
    assert "out of memory" in await _failure(running)
    (left,) = await rig.manager.heard(WorkerLeft)
    assert "out of memory" in left.reason
    assert not left.died_with


async def test_a_beat_says_what_bounds_the_kv_cache_once_there_is_an_engine() -> None:
    rig = Rig(room=Room(slots=4, max_len=4096, tokens=9000))
    running = asyncio.create_task(rig.app.run(rig.stop, {}), name="worker")
    worker = await rig.manager.ready_worker()
    beats = await rig.manager.heard(WorkerBeat)
    assert {(beat.kv_tokens, beat.kv_row_tokens) for beat in beats if beat.state == "joining"} == {(0, 0)}
    beat = await rig.manager.last_beat(worker)
    assert (beat.state, beat.kv_tokens, beat.kv_row_tokens) == ("ready", 9000, 4096)
    rig.stop.set()
    await running


async def test_a_dead_engine_is_blamed_on_the_samples_that_ran_and_not_on_those_that_waited_for_room() -> None:
    rig = Rig(room=Room(slots=4, max_len=4096, tokens=2 * 4096))
    running = asyncio.create_task(rig.app.run(rig.stop, {}), name="worker")
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, 2, 3, max_tokens=4000))
    await rig.manager.until_made((1, 1), (2, 1), tokens=5)
    assert rig.engine.stats().pending == 1, "there are slots, but no room"
    rig.engine.fail(RuntimeError("out of memory"))
    assert "out of memory" in await _failure(running)
    (left,) = await rig.manager.heard(WorkerLeft)
    assert ints(left.died_with, U64) == [1, 2]


async def test_an_engine_that_hangs_ends_the_process_with_all_its_tokens_in_the_log_and_a_last_word() -> None:
    rig = Rig()
    watchdog = Watchdog(rig.generator, limit_s=0.2)
    running = asyncio.create_task(rig.app.run(rig.stop, {"progress": watchdog.run}), name="worker")
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, 2, max_tokens=4000))
    await rig.manager.until_made((1, 1), (2, 1), tokens=5)
    rig.engine.hangs = True
    assert "no token has come for" in await _failure(running)
    (left,) = await rig.manager.heard(WorkerLeft)
    assert "the inference engine hangs" in left.reason
    assert ints(left.died_with, U64) == [1, 2]
    made = await rig.manager.made()
    assert sum(len(row.tokens) for row in made.values()) == rig.engine.stats().tokens_made_total


async def test_an_engine_that_stands_still_for_long_does_not_hang() -> None:
    rig = Rig()
    watchdog = Watchdog(rig.generator, limit_s=0.05)
    running = asyncio.create_task(rig.app.run(rig.stop, {"progress": watchdog.run}), name="worker")
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, max_tokens=500))
    await rig.manager.until_made((1, 1), tokens=5)
    rig.engine.may_load.clear()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=1))
    await rig.manager.until(worker, "pulling", -1)
    beats = len(await rig.manager.heard(WorkerBeat, worker))
    await eventually(lambda: _more_beats(rig, worker, beats + 25))  # half a second: ten times the limit
    rig.engine.may_load.set()
    await rig.manager.until_finished((1, 1))
    rig.stop.set()
    await running


async def test_a_hand_off_that_redis_does_not_take_is_a_failure() -> None:
    rig = Rig(grace_s=0.5)
    running = asyncio.create_task(rig.app.run(rig.stop, {}), name="worker")
    await rig.manager.ready_worker()
    rig.down = True
    rig.stop.set()
    assert "the hand-off" in await _failure(running)
