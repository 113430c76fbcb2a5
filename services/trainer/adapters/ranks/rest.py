"""Where a rank's tensors are while others have its device, where tensors are views into memory that others see, too.

megatron-core's parameters and gradients are views of flat buffers, FSDP2's are rows of padded ones, and both libraries
keep views of their own. So it is memory that goes and comes back, and every view stays what it is and where it is. It
must: a parameter that moves to another device loses the hook by which megatron-core collects its gradient. Therefore,
and as its gradient buffers would come back empty, its own `offload_to_cpu` and `offload_grad_buffers` are not used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

from services.trainer.adapters.torch.rest import Resting
from shared.training import Offload

Gradients = Callable[[], tuple[Iterable[Tensor], bool]]
"""Returns what holds gradients, and whether any were accumulated: otherwise it is all zeros."""

_Laid = dict[UntypedStorage, tuple[int, Tensor | None]]
"""Memory that rests -> its size in bytes, and where its content is; None for zeros."""


class RestingStorages(Resting):
    """See `Resting`. What tensors hold while they rest is known to `held` alone."""

    def __init__(
        self,
        weights: Iterable[Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
        device: torch.device,
        what: Offload,
        gradients: Gradients,
    ) -> None:
        """See `Resting`. An optimizer's own copies of weights rest as its moments do."""
        self._of_model = list(weights)
        super().__init__(self._of_model, optimizers, device, what)
        self._held_gradients = gradients
        self._laid_weights: _Laid = {}
        self._laid_moments: _Laid = {}
        self._spare: dict[int, list[Tensor]] = defaultdict(list)
        """Host buffers that were made before, by their size."""

    def held(self, tensor: Tensor) -> Tensor:
        """Return the values of this rank's part of a weight or a moment, wherever they are, until the next wake."""
        own = own_part(tensor)
        storage = own.untyped_storage()
        _, host = self._laid_weights.get(storage) or self._laid_moments.get(storage) or (0, None)
        if host is None:
            return own
        there = torch.empty(0, dtype=own.dtype)
        return there.set_(host.untyped_storage(), own.storage_offset(), own.size(), own.stride())

    def _lay_down_weights(self) -> None:
        gradients, accumulated = self._held_gradients()
        self._lay_down(gradients, self._laid_weights, zeros=not accumulated)
        self._lay_down(self._weights, self._laid_weights)

    def _bring_weights(self) -> None:
        self._bring(self._laid_weights)

    def _lay_down_moments(self) -> None:
        moments = (value for _, state in self._states() for value in state.values() if isinstance(value, Tensor))
        of_model = {_storage(weight) for weight in self._of_model}
        copies = (parameter for parameter in self._parameters() if _storage(parameter) not in of_model)
        self._lay_down(chain(moments, copies), self._laid_moments)

    def _bring_moments(self) -> None:
        self._bring(self._laid_moments)

    def _lay_down(self, tensors: Iterable[Tensor], laid: _Laid, *, zeros: bool = False) -> None:
        for tensor in tensors:
            storage = _storage(tensor)
            n_bytes = storage.nbytes()
            if storage in laid or storage.device.type != self._device.type or not n_bytes:
                continue
            host = None
            if not zeros:
                content = _content(storage)
                spare = self._spare[n_bytes]
                host = (spare.pop() if spare else self._host_buffer(content)).copy_(content, non_blocking=True)
            laid[storage] = n_bytes, host
            storage.resize_(0)

    def _bring(self, laid: _Laid) -> None:
        for storage, (n_bytes, host) in laid.items():
            storage.resize_(n_bytes)
            if host is None:
                _content(storage).zero_()
            else:
                # The buffer's next content is copied behind this, on the same stream.
                _content(storage).copy_(host, non_blocking=True)
                self._spare[n_bytes].append(host)
        laid.clear()


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a distributed tensor, or a tensor that is its own; writing to it writes to both."""
    own: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own.detach()


def _storage(tensor: Tensor) -> UntypedStorage:
    return own_part(tensor).untyped_storage()


def _content(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
