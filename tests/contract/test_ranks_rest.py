"""What ranks that rest compute is what those compute that never rest, bit for bit; and their memory really goes.

Here device and host are the same. But buffers in host memory stay once they are made, so when ranks rest for the second
time, a process shrinks by what would leave its GPU. Processes take seconds to start: each layout's do so once, and both
tests begin with a model that they load anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config

from services.trainer.adapters.ranks.model import MOMENTS, WEIGHT
from services.trainer.adapters.ranks.policy import RanksPolicy
from services.trainer.domain.loss.policy import clipped_loss
from shared.training import OptimizerSpec
from tests.contract.test_trainer_engine_contract import bits, rows
from tests.support import megatron_policies

pytestmark = pytest.mark.timeout(300)

RATE = 1e-2
OPTIMIZER = OptimizerSpec(lr=RATE, weight_decay=0.1, grad_clip=0.7)
LOSS = clipped_loss(0.2, 0.28)
BATCHES = [rows(5, seed=seed) for seed in range(3)]


class Case(NamedTuple):
    settings: dict[str, Any]
    kept: float
    """Bytes a parameter that only an optimizer step needs."""
    passing: float
    """Bytes a parameter that any pass needs."""


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


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def policy(case: Case) -> Iterator[RanksPolicy]:
    with pytest.MonkeyPatch.context() as environment:
        # Else the C library keeps what is freed, to give it out again.
        environment.setenv("MALLOC_MMAP_THRESHOLD_", "4096")
        environment.setenv("MALLOC_TRIM_THRESHOLD_", "0")
        with megatron_policies.policy(OPTIMIZER, **case.settings) as made:
            made.rest()  # there is nothing yet
            yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose rows no two ranks can share evenly."""
    return megatron_policies.write(tmp_path_factory.mktemp("models") / "llama", "llama")


def three_steps(policy: RanksPolicy, folder: Path, *, resting: bool) -> list[Any]:
    """Return everything that comes out; ranks rest between any two calls if asked."""

    def rest() -> None:
        if resting:
            policy.rest()

    seen: list[Any] = []
    for step, batch in enumerate(BATCHES):
        for part in (batch[:3], batch[3:]):
            seen.append(policy.accumulate([part], LOSS))
            rest()
        seen += [policy.step(RATE), bits(policy)]
        rest()
        seen += [bits(policy), policy.digests()]
        seen.append(policy.logprobs([batch]))
        if policy._keeps_reference:
            rest()
            seen.append(policy.reference_logprobs([batch]))
        rest()
        (folder / str(step)).mkdir(parents=True)
        policy.snapshot()(folder / str(step))
        seen.append(held_by(folder / str(step)))
    return seen


def held_by(checkpoint: Path) -> dict[str, Any]:
    """Return all values of a checkpoint. The order of the files' other entries is nobody's promise."""
    files = sorted(checkpoint.glob("*.safetensors"))
    assert {file.name.partition("-")[0] for file in files} == {WEIGHT, *MOMENTS}
    return {file.name: {name: value.tolist() for name, value in load_file(file).items()} for file in files}


def published(model: Path, dtype: str) -> dict[str, bytes]:
    values = load_file(model / "model.safetensors")
    return {
        name: bytes(value.to(getattr(torch, dtype)).reshape(-1).view(torch.uint8).numpy())
        for name, value in values.items()
    }


def test_three_steps_with_rests_between_are_those_without_bit_for_bit(
    policy: RanksPolicy, case: Case, model: Path, tmp_path: Path
) -> None:
    policy.load_hf(model)
    # After loading ranks rest in any case; this is the only time before the steps of those that are compared with.
    assert dict(bits(policy)) == published(model, case.settings.get("dtype", "float32"))
    steady = three_steps(policy, tmp_path / "steady", resting=False)
    policy.load_hf(model)
    assert three_steps(policy, tmp_path / "resting", resting=True) == steady
    # What was written or is loaded while they rest is what they go on with.
    last = bits(policy)
    policy.load(tmp_path / "resting" / "0")
    for batch in BATCHES[1:]:
        policy.accumulate([batch[:3]], LOSS)
        policy.accumulate([batch[3:]], LOSS)
        policy.step(RATE)
        policy.rest()
    assert bits(policy) == last
    policy.load_hf(model)
    shards = list(policy.export_shards())
    policy.accumulate([BATCHES[0]], LOSS)
    policy.step(RATE)
    policy.rest()
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


def test_a_rank_that_rests_has_given_back_all_that_it_was_told_to(
    policy: RanksPolicy, case: Case, wide: tuple[Path, int]
) -> None:
    source, n_parameters = wide
    policy.load_hf(source)

    def shrinks_by() -> list[float]:
        awake = resident(policy)
        policy.rest()
        return [(before - after) / n_parameters for before, after in zip(awake, resident(policy), strict=True)]

    for batch in BATCHES:
        policy.accumulate([batch], LOSS)
        policy.step(RATE)
        found = shrinks_by()
    assert found == pytest.approx([case.kept + case.passing] * 2, rel=0.03)
    # In the middle of an update FSDP2 has gradients, too. What only the step needs rests all the while.
    gradients = 4 / 2 if "backend" in case.settings else 0
    for batch in BATCHES[:2]:
        policy.accumulate([batch], LOSS)
        found = shrinks_by()
    assert found == pytest.approx([case.passing + gradients] * 2, rel=0.03)


def resident(policy: RanksPolicy) -> list[int]:
    """Return how much memory each rank's process has."""
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in policy._ranks.pids]
    return [n * os.sysconf("SC_PAGESIZE") for n in pages]


def test_a_parameter_that_moves_to_another_kind_of_memory_loses_the_hooks_on_its_gradient() -> None:
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
