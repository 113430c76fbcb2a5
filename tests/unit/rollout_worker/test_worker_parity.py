"""A worker serves weights only if its engine agrees with the trainer about them."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from rlboost.services.rollout_worker.adapters.vllm.factory import is_quantized
from rlboost.services.rollout_worker.domain.parity_check import ParityCheckFailed
from rlboost.services.rollout_worker.domain.requests import NOT_A_NUMBER, Emission, Request
from rlboost.services.rollout_worker.ports import Sequences
from rlboost.shared.messages import FINISH_NONE, Event, Resume, Suspend, UseVersion, WorkerHeartbeat, WorkerLeft
from rlboost.shared.streams.names import job_events
from rlboost.shared.weights.manifest import ParityReference, ScoredSequence
from tests.support.eventually import eventually
from tests.support.worker_fakes import FakeEngineFactory, FakeStagedWeights
from tests.support.worker_manager import JOB, assign
from tests.support.worker_rig import Rig, SlowToLoad

VOCABULARY = 128


def staged(off: float = 0.0) -> FakeStagedWeights:
    """Return weights whose canary is so far from what the fake engine says."""
    weights = FakeStagedWeights()
    row = ScoredSequence(prompt=(1, 2), completion=(3, 4, 5), logprobs=(off - math.log(VOCABULARY),) * 3)
    weights.parity_reference = ParityReference(temperature=1.0, dtype="float32", rows=(row,))
    return weights


async def _more_than(rig: Rig, n_beats: int) -> list[WorkerHeartbeat]:
    beats = await rig.manager.received(WorkerHeartbeat)
    return beats if len(beats) > n_beats else []


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    rig.weights.versions = {(JOB, version): staged() for version in range(3)}
    running = asyncio.create_task(rig.worker.run({}), name="worker")
    yield rig
    rig.stop.set()
    await asyncio.wait({running})


async def test_each_version_is_scored_once_before_it_is_served(rig: Rig) -> None:
    with capture_logs() as logs:
        worker = await rig.manager.ready_worker()
        await rig.manager.send(worker, UseVersion(job_id=JOB, version=1), assign(1, version=1, max_tokens=5))
        await rig.manager.until_finished((1, 1))
    assert (rig.engine.scored, rig.engine.sampled) == (3, 2), "the first also scored what it sampled, to compare"
    passed = [line for line in logs if line["event"] == "parity_check_passed"]
    assert [(line["version"], line["mean"], line["worst"]) for line in passed] == [
        (0, pytest.approx(0.0, abs=1e-6), pytest.approx(0.0, abs=1e-6)),
        (1, pytest.approx(0.0, abs=1e-6), pytest.approx(0.0, abs=1e-6)),
    ]


async def test_weights_without_parity_reference_are_served(rig: Rig) -> None:
    rig.weights.versions[JOB, 0].parity_reference = None
    await rig.manager.ready_worker()
    assert rig.engine.scored == 0


async def test_parity_failure_serves_nothing_and_reports_both_numbers() -> None:
    rig = Rig()
    rig.weights.versions[JOB, 0] = staged(off=0.25)
    running = asyncio.create_task(rig.worker.run({}), name="worker")
    worker = await rig.manager.joined()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=0), assign(1))
    with pytest.raises(ExceptionGroup) as failure:
        await running
    assert failure.group_contains(ParityCheckFailed, match="0.25 nats mean and 0.25 nats maximal", depth=2)
    assert {beat.state for beat in await rig.manager.received(WorkerHeartbeat)} == {"joining", "pulling"}
    assert await rig.manager.generated() == {}
    (left,) = await rig.manager.received(WorkerLeft)
    assert "RLBOOST_WORKER_PARITY_TOLERANCE" in left.reason
    assert left.running_at_failure == b"", "no sample is the cause"
    (event,) = [entry.message for entry in await rig.manager.entries(job_events(JOB))]
    assert isinstance(event, Event)
    assert (event.kind, event.fields["version"]) == ("parity_check_failed", 0)
    assert event.fields["mean"] == pytest.approx(0.25)


async def test_parity_failure_leaves_no_token_of_samples_in_flight() -> None:
    rig = Rig()
    rig.weights.versions = {(JOB, 0): staged(), (JOB, 1): staged(off=1.0)}
    running = asyncio.create_task(rig.worker.run({}), name="worker")
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, max_tokens=4000))
    await rig.manager.until_generated((1, 1), tokens=3)
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=1))
    with pytest.raises(ExceptionGroup):
        await running
    assert set((await rig.manager.generated())[1, 1].versions) == {0}


async def test_suspended_engine_is_checked_on_resume(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, Suspend(step=1), UseVersion(job_id=JOB, version=1))
    await rig.manager.until(worker, "suspended", 1)
    assert rig.engine.scored == 2, "the trainer has the device"
    assert not rig.engine.awake, "all of it"
    await rig.manager.send(worker, Resume(step=2), assign(1, version=1, max_tokens=5))
    await rig.manager.until_finished((1, 1))
    assert rig.engine.scored == 3


async def test_suspension_during_the_parity_check_frees_memory_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, may_answer, score = asyncio.Event(), asyncio.Event(), SlowToLoad.score

    async def slowly(engine: SlowToLoad, sequences: Sequences, temperature: float, job_id: str) -> list[list[float]]:
        asked.set()
        await may_answer.wait()
        return await score(engine, sequences, temperature)

    monkeypatch.setattr(SlowToLoad, "score", slowly)
    worker = await rig.manager.joined()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=0))
    await asked.wait()
    assert rig.engine.kept_kv == [False, False], "a suspension and a load"
    await rig.manager.send(worker, Suspend(step=1))
    await eventually(lambda: rig.connection.session._suspended_for)
    may_answer.set()
    await rig.manager.until(worker, "suspended")
    assert rig.engine.kept_kv == [False, False, False], "and another suspension"


@pytest.mark.parametrize("given_up", [False, True])
async def test_suspension_between_load_and_parity_check_frees_the_device(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, *, given_up: bool
) -> None:
    reading, may_read, differing = threading.Event(), threading.Event(), FakeStagedWeights.differing
    awake: list[bool] = []

    def slowly(weights: FakeStagedWeights, loaded: Any) -> list[str]:
        reading.set()
        assert may_read.wait(10)
        awake.append(rig.engine.awake)
        return differing(weights, loaded)

    worker = await rig.manager.ready_worker()
    monkeypatch.setattr(FakeStagedWeights, "differing", slowly)
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=1))
    await eventually(reading.is_set)
    if given_up:
        await rig.manager.send(worker, UseVersion(job_id=JOB, version=2))
        await eventually(lambda: rig.connection.session.target == (JOB, 2))
    await rig.manager.send(worker, Suspend(step=1))
    await eventually(lambda: "suspended" in rig.generator.pause_reasons)
    n_beats = len(await rig.manager.received(WorkerHeartbeat))
    beats = await eventually(lambda: _more_than(rig, n_beats + 2))
    assert all(beat.state != "suspended" for beat in beats), "the weights are being read"
    may_read.set()
    await rig.manager.until(worker, "suspended", 2 if given_up else 1)
    assert not rig.engine.awake
    assert all(awake), "weights are read where they lie"
    assert rig.engine.scored == 2
    await rig.manager.send(worker, Resume(step=2))
    await eventually(lambda: rig.engine.scored == 3)


async def test_parity_failure_on_resume_generates_nothing() -> None:
    rig = Rig()
    rig.weights.versions = {(JOB, 0): staged(), (JOB, 1): staged(off=1.0)}
    running = asyncio.create_task(rig.worker.run({}), name="worker")
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, Suspend(step=1), UseVersion(job_id=JOB, version=1))
    await rig.manager.until(worker, "suspended", 1)
    await rig.manager.send(worker, Resume(step=2), assign(1, version=1, max_tokens=5))
    with pytest.raises(ExceptionGroup) as failure:
        await running
    assert failure.group_contains(ParityCheckFailed)
    assert await rig.manager.generated() == {}


async def test_parity_check_is_skipped_while_samples_keep_their_cache(rig: Rig) -> None:
    worker = await rig.manager.ready_worker()
    await rig.manager.send(worker, assign(1, max_tokens=4000))
    await rig.manager.until_generated((1, 1), tokens=3)
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=1, in_flight="keep"))
    await rig.manager.until(worker, "ready", 1)
    assert rig.engine.scored == 2


async def test_engine_that_reports_other_logprobs_than_it_computes_serves_nothing() -> None:
    rig = Rig()
    rig.weights.versions[JOB, 0] = staged()
    rig.factory = FakeEngineFactory(lambda: _misreporting(0.25))
    rig.generator._engines = rig.factory
    running = asyncio.create_task(rig.worker.run({}), name="worker")
    worker = await rig.manager.joined()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=0), assign(1))
    with pytest.raises(ExceptionGroup) as failure:
        await running
    assert failure.group_contains(ParityCheckFailed, match="that it reports for sampled tokens", depth=2)
    assert await rig.manager.generated() == {}
    (event,) = [entry.message for entry in await rig.manager.entries(job_events(JOB))]
    assert isinstance(event, Event)
    assert event.fields["mean"] == pytest.approx(0.25)
    assert "that it reports for sampled tokens" in event.fields["reason"]


def _misreporting(off: float) -> SlowToLoad:
    engine = SlowToLoad()
    engine.sample_error = off
    return engine


async def test_sampling_is_checked_once_for_each_temperature_and_top_p(rig: Rig) -> None:
    for version, top_p in enumerate((1.0, 0.9, 1.0)):
        reference = staged().parity_reference
        assert reference is not None
        rig.weights.versions[JOB, version].parity_reference = reference.model_copy(update={"top_p": top_p})
    worker = await rig.manager.ready_worker()
    assert rig.engine.sampled == 2, "continuations and draws"
    for version, n in ((1, 4), (2, 4)):
        await rig.manager.send(worker, UseVersion(job_id=JOB, version=version))
        await rig.manager.until(worker, "ready", version)
        assert rig.engine.sampled == n


@pytest.mark.parametrize("error", ["top_p is not supported", NOT_A_NUMBER])
async def test_sampling_check_fails_if_sampled_logprobs_are_no_numbers(
    monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    """Requests that the engine refuses are no fault of it: other jobs can use it."""

    async def refuse(_: object, requests: Sequence[Request]) -> list[Emission]:
        return [request.emission_without_tokens(0, FINISH_NONE, error) for request in requests]

    monkeypatch.setattr(SlowToLoad, "sample", refuse)
    rig = Rig()
    rig.weights.versions[JOB, 0] = staged()
    running = asyncio.create_task(rig.worker.run({}), name="worker")
    if error == NOT_A_NUMBER:
        worker = await rig.manager.joined()
        await rig.manager.send(worker, UseVersion(job_id=JOB, version=0))
        with pytest.raises(ExceptionGroup) as failure:
            await running
        assert failure.group_contains(ParityCheckFailed, match="that are not numbers", depth=2)
        return
    with capture_logs() as logs:
        await rig.manager.ready_worker()
    assert [line["reason"] for line in logs if line["event"] == "sampling_check_skipped"] == [error]
    rig.stop.set()
    await asyncio.wait({running})


async def test_parity_check_without_an_answer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> list[list[float]]:
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(SlowToLoad, "score", never)
    rig = Rig(parity_limit_s=0.05)
    rig.weights.versions[JOB, 0] = staged()
    running = asyncio.create_task(rig.worker.run({}), name="worker")
    worker = await rig.manager.joined()
    await rig.manager.send(worker, UseVersion(job_id=JOB, version=0))
    await asyncio.wait({running}, timeout=10)
    assert running.exception() is not None
    (left,) = await eventually(lambda: rig.manager.received(WorkerLeft))
    assert "parity check" in left.reason


@pytest.mark.parametrize(
    ("vllm_args", "quantized"),
    [
        ({}, False),
        ({"kv_cache_dtype": "auto", "quantization": None}, False),
        ({"kv_cache_dtype": "bfloat16"}, False),
        ({"kv_cache_dtype": "fp8"}, True),
        ({"quantization": "fp8"}, True),
        ({"quantization_config": {"activation_scheme": "dynamic"}}, True),
    ],
)
def test_tolerance_is_that_of_quantization_only_with_quantized_values(
    vllm_args: dict[str, Any], *, quantized: bool
) -> None:
    assert is_quantized(vllm_args, "bfloat16") == quantized
