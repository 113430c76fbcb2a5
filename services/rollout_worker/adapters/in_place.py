"""Writes the changed words of published tensors into an engine's memory, in place.

A *placement* is a slice of a published tensor and the engine's memory that holds it, such as a rank's rows of one part
of a fused matrix. A word is written only where memory holds its old value: if memory is not what it is taken for, for
example since the engine has packed it, nothing is trusted and the caller loads whole tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from rlboost.shared.weights.changed_words import Words, bits


class Placement(NamedTuple):
    """Where an engine holds a slice of a published tensor."""

    target: torch.Tensor
    """A view of the engine's memory with the shape of the slice."""
    source: torch.Tensor
    """The slice, as a view of the contiguous published tensor; its values are never read."""

    @classmethod
    def whole(cls, target: torch.Tensor) -> Placement:
        """Return the placement of a tensor that is held whole."""
        return cls(target, torch.empty(target.shape, device="meta"))


def write_words(placements: Mapping[str, Sequence[Placement]], changed: Iterable[Words]) -> str:
    """Write changed words; return why memory must be loaded whole, empty if it is as published.

    Args:
        placements: name -> where its slices are; empty for tensors that this process holds nothing of.
        changed: the words.

    """
    for words in changed:
        if (places := placements.get(words.name)) is None:
            return f"{words.name} has no known place in the engine's memory"
        if not all(_write(place, words) for place in places):
            return f"{words.name} in the engine's memory is not the tensor that was loaded"
    return ""


def _write(place: Placement, words: Words) -> bool:
    """Replace the words within a slice; return False unless memory holds the old ones before, the new ones after."""
    target = place.target
    if not target.numel():
        return True
    chosen, index = _located(place, words.positions.to(target.device))
    old, new = (bits(values.to(target.device, target.dtype)[chosen]) for values in (words.old, words.new))
    span = 1 + sum((n - 1) * stride for n, stride in zip(target.shape, target.stride(), strict=True))
    # As integers, and not by advanced indexing, which both take several times longer on a CPU.
    memory = bits(target.as_strided((span,), (1,)))
    if not memory.gather(0, index).equal(old):
        return False
    memory.scatter_(0, index, new)
    return memory.gather(0, index).equal(new)


def _located(place: Placement, positions: torch.Tensor) -> tuple[torch.Tensor | slice, torch.Tensor]:
    """Return which of the positions are within the slice, and where they are in its memory."""
    source, target = place.source, place.target
    offset = int(source.storage_offset())
    if source.is_contiguous() and target.is_contiguous():
        if positions.numel() == 0 or (offset <= positions[0] and positions[-1] < offset + source.numel()):
            return slice(None), positions - offset if offset else positions
        ends = torch.tensor([offset, offset + source.numel()], device=positions.device)
        first, end = torch.searchsorted(positions, ends).tolist()
        return slice(first, end), positions[first:end] - offset
    inside = torch.ones_like(positions, dtype=torch.bool)
    index = torch.zeros_like(positions)
    rest = positions
    # From the outermost dimension on; the strides of a slice are those of the whole tensor.
    dims = [dim for dim in range(source.ndim) if source.shape[dim] > 1]
    for dim in sorted(dims, key=source.stride, reverse=True):
        stride = source.stride(dim)
        at = torch.div(rest, stride, rounding_mode="floor") - offset // stride
        rest, offset = rest % stride, offset % stride
        inside &= (at >= 0) & (at < source.shape[dim])
        index += at * target.stride(dim)
    inside &= rest == offset
    return inside, index[inside]


def is_slice(source: torch.Tensor, shape: Sequence[int]) -> bool:
    """Return True if a view is a rectangular slice of a contiguous tensor of this shape, maybe transposed."""
    sizes = [size for size in shape if size > 1]
    extent = {stride: n for n, stride in zip(source.shape, source.stride(), strict=True) if n > 1}
    n_sliced = sum(n > 1 for n in source.shape)
    at, stride, n_found = source.storage_offset(), math.prod(sizes), 0
    for size in sizes:
        stride //= size
        n = extent.get(stride, 1)
        n_found += n > 1
        if at // stride + n > size:
            return False
        at %= stride
    return n_found == n_sliced == len(extent)
