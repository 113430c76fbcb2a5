"""Where a policy's tensors are while others have its device: host memory, and back again bit for bit.

A tensor keeps its identity: optimizers, tied layers and adapters that hold it find it where it is. Copies go through
buffers that are made once and kept, pinned where the device is a GPU, so that a bus is all that they wait for.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from shared.training import Offload


class Resting:
    """Moves weights, gradients and optimizers' states, as far as `what` says, and only when asked."""

    def __init__(
        self,
        weights: Iterable[Tensor],
        optimizers: Iterable[torch.optim.Optimizer],
        device: torch.device,
        what: Offload,
    ) -> None:
        """Leave everything on `device` for now.

        Args:
            weights: whose values rest with `all`; those of the optimizers among them.
            optimizers: whose state rests with `optimizer` and `all`, and so do the gradients.
            device: where all that is computed with.
            what: what rests.

        """
        self._weights = list(weights) if what == "all" else []
        self._optimizers = list(optimizers) if what != "none" else []
        self._device = device
        self._gradients: dict[Tensor, Tensor] = {}
        self._buffers: dict[tuple[Tensor, str], Tensor] = {}
        self._weights_rest = self._moments_rest = False

    def rest(self) -> None:
        """Move to host memory what rests there; the device's memory is another process's from then on."""
        if not self._optimizers:
            return
        if not self._weights_rest:
            self._weights_rest = True
            self._lay_down_weights()
        if not self._moments_rest:
            self._moments_rest = True
            self._lay_down_moments()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    @property
    def rests(self) -> bool:
        """Tell whether everything rests that was told to."""
        return self._weights_rest and self._moments_rest

    def wake_weights(self) -> None:
        """Bring back what a forward and a backward pass need."""
        if self._weights_rest:
            self._weights_rest = False
            self._bring_weights()

    def wake(self) -> None:
        """Bring back everything, as an optimizer step needs."""
        self.wake_weights()
        if self._moments_rest:
            self._moments_rest = False
            self._bring_moments()

    def _lay_down_weights(self) -> None:
        for parameter in self._parameters():
            if parameter.grad is not None:
                self._gradients[parameter] = self._to_host(parameter.grad, (parameter, "grad"))
                parameter.grad = None
        for weight in self._weights:
            weight.data = self._to_host(weight.data, (weight, "data"))

    def _bring_weights(self) -> None:
        for weight in self._weights:
            weight.data = self._to_device(weight.data)
        for parameter, gradient in self._gradients.items():
            parameter.grad = self._to_device(gradient)
        self._gradients = {}

    def _lay_down_moments(self) -> None:
        for parameter, state in self._states():
            for name, value in state.items():
                if value.device.type == self._device.type:
                    state[name] = self._to_host(value, (parameter, name))

    def _bring_moments(self) -> None:
        for parameter, state in self._states():
            for name in state:
                if (parameter, name) in self._buffers:
                    state[name] = self._to_device(state[name])

    def _parameters(self) -> Iterable[Tensor]:
        return (p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"])

    def _states(self) -> Iterable[tuple[Tensor, dict[str, Tensor]]]:
        return (item for optimizer in self._optimizers for item in optimizer.state.items())

    def _to_host(self, value: Tensor, key: tuple[Tensor, str]) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = self._host_buffer(value)
        return buffer.copy_(value, non_blocking=True)

    def _host_buffer(self, value: Tensor) -> Tensor:
        return torch.empty_like(value, device="cpu", pin_memory=self._device.type == "cuda")

    def _to_device(self, value: Tensor) -> Tensor:
        # Whoever computes with it does so behind the copy, on the same stream; and so does what overwrites the buffer.
        return torch.empty_like(value, device=self._device).copy_(value, non_blocking=True)
