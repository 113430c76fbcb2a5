"""How much memory a forward pass keeps for its backward pass: what autograd saves, and so on any device the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def counting(besides: Iterable[Tensor] = ()) -> Iterator[Callable[[], int]]:
    """Yield what tells how many bytes have been kept so far; ask before the backward pass begins.

    Args:
        besides: what is there in any case, and does not count: parameters.

    """
    there = {tensor.untyped_storage().data_ptr() for tensor in besides}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in there:
            kept[storage.data_ptr()] = storage  # held, so that no other tensor gets its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        # FSDP2 empties storages in which it had put a layer's parameters.
        yield lambda: sum(storage.nbytes() for storage in kept.values())
