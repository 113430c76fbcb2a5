"""The loop beside a serving engine, with a scripted load, worker and manager."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rlboost.services.rollout_worker import __main__ as main
from rlboost.services.rollout_worker import life
from rlboost.services.rollout_worker.domain.borrowing import Borrowing, Seats, ServingLoad
from rlboost.services.rollout_worker.life import ServingWatch, check_serving
from rlboost.services.rollout_worker.ports import EngineFailed
from rlboost.services.rollout_worker.serving import SeatsWatch
from rlboost.shared.errors import BusUnavailable, ConfigError, Fatal, Retryable
from tests.support.eventually import eventually

IDLE, BUSY = ServingLoad(0, 0, {0.1: 0}), ServingLoad(1, 0, {0.1: 0})


class Scene:
    """The server, the worker and the reports at once."""

    url = "http://serving"

    def __init__(self) -> None:
        self.load: ServingLoad | Exception = IDLE
        self.looks = 0
        self.has_device = True
        self.may_take = True
        self.reports: list[str] = []
        self.redis_is_down = False

    async def read(self, limit_s: float) -> ServingLoad:
        del limit_s
        self.looks += 1
        if isinstance(self.load, Exception):
            raise self.load
        return self.load

    async def yield_device(self) -> None:
        self.has_device = False

    async def take_device(self) -> None:
        self.has_device = self.may_take

    async def report(self, reason: str) -> None:
        if self.redis_is_down:
            raise BusUnavailable("down")
        self.reports.append(reason)


@asynccontextmanager
async def watched(scene: Scene) -> AsyncIterator[None]:
    stop = asyncio.Event()
    watch = ServingWatch(scene, Borrowing(), scene, scene.report)
    async with asyncio.TaskGroup() as group:
        group.create_task(watch.run(stop), name="watch")
        yield
        stop.set()


async def looked_again(scene: Scene) -> None:
    before = scene.looks
    await eventually(lambda: scene.looks > before + 1)


async def test_worker_has_the_device_while_the_server_is_idle() -> None:
    scene = Scene()
    async with watched(scene):
        await eventually(lambda: not scene.has_device)
        await eventually(lambda: scene.has_device)
        scene.load = BUSY
        await eventually(lambda: not scene.has_device)
        await looked_again(scene)
        scene.load = IDLE
        await eventually(lambda: scene.has_device)


async def test_device_is_taken_as_soon_as_the_worker_can() -> None:
    scene = Scene()
    scene.may_take = False
    async with watched(scene):
        await eventually(lambda: scene.looks > 15)
        scene.may_take = True
        await eventually(lambda: scene.has_device)


async def test_silent_server_is_busy_and_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life, "_SILENCE_S", 0.1)
    scene = Scene()
    async with watched(scene):
        await eventually(lambda: scene.has_device and scene.looks > 1)
        scene.redis_is_down = True
        scene.load = Retryable("connection refused")
        await eventually(lambda: not scene.has_device)
        await looked_again(scene)
        scene.redis_is_down = False
        monkeypatch.setattr(life, "_REPORT_EVERY_S", 0.0)
        await eventually(lambda: scene.reports)
        assert scene.reports[0] == "connection refused"


async def test_limit_that_the_server_misses_alone_is_reported() -> None:
    scene = Scene()
    borrowing = Borrowing()
    watch, stop = ServingWatch(scene, borrowing, scene, scene.report), asyncio.Event()

    def observe(load: ServingLoad | None, now_s: float) -> str:
        del load, now_s
        borrowing.late_alone = "20 of its last 20 first tokens took more than 1 ms"
        return borrowing.reason

    borrowing.observe = observe  # type: ignore[method-assign]
    running = asyncio.create_task(watch.run(stop), name="watch")
    await eventually(lambda: scene.reports)
    await looked_again(scene)
    stop.set()
    await running
    (report,) = scene.reports
    assert report.startswith("http://serving: 20 of its last 20 first tokens took more than 1 ms while this worker")
    assert "raise RLBOOST_WORKER_BESIDE_TTFT_MS" in report


async def test_server_that_reports_no_load_fails_the_start_and_a_silent_one_does_not() -> None:
    scene = Scene()
    scene.load = Retryable("connection refused")
    await check_serving(scene)
    scene.load = ConfigError("no metrics")
    with pytest.raises(ConfigError):
        await check_serving(scene)


async def test_worker_that_fails_while_it_serves_joins_again_and_a_drained_one_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures = [Fatal("no Redis"), ExceptionGroup("loops", [Fatal("no manager"), ValueError("a fault of ours")])]
    stop, outcomes = asyncio.Event(), [*failures, None]
    ended: list[asyncio.Event] = []

    async def work(*given: object) -> None:
        ended.append(given[2])  # type: ignore[arg-type] # its stop
        if (outcome := outcomes[len(ended) - 1]) is not None:
            raise outcome

    monkeypatch.setattr(main, "_work", work)
    monkeypatch.setattr(main, "_REJOIN_AFTER_S", 0.01)
    working = asyncio.create_task(main._keep_working(None, None, None, stop), name="work")  # type: ignore[arg-type]
    await eventually(lambda: len(ended) == 3)
    await asyncio.sleep(0.05)
    assert (len(ended), working.done()) == (3, False)
    stop.set()
    await working


@pytest.mark.parametrize("error", [EngineFailed("dead"), ExceptionGroup("loops", [EngineFailed("dead")])])
async def test_dead_engine_ends_the_process_that_serves(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(*_: object) -> None:
        raise error

    monkeypatch.setattr(main, "_work", work)
    with pytest.raises(type(error)):
        await main._keep_working(None, None, None, asyncio.Event())  # type: ignore[arg-type]


class Times:
    """Requests whose first tokens are late."""

    def take_first_tokens_s(self) -> list[float]:
        return [1.0] if self.are_late else []

    def longest_wait_s(self) -> float:
        return 0.0

    are_late = False


async def test_late_requests_take_seats_of_the_worker_back() -> None:
    stop, times, used = asyncio.Event(), Times(), [0]

    class Worker:
        async def use_seats(self, seats: int) -> None:
            used.append(seats)

    async with asyncio.TaskGroup() as group:
        group.create_task(SeatsWatch(times, Seats(8, 0.01), Worker()).run(stop), name="seats")
        await eventually(lambda: used[-1] == 8)
        times.are_late = True
        await eventually(lambda: used[-1] == 1)
        stop.set()
