"""What clients may ask of the sampling: real vLLM on a CPU and the torch engine do the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

torch = pytest.importorskip("torch")
pytest.importorskip("xgrammar")

from rlboost.services.rollout_manager.serving.structured import grammar, json_form  # noqa: E402 - only where torch is
from rlboost.services.rollout_worker.adapters.tokenizer import tokenizer_for_grammars  # noqa: E402
from rlboost.services.rollout_worker.adapters.torch.engine import TorchEngine  # noqa: E402
from rlboost.services.rollout_worker.ports import Engine  # noqa: E402
from rlboost.shared.messages import FINISH_LENGTH, FINISH_STOP, SAMPLING_OPTIONS  # noqa: E402
from rlboost.shared.wire import I32, TOP, pack  # noqa: E402
from tests.support import tiny_models, vllm_engines  # noqa: E402
from tests.support.engines import Collector, request, run  # noqa: E402
from tests.support.eventually import eventually  # noqa: E402
from tests.support.model_folder import write_character_tokenizer  # noqa: E402
from tests.support.staged_weights import Staged  # noqa: E402

pytestmark = [
    *vllm_engines.MARKS,
    pytest.mark.filterwarnings("ignore:When constructing TokenizerInfo:UserWarning"),
]

EOS, SLOTS = 2, 8
CHARACTERS = [chr(code) for code in range(32, 127) if chr(code) not in "`~"]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 30, "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
}
Start = Callable[[], Awaitable[Engine]]


def text_of(tokens: list[int]) -> str:
    return "".join(CHARACTERS[token - 3] for token in tokens if token > EOS)


def model() -> Any:
    return tiny_models.make(vllm_engines.config(), seed=1)


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = write_character_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return tokenizer_for_grammars((folder / "tokenizer.json").read_text())


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def _no_vllm_stays() -> AsyncIterator[None]:
    yield
    vllm_engines.end_shared()


@pytest_asyncio.fixture(loop_scope="module", params=["torch", "vllm"])
async def engine(request: pytest.FixtureRequest, tokenizer_json: str, tmp_path: Path) -> AsyncIterator[Engine]:
    """Start an engine with the weights of `model` as version 0."""
    engine: Engine
    if request.param == "torch":
        folder = tiny_models.save_config(model().config, tmp_path)
        engine = TorchEngine(folder, slots=SLOTS, tokenizer_json=tokenizer_json)
    else:
        vllm_engines.require()
        vllm_engines.require_installed("lmformatenforcer")
        engine = await vllm_engines.start(model().config, slots=SLOTS, tokenizer_json=tokenizer_json)
    await engine.load_weights(0, Staged(tiny_models.weights(model())))
    yield engine
    await engine.close()


def distribution(prompt: list[int], tokens: list[int]) -> Any:
    """Return the log-probabilities [tokens, vocabulary] of a plain forward pass."""
    logits = model()(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.float(), -1)


async def test_unusable_tokenizer_is_none() -> None:
    for text in ("", "{", "[]", '{"model": {"type": "BPE"}}'):
        assert tokenizer_for_grammars(text) == ""


async def test_both_engines_support_all_options_but_those_of_torch(engine: Engine) -> None:
    of_vllm = set(SAMPLING_OPTIONS) - {"stop", "batch_invariant", "images"}  # the generator adds stop
    assert engine.sampling_options == of_vllm | ({"batch_invariant"} if isinstance(engine, TorchEngine) else set())


async def test_top_logprobs_are_those_of_a_plain_forward_pass(engine: Engine) -> None:
    asked = [request(i, max_tokens=20, top_logprobs=n) for i, n in enumerate((4, 0, 1, 20))]
    given = pack(range(3, 23), I32)
    asked += [request(4 + i, max_tokens=20, top_logprobs=n, forced=given) for i, n in enumerate((0, 1, 20))]
    asked += [request(7, max_tokens=20, top_logprobs=2, forced=given, tokens=range(3, 10))]
    for one, made in zip(asked, await run(engine, asked), strict=True):
        n = one.sampling.top_logprobs
        top = np.frombuffer(made.top_logprobs, TOP).reshape(-1, n) if n else np.zeros((0, 0), TOP)
        tokens = one.tokens + made.tokens
        assert tokens == [*range(3, 23)] or not one.sampling.forced
        whole = distribution(one.prompt, tokens)[len(one.tokens) :]
        assert len(made.top_logprobs) == len(whole) * n * TOP.itemsize
        own = whole.gather(1, torch.tensor(made.tokens)[:, None])[:, 0]
        assert made.logprobs == pytest.approx(own.tolist(), abs=1e-4)
        expected = whole.topk(n or 1, -1)
        if n:
            assert top["token"].tolist() == expected.indices.tolist()
            assert top["logprob"] == pytest.approx(expected.values.numpy(), abs=1e-4)


async def test_options_limit_what_is_drawn(engine: Engine) -> None:
    greedy, first, likely, biased, banned, longer = asked = [
        request(1, temperature=0.0),
        request(2, top_k=1),
        request(3, min_p=1.0),
        request(4, logit_bias=((7, 100.0),)),
        request(5, logit_bias=((9, -100.0),), temperature=0.0, max_tokens=30),
        request(6, min_tokens=10, max_tokens=40, stop=range(3, 90)),
    ]
    made = dict(zip([one.sample for one in asked], await run(engine, asked), strict=True))
    assert made[first.sample].tokens == made[likely.sample].tokens == made[greedy.sample].tokens
    assert made[biased.sample].tokens == [7] * 12
    assert 9 not in made[banned.sample].tokens
    ends = [i for i, token in enumerate(made[longer.sample].tokens) if 3 <= token < 90]
    assert ends == [len(made[longer.sample].tokens) - 1]
    assert ends[0] >= 10


async def test_answer_matches_its_grammar_and_stops(engine: Engine) -> None:
    asked = [
        request(
            i, max_tokens=200, stop=[EOS], grammar=grammar(json_form(PERSON), []), temperature=(1.0, 0.0, 2.0)[i % 3]
        )
        for i in range(2 * SLOTS)
    ]
    for made in await run(engine, [*asked, request(99)]):
        if len(made.tokens) == 12:
            continue  # the one without a grammar
        person = json.loads(text_of(made.tokens))
        assert made.finish == FINISH_STOP
        assert made.tokens[-1] == EOS
        assert len(person["name"]) == 30
        assert 0 <= person["age"] <= 99


async def test_invalid_request_ends_alone(engine: Engine) -> None:
    unknown = '{"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {"type": "tuple"}}}'
    asked = [
        request(1, grammar=unknown, stop=[EOS]),
        request(2, logit_bias=((96, 1.0),)),
        request(3, min_p=2.0),
        request(4),
    ]
    made = await run(engine, asked)
    assert [bool(one.error) for one in made] == [True, True, True, False]
    assert "tuple" in made[0].error
    assert made[3].finish == FINISH_LENGTH


async def test_grammar_follows_the_tokens_of_an_interrupted_answer(engine: Engine) -> None:
    """The same engine continues it after a pause, and another one from wherever it was interrupted."""
    asked = request(1, max_tokens=200, stop=[EOS], grammar=grammar(json_form(PERSON), []))
    collector = Collector(engine)
    engine.submit([asked])
    await eventually(lambda: collector.made(1) > 3)
    await engine.suspend()
    await engine.resume()
    (made,) = await collector.all_ended([asked])
    assert len(json.loads(text_of(made.tokens))["name"]) == 30
    places = range(1, len(made.tokens))
    resumed = [request(100 + n, attempt=2, tokens=made.tokens[:n], **kept(asked)) for n in places]
    resumed.append(request(1, attempt=2, tokens=made.tokens[:20], **kept(asked)))
    *others, same = await run(engine, resumed)
    for n, again in zip(places, others, strict=True):
        person = json.loads(text_of([*made.tokens[:n], *again.tokens]))
        assert (again.finish, len(person["name"]), again.tokens[-1]) == (FINISH_STOP, 30, EOS)
    if isinstance(engine, TorchEngine):
        assert [*made.tokens[:20], *same.tokens] == made.tokens
    wrong = request(1, attempt=4, tokens=[50, 51], **kept(asked))
    assert "grammar" in (error := (await run(engine, [wrong]))[0].error) or "structured output" in error


def kept(asked: Any) -> dict[str, Any]:
    sampling = asked.sampling
    return {"max_tokens": sampling.max_tokens, "stop": sampling.stop_token_ids, "grammar": sampling.grammar}


async def test_slow_grammar_delays_no_other_request(engine: Engine) -> None:
    names = [f"name {i}" for i in range(300)]
    slow = {"type": "array", "items": {"type": "string", "maxLength": 1000}, "maxItems": 1000}
    whole = {"type": "object", "properties": dict.fromkeys(names, slow), "required": names}
    heavy = request(1, max_tokens=3, stop=[EOS], grammar=grammar(json_form(whole), []))
    collector = Collector(engine)
    engine.submit([heavy])
    engine.submit([request(2)])
    longest = 0.0
    loop = asyncio.get_running_loop()

    async def watch() -> None:
        nonlocal longest
        while True:
            began = loop.time()
            await asyncio.sleep(0.01)
            longest = max(longest, loop.time() - began)

    watching = asyncio.create_task(watch())
    await eventually(lambda: collector.made(2) == 12)
    assert collector.made(1) == 0
    await collector.all_ended([heavy])
    watching.cancel()
    assert longest < 1.0
