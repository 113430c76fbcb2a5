"""Answers the ranks of a policy, which ask for the gradients of losses during `accumulate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlboost.services.trainer.adapters.torch.batch import token_batch
from rlboost.services.trainer.adapters.torch.value_model import summed_value_loss
from rlboost.services.trainer.domain.batches.training_row import TrainingRow
from rlboost.services.trainer.domain.loss import sums
from rlboost.services.trainer.domain.loss.inputs import LossFn
from rlboost.shared.job.algorithm import CriticSpec

ReplicaBatches = list[list[TrainingRow]]
"""Micro-batches of one data-parallel replica."""


class LossAnswers:
    """Computes losses, and their gradients with respect to log-probabilities or to a critic's values."""

    def __init__(
        self,
        replicas: Sequence[ReplicaBatches],
        loss: LossFn,
        references: Sequence[Sequence[bytes]] | None,
        critic: CriticSpec | None,
    ) -> None:
        """Answer for the micro-batches of one call.

        Args:
            replicas: the micro-batches.
            loss: the policy's.
            references: columns of log-probabilities under the reference model, one per micro-batch; None to take the
                rows' own.
            critic: the critic's settings, if there is one.

        """
        self._replicas = replicas
        self._loss = loss
        self._references = references
        self._critic = critic
        self.totals: dict[str, float] = {}
        """Sums of the losses' metrics, see `domain.loss.sums`."""
        self.not_finite: list[float] = []
        """Losses of the policy that are NaN or infinite, which add nothing."""

    def __call__(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a question of `RankEngine.accumulate`: float32 bytes of the gradient."""
        replica, index = question["data"], question["batch"]
        rows, column = self._replicas[replica][index], _column(question["column"]).requires_grad_()
        if question["ask"] == "value_loss":
            assert self._critic is not None
            total, metrics = summed_value_loss(rows, column, self._critic)
        else:
            reference = _column(self._references[replica][index]) if self._references else None
            total, metrics = self._loss(token_batch(rows, column, reference))
            if not torch.isfinite(total):
                # The other ranks are in the same collective: answer with a gradient of zeros.
                self.not_finite.append(float(total.detach()))
                return {"gradient": bytes(len(question["column"]))}
        sums.add(self.totals, metrics)
        (gradient,) = torch.autograd.grad(total, [column])
        return {"gradient": gradient.numpy().tobytes()}


def _column(values: bytes) -> Tensor:
    return torch.frombuffer(bytearray(values), dtype=torch.float32)
