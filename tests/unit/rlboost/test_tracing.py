"""The traces of samples, from the messages of their streams."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from rlboost.shared.ids import SampleId, request_group
from rlboost.shared.messages import (
    FINISH_NONE,
    FINISH_RELEASED,
    FINISH_STOP,
    Admitted,
    Closed,
    Event,
    GroupRequested,
    Message,
    Placed,
    Sampling,
    TokenFrame,
    WeightsCommitted,
)
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Remove
from rlboost.shared.wire import F32, I32, U8, U32, U64, pack
from rlboost.tracing import SampleTraces, Span, follow
from tests.support.memory_bus import MemoryBus

GROUP = SampleId(1, False, 4, 0, 0).pack()


def admitted(group: int = GROUP, n: int = 1, preferred_worker: str = "", session: int = 0) -> Admitted:
    request = GroupRequested(
        job_id="j",
        group=group,
        n=n,
        prompt=pack([1], I32),
        sampling=Sampling(),
        version=4,
        seed=0,
        preferred_worker=preferred_worker,
        session=session,
    )
    return Admitted(request=request)


def placed(worker: str, attempt: int, offset: int = 0, sample: int = GROUP) -> Placed:
    columns = {"attempts": pack([attempt], U32), "offsets": pack([offset], U32)}
    return Placed(worker=worker, samples=pack([sample], U64), **columns)


def frame(
    worker: str, attempt: int, offset: int, count: int, finish: int = FINISH_NONE, sample: int = GROUP
) -> TokenFrame:
    return TokenFrame(
        worker=worker,
        seq=0,
        samples=pack([sample], U64),
        attempts=pack([attempt], U32),
        offsets=pack([offset], U32),
        counts=pack([count], U32),
        versions=pack([4], U32),
        finish=pack([finish], U8),
        tokens=pack([7] * count, I32),
        logprobs=pack([-1.0] * count, F32),
    )


def closed(sample: int = GROUP) -> Closed:
    return Closed(samples=pack([sample], U64))


def scored(sample: int = GROUP, reward: float | None = 1.0) -> Event:
    return event("sample_scored", sample=str(SampleId.unpack(sample)), reward=reward, reason="")


def unassigned(worker: str, cause: str) -> Event:
    return event("samples_unassigned", worker=worker, cause=cause, samples=1, tokens=0)


def event(kind: str, **fields: object) -> Event:
    return Event(kind=kind, at=0.0, source="t", fields=fields)


def committed(version: int) -> WeightsCommitted:
    return WeightsCommitted(job_id="j", version=version, manifest_digest="", n_bytes=0, at=0.0)


def generated(sample: int = GROUP) -> list[Message]:
    """Return the messages of a sample that one worker generates, up to its delivery."""
    return [placed("a", 1, sample=sample), frame("a", 1, 0, 2, FINISH_STOP, sample), closed(sample)]


def taken(traces: SampleTraces, messages: Sequence[Message]) -> list[Span]:
    """Return the traces that messages complete, which are read one second after another."""
    return [trace for at, message in enumerate(messages) for trace in traces.take(message, float(at), "j")]


def parts(trace: Span) -> list[tuple[str, float, float, str]]:
    return [(part.name, part.start, part.end, part.error) for part in trace.children]


def ends(trace: Span) -> list[tuple[object, object, str]]:
    attempts = [part for part in trace.children if part.name == "generate"]
    return [(part.attributes["rlboost.worker"], part.attributes["rlboost.end"], part.error) for part in attempts]


def test_trace_follows_a_sample_over_workers_to_the_step_that_trained_on_it() -> None:
    traces = SampleTraces()
    messages = [
        admitted(),
        placed("a", 1),
        frame("a", 1, 0, 5),
        frame("a", 1, 5, 1, FINISH_RELEASED),
        placed("b", 2, 6),
        frame("b", 2, 6, 4),
        frame("a", 1, 6, 9, FINISH_STOP),  # of an earlier attempt
        frame("a", 2, 6, 9, FINISH_STOP),  # of a worker that does not have it
        unassigned("b", "lost"),
        placed("c", 3, 8),
        placed("c", 3, 8),
        frame("c", 3, 8, 2, FINISH_STOP),
        closed(),
        scored(),
        committed(4),
    ]
    assert not taken(traces, messages)
    (trace,) = traces.take(committed(5), 21.0)
    assert (trace.start, trace.end) == (0.0, 21.0)
    assert trace.attributes == {
        "rlboost.job": "j",
        "rlboost.sample": "1/4/0/0",
        "rlboost.step": 4,
        "rlboost.attempts": 3,
        "rlboost.tokens": 10,
        "rlboost.reward": 1.0,
    }
    assert parts(trace) == [
        ("queue", 0.0, 1.0, ""),
        ("generate", 1.0, 3.0, ""),
        ("queue", 3.0, 4.0, ""),
        ("generate", 4.0, 5.0, "lost"),
        ("queue", 5.0, 9.0, ""),
        ("generate", 9.0, 11.0, ""),
        ("deliver", 11.0, 12.0, ""),
        ("score", 12.0, 13.0, ""),
        ("train", 13.0, 21.0, ""),
    ]
    assert ends(trace) == [("a", "migrated", ""), ("b", "lost", "lost"), ("c", "stop", "")]
    tokens = [part.attributes["rlboost.tokens"] for part in trace.children if part.name == "generate"]
    assert tokens == [6, 4, 2]


@pytest.mark.parametrize(
    ("cause", "error"), [("suspended", ""), ("left", ""), ("lost", "lost"), ("invalid", "invalid")]
)
def test_attempt_ends_by_the_first_cause_after_its_beginning(cause: str, error: str) -> None:
    messages = [
        admitted(),
        unassigned("a", "suspended"),
        placed("a", 1),
        unassigned("a", cause),
        placed("b", 2),
        unassigned("a", "lost"),
        event("job_state_changed", state="failed"),
    ]
    (trace,) = taken(SampleTraces(), messages)
    assert ends(trace) == [("a", cause, error), ("b", "closed", "")]


def test_attempt_whose_cause_of_end_is_unknown_is_no_error() -> None:
    messages = [admitted(), placed("a", 1), placed("", 2), placed("b", 3), event("job_state_changed", state="failed")]
    (trace,) = taken(SampleTraces(), messages)
    assert ends(trace) == [("a", "unassigned", ""), ("b", "closed", "")]


def test_trace_ends_with_the_reward_of_an_evaluation_or_delivery_of_a_request() -> None:
    traces, evaluation, request = SampleTraces(), SampleId(1, True, 4, 0, 0).pack(), request_group(1, 0)
    assert not taken(traces, [admitted(evaluation), *generated(evaluation)])
    (trace,) = traces.take(scored(evaluation, 0.5), 9.0)
    assert (trace.attributes["rlboost.sample"], trace.end) == ("1/e4/0/0", 9.0)
    (trace,) = taken(traces, [admitted(request), *generated(request)])
    assert trace.children[-1].name == "deliver"


def test_later_turn_of_a_conversation_ends_with_its_delivery() -> None:
    turn = SampleId(1, False, 4, 7, 0).pack()
    (trace,) = taken(SampleTraces(), [admitted(turn, preferred_worker="a"), *generated(turn)])
    assert trace.children[-1].name == "deliver"
    assert not taken(SampleTraces(), [admitted(), *generated()])


def test_turn_of_a_session_ends_with_its_delivery_and_names_the_session() -> None:
    (trace,) = taken(SampleTraces(), [admitted(session=GROUP + 1), *generated()])
    assert (trace.children[-1].name, trace.attributes["rlboost.session"]) == ("deliver", "1/4/0/1")


def turn(start: float, end: float, *spans: list[object], calls: Sequence[str] = ()) -> dict[str, object]:
    return {"role": "assistant", "content": "", "tool_calls": list(calls), "spans": list(spans), "time": [start, end]}


def conversation(*turns: dict[str, object], reward: float | None = 0.5, **fields: object) -> Event:
    answer = {"role": "environment", "content": "3", "reward": 0, "over": ""}
    messages = [message for one in turns for message in (one, answer)]
    times = {"turns": len(turns), "began_at": 100.0, "duration_s": 9.0, "outside_s": 4.0}
    common = {"sample": "1/4/0/0", "step": 4, "reward": reward, "reason": ""}
    return event("sample_scored", **common, **times, messages=messages, **fields)


def test_trace_of_a_conversation_shows_turns_and_what_is_outside_the_model() -> None:
    """Two turns overlap, as those of a sub-agent do; the text of a long call is cut, but not its tool's name."""
    calls = ['{"name": "search", "arg\n[9 characters cut]\n"}', '{"name": "add", "arguments": {"a": {"name": "x"}}}']
    scored_one = conversation(
        turn(0.5, 3.0, ["a", 4, 5], ["b", 4, 2], calls=calls),
        turn(2.0, 4.0, ["a", 4, 3], calls=["{broken"]),
        turn(6.0, 8.0, ["a", 5, 1]),
    )
    (trace,) = taken(SampleTraces(), [scored_one])
    assert (trace.name, trace.start, trace.end, trace.error) == ("conversation", 100.0, 109.0, "")
    assert trace.attributes == {
        "rlboost.job": "j",
        "rlboost.sample": "1/4/0/0",
        "rlboost.step": 4,
        "rlboost.turns": 3,
        "rlboost.outside_s": 4.0,
        "rlboost.reward": 0.5,
    }
    assert parts(trace) == [
        ("outside", 100.0, 100.5, ""),
        ("turn", 100.5, 103.0, ""),
        ("turn", 102.0, 104.0, ""),
        ("outside", 104.0, 106.0, ""),
        ("turn", 106.0, 108.0, ""),
        ("outside", 108.0, 109.0, ""),
    ]
    made = {"rlboost.tokens": 7, "rlboost.workers": "a, b", "rlboost.versions": "4", "rlboost.tools": "search, add"}
    assert trace.children[1].attributes == made


def test_time_after_a_turn_names_the_tools_that_it_called() -> None:
    called = turn(0.0, 1.0, ["a", 4, 5], calls=['{"name": "add", "arguments": {}}'])
    (trace,) = taken(SampleTraces(), [conversation(called, turn(3.0, 9.0, ["a", 4, 5]))])
    outside = [part.attributes for part in trace.children if part.name == "outside"]
    assert outside == [{"rlboost.tools": "add"}]


def test_conversation_without_a_reward_is_an_error() -> None:
    (trace,) = taken(SampleTraces(), [conversation(turn(0.0, 1.0, ["a", 4, 5]), reward=None)])
    assert (trace.error, "rlboost.reward" in trace.attributes) == ("no reward", False)


def test_sample_that_is_closed_before_its_end_is_dropped() -> None:
    (trace,) = taken(SampleTraces(), [admitted(), placed("a", 1), closed()])
    assert trace.attributes["rlboost.dropped"]
    assert [part.name for part in trace.children] == ["queue", "generate"]


def test_sample_without_a_reward_was_not_trained_on() -> None:
    (trace,) = taken(SampleTraces(), [admitted(), *generated(), scored(reward=None)])
    assert parts(trace)[-1] == ("score", 3.0, 4.0, "no reward")


def test_sample_of_a_dropped_group_has_a_trace_after_the_next_step() -> None:
    traces = SampleTraces()
    assert not taken(traces, [admitted(n=2), *generated(), scored(GROUP + 1), committed(5)])
    (trace,) = traces.take(committed(6), 9.0)
    assert [part.name for part in trace.children] == ["queue", "generate", "deliver"]
    assert not traces.remaining()


def test_end_of_a_job_ends_its_traces() -> None:
    traces = SampleTraces()
    assert not taken(traces, [admitted(n=2), *generated(), event("job_state_changed", state="running")])
    found = traces.take(event("job_state_changed", state="cancelled"), 9.0, "j")
    assert ["rlboost.dropped" in trace.attributes for trace in found] == [False, True]
    assert not traces.jobs
    assert not traces.remaining()


class Sink:
    """Receives traces; sets the stop after the number that is expected."""

    def __init__(self, expected: int) -> None:
        self.traces: list[Span] = []
        self.stop = asyncio.Event()
        self._expected = expected
        self._loop = asyncio.get_running_loop()

    def send(self, traces: Sequence[Span]) -> int:
        self.traces += traces
        if len(self.traces) >= self._expected:
            self._loop.call_soon_threadsafe(self.stop.set)
        return 0


async def test_follow_reads_the_streams_of_jobs_in_the_order_of_time() -> None:
    """The token log has more entries than one read returns; scores and commits of later samples wait for them."""
    bus, n = MemoryBus(), 400
    for step in range(n):
        sample = SampleId(1, False, step, 0, 0).pack()
        for message in (admitted(sample), *generated(sample)):
            await bus.append(names.TOKEN_LOG, message)
        for stream, message in (
            (names.job_samples("j"), scored(sample)),
            (names.WEIGHTS_COMMITTED, committed(step + 1)),
        ):
            # The fake counts entries instead of the time: three that are removed make the fourth as late as the others.
            removed = [await bus.append(stream, event("worker_joined")) for _ in range(3)]
            await bus.append(stream, message)
            await bus.transact([Remove(stream, tuple(removed))])
    sink = Sink(n)
    await asyncio.wait_for(follow(bus, sink.send, sink.stop), 30)
    assert len(sink.traces) == n
    assert all([part.name for part in trace.children][-2:] == ["score", "train"] for trace in sink.traces)


async def test_follow_skips_an_entry_that_it_cannot_apply() -> None:
    bus = MemoryBus()
    messages = [admitted(), frame("a", 1, 0, 1).model_copy(update={"samples": b"123"}), placed("a", 1)]
    messages += [placed("a", 2).model_copy(update={"offsets": b""}), frame("a", 1, 0, 2, FINISH_STOP), closed()]
    for message in messages:
        await bus.append(names.TOKEN_LOG, message)
    for message in (event("samples_unassigned"), event("sample_scored"), event("job_state_changed")):
        await bus.append(names.job_events("j"), message)
    for kind in (
        "worker_joined",
        "worker_joined",
        "worker_joined",
        "job_state_changed",
    ):  # the last after the last sample
        await bus.append(names.job_events("j"), event(kind, state="completed"))
    sink = Sink(1)
    await asyncio.wait_for(follow(bus, sink.send, sink.stop), 30)
    assert [trace.children[-1].name for trace in sink.traces] == ["deliver"]
