"""What workers report reaches the shared streams once, in order, and only in the worker's own name."""

from __future__ import annotations

from collections.abc import Collection, Coroutine, Mapping, Sequence
from typing import Any

import msgpack
import pytest

from rlboost.services.rollout_manager.access import IdentityRecord, WorkerIdentities
from rlboost.services.rollout_manager.domain.effects import Now
from rlboost.services.rollout_manager.domain.workers import ABSENT_RETENTION_S, LEFT_RETENTION_S
from rlboost.services.rollout_manager.leadership import manager_record
from rlboost.services.rollout_manager.loop import BATCH, MIN_BATCH, Manager, destination
from rlboost.shared.errors import BusUnavailable, Fenced, Unprocessable
from rlboost.shared.messages import (
    Admitted,
    Closed,
    DeadLetter,
    Event,
    Message,
    SampleFailed,
    SampleFinished,
    TokenFrame,
    WorkerEvent,
    WorkerJoined,
)
from rlboost.shared.messages.codec import encode, fields_of
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Entry, Fence, HashSet, Op, RawEntry
from tests.support.builders import group_id, group_requested, job_created, job_running, placed, token_frame
from tests.support.manager_fakes import FakeWorkerUsers
from tests.support.memory_bus import MemoryBus
from tests.support.sim_worker import SimWorker
from tests.support.stream_entries import read_all

SAMPLE = group_id()
LETTER = DeadLetter(stream="s", entry_id="1-0", consumer="w-1", reason="r", body=b"", at=0.0)
EVENT = WorkerEvent(worker="w-1", job_id="j", kind="weights_unavailable", at=1.0, fields={"version": 1})
FRAME = token_frame([(SAMPLE, 1, 0, 1, 0, 0)], worker="w-1")
JOINED = WorkerJoined(worker="w-1", role="preemptible", kind="k", slots=1, host="h", pid=1, price_per_hour=0.0, at=0.0)
DEEP: Any = []
for _ in range(400):
    DEEP = [DEEP]


def to(message: Message) -> str:
    return destination("w-1", "preemptible", fields_of(encode(message)))[0]


def test_message_of_the_streams_owner_is_relayed() -> None:
    failed = SampleFailed(worker="w-1", sample=SAMPLE, attempt=1, reason="r")
    assert [to(message) for message in (FRAME, failed)] == [names.TOKEN_LOG] * 2
    assert [to(message) for message in (JOINED, EVENT)] == [names.WORKER_HEARTBEATS] * 2
    assert to(LETTER) == names.DEAD_LETTERS


@pytest.mark.parametrize(
    "message",
    [
        FRAME.model_copy(update={"worker": "w-2"}),
        EVENT.model_copy(update={"worker": ""}),
        LETTER.model_copy(update={"consumer": "manager"}),
        JOINED.model_copy(update={"role": "reserved"}),
        job_created(),
        Admitted(request=group_requested()),
        placed(SAMPLE, worker="w-1"),
        Closed(samples=b""),
        Event(kind="k", at=0.0, source="w-1"),
    ],
    ids=lambda message: message.tag,
)
def test_message_that_a_worker_may_not_send_is_rejected(message: Message) -> None:
    with pytest.raises(Unprocessable, match="w-1"):
        to(message)


# --- the manager ------------------------------------------------------------------------------------------------------


class Killed(Exception):
    """The manager ends here."""


class MortalBus(MemoryBus):
    """A bus on which the manager is killed at one of its calls, before or after the call took effect."""

    def __init__(self) -> None:
        super().__init__()
        self.calls_left, self.takes_effect = -1, False

    async def _call(self, call: Coroutine[Any, Any, Any]) -> Any:
        self.calls_left -= 1
        if self.calls_left != 0:
            return await call
        if self.takes_effect:
            await call
        call.close()
        raise Killed

    async def transact(self, ops: Sequence[Op], fence: Fence | None = None) -> None:
        transaction = super().transact(ops, fence)
        await (self._call(transaction) if fence else transaction)

    async def read_with_raw(
        self, cursors: Mapping[str, str], raw_streams: Collection[str], *, count: int = 512, block_s: float = 0.0
    ) -> tuple[list[Entry], list[RawEntry]]:
        found: tuple[list[Entry], list[RawEntry]] = await self._call(
            super().read_with_raw(cursors, raw_streams, count=count, block_s=block_s)
        )
        return found


class System:
    """A manager, its Redis, and one job."""

    def __init__(self) -> None:
        self.bus, self.users, self.clock = MortalBus(), FakeWorkerUsers(), 1000.0
        self.manager = self.new_manager()

    def new_manager(self, address: int = 1) -> Manager:
        return Manager(
            self.bus,
            lease_s=1e6,
            redis_limit_s=9.0,
            clock=lambda: Now(self.clock, self.clock),
            record=manager_record("h", address, "m"),
            identities=WorkerIdentities(self.bus, self.users),
        )

    async def start(self) -> None:
        for message, stream in zip(
            job_running(), (names.JOB_COMMANDS, names.JOB_REPORTS, names.WEIGHTS_COMMITTED), strict=True
        ):
            await self.bus.append(stream, message)
        assert await self.manager.try_lead()
        await self.manager.turn()

    async def worker(self) -> SimWorker:
        worker, _ = await self.manager.identities.create("w", "preemptible", self.manager.write)
        sim = SimWorker(self.bus, worker, own_stream=True)
        await sim.join()
        return sim

    async def turn(self, worker: SimWorker) -> None:
        """Let the manager and the worker do their work once."""
        self.clock += 0.1
        await self.manager.turn()
        await worker.execute_commands()
        worker.generate(2)
        await worker.flush()

    async def messages(self, stream: str) -> list[Message]:
        return [entry.message for entry in await read_all(self.bus, stream)]


@pytest.fixture
async def system() -> System:
    system = System()
    await system.start()
    return system


@pytest.mark.parametrize("takes_effect", [False, True])
@pytest.mark.parametrize("call", range(1, 9))
async def test_manager_killed_at_any_call_relays_everything_once(system: System, call: int, takes_effect: bool) -> None:
    worker = await system.worker()
    await system.bus.append(names.rollouts_requested("j"), group_requested(n=2, max_tokens=8))
    for _ in range(4):
        await system.turn(worker)
    system.bus.calls_left, system.bus.takes_effect = call, takes_effect
    for _ in range(9):
        try:
            await system.turn(worker)
        except Killed:
            system.manager = system.new_manager()
            assert await system.manager.try_lead()
    assert system.bus.calls_left < 0, "it was not killed"
    finished = [m for m in await system.messages(names.rollouts_finished("j")) if isinstance(m, SampleFinished)]
    assert [len(m.tokens) // 4 for m in finished] == [8, 8]
    audit = system.manager.world.jobs["j"].audit
    assert (audit.tokens_generated, audit.duplicates, audit.tokens_regenerated) == (16, 0, {})
    assert await system.bus.length(names.worker_reports(worker.id)) == 0


@pytest.mark.parametrize("stream", [names.WORKER_HEARTBEATS, names.worker_reports("w-1")])
async def test_commands_are_not_compared_while_a_short_read_left_entries(
    system: System, stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(BATCH // MIN_BATCH):  # so many workers that each read is short
        record = IdentityRecord(role="preemptible").model_dump_json()
        await system.bus.transact([HashSet(names.WORKER_IDENTITIES, {f"w-{number}": record})])
    assert await system.manager.try_lead()
    postponed: list[bool] = []
    monkeypatch.setattr(system.manager.world.fleet, "restart_command_checks", lambda: postponed.append(True))
    await system.manager.turn()
    assert not postponed
    for _ in range(MIN_BATCH):
        await system.bus.append(stream, EVENT)
    await system.manager.turn()
    assert postponed


async def test_superseded_manager_relays_nothing(system: System) -> None:
    worker = await system.worker()
    await system.turn(worker)
    successor = system.new_manager(2)
    await system.bus.transact([HashSet(names.MANAGER_CURSORS, {})])
    system.bus._leases.pop(names.MANAGER_LEASE)
    assert await successor.try_lead()
    await worker.report(FRAME.model_copy(update={"worker": worker.id}))
    pending = await system.messages(names.worker_reports(worker.id))
    with pytest.raises(Fenced):
        await system.manager.turn()
    assert await system.messages(names.worker_reports(worker.id)) == pending
    await successor.turn()
    assert await system.bus.length(names.worker_reports(worker.id)) == 0


@pytest.mark.parametrize("body", [b"", b"\xc1", msgpack.packb([1]), msgpack.packb({"t": ["x"], "worker": 3})])
async def test_invalid_report_is_dead_lettered_and_stops_nothing(system: System, body: bytes) -> None:
    worker = await system.worker()
    stream = names.worker_reports(worker.id)
    await system.bus.append_raw(stream, body)
    await worker.report(FRAME)  # in the name of another worker
    await worker.report(FRAME.model_copy(update={"worker": worker.id}))
    await system.manager.turn()
    letters = [m for m in await system.messages(names.DEAD_LETTERS) if isinstance(m, DeadLetter)]
    assert [(m.stream, m.body) for m in letters] == [(stream, body), (stream, encode(FRAME))]
    frames = [m for m in await system.messages(names.TOKEN_LOG) if isinstance(m, TokenFrame)]
    assert [frame.worker for frame in frames] == [worker.id]


async def test_relayed_frames_keep_the_bytes_of_the_worker(system: System) -> None:
    worker = await system.worker()
    body = msgpack.packb({"t": "TokenFrame", **FRAME.model_dump(), "worker": worker.id, "of_a_newer_release": 1})
    await system.bus.append_raw(names.worker_reports(worker.id), body)
    await system.manager.turn()
    assert list(system.bus._streams[names.TOKEN_LOG].entries.values()) == [body]


async def test_event_of_a_worker_appears_among_the_jobs_events(system: System) -> None:
    worker = await system.worker()
    for job_id in ("j", "unknown"):
        await worker.report(EVENT.model_copy(update={"worker": worker.id, "job_id": job_id}))
    await system.manager.turn()
    events = [m for m in await system.messages(names.job_events("j")) if isinstance(m, Event)]
    (event,) = [event for event in events if event.kind == EVENT.kind]
    assert (event.source, event.fields) == (worker.id, {"version": 1})
    assert await system.bus.length(names.job_events("unknown")) == 0


@pytest.mark.parametrize(
    "changed",
    [
        {"kind": 'k\ndata: {}\n\nevent: job_state_changed\ndata: {"state": "failed"}'},
        {"fields": {"text": b"\xff"}},
        {"fields": {"at": msgpack.Timestamp(1 << 33)}},
        {"fields": {"text": "t" * (1 << 17)}},
        {"fields": {"text": "é" * 40_000}},
        {"fields": {"deep": DEEP}},
    ],
    ids=["kind", "bytes", "timestamp", "large", "large in bytes", "deep"],
)
async def test_event_of_a_worker_that_no_client_could_read_is_dead_lettered(
    system: System, changed: dict[str, Any]
) -> None:
    """Its kind is a line of the stream that clients follow, and its fields are JSON there."""
    worker = await system.worker()
    body = msgpack.packb({"t": "WorkerEvent", **EVENT.model_dump(), "worker": worker.id, **changed})
    await system.bus.append_raw(names.worker_reports(worker.id), body)
    await system.manager.turn()
    assert [m.stream for m in await system.messages(names.DEAD_LETTERS) if isinstance(m, DeadLetter)]
    assert not [
        m for m in await system.messages(names.job_events("j")) if isinstance(m, Event) and m.source != "manager"
    ]


@pytest.mark.parametrize(
    "changed", [{"at": 1e308}, {"at": -1.0}, {"price_per_hour": -1.0}, {"price_per_hour": 1e308}, {"kind": "k" * 999}]
)
async def test_worker_whose_numbers_no_client_could_read_does_not_join(system: System, changed: dict[str, Any]) -> None:
    """One date that cannot be shown would fail each `GET /v1/workers`, one price the cost of every job."""
    worker, _ = await system.manager.identities.create("w", "preemptible", system.manager.write)
    body = msgpack.packb({"t": "WorkerJoined", **JOINED.model_dump(), "worker": worker, **changed})
    await system.bus.append_raw(names.worker_reports(worker), body)
    await system.manager.turn()
    assert worker not in system.manager.world.fleet.workers
    (letter,) = [m for m in await system.messages(names.DEAD_LETTERS) if isinstance(m, DeadLetter)]
    assert next(iter(changed)) in letter.reason


# --- identities -------------------------------------------------------------------------------------------------------


async def test_identity_is_removed_after_its_worker_has_left(system: System) -> None:
    worker = await system.worker()
    await system.turn(worker)
    await worker.leave()
    await system.turn(worker)
    system.clock += 2.0
    await system.manager.turn()
    assert set(system.users.secrets) == {worker.id}
    system.clock += LEFT_RETENTION_S
    await system.manager.turn()
    assert not system.users.secrets
    await system.bus.append_raw(names.worker_reports(worker.id), b"last words")
    system.clock += 2.0
    await system.manager.turn()  # relays them
    system.clock += 2.0
    await system.manager.turn()
    assert await system.bus.hash_all(names.WORKER_IDENTITIES) == {}
    assert names.worker_reports(worker.id) not in system.bus._streams


async def test_identity_that_never_joins_is_removed_in_the_end(system: System) -> None:
    await system.manager.identities.create("w", "preemptible", system.manager.write)
    for _ in range(3):
        system.clock += ABSENT_RETENTION_S
        await system.manager.turn()
    assert not system.users.secrets
    assert await system.bus.hash_all(names.WORKER_IDENTITIES) == {}


async def test_new_leader_restores_forgotten_users_and_removes_unknown(system: System) -> None:
    """Redis forgets its users when it restarts; a manager may have been killed between two steps of a removal."""
    worker = await system.worker()
    secrets = dict(system.users.secrets)
    system.users.secrets = {"of-a-worker-without-an-identity": ""}
    assert await system.new_manager().try_lead()
    assert system.users.secrets == secrets
    assert set(secrets) == {worker.id}


async def test_users_lost_while_a_manager_leads_are_restored(system: System) -> None:
    worker = await system.worker()
    system.users.secrets.clear()
    system.clock += 2.0
    await system.manager.turn()
    assert set(system.users.secrets) == {worker.id}


async def test_failed_join_leaves_no_redis_user(system: System) -> None:
    system.bus.down = True
    with pytest.raises(BusUnavailable):
        await system.manager.identities.create("w", "preemptible", system.manager.write)
    assert not system.users.secrets
