"""Ranks on two machines with addresses of their own: network namespaces. Needs root: `make test-network`."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.domain.loss.function import EXPERT_LOAD, ROUTED_TOKENS, ROUTING_LOSS
from rlboost.services.trainer.ports.engine import PolicyEngine, PolicySettings
from rlboost.shared.errors import Retryable
from rlboost.shared.job.training import OptimizerSpec
from rlboost.shared.wire import F32, unpack
from tests.support import rank_policies
from tests.support.eventually import eventually
from tests.support.losses import clipped_loss
from tests.support.network_namespaces import Namespace, network
from tests.support.trainer_machines import (
    DENSE_LAYOUTS,
    MEGATRON,
    TEMPERATURE,
    MachineProcess,
    policy_on,
    trainer_machines,
)
from tests.support.training_rows import rows, with_loss_mask

pytestmark = [pytest.mark.network, pytest.mark.timeout(600)]

RATE = 1e-3
OPTIMIZER = OptimizerSpec(lr=RATE, weight_decay=0.1, betas=(0.9, 0.95), grad_clip=0.7)
LOSS = clipped_loss(0.2, 0.28)
BATCHES = [rows(6, seed=1), with_loss_mask(rows(3, seed=2))]
LAYOUTS = {
    **DENSE_LAYOUTS,
    "ep2 x dp2": {**MEGATRON, "data_parallel": 4, "expert_parallel": 2},
    "ep4": {**MEGATRON, "data_parallel": 4, "expert_parallel": 4},
}
RESUMED = "hsdp2 x 2", "tp2 x dp2"
"""Layouts that are also trained on two machines, lose one of them and get it back."""
Site = tuple[str, list[Namespace]]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with network(2) as made:
        yield made


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return rank_policies.write(tmp_path / "model", "qwen3")


def step(policy: PolicyEngine) -> dict[str, float]:
    """Take a step; return the sums of its loss, the gradient's norm, and the mean log-probability afterwards."""
    sums = policy.accumulate(BATCHES, LOSS)
    for name in (ROUTED_TOKENS, ROUTING_LOSS, EXPERT_LOAD):
        sums.pop(name, None)  # of each rank's part
    norm = policy.step(RATE)
    logprobs = np.concatenate([unpack(column, F32) for column in policy.logprobs(BATCHES)])
    return {**sums, "norm": norm, "logprob": float(logprobs.mean())}


def expected_steps(model: Path, n: int) -> list[Any]:
    """Return what one process computes, to compare with."""
    policy = TorchPolicy(PolicySettings(optimizer=OPTIMIZER, temperature=TEMPERATURE), device="cpu")
    policy.load_hf(model)
    return [pytest.approx(step(policy), rel=1e-4, abs=1e-3) for _ in range(n)]


def join(url: str, namespace: Namespace, folder: Path) -> MachineProcess:
    return MachineProcess(url, namespace.name, folder / f"{namespace.name}.log", prefix=namespace.prefix)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout not in RESUMED])
async def test_two_machines_train_as_one_process(site: Site, tmp_path: Path, layout: str) -> None:
    host, namespaces = site
    model = rank_policies.write(tmp_path / "model", "qwen3-moe" if "ep" in layout else "qwen3")
    expected = expected_steps(model, 3)
    async with trainer_machines(host) as (machines, url):
        agents = [join(url, namespace, tmp_path) for namespace in namespaces]
        try:
            async with policy_on(machines, OPTIMIZER, {**LAYOUTS[layout], "nodes": 2}) as policy:
                await asyncio.to_thread(policy.load_hf, model)
                assert [await asyncio.to_thread(step, policy) for _ in expected] == expected
            assert [await asyncio.to_thread(agent.stop) for agent in agents] == [0, 0]
        finally:
            for agent in agents:
                agent.stop(signal.SIGKILL)


@pytest.mark.parametrize("layout", RESUMED)
async def test_training_resumes_on_one_machine_and_again_on_two(
    site: Site, model: Path, tmp_path: Path, layout: str
) -> None:
    """The network of one machine is cut: its connections stay open, and no packet arrives."""
    host, (first, second) = site
    expected = expected_steps(model, 3)
    trainer = {**LAYOUTS[layout], "nodes": 2, "min_nodes": 1}
    checkpoints = [tmp_path / "0", tmp_path / "1"]
    async with trainer_machines(host) as (machines, url):
        agents = [join(url, namespace, tmp_path) for namespace in (first, second)]
        try:
            async with policy_on(machines, OPTIMIZER, trainer, shrink_after_s=600.0) as policy:
                await asyncio.to_thread(policy.load_hf, model)
                assert await asyncio.to_thread(step, policy) == expected[0]
                await asyncio.to_thread(save, policy, checkpoints[0])
                second.unplug()
                with pytest.raises(Retryable, match=f"lost with machine {second.name} "):
                    await asyncio.to_thread(step, policy)
            await eventually(lambda: [machine.name for machine in machines.idle] == [first.name])
            async with policy_on(machines, OPTIMIZER, trainer, shrink_after_s=0.0) as policy:
                await asyncio.to_thread(policy.load_hf, model)
                await asyncio.to_thread(policy.load, checkpoints[0])
                assert await asyncio.to_thread(step, policy) == expected[1]
                await asyncio.to_thread(save, policy, checkpoints[1])
                second.plug()
            async with policy_on(machines, OPTIMIZER, trainer, shrink_after_s=600.0) as policy:
                await asyncio.to_thread(policy.load_hf, model)
                await asyncio.to_thread(policy.load, checkpoints[1])
                assert await asyncio.to_thread(step, policy) == expected[2]
        finally:
            for agent in agents:
                agent.stop(signal.SIGKILL)


def save(policy: PolicyEngine, folder: Path) -> None:
    folder.mkdir()
    policy.snapshot()(folder)
