"""Ranks on GPUs that they share: that their memory is really there for others. Run `pytest -m gpu tests/gpu`.

One GPU is enough for the layouts of one rank; those of two want two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from transformers import AutoModelForCausalLM  # noqa: E402 - only where torch is

from rlboost.services.trainer.adapters.torch.policy import RanksPolicy  # noqa: E402 - its like
from rlboost.shared.job.training import OptimizerSpec  # noqa: E402 - its like
from tests.support import large_model, rank_policies  # noqa: E402 - its like
from tests.support.losses import clipped_loss  # noqa: E402 - its like
from tests.support.policy_comparison import bits  # noqa: E402 - its like
from tests.support.training_rows import rows  # noqa: E402 - its like

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

RATE = 1e-3
OPTIMIZER = OptimizerSpec(lr=RATE)
LOSS = clipped_loss(0.2, 0.28)
BATCHES = [rows(12, seed=1), rows(9, seed=2), rows(7, seed=3)]
SMALL = 64 << 20
"""What may stay beyond what a tiny model leaves there: rotary tables, scalars, larger workspaces of libraries."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "megatron": {},
    "tp2": {"tensor_parallel": 2, "sequence_parallel": True},
    "dp2": {"data_parallel": 2, "distributed_optimizer": True},
    "fsdp": {"backend": "torch"},
    "fsdp2": {"backend": "torch", "data_parallel": 2},
}
N_BYTES: dict[tuple[str, str], float] = {
    # Moments, master weights, gradients; and weights, a reference.
    ("megatron", "optimizer"): 8 + 4 + 4,
    ("megatron", "all"): 8 + 4 + 4 + 2 + 2,
    ("tp2", "all"): (8 + 4 + 4 + 2 + 2) / 2,
    ("dp2", "all"): (8 + 4) / 2 + 4 + 2 + 2,
    # Moments; and weights, a reference.
    ("fsdp", "optimizer"): 8,
    ("fsdp", "all"): 8 + 4 + 4,
    ("fsdp2", "all"): (8 + 4 + 4) / 2,
}
"""A parameter, on each GPU."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of about 80 M parameters, large enough to see memory that is not freed."""
    return large_model.write(tmp_path_factory.mktemp("model"))


def settings(layout: str) -> dict[str, Any]:
    """Return a layout's settings where there are GPUs enough."""
    found = LAYOUTS[layout]
    n_ranks = max(found.get(name, 1) for name in ("tensor_parallel", "data_parallel"))
    if torch.cuda.device_count() < n_ranks:
        pytest.skip(f"{n_ranks} GPUs are needed")
    return {"dtype": "bfloat16", "device": "cuda", "reference": True, **found}


def used(policy: RanksPolicy) -> list[int]:
    """Return how much of each rank's GPU is taken, by whomever."""
    infos = [torch.cuda.mem_get_info(rank) for rank in range(len(rank_policies.pids_of(policy)))]
    return [total - free for free, total in infos]


def train(policy: RanksPolicy, batch: list[Any]) -> float:
    policy.accumulate([batch], LOSS)
    policy.reference_logprobs([batch])
    return policy.step(RATE)


@pytest.mark.parametrize(("layout", "offload"), N_BYTES)
def test_offload_of_ranks_frees_gpu_memory(model: Path, layout: str, offload: str, tmp_path: Path) -> None:
    n = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(model).parameters())
    tiny = rank_policies.write(tmp_path / "tiny", "qwen3")
    with rank_policies.policy(OPTIMIZER, offload=offload, **settings(layout)) as policy:
        policy.load_hf(tiny)
        train(policy, BATCHES[0])
        policy.offload()
        bare = used(policy)
        policy.load_hf(model)
        for batch in BATCHES:
            train(policy, batch)
        awake = used(policy)
        policy.offload()
        at_rest = used(policy)
        list(policy.export_shards())
        rank_policies.digests(policy)
        policy.snapshot()(tmp_path)
        written = used(policy)
    for before, after in zip(awake, at_rest, strict=True):
        assert before - after > N_BYTES[layout, offload] * n - SMALL
    assert max(after - before for before, after in zip(at_rest, written, strict=True)) < SMALL
    if offload == "all":
        assert max(after - before for before, after in zip(bare, at_rest, strict=True)) < SMALL


@pytest.mark.parametrize(("layout", "offload"), N_BYTES)
def test_offload_between_calls_changes_no_bit(model: Path, layout: str, offload: str, tmp_path: Path) -> None:
    seen: list[list[Any]] = []
    for resting in ("none", offload):
        folder = tmp_path / resting
        folder.mkdir()
        with rank_policies.policy(OPTIMIZER, offload=resting, **settings(layout)) as policy:
            policy.load_hf(model)
            out: list[Any] = []
            for batch in BATCHES:
                for part in (batch[:4], batch[4:]):
                    out.append(policy.accumulate([part], LOSS))
                    policy.offload()
                out.append(policy.step(RATE))
                policy.offload()
                out += [rank_policies.digests(policy), policy.logprobs([batch])]
                policy.offload()
            policy.snapshot()(folder)
            policy.load_hf(model)
            policy.load(folder)
            out += [bits(policy), train(policy, BATCHES[0]), bits(policy)]
            seen.append(out)
    assert seen[0] == seen[1]
