"""Offloads a policy's tensors to host memory while other processes use its device, and onloads them bit for bit.

A tensor keeps its identity, so optimizers, tied layers and adapters that refer to it stay valid. Copies go through host
buffers that are allocated once and reused, pinned if the device is a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rlboost.shared.job.training import Offload


class Offloader:
    """Moves weights, gradients and optimizer state between device and host, when asked."""

    def __init__(
        self,
        weights: Iterable[Tensor],
        optimizers: Iterable[torch.optim.Optimizer],
        device: torch.device,
        what: Offload,
    ) -> None:
        """Leave everything on `device` for now.

        Args:
            weights: offloaded with `all`; includes the parameters of the optimizers.
            optimizers: their state and their parameters' gradients are offloaded with `optimizer` and `all`.
            device: where the tensors are when they are not offloaded.
            what: what is offloaded.

        """
        self._weights = list(weights) if what == "all" else []
        self._optimizers = list(optimizers) if what != "none" else []
        self._device = device
        self._gradients: dict[Tensor, Tensor] = {}
        self._buffers: dict[tuple[Tensor, str], Tensor] = {}
        self._weights_offloaded = self._optimizer_offloaded = False

    def offload(self) -> None:
        """Move the selected tensors to host memory and release the device's memory to other processes."""
        if not self._optimizers:
            return
        if not self._weights_offloaded:
            self._weights_offloaded = True
            self._offload_weights()
        if not self._optimizer_offloaded:
            self._optimizer_offloaded = True
            self._offload_optimizer()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    @property
    def is_offloaded(self) -> bool:
        """True if all selected tensors are in host memory."""
        return self._weights_offloaded and self._optimizer_offloaded

    def onload_weights(self) -> None:
        """Move back what forward and backward need."""
        if self._weights_offloaded:
            self._weights_offloaded = False
            self._onload_weights()

    def onload(self) -> None:
        """Move back everything, as an optimizer step needs it."""
        self.onload_weights()
        if self._optimizer_offloaded:
            self._optimizer_offloaded = False
            self._onload_optimizer()

    def _offload_weights(self) -> None:
        for parameter in self._parameters():
            if parameter.grad is not None:
                self._gradients[parameter] = self._to_host(parameter.grad, (parameter, "grad"))
                parameter.grad = None
        for weight in self._weights:
            weight.data = self._to_host(weight.data, (weight, "data"))

    def _onload_weights(self) -> None:
        for weight in self._weights:
            weight.data = self._to_device(weight.data)
        for parameter, gradient in self._gradients.items():
            parameter.grad = self._to_device(gradient)
        self._gradients = {}

    def _offload_optimizer(self) -> None:
        for parameter, state in self._states():
            for name, value in state.items():
                if value.device.type == self._device.type:
                    state[name] = self._to_host(value, (parameter, name))

    def _onload_optimizer(self) -> None:
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
        # Computation, and the next copy into the buffer, are enqueued after this copy on the same stream.
        return torch.empty_like(value, device=self._device).copy_(value, non_blocking=True)
