"""The parts that a rank is built from, for any backend: model shard, forward and backward passes, optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from torch import Tensor
from torch.optim import Optimizer

from rlboost.services.trainer.adapters.ranks.packed import LossGradientFn, PackedBatch
from rlboost.services.trainer.adapters.ranks.tensor_slice import TensorSlice
from rlboost.services.trainer.ports.engine import Loaded

WEIGHT = "weight"
MOMENTS = ("exp_avg", "exp_avg_sq")
NO_TENSORS: Mapping[str, Tensor] = MappingProxyType({})


class WeightMap(Protocol):
    """Maps each parameter of a rank, by the backend's own name, to slices of Hugging Face tensors."""

    def owns(self, name: str) -> bool:
        """Return True if this rank exports the parameter; of several ranks with the same slices one does."""

    def slices(self, name: str) -> list[TensorSlice]:
        """Return the slices that make up the parameter, in the order of `split` and `join`."""

    def split(self, name: str, value: Tensor) -> list[Tensor]:
        """Split a value of the parameter's shape into its slices."""

    def join(self, name: str, values: list[Tensor]) -> Tensor:
        """Join slices into a value of the parameter's shape; the inverse of `split`."""


class Model(Protocol):
    """One rank's shard of a model, or of an adapter on one."""

    @property
    def weight_map(self) -> WeightMap:
        """Where the parameters are in the Hugging Face tensors."""

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's parameters under the backend's own names."""

    def put(self, parameter: Tensor, value: Tensor) -> None:
        """Overwrite this rank's slice of a parameter."""


class TrainedModel(Model, Protocol):
    """One rank's shard of what is trained, with its optimizer."""

    def zero_gradients(self) -> None:
        """Drop the accumulated gradients."""

    def finish_gradients(self, divisor: int) -> float:
        """Sum the gradients over all ranks, divide them by `divisor`, and return their global norm before clipping.

        Here or in `update` they are clipped.
        """

    def update(self, learning_rate: float) -> None:
        """Apply the gradients, clipped if `finish_gradients` has not clipped them."""

    def gradients(self) -> Iterable[Tensor]:
        """Return the tensors that hold gradients between the calls."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The torch optimizers, whose state and parameters can be offloaded."""


class Forward(Protocol):
    """Runs micro-batches through one rank's shard of a model. A collective call: all ranks make it together."""

    def columns(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Return each micro-batch's log-probabilities, or a critic's values, on the ranks that compute them.

        They are [trained tokens].
        """


class ForwardBackward(Forward, Protocol):
    """`Forward` of the trained model."""

    def accumulate(self, batches: Sequence[PackedBatch], loss_gradient: LossGradientFn) -> dict[str, float]:
        """Run forward and backward, adding to the gradients; return sums about the routers of experts."""


class OptimizerState(Protocol):
    """Master weights and Adam moments of one rank's parameters."""

    def get(self, parameter: Tensor, kind: str) -> Tensor:
        """Return this rank's slice of a master weight or a moment. A collective call."""

    def set(self, parameter: Tensor, kind: str, value: Tensor) -> None:
        """Overwrite a moment, or a master weight and the parameter with it."""

    def set_steps(self, n_steps: int) -> None:
        """Set the number of updates that the moments contain; 0 drops them."""


class Frozen(NamedTuple):
    """A model that keeps the weights that it was loaded with: a reference model, or the model below an adapter."""

    model: Model
    passes: Forward


class Trainable(NamedTuple):
    """What is trained, with the objects that run and update it."""

    model: TrainedModel
    passes: ForwardBackward
    state: OptimizerState
    base: Frozen | None = None
    """The model below an adapter; None if the whole model is trained."""
    initial: Mapping[str, Tensor] = NO_TENSORS
    """Whole values of tensors that a model's files do not have."""
    adapter_json: str = ""
    """PEFT's `adapter_config.json` if an adapter is trained."""

    def frozen(self, what: Loaded) -> Frozen | None:
        """Return the frozen model with the weights of one kind; None if these are trained."""
        return self.base if what == "base" else None
