"""The part of a tensor that a rank has."""

from __future__ import annotations

from typing import NamedTuple


class Piece(NamedTuple):
    """A box of a Hugging Face tensor."""

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    local_shape: tuple[int, ...]
