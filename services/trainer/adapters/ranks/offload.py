"""Offloads tensors whose memory other views share to host memory, and onloads them bit for bit.

megatron-core's parameters and gradients are views into flat buffers, FSDP2's are views into padded ones, and both
libraries hold further views. So this module frees and refills the storage below the views; every view stays valid.
Moving a parameter to another device instead would lose the hook with which megatron-core collects its gradient. For the
same reason megatron-core's own `offload_to_cpu` is not used; its `offload_grad_buffers` brings buffers back empty.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

from rlboost.services.trainer.adapters.torch.offload import Offloader
from rlboost.shared.job.training import Offload

GradientsFn = Callable[[], tuple[Iterable[Tensor], bool]]
"""Returns the tensors that hold gradients, and True if any were accumulated; otherwise they are all zeros."""

_Offloaded = dict[UntypedStorage, tuple[int, Tensor | None]]
"""Freed storage -> its size in bytes, and the host copy of its content; None for zeros."""


class StorageOffloader(Offloader):
    """`Offloader` that frees storages below tensors. Read offloaded tensors through `local_value` only."""

    def __init__(
        self,
        weights: Iterable[Tensor],
        optimizers: Sequence[torch.optim.Optimizer],
        device: torch.device,
        what: Offload,
        gradients: GradientsFn,
    ) -> None:
        """See `Offloader`. An optimizer's own copies of weights are offloaded with its moments."""
        self._model_weights = list(weights)
        super().__init__(self._model_weights, optimizers, device, what)
        self._gradients_of_model = gradients
        self._offloaded_weights: _Offloaded = {}
        self._offloaded_state: _Offloaded = {}
        self._free_buffers: dict[int, list[Tensor]] = defaultdict(list)
        """Host buffers for reuse, by size."""

    def local_value(self, tensor: Tensor) -> Tensor:
        """Return this rank's slice of a weight or moment, on host or device; valid until the next onload."""
        local = local_tensor(tensor)
        storage = local.untyped_storage()
        _, host = self._offloaded_weights.get(storage) or self._offloaded_state.get(storage) or (0, None)
        if host is None:
            return local
        view = torch.empty(0, dtype=local.dtype)
        return view.set_(host.untyped_storage(), local.storage_offset(), local.size(), local.stride())

    def _offload_weights(self) -> None:
        gradients, accumulated = self._gradients_of_model()
        self._free(gradients, self._offloaded_weights, zeros=not accumulated)
        self._free(self._weights, self._offloaded_weights)

    def _onload_weights(self) -> None:
        self._refill(self._offloaded_weights)

    def _offload_optimizer(self) -> None:
        moments = (value for _, state in self._states() for value in state.values() if isinstance(value, Tensor))
        of_model = {_storage(weight) for weight in self._model_weights}
        copies = (parameter for parameter in self._parameters() if _storage(parameter) not in of_model)
        self._free(chain(moments, copies), self._offloaded_state)

    def _onload_optimizer(self) -> None:
        self._refill(self._offloaded_state)

    def _free(self, tensors: Iterable[Tensor], offloaded: _Offloaded, *, zeros: bool = False) -> None:
        """Copy the storages below `tensors` to host memory, unless they hold zeros, and free them."""
        for tensor in tensors:
            storage = _storage(tensor)
            n_bytes = storage.nbytes()
            if storage in offloaded or storage.device.type != self._device.type or not n_bytes:
                continue
            host = None
            if not zeros:
                content = _content(storage)
                free = self._free_buffers[n_bytes]
                host = (free.pop() if free else self._host_buffer(content)).copy_(content, non_blocking=True)
            offloaded[storage] = n_bytes, host
            storage.resize_(0)

    def _refill(self, offloaded: _Offloaded) -> None:
        for storage, (n_bytes, host) in offloaded.items():
            storage.resize_(n_bytes)
            if host is None:
                _content(storage).zero_()
            else:
                # The next copy into the buffer is enqueued after this one, on the same stream.
                _content(storage).copy_(host, non_blocking=True)
                self._free_buffers[n_bytes].append(host)
        offloaded.clear()


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a distributed tensor, or the tensor itself; it shares the tensor's memory."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def _storage(tensor: Tensor) -> UntypedStorage:
    return local_tensor(tensor).untyped_storage()


def _content(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
