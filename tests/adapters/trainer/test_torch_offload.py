"""Offloaded tensors free device memory, keep their identity, and are onloaded bit for bit.

Here device and host are the same, so the tests distinguish memory by its owner: arrays whose release they observe.
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rlboost.services.trainer.adapters.torch.offload import Offloader
from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.ports.policy_settings import PolicySettings
from rlboost.shared.job.algorithm import CriticSpec
from rlboost.shared.job.training import Offload, OptimizerSpec
from tests.support.losses import clipped_loss
from tests.support.model_folder import write_model
from tests.support.policy_comparison import bits
from tests.support.training_rows import taught

CPU = torch.device("cpu")
LOSS, RATE = clipped_loss(0.2, 0.2), 1e-2


def trained() -> tuple[list[Tensor], torch.optim.AdamW, list[weakref.ref[np.ndarray]]]:
    """Return two parameters that were updated once, their optimizer, and what owns their memory."""
    owners = [np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), np.ones(5, np.float32)]
    parameters = [torch.from_numpy(owner).requires_grad_() for owner in owners]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True)
    learn(parameters)
    optimizer.step()
    optimizer.zero_grad()
    return parameters, optimizer, [weakref.ref(owner) for owner in owners]


def learn(parameters: list[Tensor]) -> None:
    torch.stack([(parameter**3).sum() for parameter in parameters]).sum().backward()


def held(parameters: list[Tensor], optimizer: torch.optim.AdamW) -> list[list[float]]:
    states = [value for p in parameters for value in optimizer.state[p].values()]
    return [tensor.detach().flatten().tolist() for tensor in (*parameters, *states)]


@pytest.mark.parametrize("what", ["none", "optimizer", "all"])
def test_offloaded_tensors_are_unchanged(what: Offload) -> None:
    parameters, optimizer, _ = trained()
    before, identities = held(parameters, optimizer), [id(parameter) for parameter in parameters]
    offloader = Offloader(parameters, [optimizer], CPU, what)
    for _ in range(2):
        offloader.offload()
        assert held(parameters, optimizer) == before
        offloader.onload()
        assert held(parameters, optimizer) == before
    assert [id(parameter) for parameter in parameters] == identities
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in parameters)


@pytest.mark.parametrize(("what", "gone"), [("none", False), ("optimizer", False), ("all", True)])
def test_offload_frees_the_weights_memory(what: Offload, gone: bool) -> None:
    parameters, optimizer, owners = trained()
    Offloader(parameters, [optimizer], CPU, what).offload()
    gc.collect()
    assert [owner() is None for owner in owners] == [gone, gone]


@pytest.mark.parametrize("what", ["optimizer", "all"])
def test_offloaded_gradients_continue_to_accumulate(what: Offload) -> None:
    parameters, optimizer, _ = trained()
    steady, other, _ = trained()
    offloader = Offloader(parameters, [optimizer], CPU, what)
    learn(parameters)
    offloader.offload()
    assert all(parameter.grad is None for parameter in parameters)
    offloader.onload_weights()
    learn(parameters)
    offloader.offload()
    offloader.onload()
    optimizer.step()
    for _ in range(2):
        learn(steady)
    other.step()
    assert held(parameters, optimizer) == held(steady, other)


def test_onload_weights_leaves_moments_on_the_host() -> None:
    parameters, optimizer, _ = trained()
    offloader = Offloader(parameters, [optimizer], CPU, "all")
    offloader.offload()
    away = [value.data_ptr() for state in optimizer.state.values() for value in state.values()]
    offloader.onload_weights()
    assert [value.data_ptr() for state in optimizer.state.values() for value in state.values()] == away
    offloader.onload()
    assert not {value.data_ptr() for state in optimizer.state.values() for value in state.values()} & set(away)


def test_offload_reuses_its_buffers() -> None:
    parameters, optimizer, _ = trained()
    offloader = Offloader(parameters, [optimizer], CPU, "all")
    offloader.offload()
    first = [parameter.data_ptr() for parameter in parameters]
    offloader.onload()
    offloader.offload()
    assert [parameter.data_ptr() for parameter in parameters] == first


def test_offload_covers_reference_and_critic(tmp_path: Path) -> None:
    write_model(tmp_path)
    steady, offloader = (engine(tmp_path, offload) for offload in ("none", "all"))
    for seed in range(2):
        rows = taught(seed=seed)
        for one in (steady, offloader):
            one.offload()
            one.accumulate([rows[:3]], LOSS)
            one.offload()
            one.accumulate([rows[3:]], LOSS)
        assert offloader.step(RATE) == steady.step(RATE)
        offloader.offload()
        assert offloader.values([rows]) == steady.values([rows])
        offloader.offload()
        assert offloader.reference_logprobs([rows]) == steady.reference_logprobs([rows])
        assert bits(offloader) == bits(steady)


def engine(folder: Path, offload: Offload) -> TorchPolicy:
    optimizer, critic = OptimizerSpec(lr=RATE), CriticSpec(lr=5e-3)
    settings = PolicySettings(optimizer=optimizer, reference=True, critic=critic, offload=offload)
    made = TorchPolicy(settings, device="cpu")
    made.load_hf(folder)
    return made
