"""Ranks that offload compute the same bits as ranks that do not, and they free the memory.

Here device and host are the same. But host buffers are reused, so when ranks offload for the second time, a process
shrinks by what would leave its GPU. Processes take seconds to start, so the tests share those of each layout, and load
the model again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config

from rlboost.services.trainer.adapters.torch.policy import RanksPolicy
from rlboost.shared.job.training import OptimizerSpec
from tests.support import rank_policies
from tests.support.offloaded_ranks import BATCHES, LOSS, RATE, resident, three_steps
from tests.support.policy_comparison import bits

pytestmark = pytest.mark.timeout(300)

OPTIMIZER = OptimizerSpec(lr=RATE, weight_decay=0.1, grad_clip=0.7)


class Case(NamedTuple):
    settings: dict[str, Any]
    step_bytes: float
    """Bytes per parameter that only an optimizer step needs."""
    pass_bytes: float
    """Bytes per parameter that any forward pass needs."""


FSDP2: dict[str, Any] = {"backend": "torch", "data_parallel": 2}
TP2 = {"tensor_parallel": 2, "sequence_parallel": True, "dtype": "bfloat16"}
PP2 = {"pipeline_parallel": 2, "dtype": "bfloat16"}
DP2 = {"data_parallel": 2, "distributed_optimizer": True}
CASES = {
    # Half of: moments | weights, a reference.
    "fsdp2": Case({**FSDP2, "dtype": "bfloat16", "reference": True, "offload": "all"}, 8 / 2, (4 + 4) / 2),
    "fsdp2-optimizer": Case({**FSDP2, "offload": "optimizer"}, 8 / 2, 0),
    # Half of: moments, master weights | gradients, weights, a reference.
    "tp2": Case({**TP2, "reference": True, "offload": "all"}, (8 + 4) / 2, (4 + 2 + 2) / 2),
    "pp2-optimizer": Case({**PP2, "offload": "optimizer"}, (8 + 4) / 2, 4 / 2),
    # Half of moments, or of moments and master weights | gradients, and weights.
    "dp2": Case({**DP2, "offload": "all"}, 8 / 2, 4 + 4),
    "dp2-bfloat16": Case({**DP2, "dtype": "bfloat16", "offload": "all"}, (8 + 4) / 2, 4 + 2),
}


@pytest.fixture(
    scope="module",
    params=[name if name in ("tp2", "dp2") else pytest.param(name, marks=pytest.mark.long) for name in CASES],
)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def policy(case: Case) -> Iterator[RanksPolicy]:
    with pytest.MonkeyPatch.context() as environment:
        # By default the C library keeps freed memory for reuse.
        environment.setenv("MALLOC_MMAP_THRESHOLD_", "4096")
        environment.setenv("MALLOC_TRIM_THRESHOLD_", "0")
        with rank_policies.policy(OPTIMIZER, **case.settings) as made:
            made.offload()  # does nothing before the model is loaded
            yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose vocabulary no number of ranks divides."""
    return rank_policies.write(tmp_path_factory.mktemp("models") / "llama", "llama")


def published(model: Path, dtype: str) -> dict[str, bytes]:
    values = load_file(model / "model.safetensors")
    return {
        name: bytes(value.to(getattr(torch, dtype)).reshape(-1).view(torch.uint8).numpy())
        for name, value in values.items()
    }


def test_offload_between_calls_changes_no_bit_in_three_steps(
    policy: RanksPolicy, case: Case, model: Path, tmp_path: Path
) -> None:
    policy.load_hf(model)
    # Loading always ends with an offload, the only one of the run without offloads.
    assert dict(bits(policy)) == published(model, case.settings.get("dtype", "float32"))
    steady = three_steps(policy, tmp_path / "steady", offloaded=False)
    policy.load_hf(model)
    assert three_steps(policy, tmp_path / "offloaded", offloaded=True) == steady
    # What is saved or loaded while offloaded is what training continues with.
    last = bits(policy)
    policy.load(tmp_path / "offloaded" / "0")
    for batch in BATCHES[1:]:
        policy.accumulate([batch[:3]], LOSS)
        policy.accumulate([batch[3:]], LOSS)
        policy.step(RATE)
        policy.offload()
    assert bits(policy) == last
    policy.load_hf(model)
    shards = list(policy.export_shards())
    policy.accumulate([BATCHES[0]], LOSS)
    policy.step(RATE)
    policy.offload()
    policy.load_shards(shards)
    assert bits(policy) == [(shard.name, bytes(shard.data)) for shard in shards]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A model so large that its memory shows, and how many parameters it has."""
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=160,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("wide")
    made: Any = AutoModelForCausalLM.from_config(config)
    made.save_pretrained(folder)
    return folder, sum(parameter.numel() for parameter in made.parameters())


def test_offloaded_rank_frees_the_selected_memory(policy: RanksPolicy, case: Case, wide: tuple[Path, int]) -> None:
    source, n_parameters = wide
    policy.load_hf(source)

    def shrinks_by() -> list[float]:
        awake = resident(policy)
        policy.offload()
        return [(before - after) / n_parameters for before, after in zip(awake, resident(policy), strict=True)]

    for batch in BATCHES:
        policy.accumulate([batch], LOSS)
        policy.step(RATE)
        found = shrinks_by()
    assert_freed(found, case.step_bytes + case.pass_bytes, case)
    # In the middle of an update FSDP2 has gradients, too. What only the step needs stays offloaded.
    gradients = 4 / 2 if "backend" in case.settings else 0
    for batch in BATCHES[:2]:
        policy.accumulate([batch], LOSS)
        found = shrinks_by()
    assert_freed(found, case.pass_bytes + gradients, case)


def assert_freed(found: list[float], expected: float, case: Case) -> None:
    """Compare what each rank has freed; more by chance, since the allocator also gives back what computing has left."""
    assert len(found) == 2
    for freed in found:
        assert 0.95 * expected < freed < expected + 0.6 * max(case.step_bytes, case.pass_bytes)


def test_moved_parameter_loses_its_gradient_hooks() -> None:
    """Why it is memory that goes, and not parameters: megatron-core's gradients would be lost without a word."""
    parameter = torch.nn.Parameter(torch.ones(2))
    called = []
    accumulates: Any = parameter.expand_as(parameter).grad_fn
    accumulates = accumulates.next_functions[0][0]
    accumulates.register_hook(lambda *_: called.append(True))
    parameter.data = parameter.data.double()  # on a GPU: to the host, and back
    parameter.data = parameter.data.float()
    parameter.sum().backward()
    assert not called
