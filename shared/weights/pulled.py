"""Reads a pulled version from the cache, tensor by tensor."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Container, Iterator, Mapping
from io import FileIO
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from rlboost.shared.errors import Corrupt, NotFound
from rlboost.shared.weights.manifest import ITEM_BYTES, Manifest, Part, TensorEntry, digest_of

_UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class WholeTensor(NamedTuple):
    """A tensor of a version, assembled from the shards of all ranks."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class PulledVersion:
    """One verified version in a cache."""

    def __init__(
        self, manifest: Manifest, chunks: Path, base: PulledVersion | None = None, *, verify: bool = False
    ) -> None:
        """Read the chunks of `manifest` from the directory `chunks`; `base` is the base version of an adapter.

        With `verify`, `tensors` compares the bytes of each tensor with their digest.
        """
        self.manifest = manifest
        self.base = base
        self._chunks = chunks
        self._verify = verify

    @property
    def location(self) -> dict[str, Any]:
        """Where the version is on this machine, as plain data for another process; see `at`."""
        base = self.base.location if self.base is not None else None
        return {"chunks": str(self._chunks), "manifest": self.manifest.model_dump_json(), "base": base}

    @classmethod
    def at(cls, location: Mapping[str, Any]) -> Self:
        """Invert `location`; the bytes are verified as they are read."""
        base = cls.at(location["base"]) if location["base"] is not None else None
        return cls(Manifest.decode(location["manifest"].encode()), Path(location["chunks"]), base, verify=True)

    def tensors(self, names: Container[str] | None = None) -> Iterator[tuple[WholeTensor, memoryview]]:
        """Yield every tensor with its bytes, or those with these names.

        One tensor is in memory at a time. Blocks on files: call it outside the event loop.

        Raises:
            NotFound: two later versions have been pulled, and the chunks of this one are removed.
            Corrupt: with `verify`, bytes do not match their digest.

        """
        shards: dict[str, list[tuple[Part, TensorEntry]]] = {}
        for part in self.manifest.parts:
            for entry in part.tensors:
                if names is None or entry.name in names:
                    shards.setdefault(entry.name, []).append((part, entry))
        with _Reader(self._chunks, self.manifest, verify=self._verify) as reader:
            for held in shards.values():
                yield _whole(held, reader)


def _whole(shards: list[tuple[Part, TensorEntry]], reader: _Reader) -> tuple[WholeTensor, memoryview]:
    entry = shards[0][1]
    tensor = np.empty(entry.global_shape, dtype=_UINT[ITEM_BYTES[entry.dtype]])
    for part, shard in shards:
        slices = [slice(low, low + n) for low, n in zip(shard.offset, shard.local_shape, strict=True)]
        index: tuple[Any, ...] = (..., *slices)  # with the ellipsis, the target is an array even without dimensions
        target = tensor[index]
        if target.flags.c_contiguous:
            reader.read_into(part, shard, target)
        else:
            shard_data = np.empty(shard.local_shape, dtype=tensor.dtype)
            reader.read_into(part, shard, shard_data)
            target[...] = shard_data
    return WholeTensor(entry.name, entry.dtype, entry.global_shape), _bytes(tensor)


def _bytes(array: npt.NDArray[np.unsignedinteger]) -> memoryview:
    """Return a view of a C-contiguous array's bytes."""
    return array.reshape(-1).view(np.uint8).data


class _Reader:
    """Reads shards from chunk files and keeps the last file open: adjacent shards are mostly in the same chunk."""

    def __init__(self, chunks: Path, manifest: Manifest, *, verify: bool) -> None:
        self._chunks = chunks
        self._verify = verify
        self._starts = [[0, *accumulate(chunk.n_bytes for chunk in part.chunks)] for part in manifest.parts]
        self._digest = ""
        self._file: FileIO | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def read_into(self, part: Part, entry: TensorEntry, array: npt.NDArray[np.unsignedinteger]) -> None:
        """Fill a C-contiguous array with a shard's bytes."""
        remaining, at = _bytes(array), entry.start
        starts = self._starts[part.rank]
        while remaining:
            index = bisect_right(starts, at) - 1
            digest = part.chunks[index].digest
            n_bytes = os.preadv(self._open(digest), [remaining[: starts[index + 1] - at]], at - starts[index])
            if not n_bytes:
                raise Corrupt(f"{self._chunks / digest} is truncated: remove the cache directory")
            remaining, at = remaining[n_bytes:], at + n_bytes
        if self._verify and digest_of(_bytes(array)) != entry.digest:
            raise Corrupt(f"{entry.name}: the bytes in {self._chunks} are not the published ones: remove it")

    def _open(self, digest: str) -> int:
        if self._file is None or digest != self._digest:
            if self._file is not None:
                self._file.close()
            try:
                self._file = FileIO(self._chunks / digest)
            except FileNotFoundError as error:
                raise NotFound(f"{self._chunks / digest} is no longer in the cache: pull the version again") from error
            self._digest = digest
        return self._file.fileno()
