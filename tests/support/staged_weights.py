"""Tensors of a test or benchmark as a version that a worker has pulled."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlboost.services.rollout_worker.ports import StagedWeights
from rlboost.shared.weights.manifest import ParityReference, Shard
from tests.support.staged_versions import pulled

if TYPE_CHECKING:
    import torch


class Staged:
    """`ports.StagedWeights` of tensors in memory; `location` writes them to a temporary directory."""

    config_json = "{}"
    contents: Mapping[str, Hashable] = {}
    parity_reference: ParityReference | None = None

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._tensors = tensors
        self._read: dict[str, torch.Tensor] = {}

    @property
    def location(self) -> Mapping[str, Any]:
        directory = tempfile.mkdtemp(prefix="rlboost-staged-")
        weakref.finalize(self, shutil.rmtree, directory)
        return pulled((shard(*item) for item in self.tensors()), Path(directory)).location

    def unmerged(self) -> tuple[Staged, None]:
        return self, None

    def tensors(self, names: Container[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._tensors:
            if names is None or name in names:
                self._read[name] = tensor
                yield name, tensor

    def changed_words(self, since: StagedWeights, names: Container[str]) -> None:
        """Too many for a test that does not count them."""

    def differing(self, loaded: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        found = dict(loaded)
        return [
            name for name, tensor in self._read.items() if not found[name].cpu().to(tensor.dtype).equal(tensor.cpu())
        ]


def shard(name: str, tensor: torch.Tensor) -> Shard:
    """Return a whole tensor as a trainer publishes it."""
    import torch  # noqa: PLC0415 - not every test that imports this has it

    data: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    shape = tuple(tensor.shape)
    return Shard(name, str(tensor.dtype).removeprefix("torch."), shape, (0,) * len(shape), shape, data.data)
