"""What every inference engine promises, whichever it is."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio

from rlboost.services.rollout_worker.domain.requests import Request
from rlboost.services.rollout_worker.domain.speculation import Drafter
from rlboost.services.rollout_worker.ports import Engine, EngineFailed, StagedWeights
from rlboost.shared.errors import Conflict, Corrupt, Fatal
from rlboost.shared.messages import FINISH_LENGTH, FINISH_NONE, FINISH_RELEASED, FINISH_STOP
from rlboost.shared.weights.cache import cached_version
from rlboost.shared.wire import I32, pack
from tests.support import vllm_engines
from tests.support.engines import Collector, FreePasses, request, run
from tests.support.eventually import eventually
from tests.support.staged_versions import pulled
from tests.support.staged_weights import Staged, shard
from tests.support.worker_fakes import FakeEngine, FakeStagedWeights

pytestmark = vllm_engines.MARKS

SLOTS = 4
MAX_LEN = 160
VOCABULARY = 96


class MissingChunk(FakeStagedWeights):
    def tensors(self, names: Container[str] | None = None) -> Iterator[tuple[str, Any]]:
        raise Corrupt("there is no such chunk")


def without_a_chunk(tensors: Iterable[tuple[str, Any]], directory: Path) -> StagedWeights:
    """Return a version whose chunk is removed after the pull."""
    version = pulled((shard(*item) for item in tensors), directory)
    for chunk in version.manifest.chunks():
        (directory / chunk.digest).unlink()
    return cached_version(version)


class Fake:
    weights: Any = FakeStagedWeights()
    temperature = 1.0

    def without_a_chunk(self, directory: Path) -> StagedWeights:
        return MissingChunk()

    async def make(self) -> Engine:
        return FakeEngine(SLOTS, vocabulary=VOCABULARY, max_len=MAX_LEN, interval_s=0.002)

    async def kill(self, engine: Engine, cause: Exception) -> None:
        cast("FakeEngine", engine).fail(cause)

    def awake(self, engine: Engine) -> bool:
        """Return True if it has memory of its device that it could do without while it stands still."""
        return cast("FakeEngine", engine).awake


class Torch:
    temperature = 1.0

    def __init__(self, directory: Path, *, drafts: bool = False) -> None:
        pytest.importorskip("torch")
        self._drafts = drafts
        from tests.support import tiny_models  # noqa: PLC0415 - imports torch

        config = tiny_models.CONFIGS["qwen3-tied"]
        assert (tiny_models.VOCABULARY, tiny_models.MAX_LEN) == (VOCABULARY, MAX_LEN)
        self._directory = tiny_models.save_config(config, directory)
        self.models = [tiny_models.make(config, seed) for seed in range(2)]
        self.weights = Staged(tiny_models.weights(self.models[0]))

    def without_a_chunk(self, directory: Path) -> StagedWeights:
        return without_a_chunk(self.weights.tensors(), directory)

    async def make(self) -> Engine:
        from rlboost.services.rollout_worker.adapters.torch.engine import TorchEngine  # noqa: PLC0415 - imports torch

        return TorchEngine(self._directory, slots=SLOTS, drafter=Drafter(64, FreePasses()) if self._drafts else None)

    async def kill(self, engine: Engine, cause: Exception) -> None:
        def broken(weight: tuple[str, Any]) -> tuple[str, Any]:
            raise cause

        with pytest.raises(Fatal):
            await engine.load_weights(9, Staged(map(broken, self.weights.tensors())))

    def awake(self, engine: Engine) -> bool:
        return bool(cast("Any", engine).kv_cache_bytes)


class Vllm:
    temperature = 0.0
    """Its random generators restart when a sample resumes, so only greedy samples continue identically."""

    def __init__(self) -> None:
        vllm_engines.require()
        from tests.support import tiny_models  # noqa: PLC0415 - imports torch

        self._config = vllm_engines.config()
        self.models = [tiny_models.make(self._config, seed) for seed in range(2)]
        self.weights = Staged(tiny_models.weights(self.models[0]))

    def without_a_chunk(self, directory: Path) -> StagedWeights:
        return without_a_chunk(self.weights.tensors(), directory)

    async def make(self) -> Engine:
        return await vllm_engines.start(self._config, slots=SLOTS)

    async def kill(self, engine: Engine, cause: Exception) -> None:
        """Kill vLLM while it scores, which many requests do at once."""
        scoring = asyncio.create_task(engine.score([([1] * 8, [2] * 100)] * 4, 1.0))
        await eventually(lambda: sum(task.get_name() == "score" for task in asyncio.all_tasks()) > 1)
        vllm_engines.kill_engine_core()
        with pytest.raises(EngineFailed, match="died"):
            await scoring

    def awake(self, engine: Engine) -> bool:
        # A CPU has no memory to give back: what vLLM was told is all that there is to see.
        return bool(cast("Any", engine)._asleep != {"weights", "kv_cache"})


Kind = Fake | Torch | Vllm


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[], Kind]]:
    return {
        "fake": Fake,
        "torch": lambda: Torch(tmp_path_factory.mktemp("model")),
        "torch-drafts": lambda: Torch(tmp_path_factory.mktemp("model"), drafts=True),
        "vllm": Vllm,
    }


@pytest.fixture(params=["fake", "torch", "torch-drafts", "vllm"])
def kind(request: pytest.FixtureRequest, kinds: dict[str, Callable[[], Kind]]) -> Kind:
    return kinds[request.param]()


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def _no_vllm_stays() -> AsyncIterator[None]:
    yield
    vllm_engines.end_shared()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(kind: Kind) -> AsyncIterator[Engine]:
    engine = await kind.make()
    await engine.load_weights(0, kind.weights)
    yield engine
    await engine.close()


async def test_a_request_gives_max_tokens_tokens_and_then_ends(engine: Engine) -> None:
    (made,) = await run(engine, [request(1, max_tokens=7)])
    assert len(made.tokens) == 7
    assert made.finish == FINISH_LENGTH
    assert all(0 <= token < VOCABULARY for token in made.tokens)
    assert all(logprob <= 0 for logprob in made.logprobs)
    assert made.versions == [0] * 7
    stats = engine.stats()
    assert (stats.running, stats.pending, stats.tokens_generated_total, stats.version) == (0, 0, 7, 0)


async def test_more_requests_than_slots_are_run_in_turn(engine: Engine) -> None:
    requests = [request(sample, max_tokens=3 + sample % 5) for sample in range(5 * SLOTS)]
    collector = Collector(engine)
    engine.submit(requests)
    for made, asked in zip(await collector.all_ended(requests), requests, strict=True):
        assert len(made.tokens) == asked.sampling.max_tokens
        assert engine.stats().running <= SLOTS


async def test_a_sample_does_not_depend_on_its_neighbours(engine: Engine) -> None:
    requests = [request(sample, prompt=[sample, 2], max_tokens=4 + 3 * sample) for sample in range(2 * SLOTS)]
    together = await run(engine, requests)
    alone = [(await run(engine, [one]))[0] for one in requests]
    assert [made.tokens for made in together] == [made.tokens for made in alone]


async def test_a_sample_is_the_same_with_its_group_and_alone(engine: Engine, kind: Kind) -> None:
    prompt = list(range(1, 40))
    (first,) = await run(engine, [request(0, prompt=prompt, max_tokens=30, temperature=kind.temperature)])
    group = [request(n, prompt=prompt, max_tokens=30, temperature=kind.temperature) for n in range(2 * SLOTS)]
    group[1] = request(
        0, attempt=2, prompt=prompt, max_tokens=30, tokens=first.tokens[:11], temperature=kind.temperature
    )
    together = await run(engine, group)
    assert together[0].tokens == first.tokens
    assert together[1].tokens == first.tokens[11:]
    for asked, made in zip(group[2::3], together[2::3], strict=True):
        (alone,) = await run(engine, [asked])
        assert made.tokens == alone.tokens
        assert made.logprobs == pytest.approx(alone.logprobs, abs=1e-4)


async def test_sample_resumed_at_any_offset_continues_identically(engine: Engine, kind: Kind) -> None:
    (whole,) = await run(engine, [request(5, max_tokens=40, temperature=kind.temperature)])
    offsets = range(1, 40, 3)
    rest = await run(
        engine,
        [
            request(5, attempt=2 + n, max_tokens=40, tokens=whole.tokens[:n], temperature=kind.temperature)
            for n in offsets
        ],
    )
    for n, made in zip(offsets, rest, strict=True):
        assert made.offset == n
        assert made.tokens == whole.tokens[n:]
        assert made.logprobs == pytest.approx(whole.logprobs[n:], abs=1e-4)


def scored(sample: int, given: list[int], **changes: Any) -> Request:
    """Return a request for the log-probabilities of a given completion."""
    return request(sample, max_tokens=len(given), forced=pack(given, I32), **changes)


async def test_given_completion_gets_the_log_probabilities_of_a_generated_one(engine: Engine) -> None:
    prompt = list(range(1, 30))
    (made,) = await run(engine, [request(5, prompt=prompt, max_tokens=MAX_LEN - len(prompt))])
    given = made.tokens
    assert len(given) == MAX_LEN - len(prompt), "up to the maximum length"
    requests = [
        scored(6, given, prompt=prompt),
        scored(7, given[:1], prompt=prompt),
        scored(8, given, prompt=prompt, tokens=given[:50]),
        request(9, prompt=prompt, max_tokens=20, temperature=0),
        *(scored(10 + n, given[: 20 + n], prompt=prompt, whole_logprobs=True) for n in range(2 * SLOTS)),
    ]
    whole, first, resumed, other, *more = await run(engine, requests)
    assert (whole.offset, whole.tokens, whole.finish, whole.error) == (0, given, FINISH_LENGTH, "")
    assert whole.logprobs == pytest.approx(made.logprobs, abs=1e-4)
    assert whole.versions == [0] * len(given)
    assert first.tokens == given[:1]
    assert first.logprobs == pytest.approx(made.logprobs[:1], abs=1e-4)
    assert (resumed.offset, resumed.tokens) == (50, given[50:])
    assert resumed.logprobs == pytest.approx(made.logprobs[50:], abs=1e-4)
    (alone,) = await run(engine, [request(9, attempt=2, prompt=prompt, max_tokens=20, temperature=0)])
    assert other.tokens == alone.tokens
    for n, one in enumerate(more):
        assert one.tokens == given[: 20 + n]
        assert one.logprobs == pytest.approx(made.logprobs[: 20 + n], abs=1e-4)
    assert engine.stats().running == engine.stats().pending == 0


@pytest.mark.parametrize(
    ("given", "changes", "why"),
    [
        ([2] * 90, {"prompt": [1] * 80}, "have 170 tokens; the maximum length is 160"),
        ([2, VOCABULARY], {}, "a token id to score is outside"),
        ([2, 3], {"tokens": [3]}, "differs from its tokens so far"),
        ([2], {"prompt": [], "tokens": [2]}, "without a prompt cannot be scored"),
    ],
)
async def test_completion_that_cannot_be_scored_fails_with_the_reason(
    engine: Engine, given: list[int], changes: dict[str, Any], why: str
) -> None:
    bad, good = await run(engine, [scored(1, given, **changes), scored(2, [5, 6, 7])])
    assert why in bad.error
    assert (good.tokens, good.finish) == ([5, 6, 7], FINISH_LENGTH)


async def test_scored_completion_can_be_aborted_and_scored_again(engine: Engine) -> None:
    given = [n % 50 for n in range(100)]
    collector = Collector(engine)
    requests = [scored(sample, given) for sample in range(3 * SLOTS)]
    engine.submit(requests)
    engine.release([one.key for one in requests])
    await eventually(lambda: len(collector.take_emissions()) >= 0 and all(one.key in collector.of for one in requests))
    again = await run(engine, [scored(sample, given, attempt=2) for sample in range(3 * SLOTS)])
    assert all(one.tokens == given and one.finish == FINISH_LENGTH for one in again)


async def test_hints_change_no_sample(engine: Engine, kind: Kind) -> None:
    prompt = [7, 8, 9]
    (whole,) = await run(engine, [request(5, prompt=prompt, max_tokens=100, temperature=kind.temperature)])
    collector = Collector(engine)
    again = request(5, attempt=2, prompt=prompt, max_tokens=100, temperature=kind.temperature)
    engine.hint([(5, whole.tokens)])  # it has no request now
    engine.submit([again])
    engine.hint([(5, whole.tokens), (5, []), (5, [VOCABULARY, -1, 2**31 - 1]), (77, [1, 2, 3])])
    engine.hint([(5, whole.tokens[:50] + [1] * 50)])
    await eventually(lambda: collector.made(5, 2) > 3)
    engine.hint([(5, list(range(VOCABULARY)))])
    (made,) = await collector.all_ended([again])
    assert made.tokens == whole.tokens
    assert made.logprobs == pytest.approx(whole.logprobs, abs=1e-4)


async def test_different_seeds_give_different_samples(engine: Engine) -> None:
    one, two = await run(engine, [request(1, seed=1, max_tokens=30), request(2, seed=2, max_tokens=30)])
    assert one.tokens != two.tokens


async def test_a_stop_token_ends_a_sample_and_belongs_to_it(engine: Engine) -> None:
    (whole,) = await run(engine, [request(5, max_tokens=40)])
    stop = whole.tokens[10]
    (made,) = await run(engine, [request(5, attempt=2, max_tokens=40, stop=[stop, VOCABULARY + 7])])
    assert made.finish == FINISH_STOP
    assert made.tokens == whole.tokens[: whole.tokens.index(stop) + 1]


async def test_a_stop_token_in_the_prompt_ends_nothing(engine: Engine) -> None:
    (whole,) = await run(engine, [request(5, max_tokens=10)])
    unused = next(token for token in range(VOCABULARY) if token not in whole.tokens)
    (made,) = await run(engine, [request(6, prompt=[1, unused], max_tokens=1, stop=[unused])])
    assert len(made.tokens) == 1


async def test_a_request_that_is_finished_already_ends_at_once(engine: Engine) -> None:
    full, stopped = await run(
        engine,
        [request(1, tokens=[1, 2, 3], max_tokens=3), request(2, tokens=[1, 2], stop=[2])],
    )
    assert (full.offset, full.tokens, full.finish) == (3, [], FINISH_LENGTH)
    assert (stopped.offset, stopped.tokens, stopped.finish) == (2, [], FINISH_STOP)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"prompt": [1] * 100, "tokens": [2] * 60}, "maximum length"),
        ({"prompt": []}, "empty"),
        ({"prompt": [1, VOCABULARY]}, "token id"),
        ({"prompt": [1, -1]}, "token id"),
    ],
)
async def test_invalid_request_fails_alone_with_the_reason(engine: Engine, changes: dict[str, Any], why: str) -> None:
    bad, good = await run(engine, [request(1, max_tokens=500, **changes), request(2)])
    assert why in bad.error
    assert bad.tokens == []
    assert good.finish == FINISH_LENGTH


async def test_a_sample_ends_at_the_models_maximum_length(engine: Engine) -> None:
    (made,) = await run(engine, [request(1, prompt=[1] * 100, max_tokens=500)])
    assert len(made.tokens) == MAX_LEN - 100
    assert made.finish == FINISH_LENGTH


async def test_repeated_request_is_a_conflict_and_rejects_the_batch(engine: Engine) -> None:
    await engine.suspend()
    engine.submit([request(1)])
    with pytest.raises(Conflict, match="sample 1, attempt 1"):
        engine.submit([request(2), request(1)])
    assert engine.stats().pending == 1


async def test_an_aborted_request_makes_nothing_more(engine: Engine) -> None:
    collector = Collector(engine)
    requests = [request(sample, max_tokens=150) for sample in range(3)]
    engine.submit(requests)
    await eventually(lambda: engine.stats().tokens_generated_total > 30)
    engine.abort([(0, 1), (2, 1), (77, 1)])
    collector.take_emissions()
    counts = {key: len(made.tokens) for key, made in collector.of.items()}
    (rest,) = await collector.all_ended(requests[1:2])
    assert len(rest.tokens) == 150
    for key in ((0, 1), (2, 1)):
        assert len(collector.of[key].tokens) == counts[key] > 0
        assert collector.of[key].finish == FINISH_NONE


async def test_released_request_resumes_identically_in_another_engine(engine: Engine, kind: Kind) -> None:
    (whole,) = await run(engine, [request(1, max_tokens=150, temperature=kind.temperature)])
    collector = Collector(engine)
    released, kept = (
        request(1, attempt=2, max_tokens=150, temperature=kind.temperature),
        request(2, max_tokens=150, temperature=kind.temperature),
    )
    engine.submit([released, kept])
    await eventually(lambda: collector.made(1, 2) > 3)
    engine.release([(1, 2), (1, 9), (77, 1)])
    collector.take_emissions()
    part = collector.of[1, 2]
    assert part.finish == FINISH_RELEASED
    assert 3 < len(part.tokens) < 150
    assert (1, 9) not in collector.of
    engine.submit([request(1, attempt=3, max_tokens=150, tokens=part.tokens, temperature=kind.temperature)])
    rest, other = await collector.all_ended([request(1, attempt=3, temperature=kind.temperature), kept])
    assert part.tokens + rest.tokens == whole.tokens
    assert len(other.tokens) == 150
    assert collector.of[1, 2] is part, "nothing of it came after its last word"


async def test_release_without_a_new_token_emits_once(engine: Engine) -> None:
    collector = Collector(engine)
    running = request(1, max_tokens=150)
    engine.submit([running])
    await eventually(lambda: collector.made(1) > 3)
    await engine.suspend()
    made = collector.made(1)
    engine.submit([request(2, tokens=[5, 6, 7])])
    engine.release([(1, 1), (2, 1)])
    engine.release([(1, 1), (2, 1)])
    engine.abort([(1, 1), (2, 1)])
    assert {(e.sample, e.offset, *e.tokens, e.finish) for e in collector.take_emissions()} == {
        (1, made, FINISH_RELEASED),
        (2, 3, FINISH_RELEASED),
    }
    await engine.resume()
    await eventually(lambda: engine.stats().running == 0)
    assert collector.take_emissions() == []


async def test_release_of_a_finished_request_keeps_its_finish(engine: Engine) -> None:
    engine.submit([request(1, max_tokens=5)])
    await eventually(lambda: engine.stats().tokens_generated_total == 5)
    engine.release([(1, 1)])
    (emission,) = engine.take_emissions()
    assert (len(emission.tokens), emission.finish) == (5, FINISH_LENGTH)


async def test_release_of_an_aborted_request_emits_nothing(engine: Engine) -> None:
    engine.submit([request(1, max_tokens=150)])
    await eventually(lambda: engine.stats().tokens_generated_total > 3)
    engine.abort([(1, 1)])
    engine.release([(1, 1)])
    assert all(emission.finish == FINISH_NONE for emission in engine.take_emissions())


async def test_an_aborted_request_may_be_submitted_again(engine: Engine) -> None:
    (whole,) = await run(engine, [request(1, max_tokens=60)])
    for attempt in range(2, 6):
        engine.submit([request(1, attempt=attempt, max_tokens=60)])
        engine.abort([(1, attempt)])
        engine.take_emissions()
    (made,) = await run(engine, [request(1, attempt=6, max_tokens=60)])
    assert made.tokens == whole.tokens


async def test_a_queued_request_can_be_aborted(engine: Engine) -> None:
    await engine.suspend()
    engine.submit([request(1), request(2)])
    engine.abort([(1, 1)])
    await engine.resume()
    collector = Collector(engine)
    await collector.all_ended([request(2)])
    assert (1, 1) not in collector.of


async def test_requests_wait_for_the_first_weights(kind: Kind) -> None:
    engine = await kind.make()
    assert engine.stats().version == -1
    engine.submit([request(1)])
    assert engine.take_emissions() == []
    await engine.load_weights(3, kind.weights)
    (made,) = await Collector(engine).all_ended([request(1)])
    assert set(made.versions) == {3}
    await engine.close()


async def test_suspended_engine_generates_nothing_and_resumes_in_place(engine: Engine, kind: Kind) -> None:
    (whole,) = await run(engine, [request(1, max_tokens=150, temperature=kind.temperature)])
    collector = Collector(engine)
    again = request(1, attempt=2, max_tokens=150, temperature=kind.temperature)
    engine.submit([again])
    await eventually(lambda: collector.made(1, 2) > 3)
    await engine.suspend()
    before = engine.stats()
    assert collector.made(1, 2) < 150
    engine.submit([request(2, temperature=kind.temperature)])
    await engine.suspend()
    assert engine.take_emissions() == []
    assert engine.stats().tokens_generated_total == before.tokens_generated_total
    await engine.resume()
    (made, _) = await collector.all_ended([again, request(2, temperature=kind.temperature)])
    assert made.tokens == whole.tokens
    assert made.logprobs == pytest.approx(whole.logprobs, abs=1e-4)


async def test_engine_suspended_right_after_a_submission_resumes_it(engine: Engine) -> None:
    collector, requests = Collector(engine), [request(n, max_tokens=20) for n in range(3)]
    for one in requests:
        engine.submit([one])
        await engine.suspend()
        await engine.resume()
    for made in await collector.all_ended(requests):
        assert len(made.tokens) == 20


@pytest.mark.parametrize("keep_kv", [False, True])
async def test_tokens_carry_the_version_that_generated_them(engine: Engine, kind: Kind, keep_kv: bool) -> None:
    collector = Collector(engine)
    one = request(1, max_tokens=150)
    engine.submit([one])
    await eventually(lambda: engine.stats().tokens_generated_total > 5)
    await engine.suspend(keep_kv=keep_kv)
    before = engine.stats().tokens_generated_total
    await engine.load_weights(1, kind.weights, keep_kv=keep_kv)
    await engine.resume()
    (made,) = await collector.all_ended([one])
    assert made.versions == [0] * before + [1] * (150 - before)


@pytest.mark.parametrize("kind", ["torch", "torch-drafts", "vllm"], indirect=True)  # the fake's weights do not matter
@pytest.mark.parametrize("keeps", [(), ("suspend",), ("load",), ("suspend", "load")])
async def test_keep_kv_decides_whether_later_tokens_attend_to_old_weights(
    engine: Engine, kind: Kind, keeps: tuple[str, ...]
) -> None:
    assert not isinstance(kind, Fake)
    from tests.support import tiny_models  # noqa: PLC0415 - imports torch

    collector, one = Collector(engine), request(1, max_tokens=100)
    old, new = kind.models
    engine.submit([one])
    await eventually(lambda: engine.stats().tokens_generated_total > 20)
    await engine.suspend(keep_kv="suspend" in keeps)
    await engine.load_weights(1, Staged(tiny_models.weights(new)), keep_kv="load" in keeps)
    await engine.resume()
    (made,) = await collector.all_ended([one])
    n = made.versions.index(1)
    assert n > 20
    assert made.logprobs[:n] == pytest.approx(tiny_models.logprobs(old, one.prompt, made.tokens)[:n], abs=1e-4)
    later = pytest.approx(tiny_models.logprobs(new, one.prompt, made.tokens)[n:], abs=1e-4)
    assert (made.logprobs[n:] == later) is (keeps != ("suspend", "load"))


async def test_second_suspend_without_keep_kv_frees_the_cache(engine: Engine, kind: Kind) -> None:
    (whole,) = await run(engine, [request(1, max_tokens=60, temperature=kind.temperature)])
    collector, again = Collector(engine), request(1, attempt=2, max_tokens=60, temperature=kind.temperature)
    engine.submit([again])
    await eventually(lambda: collector.made(1, 2) > 3)
    await engine.suspend(keep_kv=True)
    await engine.suspend()
    await engine.resume()
    (made,) = await collector.all_ended([again])
    assert made.tokens == whole.tokens
    assert made.logprobs == pytest.approx(whole.logprobs, abs=1e-4)


async def test_load_of_the_published_bytes_reports_no_difference(engine: Engine, kind: Kind) -> None:
    assert await engine.load_weights(1, kind.weights) == []


async def test_missing_chunk_is_corrupt_and_the_next_load_is_served(engine: Engine, kind: Kind, tmp_path: Path) -> None:
    with pytest.raises(Corrupt):
        await engine.load_weights(1, kind.without_a_chunk(tmp_path))
    assert engine.stats().version == -1
    assert await engine.load_weights(2, kind.weights) == []
    (made,) = await run(engine, [request(1, max_tokens=5)])
    assert made.versions == [2] * 5


async def test_closed_engine_rejects_requests_and_still_emits_its_tokens(engine: Engine) -> None:
    engine.submit([request(1, max_tokens=150)])
    await eventually(lambda: engine.stats().tokens_generated_total > 3)
    await engine.close()
    await engine.close()
    assert len(engine.take_emissions()[0].tokens) > 3
    with pytest.raises(Fatal, match="closed"):
        engine.submit([request(2)])
    with pytest.raises(Fatal, match="closed"):
        await engine.resume()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_score_equals_the_logprobs_of_generation(engine: Engine, kind: Kind, temperature: float) -> None:
    requests = [request(n, prompt=[n, 2] * n, max_tokens=5 + 7 * n, temperature=temperature) for n in range(1, 4)]
    made = await run(engine, requests)
    before = engine.stats()
    await engine.suspend()
    asked = [(one.prompt, done.tokens) for one, done in zip(requests, made, strict=True)]
    scored = await engine.score(asked, temperature)
    assert engine.stats() == before
    for (prompt, tokens), done, logprobs in zip(asked, made, scored, strict=True):
        assert logprobs == pytest.approx(done.logprobs, abs=1e-4)
        if not isinstance(kind, Fake):
            from tests.support import tiny_models  # noqa: PLC0415 - imports torch

            assert logprobs == pytest.approx(
                tiny_models.logprobs(kind.models[0], prompt, tokens, temperature), abs=1e-4
            )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_sample_of_a_suspended_engine_equals_submitted_requests(engine: Engine, temperature: float) -> None:
    requests = [request(n, prompt=[n, 2] * n, max_tokens=5 + 7 * n, temperature=temperature) for n in range(1, 8)]
    submitted = await run(engine, requests)
    before = engine.stats()
    await engine.suspend()
    sampled = {one.sample: one for one in await engine.sample(requests)}
    assert engine.stats() == before
    assert engine.take_emissions() == []
    for asked, made in zip(requests, submitted, strict=True):
        one = sampled[asked.sample]
        assert (one.offset, one.tokens, one.finish, one.version) == (0, made.tokens, FINISH_LENGTH, 0)
        assert one.logprobs == pytest.approx(made.logprobs, abs=1e-4)


async def test_sample_leaves_running_and_queued_requests_as_they_are(engine: Engine, kind: Kind) -> None:
    (whole,) = await run(engine, [request(1, max_tokens=60, temperature=kind.temperature)])
    collector, again = Collector(engine), request(1, attempt=2, max_tokens=60, temperature=kind.temperature)
    engine.submit([again])
    await eventually(lambda: collector.made(1, 2) > 3)
    await engine.suspend()
    queued = request(2, max_tokens=5)
    engine.submit([queued])
    await engine.sample([request(1, max_tokens=9)])
    await engine.resume()
    made, other = await collector.all_ended([again, queued])
    assert made.tokens == whole.tokens
    assert made.logprobs == pytest.approx(whole.logprobs, abs=1e-4)
    assert len(other.tokens) == 5


async def test_sample_returns_why_a_request_is_invalid(engine: Engine) -> None:
    await engine.suspend()
    good, bad = sorted(
        await engine.sample([request(1, max_tokens=4), request(2, prompt=[1, VOCABULARY])]), key=lambda one: one.sample
    )
    assert (len(good.tokens), good.error) == (4, "")
    assert "token id" in bad.error


@pytest.mark.parametrize(
    "kind", ["torch", "torch-drafts", "vllm"], indirect=True
)  # the fake's tokens are equally likely
async def test_top_p_narrows_what_is_drawn(engine: Engine, kind: Kind) -> None:
    assert not isinstance(kind, Fake)
    from tests.support import tiny_models  # noqa: PLC0415 - imports torch

    prompt, requests = [3, 1, 4], [request(n, max_tokens=1, top_p=0.3) for n in range(64)]
    drawn = {made.tokens[0] for made in await run(engine, requests)}
    whole = sorted(
        (tiny_models.logprobs(kind.models[0], prompt, [token])[0] for token in range(VOCABULARY)), reverse=True
    )
    nucleus = next(n for n in range(1, VOCABULARY) if sum(map(math.exp, whole[:n])) >= 0.3)
    likely = sorted(range(VOCABULARY), key=lambda token: -tiny_models.logprobs(kind.models[0], prompt, [token])[0])
    assert drawn <= set(likely[:nucleus])
    assert len(drawn) > nucleus / 2


@pytest.mark.parametrize(
    "kind", ["torch", "torch-drafts", "vllm"], indirect=True
)  # the fake's tokens are equally likely
async def test_whole_logprobs_with_top_p_are_the_models_or_an_error(engine: Engine, kind: Kind) -> None:
    assert not isinstance(kind, Fake)
    from tests.support import tiny_models  # noqa: PLC0415 - imports torch

    asked = request(1, temperature=0.8, top_p=0.5, whole_logprobs=True)
    (made,) = await run(engine, [asked])
    if isinstance(kind, Vllm):
        assert "sampling.top_p is 0.5" in made.error
        assert made.tokens == []
    else:
        expected = tiny_models.logprobs(kind.models[0], asked.prompt, made.tokens, 0.8)
        assert made.logprobs == pytest.approx(expected, abs=1e-4)


async def test_score_does_not_change_later_generation(engine: Engine, kind: Kind) -> None:
    (whole,) = await run(engine, [request(1, max_tokens=60, temperature=kind.temperature)])
    collector, again = Collector(engine), request(1, attempt=2, max_tokens=60, temperature=kind.temperature)
    engine.submit([again])
    await eventually(lambda: collector.made(1, 2) > 3)
    await engine.suspend()
    await engine.score([([1, 2], [3, 4])], 1.0)
    await engine.resume()
    (made,) = await collector.all_ended([again])
    assert made.tokens == whole.tokens


@pytest.mark.parametrize("kind", ["torch", "torch-drafts", "vllm"], indirect=True)  # the fake's weights do not matter
async def test_score_uses_the_last_loaded_weights(engine: Engine, kind: Kind) -> None:
    assert not isinstance(kind, Fake)
    from tests.support import tiny_models  # noqa: PLC0415 - imports torch

    await engine.suspend()
    await engine.load_weights(1, Staged(tiny_models.weights(kind.models[1])))
    (logprobs,) = await engine.score([([3, 1, 4], [1, 5, 9])], 1.0)
    assert logprobs == pytest.approx(tiny_models.logprobs(kind.models[1], [3, 1, 4], [1, 5, 9]), abs=1e-4)


@pytest.mark.parametrize("takes", [("load",), ("score",), ("sample",), ("load", "score"), ("load", "load")])
async def test_second_suspend_frees_memory_taken_since_the_first(
    engine: Engine, kind: Kind, takes: tuple[str, ...]
) -> None:
    collector, one = Collector(engine), request(1, max_tokens=100)
    engine.submit([one])
    await eventually(lambda: collector.made(1) > 3)
    assert kind.awake(engine)
    await engine.suspend()
    assert not kind.awake(engine)
    for version, what in enumerate(takes, 1):
        if what == "load":
            await engine.load_weights(version, kind.weights)
        elif what == "sample":
            await engine.sample([request(7)])
        else:
            await engine.score([([1, 2], [3, 4])], 1.0)
    await engine.suspend()
    assert not kind.awake(engine)
    await engine.resume()
    (made,) = await collector.all_ended([one])
    assert len(made.tokens) == 100


# --- last: vLLM's process is shared, and this kills it ---


def is_dead(engine: Engine) -> bool:
    try:
        engine.stats()
    except EngineFailed:
        return True
    return False


async def test_dead_engine_raises_its_error_at_every_call(engine: Engine, kind: Kind) -> None:
    requests = [request(sample, max_tokens=150) for sample in range(SLOTS + 2)]
    engine.submit(requests)
    await eventually(lambda: engine.stats().tokens_generated_total > 0)
    await engine.suspend()
    ran = {one.key for one in requests[:SLOTS]}
    assert engine.running() == ran
    await kind.kill(engine, RuntimeError("out of luck"))
    await eventually(lambda: is_dead(engine))
    for call in (
        engine.take_emissions,
        engine.stats,
        lambda: engine.submit([request(1)]),
        lambda: engine.abort([(1, 1)]),
    ):
        with pytest.raises(Fatal, match="died"):
            call()
    with pytest.raises(Fatal, match="died"):
        await engine.suspend()
    assert engine.running() == ran, "any of them may have been the cause"
    await engine.close()
