"""Measures the memory that autograd saves for the backward pass, which is the same on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def saved_bytes(excluded: Iterable[Tensor] = ()) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the bytes saved so far; call it before the backward pass begins.

    Args:
        excluded: tensors that exist anyway and do not count, such as parameters.

    """
    known = {tensor.untyped_storage().data_ptr() for tensor in excluded}
    saved: dict[int, torch.UntypedStorage] = {}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage  # held, so that its address is not reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        # Summed at the end: FSDP2 empties the storages of gathered parameters.
        yield lambda: sum(storage.nbytes() for storage in saved.values())
