"""Prompts with images in both engines, against transformers' own forward pass. Real vLLM on a CPU."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

torch = pytest.importorskip("torch")

from rlboost.services.rollout_worker.adapters.tokenizer import tokenizer_for_grammars  # noqa: E402
from rlboost.services.rollout_worker.adapters.torch.engine import TorchEngine  # noqa: E402
from rlboost.services.rollout_worker.ports import Engine  # noqa: E402
from rlboost.services.trainer.adapters.torch.policy import TorchPolicy  # noqa: E402
from rlboost.services.trainer.adapters.torch.ranks import Layout  # noqa: E402
from rlboost.services.trainer.domain.plan import SequenceRow  # noqa: E402
from rlboost.services.trainer.ports.engine import PolicySettings  # noqa: E402
from rlboost.shared.data.vision import FAMILIES, VisionConfig, vision_of  # noqa: E402
from rlboost.shared.job.training import OptimizerSpec  # noqa: E402
from rlboost.shared.model.folder import read_config  # noqa: E402
from rlboost.shared.wire import F32, I32, pack, unpack  # noqa: E402
from tests.support import tiny_models, tiny_vision, vllm_engines  # noqa: E402
from tests.support.engines import Collector, request  # noqa: E402
from tests.support.engines import run as run_texts  # noqa: E402
from tests.support.eventually import eventually  # noqa: E402
from tests.support.model_folder import write_character_tokenizer  # noqa: E402
from tests.support.staged_weights import Staged  # noqa: E402
from tests.support.tiny_vision import (  # noqa: E402
    IMAGE,
    NO_IMAGE,
    SHORT,
    Shown,
    check_reasons_without_images,
    picture,
    run,
)

# The tests share one vLLM, which belongs to an event loop.
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),  # vLLM leaves its own open
]

HEAD_DIM = 32
Make = Callable[..., Any]


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision.write(tmp_path_factory.mktemp("vision") / "model", family=family, head_dim=HEAD_DIM)


@pytest.fixture(scope="module")
def vision(folder: Path) -> VisionConfig:
    found = vision_of(read_config(folder))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def make(family: str) -> Make:
    return partial(tiny_vision.make, family=family, head_dim=HEAD_DIM)


@pytest_asyncio.fixture(loop_scope="module", params=["torch", "vllm"])
async def engine(
    request: pytest.FixtureRequest,
    family: str,
    folder: Path,
    make: Make,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Engine]:
    engine: Engine
    if request.param == "torch":
        engine = TorchEngine(folder, slots=6)
    else:
        vllm_engines.require()
        tokenizer = write_character_tokenizer(tmp_path_factory.mktemp("tokenizer")) / "tokenizer.json"
        engine = await vllm_engines.start(
            tiny_vision.config(family, HEAD_DIM),
            slots=6,
            tokenizer_json=tokenizer_for_grammars(tokenizer.read_text()),
            max_adapters=2,
            vllm_args={"max_num_batched_tokens": 24},  # parts of a prompt are computed apart, and it keeps 24 images
        )
    await engine.load_weights(0, Staged(tiny_models.weights(make())))
    yield engine
    await engine.close()


def expected(engine: Engine, shown: Shown, model: Any, tokens: Sequence[int]) -> list[float]:
    """Return the log-probabilities of a completion with `NO_IMAGE`, which vLLM takes into account."""
    return shown.logprobs(model, tokens, among_others=not isinstance(engine, TorchEngine))


async def test_samples_see_their_own_images(engine: Engine, folder: Path, vision: VisionConfig, make: Make) -> None:
    """Prompts with the same tokens and other images share no keys and values; those with the same images do."""
    model = make()
    shown = [
        Shown(folder, vision, SHORT, picture("red")),
        Shown(folder, vision, SHORT, picture("blue")),
        Shown(folder, vision, [*SHORT[:5], *SHORT], picture("green"), picture("white", size=(16, 24))),
    ]
    asked = [(shown[i % 3], shown[i % 3].request(i, max_tokens=8 + i, **NO_IMAGE)) for i in range(9)]
    plain = request(20, prompt=[2, 6, 8, 9, 1, 2, 7], max_tokens=20)
    engine.submit([plain])
    made = await run(engine, asked)
    for (prompt, _), one in zip(asked, made, strict=True):
        assert not one.error
        assert one.logprobs == pytest.approx(expected(engine, prompt, model, one.tokens), abs=1e-4)
    assert expected(engine, shown[0], model, made[0].tokens) != pytest.approx(
        expected(engine, shown[1], model, made[0].tokens), abs=0.1
    )
    assert engine.adapters is None or isinstance(engine, TorchEngine), "vLLM workers merge them"


async def test_more_images_than_an_engine_keeps(engine: Engine, folder: Path, vision: VisionConfig, make: Make) -> None:
    shown = [Shown(folder, vision, SHORT, picture("red", seed)) for seed in range(40)]
    asked = [(shown[i % 40], shown[i % 40].request(i, **NO_IMAGE)) for i in range(80)]
    for (prompt, _), one in zip(asked, await run(engine, asked), strict=True):
        assert one.logprobs == pytest.approx(expected(engine, prompt, make(), one.tokens), abs=1e-4)


async def test_given_completion_is_scored_with_its_images(
    engine: Engine, folder: Path, vision: VisionConfig, make: Make
) -> None:
    tokens = [11, 12, 7, 8, 1]
    shown = [Shown(folder, vision, SHORT, picture(color)) for color in ("red", "blue")]
    asked = [(one, one.request(i, max_tokens=5, forced=pack(tokens, I32))) for i, one in enumerate(shown)]
    for (prompt, _), one in zip(asked, await run(engine, asked), strict=True):
        assert one.tokens == tokens
        assert one.logprobs == pytest.approx(prompt.logprobs(make(), tokens), abs=1e-4)


async def test_resumed_sample_is_prefilled_with_its_images(engine: Engine, folder: Path, vision: VisionConfig) -> None:
    shown = Shown(folder, vision, SHORT, picture("green"))
    # vLLM's random generators begin anew.
    temperature = 1.0 if isinstance(engine, TorchEngine) else 0.0
    whole = shown.request(1, max_tokens=20, temperature=temperature)
    (first,) = await run(engine, [(shown, whole)])
    resumed = replace(whole, attempt=2, tokens=first.tokens[:7])
    other = Shown(folder, vision, SHORT, picture("white"))
    again, _ = await run(engine, [(shown, resumed), (other, other.request(2, max_tokens=20))])
    assert again.tokens == first.tokens[7:]
    assert again.logprobs == pytest.approx(first.logprobs[7:], abs=1e-4)


@pytest.mark.parametrize("keep_kv", [False, True])
async def test_new_weights_see_images_anew(
    engine: Engine, folder: Path, vision: VisionConfig, make: Make, *, keep_kv: bool
) -> None:
    """Also where a sample that runs meanwhile keeps what it has computed of the same image."""
    shown, other = Shown(folder, vision, SHORT, picture("red")), make(seed=3)
    running = shown.request(1, max_tokens=200, **NO_IMAGE)
    collector = Collector(engine)
    engine.submit([running])
    engine.set_images(running.key, shown.data)
    await eventually(lambda: collector.made(1) > 3, within_s=60)
    await engine.load_weights(1, Staged(tiny_models.weights(other)), keep_kv=keep_kv)
    later = shown.request(2, **NO_IMAGE)
    engine.submit([later])
    engine.set_images(later.key, shown.data)
    before, made = await collector.all_ended([running, later])
    assert made.logprobs == pytest.approx(expected(engine, shown, other, made.tokens), abs=1e-4)
    n_old = before.versions.count(0)
    assert 0 < n_old < 200
    assert before.logprobs[:n_old] == pytest.approx(expected(engine, shown, make(), before.tokens)[:n_old], abs=1e-4)
    of_new = pytest.approx(expected(engine, shown, other, before.tokens)[n_old:], abs=1e-4)
    assert (before.logprobs[n_old:] == of_new) is not keep_kv


@pytest.mark.parametrize("keep_kv", [False, True])
async def test_suspended_sample_continues_with_its_images(
    engine: Engine, folder: Path, vision: VisionConfig, make: Make, *, keep_kv: bool
) -> None:
    shown = [Shown(folder, vision, SHORT, picture(color)) for color in ("red", "blue")]
    asked = [one.request(i, max_tokens=200, **NO_IMAGE) for i, one in enumerate(shown)]
    collector = Collector(engine)
    engine.submit(asked)
    assert not engine.stats().can_generate
    engine.set_images(asked[0].key, shown[0].data)
    assert engine.stats().can_generate
    await eventually(lambda: collector.made(0) > 3, within_s=60)
    await engine.suspend(keep_kv=keep_kv)
    engine.set_images(asked[1].key, shown[1].data)
    assert collector.made(0) < 200
    await engine.resume()
    for prompt, one in zip(shown, await collector.all_ended(asked), strict=True):
        assert one.logprobs == pytest.approx(expected(engine, prompt, make(), one.tokens), abs=1e-4)


async def test_request_without_its_images_ends_with_the_reason(
    engine: Engine, folder: Path, vision: VisionConfig
) -> None:
    await check_reasons_without_images(engine, folder, vision)


@pytest.mark.parametrize("argument", [{"language_model_only": True}, {"limit_mm_per_prompt": {"image": 0}}], ids=str)
async def test_vllm_without_its_tower_takes_no_images(
    family: str, folder: Path, vision: VisionConfig, make: Make, argument: dict[str, Any]
) -> None:
    vllm_engines.require()
    vllm_engines.end_shared()
    engine = vllm_engines.build(tiny_vision.config(family, HEAD_DIM), slots=2, vllm_args=argument)
    await engine.load_weights(0, Staged(tiny_models.weights(make())))
    assert "images" not in engine.sampling_options
    shown = Shown(folder, vision, SHORT, picture("red"))
    refused, made = await run_texts(engine, [shown.request(1), request(2, prompt=[2, 6, 8, 9])])
    await engine.close()
    assert "without language_model_only and limit_mm_per_prompt" in refused.error
    logits = make()(input_ids=torch.tensor([[2, 6, 8, 9, *made.tokens]])).logits[0, 3:-1]
    found = torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(made.tokens)[:, None])[:, 0]
    assert made.logprobs == pytest.approx(found.tolist(), abs=1e-4)


async def test_engine_and_training_have_the_same_log_probabilities(
    engine: Engine, folder: Path, vision: VisionConfig, tmp_path: Path
) -> None:
    """Also of samples that resume after the token of an image that the model has written, which shows none."""
    policy = TorchPolicy(
        PolicySettings(optimizer=OptimizerSpec(lr=1e-2), images=str(tmp_path)),
        Layout(1, 1, 1, sequence_parallel=False, distributed_optimizer=False),
        device="cpu",
    )
    policy.load_hf(folder)
    shown = [Shown(folder, vision, SHORT, picture(color)) for color in ("red", "blue")]
    asked = [(shown[i % 2], shown[i % 2].request(i, max_tokens=20, tokens=[11, IMAGE, 12][:i])) for i in range(8)]
    made = await run(engine, asked)
    rows = []
    for (one, resumed), result in zip(asked, made, strict=True):
        for (digest, _), data in zip(one.images, one.data, strict=True):
            (tmp_path / digest).write_bytes(data)
        digests = [digest for digest, _ in one.images]
        rows.append(SequenceRow(pack(one.ids, I32), pack(resumed.tokens + result.tokens, I32), images=digests))
    for result, column in zip(made, policy.logprobs([rows]), strict=True):
        assert result.logprobs == pytest.approx(unpack(column, F32)[result.offset :].tolist(), abs=1e-4)
