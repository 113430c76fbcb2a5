"""Router replay (R3): experts that the torch engine selects, replayed by the torch backend, FSDP2 and megatron-core."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlboost.services.rollout_worker.adapters.torch.engine import TorchEngine
from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.domain.loss.function import routing_metrics
from rlboost.services.trainer.domain.plan import TrainingRow, select
from rlboost.services.trainer.ports.engine import PolicySettings
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.training import LoraSpec, OptimizerSpec
from rlboost.shared.model.experts import require_replayable
from rlboost.shared.wire import RoutedShape, floats, ints, pack
from tests.support import rank_policies, tiny_models
from tests.support.engines import Collected, request, run
from tests.support.losses import clipped_loss
from tests.support.model_folder import write_model
from tests.support.staged_weights import Staged
from tests.support.training_rows import rows, training_row, with_loss_mask

pytestmark = pytest.mark.timeout(600)

SHAPE = RoutedShape(layers=3, experts_per_token=2, experts=8)
OPTIMIZER = OptimizerSpec(lr=1e-3)
LOSS = clipped_loss(0.2, 0.28)
MEGATRON: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel": 2, "sequence_parallel": True},
    "pp2": {"pipeline_parallel": 2, "activation_checkpointing": True},
    "cp2": {"context_parallel": 2},
    "ep2": {"data_parallel": 2, "expert_parallel": 2, "activation_checkpointing": True},
}


def trained(model: Path, *, dtype: str = "float32", replayed: RoutedShape = SHAPE, **settings: Any) -> TorchPolicy:
    policy = TorchPolicy(PolicySettings(optimizer=OPTIMIZER, dtype=dtype, replayed=replayed, **settings), device="cpu")
    policy.load_hf(model)
    return policy


def with_experts(batch: Sequence[TrainingRow], seed: int = 0, layers: int = SHAPE.layers) -> list[TrainingRow]:
    """Give each row but the first random experts for every trained token."""
    rng = random.Random(seed)

    def column(row: TrainingRow) -> bytes:
        experts = [rng.sample(range(8), 2) for _ in range(row.n_loss_tokens * layers)]
        return pack(np.array(experts).ravel(), np.dtype("u1"))

    return [batch[0], *(replace(row, routed_experts=column(row)) for row in batch[1:])]


def plain_logprobs(model: Any, row: TrainingRow) -> list[float]:
    """Return what transformers computes if the routers' top-k is replaced at the positions before trained tokens."""
    prompt, tokens = ints(row.prompt), ints(row.completion)
    if not row.routed_experts:
        return tiny_models.logprobs(model, prompt, tokens)
    layers = [layer.mlp for layer in model.model.layers]
    first = len(prompt) - 1
    recorded = SHAPE.unpack(row.routed_experts)
    handles = []
    for number, layer in enumerate(layers):
        if not hasattr(layer, "gate"):
            continue

        def replace_output(_gate: Any, _inputs: Any, output: Any, number: int = number) -> Any:
            logits, weights, indices = output
            weights, indices = weights.clone(), indices.clone()
            for at, experts in enumerate(recorded[:, number].tolist()):
                probabilities = torch.softmax(logits[first + at], -1)[experts]
                indices[first + at] = torch.tensor(experts)
                weights[first + at] = probabilities / probabilities.sum()
            return logits, weights, indices

        handles.append(layer.gate.register_forward_hook(replace_output))
    found = tiny_models.logprobs(model, prompt, tokens)
    for handle in handles:
        handle.remove()
    return found


def test_replay_matches_an_independent_forward_pass(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3-moe")
    batch = with_experts(rows(5))
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    for row, column in zip(batch, trained(tmp_path).logprobs([batch]), strict=True):
        assert floats(column) == pytest.approx(plain_logprobs(model, row), abs=2e-5)


def test_replay_with_recomputed_layers_gives_the_same_gradients(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3-moe")
    batches = [with_experts(rows(4)), with_experts(with_loss_mask(rows(4, seed=3)), seed=1)]
    norms = []
    for checkpointing in (False, True):
        policy = trained(tmp_path, activation_checkpointing=checkpointing)
        policy.accumulate(batches, LOSS)
        norms.append(policy.step(1e-3))
    without = trained(tmp_path)
    without.accumulate([[replace(row, routed_experts=b"") for row in batch] for batch in batches], LOSS)
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    assert without.step(1e-3) != pytest.approx(norms[0], rel=1e-3)


@pytest.mark.parametrize("layout", [pytest.param("data_parallel", marks=pytest.mark.long), "context_parallel"])
def test_replay_in_ranks_matches_one_process(tmp_path: Path, layout: str) -> None:
    write_model(tmp_path, "qwen3-moe")
    batches = [with_experts(rows(4)), with_experts(with_loss_mask(rows(4, seed=3)), seed=1)]
    one, ranks = trained(tmp_path), cast("dict[str, Any]", {layout: 2})
    with rank_policies.policy(OPTIMIZER, backend="torch", replayed=SHAPE, **ranks) as many:
        many.load_hf(tmp_path)
        expected, found = (b"".join(policy.logprobs(batches)) for policy in (one, many))
        np.testing.assert_allclose(floats(found), floats(expected), rtol=0, atol=1e-5)
        for policy in (one, many):
            policy.accumulate(batches, LOSS)
        assert many.step(1e-3) == pytest.approx(one.step(1e-3), rel=1e-4)


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=() if layout == "cp2" else pytest.mark.long) for layout in MEGATRON]
)
def test_replay_by_megatron_matches_one_process(tmp_path: Path, layout: str) -> None:
    """With a load-balancing loss, and a reference model that replays the same experts."""
    model = rank_policies.write(tmp_path / "model", "qwen3-moe")
    shape = SHAPE._replace(layers=4)
    batches = [with_experts(rows(7), layers=4), with_experts(with_loss_mask(rows(4, seed=3)), seed=1, layers=4)]
    # Sequence parallelism routes a token of padding, which the load-balancing loss counts. Of context-parallel ranks
    # each has a loss of its own.
    is_balanced = layout in ("pp2", "ep2")
    coefficient = 0.1 if is_balanced else 0.0
    settings: dict[str, Any] = {"replayed": shape, "reference": True, "router_aux_loss_coef": coefficient}
    one = trained(model, **settings)
    with rank_policies.policy(OPTIMIZER, **settings, **MEGATRON[layout]) as many:
        many.load_hf(model)
        # Each micro-batch of a rank has its own load-balancing loss.
        parts = select(list(itertools.chain(*batches)), list(itertools.chain(*many._split(batches))))
        for step in range(2):
            for name in ("logprobs", "reference_logprobs"):
                expected, found = (b"".join(getattr(policy, name)(batches)) for policy in (one, many))
                np.testing.assert_allclose(floats(found), floats(expected), rtol=0, atol=1e-5 * 10**step)
            expected_sums, sums = one.accumulate(parts, LOSS), many.accumulate(batches, LOSS)
            assert sums["loss"] == pytest.approx(expected_sums["loss"], rel=1e-4, abs=1e-4)
            if is_balanced:
                assert routing_metrics(sums) == pytest.approx(routing_metrics(expected_sums), rel=1e-4)
            assert many.step(1e-3) == pytest.approx(one.step(1e-3), rel=1e-4)


@pytest.mark.parametrize("lora", [None, LoraSpec(targets=["q_proj"])], ids=["full", "lora"])
def test_reference_replays_the_experts_of_the_policy(tmp_path: Path, lora: LoraSpec | None) -> None:
    """Else the difference of two routings would count as a KL divergence of equal weights."""
    write_model(tmp_path, "qwen3-moe")
    batch = with_experts(rows(4))
    policy = trained(tmp_path, reference=True, lora=lora)
    assert policy.reference_logprobs([batch]) == policy.logprobs([batch])


def test_reference_in_ranks_replays_the_experts_of_the_policy(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen3-moe")
    batch = with_experts(rows(4))
    with rank_policies.policy(OPTIMIZER, backend="torch", replayed=SHAPE, reference=True, data_parallel=2) as many:
        many.load_hf(tmp_path)
        assert many.reference_logprobs([batch]) == many.logprobs([batch])


async def generated(model: Any, folder: Path, requests: list[Any], dtype: Any = "float32") -> list[Collected]:
    engine = TorchEngine(tiny_models.save_config(model.config, folder), slots=8, dtype=dtype)
    await engine.load_weights(0, Staged((n, t.to(getattr(torch, dtype))) for n, t in tiny_models.weights(model)))
    made = await run(engine, requests)
    await engine.close()
    return made


def row_of(asked: Any, made: Collected, advantage: float = 1.0) -> TrainingRow:
    logprobs = [*([-1.0] * len(asked.tokens)), *made.logprobs]
    row = training_row(asked.prompt, [*asked.tokens, *made.tokens], logprobs, advantage)
    return replace(row, routed_experts=made.routed_experts)


async def test_engine_returns_the_experts_that_the_model_selects(tmp_path: Path) -> None:
    """More requests than slots, of different lengths: they join, end and move, and share prompts."""
    model = tiny_models.make(tiny_models.CONFIGS["qwen3-moe"])
    lengths = [3, 30, 11, 18, 40, 7, 25, 16]
    requests = [
        request(i, prompt=[5, 6, 7, 8 + i // 2], max_tokens=n, routed_experts=SHAPE) for i, n in enumerate(lengths)
    ]
    # One continues the completion of another worker.
    requests.append(request(20, prompt=[5, 6, 7, 8], tokens=range(30, 45), max_tokens=25, routed_experts=SHAPE))
    for asked, made in zip(requests, await generated(model, tmp_path, requests), strict=True):
        tokens = torch.tensor([[*asked.prompt, *asked.tokens, *made.tokens]])
        routers = model(input_ids=tokens, output_router_logits=True).router_logits
        found = SHAPE.unpack(made.routed_experts)
        assert SHAPE.is_valid(made.routed_experts, asked.sampling.max_tokens)
        for layer, logits in zip((1, 2), routers, strict=True):
            expected = logits.topk(2).indices[len(asked.prompt) - 1 : -1].sort().values
            np.testing.assert_array_equal(np.sort(found[:, layer]), expected.numpy())


async def test_requests_without_replay_get_no_experts(tmp_path: Path) -> None:
    model = tiny_models.make(tiny_models.CONFIGS["qwen3-moe"])
    made = await generated(model, tmp_path, [request(1), request(2, routed_experts=SHAPE), request(3)])
    assert [bool(one.routed_experts) for one in made] == [False, True, False]


async def test_requests_of_another_shape_end_with_an_error(tmp_path: Path) -> None:
    model = tiny_models.make(tiny_models.CONFIGS["qwen3-moe"])
    dense = tiny_models.make(tiny_models.CONFIGS["qwen3-tied"])
    (wrong,) = await generated(model, tmp_path / "moe", [request(1, routed_experts=(4, 2, 8))])
    (none,) = await generated(dense, tmp_path / "dense", [request(1, routed_experts=SHAPE)])
    assert wrong.error == "the routed experts of the model are (3, 2, 8), and (4, 2, 8) are requested"
    assert "this engine does not return routed experts: start vllm workers with" in none.error


async def test_replay_lowers_the_mismatch_of_an_engine_in_bfloat16(tmp_path: Path) -> None:
    """The engine computes with rounded weights, so that routers of near ties select other experts."""
    model = tiny_models.make(tiny_models.CONFIGS["qwen3-moe"])
    model.save_pretrained(tmp_path / "model")
    requests = [request(i, prompt=[3 + i], max_tokens=100, routed_experts=SHAPE) for i in range(8)]
    made = await generated(model, tmp_path / "engine", requests, "bfloat16")
    batch = [row_of(asked, one) for asked, one in zip(requests, made, strict=True)]
    found = {}
    for name, columns in {"replay": batch, "none": [replace(row, routed_experts=b"") for row in batch]}.items():
        sums = trained(tmp_path / "model", dtype="bfloat16").accumulate([columns], LOSS)
        found[name] = sums["mismatch_kl"] / sums["tokens"]
    assert found["replay"] < 0.5 * found["none"]


async def learned(folder: Path, *, replays: bool, steps: int = 10) -> tuple[list[float], float]:
    """Return each step's mean reward, and the mean `mismatch_kl`, of a mixture trained in bfloat16.

    The reward is the fraction of tokens in the first half of the vocabulary; groups are of eight.
    """
    model = tiny_models.make(tiny_models.CONFIGS["qwen3-moe"])
    model.save_pretrained(folder / "model")
    policy = trained(folder / "model", dtype="bfloat16")
    engine = TorchEngine(tiny_models.save_config(model.config, folder), slots=32, dtype="bfloat16")
    rewards, sums = [], []
    for step in range(steps):
        weights = tiny_models.weights(policy.rank.module)
        await engine.load_weights(step, Staged((name, tensor.bfloat16()) for name, tensor in weights))
        ids = range(32 * step, 32 * step + 32)
        requests = [request(i, prompt=[3 + i // 8 % 4], max_tokens=24, routed_experts=SHAPE) for i in ids]
        made = await run(engine, requests)
        scores = np.array([np.mean(np.array(one.tokens) < tiny_models.VOCABULARY // 2) for one in made]).reshape(-1, 8)
        advantages = (scores - scores.mean(1, keepdims=True)) / (scores.std(1, keepdims=True) + 1e-4)
        batch = [
            row_of(asked, one, float(advantage))
            for asked, one, advantage in zip(requests, made, advantages.ravel(), strict=True)
        ]
        sums.append(policy.accumulate([batch if replays else [replace(r, routed_experts=b"") for r in batch]], LOSS))
        policy.step(5e-3)
        rewards.append(float(scores.mean()))
    await engine.close()
    return rewards, sum(s["mismatch_kl"] for s in sums) / sum(s["tokens"] for s in sums)


@pytest.mark.long
async def test_tiny_mixture_learns_and_replay_lowers_the_mismatch(tmp_path: Path) -> None:
    replayed, mismatch = await learned(tmp_path / "replay", replays=True)
    _, mismatch_without = await learned(tmp_path / "none", replays=False)
    assert np.mean(replayed[-3:]) > np.mean(replayed[:3]) + 0.1
    assert mismatch < 0.5 * mismatch_without


def test_jobs_without_a_supported_mixture_are_rejected(tmp_path: Path) -> None:
    assert require_replayable(write_model(tmp_path / "moe", "qwen3-moe"), 100) == SHAPE
    with pytest.raises(ConfigError, match=r"trainer\.router_replay is for mixtures of experts"):
        require_replayable(write_model(tmp_path / "dense", "qwen3-tied"), 100)
    with pytest.raises(ConfigError, match=r"may have 67,108,866 bytes, 6 per token"):
        require_replayable(tmp_path / "moe", 11_184_811)
    config = tmp_path / "moe/config.json"
    config.write_text(config.read_text().replace("num_experts_per_tok", "other"))
    with pytest.raises(ConfigError, match=r"config\.json of model type qwen3_moe has no num_experts_per_tok"):
        require_replayable(tmp_path / "moe", 100)
