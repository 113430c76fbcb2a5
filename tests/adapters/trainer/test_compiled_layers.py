"""Layers compiled by torch.compile, compared with the same policy without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.ports.engine import PolicyEngine, PolicySettings
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.algorithm import CriticSpec
from rlboost.shared.job.training import OptimizerSpec
from rlboost.shared.wire import F32, unpack
from tests.support import rank_policies
from tests.support.jobs import job
from tests.support.losses import clipped_loss
from tests.support.model_folder import write_model
from tests.support.training_rows import rows, taught

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:::torch"),  # of the compiler's own code
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

OPTIMIZER = OptimizerSpec(lr=1e-2)
LOSS = clipped_loss(0.2, 0.28)


@pytest.fixture(autouse=True)
def compilation_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what a vLLM engine on the CPU sets in its process, which may be this one."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)


def torch_policy(model: Path, *, compiled: bool, **settings: Any) -> TorchPolicy:
    policy = TorchPolicy(
        PolicySettings(optimizer=OPTIMIZER, temperature=0.8, compile=compiled, **settings), device="cpu"
    )
    policy.load_hf(model)
    return policy


def steps(policy: PolicyEngine) -> list[float]:
    """Return log-probabilities, losses and gradient norms of two steps with different numbers of rows."""
    found: list[float] = []
    for seed in range(2):
        batch = taught(seed=seed)
        found += [policy.accumulate([batch[:3], batch[3:]], LOSS)["loss"], policy.step(1e-2)]
        found += np.concatenate([unpack(column, F32) for column in policy.logprobs([rows(2 + seed)])]).tolist()
    return found


@pytest.mark.long
def test_compiled_layers_train_as_others(tmp_path: Path) -> None:
    settings = {"critic": CriticSpec(lr=5e-3), "reference": True, "activation_checkpointing": True}
    model = write_model(tmp_path, "qwen3-tied")
    expected = steps(torch_policy(model, compiled=False, **settings))
    policy = torch_policy(model, compiled=True, **settings)
    assert steps(policy) == pytest.approx(expected, rel=1e-3, abs=1e-4)
    n_graphs = counters["stats"]["unique_graphs"]
    steps(policy)
    policy.logprobs([rows(7, seed=5)])
    assert counters["stats"]["unique_graphs"] == n_graphs > 1


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [{"data_parallel": 2, "activation_checkpointing": True}, {"context_parallel": 2}],
    ids=["fsdp2", "context"],
)
def test_compiled_layers_of_ranks_train_as_one_process(layout: dict[str, Any], tmp_path: Path) -> None:
    model = rank_policies.write(tmp_path / "qwen3", "qwen3")
    expected = steps(torch_policy(model, compiled=False))
    with rank_policies.policy(OPTIMIZER, temperature=0.8, backend="torch", compile=True, **layout) as policy:
        policy.load_hf(model)
        assert steps(policy) == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_models_that_cannot_be_compiled_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^trainer\.compile: not supported for Qwen3MoeForCausalLM, whose layers"):
        torch_policy(write_model(tmp_path, "qwen3-moe"), compiled=True)


def test_machine_without_a_compiler_is_rejected(tmp_path: Path) -> None:
    model = write_model(tmp_path, "qwen3-tied")
    torch.compiler.reset()
    with (
        inductor_config.patch({"cpp.cxx": ("/no/such/compiler",), "force_disable_caches": True}),
        pytest.raises(ConfigError, match=r"^trainer\.compile: torch\.compile does not work on this machine \(.+\)"),
    ):
        torch_policy(model, compiled=True)


def test_compile_is_rejected_with_megatron_and_adapters() -> None:
    with pytest.raises(ConfigError, match=r"compile is for whole models, and elastic\.weights is lora"):
        job(trainer={"compile": True}, elastic={"weights": "lora"})
    with pytest.raises(ConfigError, match=r"compile needs trainer\.backend: torch"):
        job(trainer={"backend": "megatron", "compile": True})
