"""Offloaded tensors free device memory, keep their identity, and are onloaded bit for bit.

Here device and host are the same, so the tests look at the memory below the tensors.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.adapters.torch.trainable import Offloader
from rlboost.services.trainer.ports.engine import PolicySettings
from rlboost.shared.job.algorithm import CriticSpec
from rlboost.shared.job.training import Offload, OptimizerSpec
from tests.support.losses import clipped_loss
from tests.support.model_folder import write_model
from tests.support.policy_comparison import bits
from tests.support.training_rows import taught

CPU = torch.device("cpu")
LOSS, RATE = clipped_loss(0.2, 0.2), 1e-2


def trained() -> tuple[list[Tensor], torch.optim.AdamW]:
    """Return two parameters that were updated once, and their optimizer."""
    parameters = [tensor.requires_grad_() for tensor in (torch.linspace(-1, 1, 12).reshape(3, 4), torch.ones(5))]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True)
    learn(parameters)
    optimizer.step()
    optimizer.zero_grad()
    return parameters, optimizer


def learn(parameters: list[Tensor]) -> None:
    torch.stack([(parameter**3).sum() for parameter in parameters]).sum().backward()


def offloader_of(parameters: list[Tensor], optimizer: torch.optim.AdamW, what: Offload) -> Offloader:
    def gradients() -> tuple[list[Tensor], bool]:
        return [parameter.grad for parameter in parameters if parameter.grad is not None], True

    return Offloader(parameters, [optimizer], CPU, what, gradients)


def tensors_of(parameters: list[Tensor], optimizer: torch.optim.AdamW) -> list[Tensor]:
    return [*parameters, *(value for p in parameters for value in optimizer.state[p].values())]


def held(parameters: list[Tensor], optimizer: torch.optim.AdamW, offloader: Offloader) -> list[list[float]]:
    return [offloader.local_value(tensor).flatten().tolist() for tensor in tensors_of(parameters, optimizer)]


def n_bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize("what", ["none", "optimizer", "all"])
def test_offloaded_tensors_are_unchanged(what: Offload) -> None:
    parameters, optimizer = trained()
    offloader = offloader_of(parameters, optimizer, what)
    before, identities = held(parameters, optimizer, offloader), [id(parameter) for parameter in parameters]
    for _ in range(2):
        offloader.offload()
        assert held(parameters, optimizer, offloader) == before
        offloader.onload()
        assert [tensor.flatten().tolist() for tensor in tensors_of(parameters, optimizer)] == before
    assert [id(parameter) for parameter in parameters] == identities
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in parameters)


@pytest.mark.parametrize(("what", "gone"), [("none", False), ("optimizer", False), ("all", True)])
def test_offload_frees_the_weights_memory(what: Offload, gone: bool) -> None:
    parameters, optimizer = trained()
    offloader_of(parameters, optimizer, what).offload()
    assert (n_bytes(parameters) == 0) is gone


@pytest.mark.parametrize("what", ["optimizer", "all"])
def test_offloaded_gradients_continue_to_accumulate(what: Offload) -> None:
    parameters, optimizer = trained()
    steady, other = trained()
    offloader = offloader_of(parameters, optimizer, what)
    learn(parameters)
    offloader.offload()
    assert n_bytes([parameter.grad for parameter in parameters if parameter.grad is not None]) == 0
    offloader.onload_weights()
    learn(parameters)
    offloader.offload()
    offloader.onload()
    optimizer.step()
    for _ in range(2):
        learn(steady)
    other.step()
    assert held(parameters, optimizer, offloader) == held(steady, other, offloader)


def test_onload_weights_leaves_moments_on_the_host() -> None:
    parameters, optimizer = trained()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    offloader = offloader_of(parameters, optimizer, "all")
    offloader.offload()
    offloader.onload_weights()
    assert n_bytes(moments) == 0 < n_bytes(parameters)
    offloader.onload()
    assert all(moment.untyped_storage().nbytes() for moment in moments)


def test_offload_reuses_its_buffers() -> None:
    parameters, optimizer = trained()
    offloader = offloader_of(parameters, optimizer, "all")
    places = []
    for _ in range(2):
        offloader.offload()
        places.append({offloader.local_value(tensor).data_ptr() for tensor in tensors_of(parameters, optimizer)})
        offloader.onload()
    assert places[0] == places[1]


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
