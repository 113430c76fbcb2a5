"""The engines' log-probabilities of sampled tokens, as the trainer computes them: the ratio of a first step is 1."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from structlog.testing import capture_logs

torch = pytest.importorskip("torch")

from rlboost.services.rollout_worker.adapters.torch import engine as torch_engine_module  # noqa: E402 - needs torch
from rlboost.services.rollout_worker.adapters.torch.engine import TorchEngine, sample  # noqa: E402
from rlboost.services.rollout_worker.domain.parity_check import ParityCheckFailed  # noqa: E402
from rlboost.services.rollout_worker.generator import Generator  # noqa: E402
from rlboost.services.rollout_worker.ports import Engine  # noqa: E402
from rlboost.services.trainer.adapters.torch.policy import TorchPolicy  # noqa: E402
from rlboost.services.trainer.domain.canary_prompts import build_canary_prompts, build_reference  # noqa: E402
from rlboost.services.trainer.domain.loss.policy import job_loss  # noqa: E402
from rlboost.services.trainer.domain.plan import TrainingRow  # noqa: E402
from rlboost.services.trainer.ports.engine import PolicySettings  # noqa: E402
from rlboost.shared.job.algorithm import PRESETS  # noqa: E402
from tests.support import tiny_models, vllm_engines  # noqa: E402
from tests.support.engines import request, run  # noqa: E402
from tests.support.staged_weights import Staged  # noqa: E402
from tests.support.trainer_rig import spec  # noqa: E402
from tests.support.training_rows import training_row  # noqa: E402

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = vllm_engines.MARKS

GROUPS, SAMPLES = 3, 8
RATIO_PRESETS = sorted(set(PRESETS) - {"dpo", "distill"})
"""All but the one whose loss has no ratio."""
RAW = {"logprobs_mode": "raw_logprobs"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model for the trainer and both engines."""
    directory = tmp_path_factory.mktemp("model")
    tiny_models.make(vllm_engines.config()).save_pretrained(directory)
    return directory


def weights() -> Staged:
    return Staged(tiny_models.weights(tiny_models.make(vllm_engines.config())))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def torch_engine(folder: Path) -> AsyncIterator[Engine]:
    engine = TorchEngine(folder, slots=16)
    await engine.load_weights(0, weights())
    yield engine
    await engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def raw_vllm(folder: Path) -> AsyncIterator[Engine]:
    vllm_engines.require()
    engine = vllm_engines.build(vllm_engines.config(), slots=16, vllm_args=RAW)
    await engine.load_weights(0, weights())
    yield engine
    await engine.close()


async def sampled(engine: Engine, top_p: float, temperature: float = 1.0, **options: Any) -> list[TrainingRow]:
    """Return groups of training rows whose advantages are of both signs."""
    requests = [
        request(
            sample,
            prompt=[3 + sample // SAMPLES, 1, 4],
            max_tokens=4 + sample % 9,
            temperature=temperature,
            top_p=top_p,
            whole_logprobs=True,
            **options,
        )
        for sample in range(GROUPS * SAMPLES)
    ]
    rows = []
    for asked, made in zip(requests, await run(engine, requests), strict=True):
        assert not made.error
        rows.append(training_row(asked.prompt, made.tokens, made.logprobs, (-1.0) ** asked.sample))
    return rows


@cache
def trainer(folder: Path, temperature: float) -> TorchPolicy:
    policy = TorchPolicy(PolicySettings(optimizer=spec().optimizer, temperature=temperature), device="cpu")
    policy.load_hf(folder)
    return policy


def assert_first_step_is_on_policy(
    rows: list[TrainingRow], folder: Path, temperature: float = 1.0, **algorithm: Any
) -> None:
    job = spec(algorithm={"group_size": SAMPLES, **algorithm}, sampling={"temperature": temperature, "max_tokens": 16})
    policy = trainer(folder, temperature)
    sums = policy.accumulate([rows], job_loss(job))
    assert sums["ratio"] / sums["tokens"] == pytest.approx(1.0, abs=1e-4)
    assert sums["mismatch_kl"] / sums["tokens"] == pytest.approx(0.0, abs=1e-6)
    assert [sums.get(name, 0.0) for name in ("clipped_low", "clipped_high", "tis_capped", "rejected")] == [0.0] * 4
    assert policy.step(0.0) > 0.01, "the gradient's norm"


@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.7])
async def test_first_step_has_ratio_1_with_each_preset_and_top_p(
    torch_engine: Engine, folder: Path, top_p: float
) -> None:
    rows = await sampled(torch_engine, top_p)
    for preset in RATIO_PRESETS:
        assert_first_step_is_on_policy(rows, folder, name=preset)


OPTIONS: list[dict[str, Any]] = [{"top_k": 5}, {"min_p": 0.3}, {"min_tokens": 4, "stop": range(48)}]
"""Other limits of what is drawn."""


@pytest.mark.parametrize("options", OPTIONS)
async def test_first_step_has_ratio_1_with_other_limits(
    torch_engine: Engine, folder: Path, options: dict[str, Any]
) -> None:
    rows = await sampled(torch_engine, 1.0, 0.8, **options)
    assert_first_step_is_on_policy(rows, folder, 0.8, name="grpo")


@pytest.mark.parametrize("options", OPTIONS)
async def test_vllm_with_raw_logprobs_has_ratio_1_with_other_limits(
    raw_vllm: Engine, folder: Path, options: dict[str, Any]
) -> None:
    assert_first_step_is_on_policy(await sampled(raw_vllm, 1.0, **options), folder, name="grpo")


@pytest.mark.parametrize("temperature", [0.6, 1.3])
@pytest.mark.parametrize("old_logprobs", ["sampled", "recomputed"])
async def test_first_step_with_top_p_has_ratio_1_at_any_temperature(
    torch_engine: Engine, folder: Path, temperature: float, old_logprobs: str
) -> None:
    rows = await sampled(torch_engine, 0.8, temperature)
    assert_first_step_is_on_policy(rows, folder, temperature, name="grpo", old_logprobs=old_logprobs)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
async def test_documented_rejection_rejects_nothing_with_top_p(torch_engine: Engine, folder: Path, level: str) -> None:
    rejection = {"level": level, "threshold": 1.001, "threshold_lower": 0.999, "token_veto": 1.0e-4}
    assert_first_step_is_on_policy(await sampled(torch_engine, 0.95), folder, name="grpo", rollout_rs=rejection)


@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.7])
async def test_vllm_with_raw_logprobs_has_ratio_1_with_each_preset(
    raw_vllm: Engine, folder: Path, top_p: float
) -> None:
    rows = await sampled(raw_vllm, top_p)
    for preset in RATIO_PRESETS:
        assert_first_step_is_on_policy(rows, folder, name=preset)


async def test_vllm_fails_only_trained_samples_that_it_cannot_report(raw_vllm: Engine) -> None:
    changes: list[dict[str, Any]] = [
        {"temperature": 0.7, "whole_logprobs": True},
        {"temperature": 0.005, "whole_logprobs": True},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0.0, "whole_logprobs": True},
    ]
    made = await run(raw_vllm, [request(i, max_tokens=3, **change) for i, change in enumerate(changes)])
    refused = [one.error for one in made]
    assert "sampling.temperature is 0.7" in refused[0]
    assert "vllm samples at 0.01" in refused[1]
    assert refused[2:] == ["", ""], "of an evaluation, and greedy"


# --- the sampling check -----------------------------------------------------------------------------------------------


class Factory:
    """Builds an engine once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def prepare(self) -> None:
        """See `EngineFactory`."""

    def build(self, config_json: str, _tokenizer_json: str = "") -> Engine:
        return self._engine


def referenced(folder: Path, *, temperature: float = 1.0, top_p: float = 1.0) -> Staged:
    """Return weights whose parity reference is the trainer's."""
    canaries = build_canary_prompts(tiny_models.VOCABULARY, temperature=temperature, dtype="float32", top_p=top_p)
    rows = [[training_row(prompt, tokens, [0.0] * len(tokens)) for prompt, tokens in canaries.rows]]
    staged = weights()
    staged.contents = {name: name for name, _ in staged.tensors()}
    staged.parity_reference = build_reference(canaries, trainer(folder, temperature).logprobs(rows))
    return staged


async def load(engine: Engine, staged: Staged, suspects: str = "") -> list[str]:
    """Load weights as a worker does; return the checks that passed or were skipped."""
    with capture_logs() as logs:
        await Generator(Factory(engine), suspects=suspects).replace_weights(staged, 1, lambda: None)
    names = [line["event"] for line in logs if line["event"].startswith(("parity_check", "sampling_check"))]
    await engine.resume()
    return names


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.0, 0.7), (1.7, 0.95)])
async def test_torch_engine_passes_the_sampling_check(
    torch_engine: Engine, folder: Path, temperature: float, top_p: float
) -> None:
    staged = referenced(folder, temperature=temperature, top_p=top_p)
    assert await load(torch_engine, staged) == ["parity_check_passed", "sampling_check_passed"]


@pytest.mark.parametrize("top_p", [1.0, 0.7])
async def test_vllm_passes_the_sampling_check(raw_vllm: Engine, folder: Path, top_p: float) -> None:
    assert await load(raw_vllm, referenced(folder, top_p=top_p)) == ["parity_check_passed", "sampling_check_passed"]


WRONG_SAMPLERS: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "log-probabilities within the nucleus": lambda drawn, _: (drawn[0], drawn[1] + 0.3),
    "log-probabilities of another distribution at times": lambda drawn, _: (
        drawn[0],
        torch.where(drawn[0] % 9 == 0, 0.0, drawn[1]),
    ),
    "no number at times": lambda drawn, _: (drawn[0], torch.where(drawn[0] % 9 == 0, torch.nan, drawn[1])),
    "only the ten most likely tokens": lambda _, logits: top_k(logits, 10),
    "always the most likely token": lambda _, logits: top_k(logits, 1),
}


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Draw from the k most likely tokens, and report log-probabilities of the whole distribution."""
    logprobs = logits.float().log_softmax(-1)
    likely = logprobs.topk(k)
    tokens = likely.indices.gather(1, torch.multinomial(likely.values.exp(), 1))
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]


@pytest.mark.parametrize("wrong", WRONG_SAMPLERS.values(), ids=WRONG_SAMPLERS)
async def test_engine_that_samples_wrongly_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Any, Any], tuple[Any, Any]]
) -> None:

    def sample_wrongly(logits: Tensor, *settings: Any, **limits: Any) -> tuple[Tensor, Tensor]:
        return wrong(sample(logits, *settings, **limits), logits)

    monkeypatch.setattr(torch_engine_module, "sample", sample_wrongly)
    engine = TorchEngine(folder, slots=16)
    with pytest.raises(ParityCheckFailed, match=r"version 1 of job .*: .*Remove OPTION"):
        await load(engine, referenced(folder), suspects="Remove OPTION.")
    await engine.close()


@pytest.mark.long
async def test_vllm_with_a_logits_processor_is_refused_at_load(folder: Path) -> None:
    """Its arguments are refused before; other ways to install one are not."""
    vllm_engines.require()
    arguments = {"logits_processors": ["tests.support.logits_processors:FewTokens"]}
    for more in ({}, RAW):
        engine = vllm_engines.build(vllm_engines.config(), slots=16, vllm_args={**arguments, **more})
        with pytest.raises(ParityCheckFailed):
            await load(engine, referenced(folder))
        await engine.close()
