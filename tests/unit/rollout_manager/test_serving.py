"""Clients' samples among the trainer's: who makes them, what they hold back, and when they are given up."""

from __future__ import annotations

import asyncio
from unittest.mock import AsyncMock, Mock

import pytest

from rlboost.services.rollout_manager.domain.world import GRACE_S, Clients
from rlboost.services.rollout_manager.serving.sessions import MAX_REPEATS, Sessions, _Turn
from rlboost.services.rollout_manager.waiters import (
    MAX_CHUNK_TOKENS,
    CompletionFailed,
    CompletionUnavailable,
)
from rlboost.shared.ids import MAX_REQUESTS, SampleId, is_served, job_of, request_group
from rlboost.shared.job.agent import SessionId
from rlboost.shared.messages import FINISH_NONE, JobReport, SampleDropped, SampleFailed, SampleFinished, Sampling
from rlboost.shared.streams import names
from rlboost.shared.wire import F32, I32, pack
from tests.support.serving_rig import Rig


@pytest.fixture
async def rig() -> Rig:
    return Rig()


def test_request_ids_differ_from_trainer_ids() -> None:
    for number in (0, 1, MAX_REQUESTS - 1):
        group = request_group(7, number)
        assert is_served(group)
        assert is_served(group + 255)
        assert job_of(group) == 7
        assert SampleId.unpack(group).pack() == group
    assert not is_served(SampleId(7, True, (1 << 22) - 1, 65535, 255).pack())
    assert request_group(7, 1) != request_group(7, 2)


async def test_conversation_prefers_the_worker_with_its_prefix(rig: Rig) -> None:
    await rig.start("a", "b")
    for near, chosen in (("b", "b"), ("a", "a"), ("gone", "a")):
        rig.register(request := await rig.ask(preferred_worker=near))
        await rig.turn()
        await rig.turn()
        assert request.group in rig.held()[chosen], near


async def test_client_requests_have_priority_over_queued_samples(rig: Rig) -> None:
    await rig.start("a", slots=2)
    trained = await rig.ask(served=False, n=9)
    await rig.turn()
    running = rig.held()["a"]
    assert running
    rig.register(request := await rig.ask())
    await rig.turn()
    assert rig.held()["a"] == running
    for _ in range(3):
        await rig.work()
        if request.group in rig.held()["a"]:
            break
    assert request.group in rig.held()["a"]
    waiting = rig.manager.world.queues
    assert not all(queue.empty for queue in waiting.values())
    assert all(need.newest_version == 0 for need in waiting)
    assert trained.n == 9


async def test_client_request_does_not_delay_a_weight_update(rig: Rig) -> None:
    await rig.start("a")
    waiter = rig.register(await rig.ask(sampling=Sampling(max_tokens=12)))
    await rig.turn()
    await rig.work()
    await rig.commit(1)
    await rig.turn()
    assert rig.workers["a"].version == 1
    await rig.work()
    sample = waiter.sample(0)
    assert sample is not None
    assert [version for _, version, _ in sample.spans] == [0, 1]


async def test_unattended_requests_are_dropped(rig: Rig) -> None:
    await rig.start("a")
    alone = await rig.ask()
    waiter = rig.register(await rig.ask())
    for _ in range(4):
        await rig.work()
    assert not rig.held()["a"]
    assert len(rig.manager.world.ledger.served) == 2
    rig.clock += GRACE_S + 1.0
    await rig.turn()
    assert [sample.request.group for sample in rig.manager.world.ledger.served.values()] == [waiter.request.group]
    rig.clock += 90.0
    await rig.turn()
    assert not rig.manager.world.ledger.served
    assert isinstance(waiter.error, CompletionUnavailable)
    assert rig.manager.world.jobs["j"].audit.serving.dropped == {"the client did not reconnect": 1, "out of time": 1}
    assert alone.group not in rig.manager.world.ledger.open_in_group


async def test_request_abandoned_before_its_admission_is_dropped_once_admitted(rig: Rig) -> None:
    await rig.start("a")
    waiters = rig.manager.completion_waiters
    waiters.unregister(rig.register(unsent := rig.request()))
    await rig.turn()
    waiters.unregister(rig.register(late := rig.request()))
    await rig.turn()
    await rig.send(late)
    await rig.turn()
    assert not rig.manager.world.ledger.served
    assert rig.manager.world.jobs["j"].audit.serving.dropped == {"the client disconnected": 1}
    await rig.turn()
    assert set(waiters.clients.gone) == {unsent.group}
    rig.clock = unsent.expires_at
    await rig.turn()
    assert not waiters.clients.gone


async def test_failed_requests_and_ended_jobs_are_reported_to_clients(rig: Rig) -> None:
    await rig.start("a")
    waiter, other = rig.register(await rig.ask()), rig.register(await rig.ask())
    while waiter.error is None:
        await rig.turn()
        if (sample := waiter.sample(0)) is not None and sample.worker:
            failed = SampleFailed(worker="a", sample=sample.id, attempt=sample.attempt, reason="too long")
            await rig.bus.append(names.TOKEN_LOG, failed)
    assert isinstance(waiter.error, CompletionFailed)
    assert "too long" in str(waiter.error)
    await rig.bus.append(names.JOB_REPORTS, JobReport(job_id="j", state="completed", step=9))
    await rig.turn()
    assert isinstance(other.error, CompletionFailed), "a repeated request would be refused"
    late = rig.register(await rig.ask())
    await rig.turn()
    assert isinstance(late.error, CompletionFailed)


async def test_client_requests_affect_neither_seeding_nor_length_estimates(rig: Rig) -> None:
    await rig.start("a")
    waiter = rig.register(await rig.ask())
    for _ in range(4):
        await rig.work()
    rig.manager.completion_waiters.complete([waiter], 0, 0)
    await rig.turn()
    world = rig.manager.world
    assert not world.ledger.served
    assert not world.jobs["j"].progress.window
    assert not world.queues.in_flight.requested
    assert world.jobs["j"].progress.lengths.mean == 0
    assert (world.jobs["j"].audit.requested, world.jobs["j"].audit.serving.delivered) == (0, 1)


async def test_sample_with_an_option_waits_for_a_worker_that_supports_it(rig: Rig) -> None:
    await rig.start("a", "b")
    rig.register(request := await rig.ask(sampling=Sampling(max_tokens=8, top_k=3)))
    for _ in range(3):
        await rig.work()
    assert not any(rig.held().values())
    rig.workers["b"].sampling_options = ("top_k",)
    for _ in range(3):
        await rig.turn()
    assert request.group in rig.held()["b"]


async def test_client_of_a_whole_completion_is_woken_at_its_end_only(rig: Rig) -> None:
    await rig.start("a")
    waiters, world = rig.manager.completion_waiters, rig.manager.world
    request = await rig.ask(sampling=Sampling(max_tokens=3 * MAX_CHUNK_TOKENS), expires_at=9e10)
    (waiter,) = waiters.register([request], world, resumable=False, whole=True)
    chunks = waiters.follow([waiter])
    first = asyncio.create_task(anext(chunks))
    n_woken = 0
    while (sample := waiter.sample(0)) is None or not sample.finish:
        await rig.work()
        n_woken += waiter.changed.is_set()
        await asyncio.sleep(0)
    found = [await first, *[chunk async for chunk in chunks]]
    sizes = [len(chunk.tokens) for _, chunk in filter(None, found)]
    assert (sum(sizes), max(sizes), n_woken) == (3 * MAX_CHUNK_TOKENS, MAX_CHUNK_TOKENS, 1)
    assert [chunk.finish for _, chunk in filter(None, found)] == [None, None, "length"]


async def test_client_is_woken_for_each_of_two_completions_that_end_one_after_the_other(rig: Rig) -> None:
    await rig.start("a")
    waiters, world = rig.manager.completion_waiters, rig.manager.world
    (waiter,) = waiters.register([await rig.ask(n=2, expires_at=9e10)], world, resumable=False, whole=True)
    while not all((sample := waiter.sample(i)) and sample.finish for i in range(2)):
        await rig.work()
    chunks = waiters.follow([waiter])
    first, second = (waiter.sample(i) for i in range(2))
    assert first is not None
    assert second is not None
    second.finish, finish = FINISH_NONE, second.finish
    waiters.notify(world, rig.clock)
    assert await anext(chunks)
    last = asyncio.create_task(anext(chunks))
    await asyncio.sleep(0.01)
    second.finish = finish
    waiters.notify(world, rig.clock)
    async with asyncio.timeout(5.0):
        assert (await last) is not None
    await chunks.aclose()


@pytest.mark.parametrize("whole", [True, False])
async def test_turn_that_had_ended_comes_in_chunks(rig: Rig, whole: bool) -> None:
    request = rig.request(served=False)
    tokens = list(range(2 * MAX_CHUNK_TOKENS + 1))
    end = SampleFinished(
        sample=request.group,
        tokens=pack(tokens, I32),
        logprobs=pack([0.0] * len(tokens), F32),
        finish="stop",
        spans=[("a", 0, len(tokens))],
        attempts=1,
        group_done=True,
    )
    waiters = rig.manager.completion_waiters
    (waiter,) = waiters.register([request], rig.manager.world, resumable=True, whole=whole)
    waiter.end(end)
    found = [item async for item in rig.manager.completion_waiters.follow([waiter]) if item]
    assert [token for _, chunk in found for token in chunk.tokens] == tokens
    assert [chunk.finish for _, chunk in found] == [None, None, "stop"]
    (waiter,) = waiters.register([request], rig.manager.world, resumable=True)
    waiter.end(SampleDropped(sample=request.group, reason="out of time", group_done=True))
    with pytest.raises(CompletionFailed, match="out of time"):
        await anext(rig.manager.completion_waiters.follow([waiter]))


async def test_turn_is_lost_without_an_answer_and_a_connection() -> None:
    """The answer to the second one came after the session was read."""
    attended, answered, lost, repeated = (_Turn(number, Mock()) for number in range(4))
    repeated.n_repeats = MAX_REPEATS
    bus = Mock(hash_some=AsyncMock(return_value=["digest", None]))
    sessions = Sessions(Mock(completion_waiters=Mock(clients=Clients(attended={0}))), bus)
    assert await sessions._lost(SessionId("j", 0), [attended, answered, lost, repeated]) == [lost]
