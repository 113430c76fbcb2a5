"""What a rank is built of, whatever cuts its model up: its part of the model, passes through it, optimizer's state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor
from torch.optim import Optimizer

from services.trainer.adapters.ranks.packed import GradientOf, Packed
from services.trainer.adapters.ranks.piece import Piece

WEIGHT = "weight"
MOMENTS = ("exp_avg", "exp_avg_sq")


class Parts(Protocol):
    """Which boxes of Hugging Face's tensors a rank's parameters consist of, by the parameters' own names."""

    def owns(self, name: str) -> bool:
        """Tell whether this rank is the one that speaks for a parameter, of those that have the same part."""

    def pieces(self, name: str) -> list[Piece]:
        """Return the boxes, in the order of `split` and `join`."""

    def split(self, name: str, value: Tensor) -> list[Tensor]:
        """Return the boxes' values, of the parameter's."""

    def join(self, name: str, parts: list[Tensor]) -> Tensor:
        """Return the parameter's value, of its boxes'."""


class Model(Protocol):
    """One rank's part of a model."""

    @property
    def map(self) -> Parts:
        """What its parameters are."""

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's parameters under their own names."""

    def put(self, parameter: Tensor, value: Tensor) -> None:
        """Overwrite this rank's part of a parameter."""


class Trained(Model, Protocol):
    """One rank's part of the model being trained and of its optimizer."""

    def zero_gradients(self) -> None:
        """Forget what was accumulated."""

    def finish_gradients(self, divisor: int) -> float:
        """Add up all ranks' gradients, divide them, and return the norm of all."""

    def update(self, learning_rate: float) -> None:
        """Clip and apply the gradients."""

    def gradients(self) -> Iterable[Tensor]:
        """Return what holds gradients between the calls."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Return torch's optimizers: what rests is theirs, and what they update."""


class Passes(Protocol):
    """Runs micro-batches through one rank's part of a model; all ranks do so at once."""

    def logprobs(self, batches: Sequence[Packed]) -> list[Tensor]:
        """Return each micro-batch's log-probabilities, [trained tokens], where they come out."""

    def accumulate(self, batches: Sequence[Packed], gradient_of: GradientOf) -> None:
        """Run forward and backward, adding to the gradients."""


class State(Protocol):
    """The master weights and Adam's moments of one rank's parameters."""

    def get(self, parameter: Tensor, kind: str) -> Tensor:
        """Return this rank's part of a master weight or a moment; all ranks ask at once."""

    def set(self, parameter: Tensor, kind: str, value: Tensor) -> None:
        """Overwrite a master weight, with it the parameter, or a moment."""

    def set_steps(self, n_steps: int) -> None:
        """Say how many updates the moments come from; 0 forgets them."""


class Built(NamedTuple):
    """A model to train and what works with it."""

    model: Trained
    passes: Passes
    state: State
