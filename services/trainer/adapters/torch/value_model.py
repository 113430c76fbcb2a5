"""The network of a critic: the body of a language model, and a head of one value per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlboost.services.trainer.adapters.torch import batch
from rlboost.services.trainer.adapters.torch.context_parallel import ContextGroup
from rlboost.services.trainer.adapters.torch.logprobs import in_dtype
from rlboost.services.trainer.adapters.torch.packing import model_inputs, packs_rows, select_rows
from rlboost.services.trainer.domain.batches.training_row import SequenceRow, TrainingRow
from rlboost.services.trainer.domain.loss.value import value_loss
from rlboost.shared.job.algorithm import CriticSpec


class ValueModel(torch.nn.Module):
    """A body of transformers with a linear head, whose zeros make every value 0. The head computes in float32."""

    def __init__(self, body: Any, name: str = "body") -> None:
        """Take a body, which is in evaluation mode; `name` is the prefix of its parameters' names."""
        super().__init__()
        self.add_module(name, body)
        self._name = name
        self.head = torch.nn.Linear(int(body.config.get_text_config().hidden_size), 1)
        with torch.no_grad():
            for parameter in self.head.parameters():
                parameter.zero_()

    @property
    def base_model(self) -> Any:
        """The model of transformers."""
        return self.get_submodule(self._name)

    def forward(self, *, positions: Tensor, **given: Any) -> Tensor:
        """Return the values at positions of the tokens that `given` describes, [positions]."""
        hidden = select_rows(self.base_model(**given).last_hidden_state[0], positions)
        with torch.autocast(hidden.device.type, enabled=False):
            values: Tensor = self.head(hidden.float())[:, 0]
        return values


class ValuePass:
    """Forward passes of a `ValueModel`."""

    balance = None
    """The load of a critic's experts is not balanced; see `LogprobPass.balance`."""

    def __init__(
        self, model: ValueModel, *, dtype: torch.dtype, device: torch.device, context: ContextGroup | None = None
    ) -> None:
        """Use a model.

        Args:
            model: the critic.
            dtype: dtype of matrix multiplications.
            device: the model's device.
            context: the ranks that divide the tokens of each micro-batch, if any.

        """
        self._model = model
        self._packs = packs_rows(model.base_model)
        self._dtype = dtype
        self._device = device
        self._context = context

    def __call__(self, rows: Sequence[SequenceRow]) -> Tensor:
        """Return the values before all trained tokens, row by row, [tokens]."""
        packed, context = batch.packed(rows), self._context
        if context is not None:
            packed = packed.padded(context.size)
        ids, positions = (torch.from_numpy(part).to(self._device) for part in (packed.ids, packed.predicts))
        inputs = model_inputs(packed, ids, packs=self._packs, context=context)
        with in_dtype(self._dtype, self._device):
            if context is None:
                values: Tensor = self._model(**inputs, positions=positions)
                return values
            own = context.positions(packed.predicts, len(ids))
            found = self._model(**inputs, positions=positions[own] - context.slice_of(len(ids)).start)
        return context.joined(found, own, len(positions))


def summed_value_loss(rows: Sequence[TrainingRow], values: Tensor, spec: CriticSpec) -> tuple[Tensor, dict[str, float]]:
    """Return the sum of the losses of a micro-batch's values, and its metrics, for `sums.add`.

    The metrics are `value_loss` and `value_clipped`, the number of clipped tokens.

    Args:
        rows: with `values` and `returns`.
        values: the critic's, with a gradient, [tokens].
        spec: says by how much a value may change.

    """
    before, returns = (torch.tensor(column, device=values.device) for column in batch.values(rows))
    losses, clipped = value_loss(values, before, returns, None if spec.value_clip == "off" else spec.value_clip)
    total = losses.sum()
    return total, {"value_loss": total.item(), "value_clipped": float(clipped.sum())}
