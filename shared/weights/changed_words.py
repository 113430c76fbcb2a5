"""The words of a model's tensors that differ between two versions, in one file for the processes of an engine.

The file is in safetensors format. Of each tensor that differs it has three vectors of equal length: the flat positions
of the words, ascending, their old values and their new ones. Imports torch: a worker imports it after it has joined.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping
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
