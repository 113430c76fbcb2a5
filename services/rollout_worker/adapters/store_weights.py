"""Weights from the weight store, by way of this machine's cache. Imports torch only when tensors are asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from shared.weights.pulled import PulledVersion
from shared.weights.puller import Puller

if TYPE_CHECKING:
    import torch


class StoredVersion:
    """`ports.StagedWeights` in a puller's cache."""

    def __init__(self, pulled: PulledVersion) -> None:
        self._pulled = pulled

    @property
    def config_json(self) -> str:
        """See `StagedWeights`."""
        return self._pulled.manifest.config_json

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `StagedWeights`."""
        from services.rollout_worker.adapters import torch_tensors  # noqa: PLC0415 - torch is imported after joining

        return torch_tensors.tensors(self._pulled)

    def differing(self, loaded: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """See `StagedWeights`."""
        from services.rollout_worker.adapters import torch_tensors  # noqa: PLC0415 - torch is imported after joining

        return torch_tensors.differing(self._pulled.manifest, loaded)


class StoreWeights:
    """`ports.WeightSource` on one weight store."""

    def __init__(self, puller: Puller) -> None:
        self._puller = puller

    async def pull(self, job_id: str, version: int) -> StoredVersion:
        """See `WeightSource`."""
        return StoredVersion(await self._puller.pull(job_id, version))
