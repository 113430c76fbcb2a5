"""What a policy trains whose only rank is in this process."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from rlboost.services.trainer.adapters.torch.policy import RanksPolicy
from rlboost.services.trainer.adapters.torch.trainable import Trainable


class Trained(NamedTuple):
    """The policy itself, or its critic."""

    forward: Any
    """Its forward passes."""
    tensors: dict[str, Tensor]
    """Those of a checkpoint, by name."""
    parameters: list[Tensor]
    """Those that the optimizers update."""
    optimizers: list[Optimizer]


def trained_by(policy: RanksPolicy) -> Trained:
    return _trained(policy.rank.policy)


def critic_of(policy: RanksPolicy) -> Trained:
    assert policy.rank.critic is not None
    return _trained(policy.rank.critic)


def _trained(trainable: Trainable) -> Trained:
    model, passes = trainable.model, trainable.passes
    parameters = [parameter for one in model.optimizers for group in one.param_groups for parameter in group["params"]]
    return Trained(passes.forward, dict(model.parameters()), parameters, list(model.optimizers))  # type: ignore[attr-defined]  # of FSDP2
