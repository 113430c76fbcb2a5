"""Tensors in safetensors files, whole or in boxes that several ranks wrote; read back in any other cut.

A box's place is in the file's metadata, so any number of ranks can read what any other number wrote. A tensor that is
not mentioned there is whole, as in every Hugging Face folder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from services.trainer.adapters.ranks.piece import Piece

_PLACES = "places"


def write(file: Path, boxes: Mapping[Piece, Tensor]) -> None:
    """Write boxes of different tensors into one file.

    Raises:
        OSError, SafetensorError: it cannot be written.

    """
    # Copies: safetensors refuses views that share their memory.
    tensors = {
        piece.name: torch.empty(piece.local_shape, dtype=value.dtype).copy_(value) for piece, value in boxes.items()
    }
    places = {piece.name: [piece.global_shape, piece.offset] for piece in boxes}
    save_file(tensors, file, metadata={"format": "pt", _PLACES: json.dumps(places)})


class BoxReader:
    """All tensors of some files. Close it, or use it in a `with`."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Open the files.

        Raises:
            OSError, SafetensorError, ValueError: one is missing or is none.

        """
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Name -> shape of the whole tensor."""
        self._stored: dict[str, list[tuple[Any, Piece]]] = {}
        self._stack = ExitStack()
        with ExitStack() as stack:
            for file in files:
                opened: Any = stack.enter_context(safe_open(file, framework="pt"))
                places = json.loads((opened.metadata() or {}).get(_PLACES, "{}"))
                for name in opened.keys():  # noqa: SIM118 - it is no mapping
                    part = opened.get_slice(name)
                    local = tuple(part.get_shape())
                    shape, offset = places.get(name, (local, (0,) * len(local)))
                    self.shapes[name] = tuple(shape)
                    self._stored.setdefault(name, []).append((part, Piece(name, tuple(shape), tuple(offset), local)))
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, wanted: Piece) -> Tensor:
        """Return a box of a tensor.

        Raises:
            ValueError: the tensor is not there, or has another shape, or a part of the box is in no file.

        """
        if self.shapes.get(wanted.name) != wanted.global_shape:
            found = self.shapes.get(wanted.name)
            raise ValueError(
                f"tensor {wanted.name} of shape {list(wanted.global_shape)} is wanted, and "
                + (f"there it has shape {list(found)}" if found else "it is not there")
            )
        if not math.prod(wanted.local_shape):
            return torch.zeros(wanted.local_shape)
        stored, n_read = self._stored[wanted.name], 0
        made: Tensor | None = None
        for part, piece in stored:
            low = [max(pair) for pair in zip(wanted.offset, piece.offset, strict=True)]
            high = [min(pair) for pair in zip(_end(wanted), _end(piece), strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            value = part[_box(low, high, piece.offset)]
            if value.shape == wanted.local_shape:
                return _tensor(value)
            made = torch.empty(wanted.local_shape, dtype=value.dtype) if made is None else made
            made[_box(low, high, wanted.offset)] = value
            n_read += value.numel()
        if made is None or n_read != math.prod(wanted.local_shape):
            raise ValueError(f"tensor {wanted.name} is not whole")
        return made


def _tensor(value: Any) -> Tensor:
    tensor: Tensor = value
    return tensor


def _end(piece: Piece) -> tuple[int, ...]:
    return tuple(low + n for low, n in zip(piece.offset, piece.local_shape, strict=True))


def _box(low: Iterable[int], high: Iterable[int], origin: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(a - at, b - at) for a, b, at in zip(low, high, origin, strict=True))
