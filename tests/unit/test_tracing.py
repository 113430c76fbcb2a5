"""The traces of samples, from the messages of their streams."""

from __future__ import annotations

from rlboost.shared.columns import F32, I32, U8, U32, U64, pack
from rlboost.shared.ids import SampleId, request_group
from rlboost.shared.messages import (
    FINISH_NONE,
    FINISH_RELEASED,
    FINISH_STOP,
    Admitted,
    Closed,
    Event,
    GroupRequested,
    Placed,
    Sampling,
    TokenFrame,
    WeightsCommitted,
)
from rlboost.tracing.samples import SampleTraces, Span

GROUP = SampleId(1, False, 4, 0, 0).pack()


def admitted(group: int = GROUP, n: int = 1) -> Admitted:
    request = GroupRequested(
        job_id="j", group=group, n=n, prompt=pack([1], I32), sampling=Sampling(), version=4, seed=0
    )
    return Admitted(request=request)


def placed(worker: str, attempt: int, offset: int = 0, sample: int = GROUP) -> Placed:
    columns = {"attempts": pack([attempt], U32), "offsets": pack([offset], U32)}
    return Placed(worker=worker, samples=pack([sample], U64), **columns)


def frame(worker: str, attempt: int, offset: int, count: int, finish: int = FINISH_NONE) -> TokenFrame:
    return TokenFrame(
        worker=worker,
        seq=0,
        samples=pack([GROUP], U64),
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


def scored(sample: int = GROUP, reward: float = 1.0) -> Event:
    return Event(
        kind="sample_scored", at=0.0, source="t", fields={"sample": str(SampleId.unpack(sample)), "reward": reward}
    )


def committed(version: int) -> WeightsCommitted:
    return WeightsCommitted(job_id="j", version=version, manifest_digest="", n_bytes=0, at=0.0)


def parts(trace: Span) -> list[tuple[str, float, float, str]]:
    return [(part.name, part.start, part.end, part.error) for part in trace.children]


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
        placed("c", 3, 8),
        frame("c", 3, 8, 2, FINISH_STOP),
        closed(),
        scored(),
    ]
    for at, message in enumerate(messages):
        assert not traces.take(message, float(at))
    assert not traces.take(committed(4), 20.0)
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
        ("queue", 5.0, 7.0, ""),
        ("generate", 7.0, 8.0, ""),
        ("deliver", 8.0, 9.0, ""),
        ("score", 9.0, 10.0, ""),
        ("train", 10.0, 21.0, ""),
    ]
    generated = [part.attributes for part in trace.children if part.name == "generate"]
    assert [(part["rlboost.worker"], part["rlboost.tokens"], part["rlboost.end"]) for part in generated] == [
        ("a", 6, "migrated"),
        ("b", 4, "lost"),
        ("c", 2, "stop"),
    ]
    assert traces.jobs == set()


def test_trace_ends_with_the_reward_of_an_evaluation_or_delivery_of_a_request() -> None:
    traces, evaluation, request = SampleTraces(), SampleId(1, True, 4, 0, 0).pack(), request_group(1, 0)
    for sample in (evaluation, request):
        assert not traces.take(admitted(sample), 0.0)
        assert not traces.take(placed("a", 1, sample=sample), 1.0)
    assert len(traces.take(closed(request), 2.0)) == 1
    assert not traces.take(closed(evaluation), 2.0)
    (trace,) = traces.take(scored(evaluation, 0.5), 3.0)
    assert (trace.attributes["rlboost.sample"], trace.end) == ("1/e4/0/0", 3.0)


def test_sample_of_a_dropped_group_has_a_trace_after_the_next_step() -> None:
    traces = SampleTraces()
    for message in (admitted(n=2), placed("a", 1), closed(), scored(GROUP + 1), committed(5)):
        assert not traces.take(message, 1.0)
    (trace,) = traces.take(committed(6), 2.0)
    assert "rlboost.reward" not in trace.attributes
    assert not traces.remaining()


def test_scores_that_are_read_before_the_delivery_count() -> None:
    traces = SampleTraces()
    for message in (committed(5), admitted(), placed("a", 1), scored()):
        assert not traces.take(message, 1.0)
    assert len(traces.take(closed(), 2.0)) == 1
