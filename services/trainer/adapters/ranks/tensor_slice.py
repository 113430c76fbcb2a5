"""The rectangular slice of a tensor that one rank owns."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class TensorSlice(NamedTuple):
    """A rectangular slice of a Hugging Face tensor."""

    name: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    local_shape: tuple[int, ...]

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...]) -> TensorSlice:
        """Return the slice that is the whole tensor."""
        return cls(name, shape, (0,) * len(shape), shape)

    @property
    def end(self) -> tuple[int, ...]:
        """The first index after the slice, in each dimension."""
        return tuple(low + n for low, n in zip(self.offset, self.local_shape, strict=True))

    def of(self, whole: Tensor) -> Tensor:
        """Return this slice of the whole tensor; it shares the tensor's memory."""
        return whole[tuple(slice(low, high) for low, high in zip(self.offset, self.end, strict=True))]
