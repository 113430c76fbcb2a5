"""One invalid message never stops the manager: it is dead-lettered, also when it fails in an unforeseen way."""

from __future__ import annotations

import asyncio
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from rlboost.services.rollout_manager import loop, recovery
from rlboost.services.rollout_manager.domain.apply_messages import apply_frames
from rlboost.services.rollout_manager.domain.effects import Now
from rlboost.services.rollout_manager.domain.frames import MAX_ROWS
from rlboost.services.rollout_manager.loop import Manager
from rlboost.shared.ids import SampleId
from rlboost.shared.messages import (
    Admitted,
    Closed,
    DeadLetter,
    JobReport,
    Message,
    Placed,
    PreemptionNotice,
    Restated,
    SampleDropped,
    SampleFailed,
    SampleFinished,
    SeedingEnded,
    StepReport,
    TokenFrame,
    WeightsCommitted,
    WorkerEvent,
    WorkerHeartbeat,
    WorkerJoined,
    WorkerLeft,
    WorkerLog,
)
from rlboost.shared.messages.codec import encode
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START
from rlboost.shared.wire import F32, I32, U8, U32, U64, pack
from tests.support.builders import group_id, group_requested, job_created
from tests.support.serving_rig import Rig

SAMPLE = SampleId(1, False, 0, 1, 0).pack()
HUGE = [-1, 0, 1, 255, 256, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)]
REQUEST = group_requested(1, n=2)
ONE = {"samples": pack([SAMPLE], U64), "attempts": pack([1], U32), "offsets": pack([0], U32)}
FRAME = TokenFrame(
    worker="a",
    seq=0,
    **ONE,
    counts=pack([2], U32),
    versions=pack([0], U32),
    finish=pack([0], U8),
    tokens=pack([5, 6], I32),
    logprobs=pack([-0.5, -0.25], F32),
)
HEARTBEAT = WorkerHeartbeat(
    worker="a", state="ready", job_id="j", version=0, running=1, pending=0, tokens_per_s=9.0, at=1.0
)
JOINED = WorkerJoined(
    worker="c-1", role="preemptible", kind="sim", slots=4, host="h", pid=1, price_per_hour=0.0, at=0.0
)
FINISHED = SampleFinished(
    sample=SAMPLE,
    tokens=pack([5], I32),
    logprobs=pack([-1.0], F32),
    finish="stop",
    spans=[("a", 0, 1)],
    attempts=1,
    group_done=False,
)
RESTATED = Restated(
    request=REQUEST,
    sample=SAMPLE,
    attempt=1,
    worker="a",
    tokens=pack([5], I32),
    logprobs=pack([-1.0], F32),
    spans=[("a", 0, 1)],
)
VALID: list[tuple[str, Message]] = [
    (names.TOKEN_LOG, FRAME),
    (names.TOKEN_LOG, Placed(worker="a", **{**ONE, "attempts": pack([7], U32)})),
    (names.TOKEN_LOG, Closed(samples=pack([SAMPLE], U64))),
    (names.TOKEN_LOG, SampleFailed(worker="a", sample=SAMPLE, attempt=1, reason="r")),
    (names.TOKEN_LOG, Admitted(request=group_requested(3))),
    (names.TOKEN_LOG, RESTATED),
    (names.WORKER_HEARTBEATS, HEARTBEAT),
    (names.WORKER_HEARTBEATS, JOINED),
    (names.WORKER_HEARTBEATS, PreemptionNotice(worker="a", lead_s=1.0, reason="r", at=1.0)),
    (names.WORKER_HEARTBEATS, WorkerLeft(worker="a", reason="r", at=1.0, running_at_failure=pack([SAMPLE], U64))),
    (names.rollouts_requested("j"), group_requested(2)),
    (names.WEIGHTS_COMMITTED, WeightsCommitted(job_id="j", version=1, manifest_digest="", n_bytes=0, at=0.0)),
    (names.JOB_COMMANDS, job_created("k", 2)),
    (names.JOB_REPORTS, JobReport(job_id="j", state="running", step=0)),
    (names.JOB_REPORTS, StepReport(job_id="j", step=0, metrics={"loss": 1.0}, wait_s=1.0, train_s=1.0)),
    (names.rollouts_finished("j"), FINISHED),
    (names.rollouts_finished("j"), SampleDropped(sample=SAMPLE, reason="r", group_done=False)),
    (names.rollouts_finished("j"), SeedingEnded(step=0, window_s=1.0, reason="window")),
    (names.WORKER_HEARTBEATS, WorkerEvent(worker="a", job_id="j", kind="k", at=1.0)),
    (names.WORKER_HEARTBEATS, WorkerLog(worker="a", job_id="j", times=[1.0], texts=["t"])),
]


def anything(annotation: Any) -> st.SearchStrategy[Any]:  # noqa: PLR0911 - one case a kind of type
    """Values of a field's type, whatever its constraints."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return anything(args[0])
    if origin is Literal:
        return st.sampled_from(args)
    if origin in {Union, types.UnionType}:
        return st.one_of(*map(anything, args))
    if origin is tuple and args[-1] is not ...:
        return st.tuples(*map(anything, args)).map(list)
    if origin in {list, tuple}:
        return st.lists(anything(args[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(st.text(max_size=3), st.floats(), max_size=3)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return st.fixed_dictionaries({name: anything(f.annotation) for name, f in annotation.model_fields.items()})
    columns = st.lists(st.sampled_from([SAMPLE, SAMPLE + 1, 0, 1, 2**32 - 1]), max_size=3).map(lambda i: pack(i, U64))
    simple: dict[type, st.SearchStrategy[Any]] = {
        int: st.sampled_from([*HUGE, SAMPLE, SAMPLE + 1, group_id(9)]) | st.integers(-(2**63), 2**64 - 1),
        float: st.floats() | st.sampled_from([0.0, -1.0, 1e308, 5e-324, float("inf")]),
        str: st.sampled_from(["j", "k", "a", "b", "c-1", ""]) | st.text(max_size=4),
        bytes: st.binary(max_size=40) | columns | st.sampled_from([b"", b"abc"]),
        bool: st.booleans(),
        types.NoneType: st.none(),
    }
    return simple[annotation]


@st.composite
def nearly_valid(draw: st.DrawFn) -> tuple[str, bytes]:
    """A stream and an entry in it: a message of which a few fields have any value of their type."""
    stream, message = draw(st.sampled_from(VALID))
    fields = type(message).model_fields
    chosen = draw(st.lists(st.sampled_from(sorted(fields)), max_size=3, unique=True))
    values = {name: draw(anything(fields[name].annotation)) for name in chosen}
    if draw(st.integers(0, 9)) == 0:
        stream = draw(st.sampled_from(VALID))[0]
    return stream, raw(message, **values)


def raw(message: Message, **values: Any) -> bytes:
    body: bytes = msgpack.packb({**msgpack.unpackb(encode(message)), **values})
    return body


def all_of(stream: str, message: Message, **fields: Any) -> list[tuple[str, bytes]]:
    return [(stream, raw(message, **fields))]


async def survives(entries: list[tuple[str, bytes]]) -> Rig:
    """Let a manager with samples in flight read the entries, then rebuild its world and go on."""
    rig = Rig()
    await rig.start("a", "b")
    for number in (1, 4):
        await rig.bus.append(names.rollouts_requested("j"), group_requested(number, n=2))
    await rig.work()
    for stream, body in entries:
        await rig.bus.append_raw(stream, body)
    for _ in range(2):
        rig.clock += 1.5
        await rig.manager.turn()
    assert await rig.manager.try_lead()
    await rig.manager.turn()
    return rig


@settings(max_examples=150, deadline=None)
@given(st.lists(nearly_valid(), min_size=1, max_size=3))
@example(all_of(names.WORKER_HEARTBEATS, VALID[9][1], running_at_failure=b"abc"))
@example(all_of(names.WORKER_HEARTBEATS, JOINED, slots=0))
@example(all_of(names.WORKER_HEARTBEATS, HEARTBEAT, tokens_per_s=float("inf")))
@example(all_of(names.WORKER_HEARTBEATS, HEARTBEAT, batch=5e-324, step_s=2.0))
@example(all_of(names.WORKER_HEARTBEATS, HEARTBEAT, batch=1e9, step_s=1.7e308))
@example(all_of(names.TOKEN_LOG, VALID[2][1], samples=b"abc"))
@example(all_of(names.TOKEN_LOG, VALID[1][1], attempts=b"abc"))
@example(all_of(names.TOKEN_LOG, VALID[1][1], attempts=pack([2**32 - 1], U32)))
@example(all_of(names.rollouts_finished("j"), HEARTBEAT))
@example(all_of(names.WORKER_HEARTBEATS, VALID[18][1], fields={"text": b"\xff"}))
def test_no_message_stops_the_manager_or_its_recovery(entries: list[tuple[str, bytes]]) -> None:
    rig = asyncio.run(survives(entries))
    assert rig.manager.leads
    failed = [letter.reason for letter in asyncio.run(dead_letters(rig)) if "cannot be applied" in letter.reason]
    assert not failed, "a handler raised something else than Unprocessable"


async def dead_letters(rig: Rig) -> list[DeadLetter]:
    entries = await rig.bus.read({names.DEAD_LETTERS: START})
    return [entry.message for entry in entries if isinstance(entry.message, DeadLetter)]


class Bug(Exception):
    pass


@pytest.mark.parametrize("where", ["live", "recovery"])
async def test_entry_that_fails_unexpectedly_is_dead_lettered_once(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """A handler that fails half way: the world is rebuilt, and everything but the entry takes effect."""
    rig = Rig()
    await rig.start("a")
    frames = apply_frames

    def failing(world: Any, batch: Any, **more: Any) -> Any:
        effects = frames(world, batch, **more)
        if any(frame.worker == "bug" for frame in batch):
            world.ledger.samples.clear()
            raise Bug("half done")
        return effects

    for module in (loop, recovery):
        monkeypatch.setattr(module, "apply_frames", failing)
        monkeypatch.setattr(
            f"{module.__name__}.apply_{'message' if module is loop else 'record'}", single(failing, module)
        )
    await rig.bus.append(names.rollouts_requested("j"), group_requested(1, n=2, max_tokens=8))
    await rig.work()
    await rig.bus.append(names.TOKEN_LOG, FRAME.model_copy(update={"worker": "bug", "samples": pack([0], U64)}))
    if where == "recovery":
        rig.manager = Manager(
            rig.bus, lease_s=2.0, redis_limit_s=9.0, clock=lambda: Now(rig.clock, rig.clock), leader_lease_s=1e6
        )
        rig.clock += 2e6
        assert await rig.manager.try_lead()
        for worker in rig.workers.values():
            await worker.send_heartbeat()
    for _ in range(4):
        await rig.work()
    assert [letter.reason for letter in await dead_letters(rig)] == ["it cannot be applied: Bug('half done')"]
    finished = await rig.bus.read({names.rollouts_finished("j"): START})
    delivered = [entry.message for entry in finished if isinstance(entry.message, SampleFinished)]
    assert sorted(message.sample for message in delivered) == [SAMPLE, SAMPLE + 1]
    audit = rig.manager.world.jobs["j"].audit
    assert (audit.requested, audit.delivered) == (2, 2)
    assert await rig.manager.try_lead()
    assert len(await dead_letters(rig)) == 1


def single(failing: Any, module: Any) -> Any:
    """Return the handler of single entries that applies frames by `failing`."""
    original = getattr(module, "apply_message" if module is loop else "apply_record")

    def apply(world: Any, message: Message, *arguments: Any, **more: Any) -> Any:
        if isinstance(message, TokenFrame):
            return failing(world, [message], **more)
        return original(world, message, *arguments, **more)

    return apply


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", pack([5, -1], I32)),
        ("logprobs", pack([-0.5, float("nan")], F32)),
        ("logprobs", pack([-0.5, float("-inf")], F32)),
        ("logprobs", pack([0.5, -0.5], F32)),
        ("finish", pack([9], U8)),
        ("tokens", pack([5, 1 << 30], I32)),
        ("versions", pack([1], U32)),
        ("offsets", pack([31], U32)),
    ],
)
async def test_sample_with_invalid_tokens_resumes_on_another_worker(field: str, value: bytes) -> None:
    """The tokens do not count, the worker loses the sample, and the job goes on."""
    rig = Rig()
    await rig.start("a", "b")
    request = group_requested(1, max_tokens=32, vocab_size=1 << 30)
    await rig.bus.append(names.rollouts_requested("j"), request)
    await rig.turn()
    await rig.turn()
    (holder,) = (name for name, held in rig.held().items() if held)
    await rig.bus.append(names.TOKEN_LOG, FRAME.model_copy(update={"worker": holder, field: value}))
    await rig.turn()
    await rig.turn()
    (sample,) = rig.manager.world.ledger.samples.values()
    assert (sample.failed_on, bytes(sample.tokens)) == ([holder], b"")
    assert sample.worker not in {"", holder}
    assert not rig.held()[holder]
    for _ in range(12):
        await rig.work()
    audit = rig.manager.world.jobs["j"].audit
    assert audit.delivered == 1
    assert audit.tokens_regenerated["invalid"] == 2
    assert audit.tokens_generated == audit.tokens_delivered + 2
    assert not await dead_letters(rig)


async def send_invalid(rig: Rig, worker: str) -> None:
    """Play frames with NaN for every sample that a worker holds, instead of its own."""
    for sample in sorted(rig.workers[worker].held):
        held = rig.manager.world.ledger.samples[sample]
        columns = {
            "samples": pack([sample], U64),
            "attempts": pack([held.attempt], U32),
            "offsets": pack([held.n_tokens], U32),
            "logprobs": pack([-0.5, float("nan")], F32),
        }
        await rig.bus.append(names.TOKEN_LOG, FRAME.model_copy(update={"worker": worker, **columns}))


@pytest.mark.parametrize(("faulty", "rejected"), [(["a"], ["a"]), (["a", "b"], [])])
async def test_worker_with_invalid_tokens_is_drained_if_others_send_valid_ones(
    faulty: list[str], rejected: list[str]
) -> None:
    """If every worker sends NaN, the weights are to blame: the fleet stays, and the samples are dropped."""
    rig = Rig()
    await rig.start("a", "b")
    await rig.bus.append(names.rollouts_requested("j"), group_requested(1, n=8))
    for _ in range(40):
        for name, worker in rig.workers.items():
            if name in faulty:
                await send_invalid(rig, name)
            else:
                worker.generate(4)
                await worker.flush()
        await rig.turn()
    fleet = rig.manager.world.fleet
    assert [worker.id for worker in fleet.gone.values() if worker.drain_commanded] == rejected
    assert not any(worker.drain_commanded for worker in fleet.workers.values())
    audit = rig.manager.world.jobs["j"].audit
    assert (audit.delivered, audit.dropped["failed"]) == ((8, 0) if rejected else (0, 8))


async def test_valid_rows_of_a_frame_with_an_invalid_row_count() -> None:
    rig = Rig()
    await rig.start("a")
    await rig.bus.append(names.rollouts_requested("j"), group_requested(1, n=2))
    await rig.turn()
    await rig.turn()
    two = {name: getattr(FRAME, name) * 2 for name in ("attempts", "offsets", "counts", "versions", "finish", "tokens")}
    both = {"samples": pack([SAMPLE, SAMPLE + 1], U64), "logprobs": pack([-1.0, float("nan"), -1.0, -2.0], F32)}
    await rig.bus.append(names.TOKEN_LOG, FRAME.model_copy(update={**two, **both}))
    await rig.turn()
    samples = rig.manager.world.ledger.samples
    assert [(samples[i].n_tokens, samples[i].failed_on) for i in (SAMPLE, SAMPLE + 1)] == [(0, ["a"]), (2, [])]


async def test_frame_with_more_rows_than_any_worker_sends_is_dead_lettered() -> None:
    rig = Rig()
    await rig.start("a")
    n = MAX_ROWS + 1
    columns = {"samples": 8, "attempts": 4, "offsets": 4, "counts": 4, "versions": 4, "finish": 1}
    rows = {name: bytes(n * n_bytes) for name, n_bytes in columns.items()}
    await rig.bus.append(names.TOKEN_LOG, FRAME.model_copy(update={**rows, "tokens": b"", "logprobs": b""}))
    await rig.turn()
    (letter,) = await dead_letters(rig)
    assert f"it has {n} rows" in letter.reason


async def test_job_whose_metrics_are_not_finite_can_be_read_again() -> None:
    rig = Rig()
    await rig.start("a")
    report = StepReport(job_id="j", step=0, metrics={"loss": float("nan"), "reward": 1.0, "kl": float("inf")})
    await rig.bus.append(names.JOB_REPORTS, report)
    await rig.turn()
    assert await rig.manager.try_lead()
    assert rig.manager.world.jobs["j"].record.latest == {"reward": 1.0}
