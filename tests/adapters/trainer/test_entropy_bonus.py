"""The entropy bonus on real models: against autograd on plain transformers, and several ranks against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.domain.loss.policy import PolicyLoss
from rlboost.services.trainer.ports.engine import PolicySettings
from rlboost.shared.job.algorithm import CriticSpec, RejectionSpec
from rlboost.shared.job.training import LoraSpec, OptimizerSpec
from rlboost.shared.wire import floats, ints
from tests.support import rank_policies
from tests.support.policy_comparison import assert_trained_equally, gradients, values
from tests.support.training_rows import rows, taught, with_loss_mask

pytestmark = pytest.mark.timeout(300)

COEFFICIENT, TEMPERATURE, RATE = 0.3, 0.8, 1e-3
OPTIMIZER = OptimizerSpec(lr=RATE)
LOSS = PolicyLoss(aggregation="sequence_mean", entropy_coef=COEFFICIENT)
BATCHES = [taught(6, seed=1), taught(3, seed=2), taught(1, seed=3)]
"""The last has a row for one rank only."""


def policy(model: Path, **settings: Any) -> TorchPolicy:
    made = TorchPolicy(
        PolicySettings(optimizer=OPTIMIZER, temperature=TEMPERATURE, **{"entropies": True, **settings}), device="cpu"
    )
    made.load_hf(model)
    return made


@pytest.mark.parametrize("max_logits", [1 << 27, 96 * 5], ids=["whole", "in chunks"])
def test_gradient_is_that_of_autograd(tmp_path: Path, max_logits: int) -> None:
    folder = rank_policies.write(tmp_path / "model", "qwen3")
    batch = [*rows(4, seed=5), *with_loss_mask(rows(2, seed=6))]
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    total = torch.zeros(())
    entropy = 0.0
    for row in batch:
        prompt, tokens = ints(row.prompt), ints(row.completion)
        logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0][len(prompt) - 1 : -1] / TEMPERATURE
        trained = torch.tensor([*row.loss_mask] or [1] * len(tokens), dtype=torch.bool)
        spread = torch.distributions.Categorical(logits=logits[trained])
        ratio = (spread.log_prob(torch.tensor(tokens)[trained]) - torch.tensor(floats(row.sampled))).exp()
        total = total - (ratio * torch.tensor(floats(row.advantages)) + COEFFICIENT * spread.entropy()).mean()
        entropy += spread.entropy().sum().item()
    total.backward()
    ours = policy(folder, max_logits=max_logits)
    sums = ours.accumulate([batch], LOSS)
    assert sums["policy_entropy"] == pytest.approx(entropy, rel=1e-5)
    assert sums["loss"] == pytest.approx(total.item(), rel=1e-5)
    found = gradients(ours)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_rejected_tokens_have_no_bonus(tmp_path: Path) -> None:
    ours = policy(rank_policies.write(tmp_path / "model", "qwen3"))
    loss = PolicyLoss(entropy_coef=COEFFICIENT, rollout_rs=RejectionSpec(level="token", threshold=1 + 1e-9))
    sums = ours.accumulate([rows()], loss)
    assert (sums["rejected"], sums["loss"]) == (sums["tokens"], 0.0)
    assert ours.step(RATE) == 0.0


def test_passes_without_gradients_have_no_entropies(tmp_path: Path) -> None:
    folder = rank_policies.write(tmp_path / "model", "qwen3")
    assert policy(folder).logprobs(BATCHES) == policy(folder, entropies=False).logprobs(BATCHES)


@pytest.mark.parametrize(
    ("family", "layout", "settings"),
    [
        ("qwen3", {"backend": "torch", "data_parallel": 2}, {"critic": CriticSpec()}),
        ("qwen3", {"backend": "torch", "context_parallel": 2}, {"lora": LoraSpec(rank=3)}),
        ("llama", {"tensor_parallel": 2, "sequence_parallel": True}, {}),
        ("qwen3", {"pipeline_parallel": 2}, {}),
        ("qwen3", {"context_parallel": 2}, {}),
    ],
    ids=["fsdp2", "cp2", "megatron tp2", "megatron pp2", "megatron cp2"],
)
def test_ranks_train_as_one_process(
    tmp_path: Path, family: str, layout: dict[str, Any], settings: dict[str, Any]
) -> None:
    """97 tokens, the vocabulary of `llama`, are padded on two ranks."""
    model = rank_policies.write(tmp_path / "model", family)
    one = policy(model, **settings)
    given = {"temperature": TEMPERATURE, "entropies": True, **settings, **layout}
    with rank_policies.policy(OPTIMIZER, **given) as many:
        many.load_hf(model)
        for _ in range(2):
            sums, found = one.accumulate(BATCHES, LOSS), many.accumulate(BATCHES, LOSS)
            for name in ("loss", "policy_entropy", "tokens"):
                assert found[name] == pytest.approx(sums[name], rel=1e-5)
            assert many.step(RATE) == pytest.approx(one.step(RATE), rel=1e-5)
        assert_trained_equally(values(many), values(one))
