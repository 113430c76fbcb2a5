"""Tensors divided among ranks, in files that any other partition reads back."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlboost.services.trainer.adapters.torch.ranks import TensorSlice

# --- Scratch directories for tensors in transit, removed even if their process is killed ------------------------------


_PREFIX = "tensors-"


def flock_directory(directory: Path) -> int:
    """Lock a directory until the returned descriptor is closed or the process ends.

    Raises:
        BlockingIOError: another process has locked it.
        FileNotFoundError: it does not exist any more.

    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        directory.stat()
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class ScratchDir(tempfile.TemporaryDirectory[str]):
    """A temporary directory, locked while its process lives so that `remove_stale` of other processes spares it."""

    def __init__(self, folder: Path | None, lock: Callable[[Path], int] = flock_directory) -> None:
        """Create it.

        Args:
            folder: the parent directory, created if missing; the system's temporary directory if None.
            lock: locks the directory; see `flock_directory`.

        """
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._unlock: Callable[[], object] = lambda: None
        while True:
            super().__init__(prefix=_PREFIX, dir=folder)
            try:
                self._unlock = weakref.finalize(self, os.close, lock(Path(self.name)))
            except (BlockingIOError, FileNotFoundError):
                super().cleanup()  # `remove_stale` of another process took it before it was locked
            except OSError:
                return  # this file system has no locks, so `remove_stale` removes nothing either
            else:
                return

    def __enter__(self) -> Path:  # type: ignore[override]
        return Path(super().__enter__())

    def cleanup(self) -> None:
        """Remove the directory."""
        super().cleanup()
        self._unlock()


def remove_stale(folder: Path) -> None:
    """Remove the scratch directories in `folder` whose processes are dead."""
    for directory in folder.glob(f"{_PREFIX}*"):
        try:
            descriptor = flock_directory(directory)
        except OSError:
            continue
        try:
            with contextlib.suppress(FileNotFoundError):  # its owner removes it at the same time
                shutil.rmtree(directory)
        finally:
            os.close(descriptor)


# --- Sharded tensors in safetensors files: written as slices by several ranks, read back in any other partition -------
# The position of a slice is in the file's metadata, so any number of ranks can read what any other number wrote. A
# tensor without an entry there is whole, as in every Hugging Face folder.


_SLICES = "slices"
"""Key of the metadata: JSON, tensor name -> [global shape, offset]."""


def host_copies(values: Iterable[tuple[TensorSlice, Tensor]]) -> dict[TensorSlice, Tensor]:
    """Return copies on the host, contiguous and each with memory of its own."""
    return {s: torch.empty(s.local_shape, dtype=value.dtype).copy_(value.detach()) for s, value in values}


def write_slices(file: Path, values: Mapping[TensorSlice, Tensor]) -> None:
    """Write slices of different tensors into one file. They share no memory, which safetensors refuses.

    Raises:
        OSError, SafetensorError: the file cannot be written.

    """
    tensors = {s.name: value for s, value in values.items()}
    positions = {s.name: [s.global_shape, s.offset] for s in values}
    save_file(tensors, file, metadata={"format": "pt", _SLICES: json.dumps(positions)})


class SliceReader:
    """Reads slices of the tensors in several files. Close it, or use it in a `with`."""

    def __init__(self, files: Iterable[Path], name_of: Callable[[str], str] = str) -> None:
        """Open the files.

        Args:
            files: their paths.
            name_of: a name in a file -> the name by which the tensor is read.

        Raises:
            OSError, SafetensorError, ValueError: a file is missing or is not a safetensors file.

        """
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Name -> shape of the whole tensor."""
        self._stored: dict[str, list[tuple[Any, TensorSlice]]] = {}
        self._stack = ExitStack()
        with ExitStack() as stack:
            for file in files:
                opened: Any = stack.enter_context(safe_open(file, framework="pt"))
                positions = json.loads((opened.metadata() or {}).get(_SLICES, "{}"))
                for given in opened.keys():  # noqa: SIM118 - not a mapping
                    name, data = name_of(given), opened.get_slice(given)
                    local = tuple(data.get_shape())
                    shape, offset = positions.get(given, (local, (0,) * len(local)))
                    stored = TensorSlice(name, tuple(shape), tuple(offset), local)
                    self.shapes[name] = stored.global_shape
                    self._stored.setdefault(name, []).append((data, stored))
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, requested: TensorSlice) -> Tensor:
        """Return a slice of a tensor, put together from all files that overlap it.

        Raises:
            ValueError: the tensor is missing, has another shape, or some of the slice is in no file.

        """
        name, shape = requested.name, self.shapes.get(requested.name)
        if shape is None:
            raise ValueError(f"tensor {name} is missing (expected shape {list(requested.global_shape)})")
        if shape != requested.global_shape:
            raise ValueError(f"tensor {name} has shape {list(shape)}, expected {list(requested.global_shape)}")
        if not math.prod(requested.local_shape):
            return torch.zeros(requested.local_shape)
        result: Tensor | None = None
        n_read = 0
        for data, stored in self._stored[name]:
            low = [max(pair) for pair in zip(requested.offset, stored.offset, strict=True)]
            high = [min(pair) for pair in zip(requested.end, stored.end, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            value: Tensor = data[_relative(low, high, stored.offset)]
            if value.shape == requested.local_shape:
                return value
            result = torch.empty(requested.local_shape, dtype=value.dtype) if result is None else result
            result[_relative(low, high, requested.offset)] = value
            n_read += value.numel()
        if result is None or n_read != math.prod(requested.local_shape):
            raise ValueError(f"tensor {name} is incomplete: some of its slices are in no file")
        return result


def _relative(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - start, b - start) for a, b, start in zip(low, high, origin, strict=True))
