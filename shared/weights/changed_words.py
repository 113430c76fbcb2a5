"""The words of tensors that differ between two versions: their file, and writing them into an engine's memory.

The file is in safetensors format. Of each tensor that differs it has three vectors of equal length: the flat positions
of the words, ascending, their old values and their new ones. Imports torch: a worker imports it after it has joined.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors.torch import load, save

from rlboost.shared.errors import Corrupt
from rlboost.shared.files import replace_file
from rlboost.shared.weights.manifest import digest_of

MAX_FRACTION = 1 / 16
"""Beyond this fraction of changed words, loading whole tensors takes no longer."""
_INT = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_INT32 = 2**31 - 1


class Words(NamedTuple):
    """The changed words of one tensor."""

    name: str
    positions: torch.Tensor
    """Flat positions in the whole tensor, ascending."""
    old: torch.Tensor
    """What the words were, in the published dtype."""
    new: torch.Tensor
    """What they become."""


class ChangedWords:
    """A file of changed words. Remove it with `remove`."""

    def __init__(self, path: Path, digest: str) -> None:
        """Take the file and the digest of its bytes."""
        self.path = path
        self.digest = digest

    @property
    def location(self) -> dict[str, Any]:
        """Where the file is on this machine, as plain data for another process; see `at`."""
        return {"path": str(self.path), "digest": self.digest}

    @classmethod
    def at(cls, location: Mapping[str, Any]) -> Self:
        """Invert `location`."""
        return cls(Path(location["path"]), location["digest"])

    def read(self) -> Iterator[Words]:
        """Yield the changed words, tensor by tensor.

        Raises:
            Corrupt: the file is missing, or its bytes do not have the digest.

        """
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise Corrupt(f"{self.path}: {error.strerror}") from error
        if digest_of(data) != self.digest:
            raise Corrupt(f"{self.path}: these are not the bytes that were written")
        found = load(data)
        for key in sorted(found):
            if key.endswith(" positions"):
                name = key.removesuffix(" positions")
                yield Words(name, found[key].long(), found[f"{name} old"], found[f"{name} new"])

    def excuse(self, rank: int) -> Path:
        """Return the file in which a process says why it loads whole tensors all the same."""
        return self.path.with_suffix(f".{rank}")

    def remove(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)


Tensors = Iterable[tuple[str, torch.Tensor]]


def find_changed_words(old: Tensors, new: Tensors, n_words: int, directory: Path) -> ChangedWords | None:
    """Compare the tensors of two versions, in the same order; return None if too many words differ.

    Args:
        old: on the CPU; those without a difference may be left out of both.
        new: as `old`.
        n_words: number of words of the whole model.
        directory: for the file.

    Raises:
        Corrupt: see `CachedVersion.tensors`.
        OSError: the file cannot be written.

    """
    found: dict[str, torch.Tensor] = {}
    left = int(n_words * MAX_FRACTION)
    for (name, before), (other, after) in zip(old, new, strict=True):
        if (name, before.shape, before.dtype) != (other, after.shape, after.dtype):
            return None
        old_words, new_words = before.reshape(-1), after.reshape(-1)
        positions = (bits(old_words) != bits(new_words)).nonzero().view(-1)
        left -= positions.numel()
        if left < 0:
            return None
        found[f"{name} positions"] = positions if new_words.numel() > _MAX_INT32 else positions.int()
        found[f"{name} old"], found[f"{name} new"] = old_words[positions], new_words[positions]
    data = save(found)
    path = directory / f".changed-{secrets.token_hex(8)}"
    replace_file(path, data)
    return ChangedWords(path, digest_of(data))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor's bit patterns, which compare equal only if all bits are."""
    return tensor.view(_INT[tensor.element_size()])


# --- Writes changed words into an engine's memory, in place -----------------------------------------------------------
# A *placement* is a slice of a published tensor and the engine's memory that holds it, such as a rank's rows of one
# part of a fused matrix. A word is written only where memory holds its old value: if memory is not what it is taken
# for, for example since the engine has packed it, nothing is trusted and the caller loads whole tensors.


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
