"""Log lines of all processes reach the log of a job: bounded, in order, and without secrets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import structlog

from rlboost.services.rollout_manager.api import history
from rlboost.services.rollout_manager.api.history import in_order
from rlboost.services.rollout_manager.settings import Settings
from rlboost.shared.messages import Event, WorkerLog
from rlboost.shared.process import logs
from rlboost.shared.process.logs import BUFFER, IN_EVENTS, MAX_BUFFERED, MAX_CHARACTERS, MAX_TAKEN, LogBuffer
from rlboost.shared.process.system import run_in_thread
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START, Entry
from rlboost.shared.streams.job_logs import log_ops, log_sender
from tests.support.manager_rig import ManagerRig
from tests.support.memory_bus import MemoryBus
from tests.support.worker_manager import JOB
from tests.support.worker_rig import Rig


def lines_of(buffer: LogBuffer) -> list[str]:
    return [line.text for line in buffer.take()]


def logged(buffer: LogBuffer, event: str, **fields: object) -> None:
    buffer(None, "info", {"event": event, "level": "info", "service": "s", "timestamp": "t", **fields})


async def texts(bus: MemoryBus, job_id: str) -> list[str]:
    entries = await bus.read({names.job_logs(job_id): START}, count=1000)
    return [entry.message.fields["text"] for entry in entries if isinstance(entry.message, Event)]


# --- the buffer -------------------------------------------------------------------------------------------------------


def test_line_has_level_event_and_fields_without_secrets() -> None:
    buffer = LogBuffer()
    buffer.hide(["s3cret", ""])
    error = "redis://:passw0rd@10.0.0.5:6379/0 refused s3cret and rlb_abc.DEF-1"
    logged(buffer, "redis_unavailable", error=error, during="flush")
    assert lines_of(buffer) == [
        "info redis_unavailable error=redis://***@10.0.0.5:6379/0 refused *** and *** during=flush"
    ]
    advice = "give redis://[:PASSWORD@]HOST:PORT/DB"
    assert buffer.without_secrets(advice) == advice


def test_line_of_an_event_is_left_to_the_events_of_the_job() -> None:
    buffer = LogBuffer()
    logged(buffer, "a")
    assert buffer(None, "info", {"event": "b", IN_EVENTS: True}) == {"event": "b"}
    assert len(lines_of(buffer)) == 1


def test_buffer_drops_the_oldest_lines_and_counts_them() -> None:
    buffer = LogBuffer()
    for number in range(MAX_BUFFERED + 7):
        logged(buffer, f"event-{number}", text="x" * 2 * MAX_CHARACTERS)
    first, *taken = lines_of(buffer)
    assert first == "warning log_lines_dropped lines=7"
    assert taken[0].startswith("info event-7 ")
    assert len(taken) == MAX_TAKEN
    assert all(len(text) == MAX_CHARACTERS for text in taken)
    assert len(lines_of(buffer)) == MAX_TAKEN, "the drop is counted once"


def test_configured_logs_reach_the_buffer_without_the_services_secrets() -> None:
    BUFFER.take()
    settings = Settings(token="the-token", join_token="the-join-token")
    try:
        logs.configure("manager", secrets=settings.secrets)
        structlog.get_logger("test").warning("joined", token="the-token", other="the-join-token", job="j-1")
        (line,) = BUFFER.take()
    finally:
        structlog.reset_defaults()
        BUFFER.hide([])
    assert (line.job, line.text) == ("j-1", "warning joined token=*** other=***")


async def test_log_line_of_a_thread_has_the_service_and_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        logs.configure("manager")
        with structlog.contextvars.bound_contextvars(job="j-1"):
            await run_in_thread("a-thread", lambda: structlog.get_logger("test").warning("listening"))
        line = json.loads(capsys.readouterr().err)
    finally:
        structlog.reset_defaults()
        BUFFER.take()
    assert (line["service"], line["job"]) == ("manager", "j-1")


# --- senders ----------------------------------------------------------------------------------------------------------


async def test_sender_writes_to_the_named_job_and_else_to_the_current() -> None:
    bus, buffer, stop = MemoryBus(), LogBuffer(), asyncio.Event()
    logged(buffer, "about_a", job="a")
    logged(buffer, "about_all")
    stop.set()
    await log_sender(bus, "trainer", lambda: ["a", "b"], buffer)(stop)
    assert await texts(bus, "a") == ["info about_a", "info about_all"]
    assert await texts(bus, "b") == ["info about_all"]


async def test_worker_sends_its_lines_once_it_has_a_job() -> None:
    rig = Rig()
    buffer = rig.connection._log_lines = LogBuffer()
    logged(buffer, "listening", port=8703)
    await rig.connection.send_heartbeat()
    assert not await rig.manager.received(WorkerLog)
    rig.connection.session.loaded = {JOB: 0}
    await rig.connection.send_heartbeat()
    (log,) = await rig.manager.received(WorkerLog)
    assert (log.job_id, log.texts) == (JOB, ["info listening port=8703"])
    logged(buffer, "engine_failed")
    await rig.connection.leave("failed")
    (_, last) = await rig.manager.received(WorkerLog)
    assert last.texts == ["info engine_failed"]


# --- the route --------------------------------------------------------------------------------------------------------


class System(ManagerRig):
    """Shows the job's log."""

    async def log(self) -> list[str]:
        return (await self.http.get(f"/jobs/{self.job}/logs")).text.splitlines()


@pytest.fixture
async def system() -> AsyncIterator[System]:
    system = System()
    await system.start()
    yield system
    await system.http.aclose()


async def test_log_is_in_the_order_of_time_though_lines_of_workers_come_late(system: System) -> None:
    events, lines = names.job_events(system.job), names.job_logs(system.job)
    await system.bus.append(events, Event(kind="second", at=2.0, source="manager", fields={}))
    for at in (1.0, 3.0):
        await system.bus.append(lines, Event(kind="log", at=at, source="w1", fields={"text": f"info at-{at:g}"}))
    shown = [line for line in await system.log() if line.startswith("1970")]
    assert [line.split()[-1] for line in shown] == ["at-1", "second", "at-3"]


async def test_log_has_lines_of_workers_and_events_in_order(system: System) -> None:
    events = names.job_events(system.job)
    await system.bus.append(events, Event(kind="first", at=0.0, source="manager", fields={"n": 1}))
    log = WorkerLog(
        worker="w-1", job_id=system.job, times=[0.0, 1.0], texts=["info second", "warning third\nTraceback"]
    )
    await system.bus.append(names.WORKER_HEARTBEATS, log)
    await system.manager.turn()
    await system.bus.append(events, Event(kind="fourth", at=2.0, source="trainer"))
    shown = [line.partition(" ")[2] for line in await system.log() if not line.startswith(" ")]
    # The bus in memory numbers the entries of each stream: only their order within one is that of time.
    assert [line for line in shown if line in {"manager first n=1", "trainer fourth"}] == [
        "manager first n=1",
        "trainer fourth",
    ]
    assert [line for line in shown if line.startswith("w-1")] == ["w-1 info second", "w-1 warning third"]
    assert "    Traceback" in await system.log()


async def test_long_log_has_every_entry_once(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "BATCH", 4)
    for number in range(20):
        await system.bus.append(names.job_events(system.job), Event(kind=f"{number:02d}", at=0.0, source="e"))
        if number % 3 == 0:
            await system.bus.transact(log_ops(system.job, "l", [(0.0, f"{number:02d}")]))
    shown = [line.split()[1:] for line in await system.log()]
    for source, numbers in (("e", range(20)), ("l", range(0, 20, 3))):
        assert [text for by, text in shown if by == source] == [f"{number:02d}" for number in numbers]


def test_entries_are_held_back_until_older_ones_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "BATCH", 3)

    def entry(stream: str, at: int) -> Entry:
        return Entry(stream, f"{at}-0", Event(kind="k", at=0.0, source="s"))

    whole_batch = [entry("events", at) for at in (5, 30, 100)]
    lines = [entry("logs", at) for at in (20, 200)]
    assert [one.id for one in in_order([*whole_batch, *lines])] == ["5-0", "20-0", "30-0", "100-0"]
    assert [one.id for one in in_order([*whole_batch[1:], *lines])] == ["20-0", "30-0", "100-0", "200-0"]


async def test_lines_of_an_unknown_job_are_dropped(system: System) -> None:
    log = WorkerLog(worker="w-1", job_id="unknown", times=[0.0], texts=["info lost"])
    await system.bus.append(names.WORKER_HEARTBEATS, log)
    await system.manager.turn()
    assert await system.bus.length(names.job_logs("unknown")) == 0
    assert await system.bus.length(names.DEAD_LETTERS) == 0
