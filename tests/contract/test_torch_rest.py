"""What rests in host memory gives its device's memory back, keeps its identity, and comes back bit for bit.

Here device and host are the same, so memory is told apart by its owner: arrays that can be seen to go.
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from services.trainer.adapters.torch.policy import TorchPolicy
from services.trainer.adapters.torch.rest import Resting
from services.trainer.domain.loss.policy import clipped_loss
from shared.algorithm import CriticSpec
from shared.training import Offload, OptimizerSpec
from tests.contract.test_torch_critic import taught
from tests.contract.test_trainer_engine_contract import bits
from tests.support.model_folder import write_model

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
    sum((parameter**3).sum() for parameter in parameters).backward()


def held(parameters: list[Tensor], optimizer: torch.optim.AdamW) -> list[list[float]]:
    states = [value for p in parameters for value in optimizer.state[p].values()]
    return [tensor.detach().flatten().tolist() for tensor in (*parameters, *states)]


@pytest.mark.parametrize("what", ["none", "optimizer", "all"])
def test_what_rests_is_the_same_afterwards_and_under_way(what: Offload) -> None:
    parameters, optimizer, _ = trained()
    before, identities = held(parameters, optimizer), [id(parameter) for parameter in parameters]
    resting = Resting(parameters, [optimizer], CPU, what)
    for _ in range(2):
        resting.rest()
        assert held(parameters, optimizer) == before
        resting.wake()
        assert held(parameters, optimizer) == before
    assert [id(parameter) for parameter in parameters] == identities
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in parameters)


@pytest.mark.parametrize(("what", "gone"), [("none", False), ("optimizer", False), ("all", True)])
def test_the_memory_of_weights_that_rest_is_given_back(what: Offload, gone: bool) -> None:
    parameters, optimizer, owners = trained()
    Resting(parameters, [optimizer], CPU, what).rest()
    gc.collect()
    assert [owner() is None for owner in owners] == [gone, gone]


@pytest.mark.parametrize("what", ["optimizer", "all"])
def test_gradients_rest_too_and_go_on_adding_up(what: Offload) -> None:
    parameters, optimizer, _ = trained()
    steady, other, _ = trained()
    resting = Resting(parameters, [optimizer], CPU, what)
    learn(parameters)
    resting.rest()
    assert all(parameter.grad is None for parameter in parameters)
    resting.wake_weights()
    learn(parameters)
    resting.rest()
    resting.wake()
    optimizer.step()
    for _ in range(2):
        learn(steady)
    other.step()
    assert held(parameters, optimizer) == held(steady, other)


def test_moments_stay_away_while_only_the_weights_are_needed() -> None:
    parameters, optimizer, _ = trained()
    resting = Resting(parameters, [optimizer], CPU, "all")
    resting.rest()
    away = [value.data_ptr() for state in optimizer.state.values() for value in state.values()]
    resting.wake_weights()
    assert [value.data_ptr() for state in optimizer.state.values() for value in state.values()] == away
    resting.wake()
    assert not {value.data_ptr() for state in optimizer.state.values() for value in state.values()} & set(away)


def test_the_same_buffers_serve_every_time() -> None:
    parameters, optimizer, _ = trained()
    resting = Resting(parameters, [optimizer], CPU, "all")
    resting.rest()
    first = [parameter.data_ptr() for parameter in parameters]
    resting.wake()
    resting.rest()
    assert [parameter.data_ptr() for parameter in parameters] == first


def test_a_reference_and_a_critic_rest_along(tmp_path: Path) -> None:
    write_model(tmp_path)
    steady, resting = (engine(tmp_path, offload) for offload in ("none", "all"))
    for seed in range(2):
        rows = taught(seed=seed)
        for one in (steady, resting):
            one.rest()
            one.accumulate([rows[:3]], LOSS)
            one.rest()
            one.accumulate([rows[3:]], LOSS)
        assert resting.step(RATE) == steady.step(RATE)
        resting.rest()
        assert resting.values([rows]) == steady.values([rows])
        resting.rest()
        assert resting.reference_logprobs([rows]) == steady.reference_logprobs([rows])
        assert bits(resting) == bits(steady)


def engine(folder: Path, offload: Offload) -> TorchPolicy:
    choices: dict[str, Any] = {"dtype": "float32", "device": "cpu", "reference": True, "critic": CriticSpec(lr=5e-3)}
    made = TorchPolicy(OptimizerSpec(lr=RATE), temperature=1.0, offload=offload, **choices)
    made.load_hf(folder)
    return made
