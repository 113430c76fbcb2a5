"""Compare what policy engines have learned: bit by bit, or to rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlboost.services.trainer.adapters.torch.policy import RanksPolicy, TorchPolicy
from rlboost.services.trainer.adapters.torch.ranks import TensorSlice
from rlboost.services.trainer.adapters.torch.tensors import SliceReader
from rlboost.services.trainer.ports.engine import Exported, PolicyEngine
from rlboost.shared.wire import F32
from tests.support.one_rank import critic_of, trained_by


def bits(engine: PolicyEngine, what: Exported = "model") -> list[tuple[str, bytes]]:
    return [(shard.name, bytes(shard.data)) for shard in engine.export_shards(what)]


def values(policy: PolicyEngine) -> dict[str, Any]:
    return {shard.name: np.frombuffer(bytes(shard.data), F32) for shard in policy.export_shards()}


def moment(policy: RanksPolicy, folder: Path, kind: str) -> dict[str, Any]:
    """Return a moment of the optimizer, read from a checkpoint."""
    folder.mkdir()
    policy.snapshot()(folder)
    with SliceReader(sorted(folder.glob(f"{kind}-*"))) as reader:
        return {
            name: reader.read(TensorSlice.whole(name, shape)).numpy().ravel() for name, shape in reader.shapes.items()
        }


def assert_close(found: dict[str, Any], expected: dict[str, Any], atol: float) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=atol, err_msg=name)


def gradients(policy: TorchPolicy) -> dict[str, torch.Tensor]:
    """Return copies of the accumulated gradients, of the critic too."""
    trained = trained_by(policy).tensors
    if policy.rank.critic is not None:
        trained |= {f"critic.{name}": tensor for name, tensor in critic_of(policy).tensors.items()}
    return {name: tensor.grad.clone() for name, tensor in trained.items() if tensor.grad is not None}


def gradient_of(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


def assert_trained_equally(found: dict[str, Any], expected: dict[str, Any], lr: float = 1e-3) -> None:
    """Compare weights after some steps of Adam at a learning rate of `lr`."""
    # Adam divides by the gradient's magnitude: for tiny gradients rounding errors become a part of a whole step.
    assert_close(found, expected, lr / 10)
    assert np.mean(np.concatenate([np.abs(found[name] - expected[name]) for name in expected])) < lr / 10_000
