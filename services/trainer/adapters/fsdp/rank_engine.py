"""A rank of FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from services.trainer.adapters.fsdp.network import Network, TrainedNetwork
from services.trainer.adapters.fsdp.passes import PaddedPasses
from services.trainer.adapters.fsdp.state import OptimizerState
from services.trainer.adapters.ranks.engine import RankEngine
from services.trainer.adapters.ranks.layout import Layout, Place
from services.trainer.adapters.ranks.model import Built, Model, Passes
from services.trainer.adapters.torch.logprobs import LogprobPass


class FsdpRank(RankEngine):
    """See `RankEngine`. No two ranks have the same part of a tensor, and each has samples of its own."""

    def _joined(self, rank: int, layout: Layout) -> Place:
        return Place.of(rank, layout)

    def _built(self, model: dict[str, Any]) -> Built:
        network = TrainedNetwork(Path(model["source"]), self._device, self._optimizer, recomputes=self._recomputes)
        return Built(network, self._passes_of(network), OptimizerState(network.optimizer, self._held))

    def _frozen(self, model: dict[str, Any]) -> tuple[Model, Passes]:
        network = Network(Path(model["source"]), self._device, trained=False)
        return network, self._passes_of(network)

    def _passes_of(self, network: Network) -> PaddedPasses:
        forward = LogprobPass(
            network.module, temperature=self._temperature, dtype=self._dtype, device=torch.device(self._device)
        )
        return PaddedPasses(forward, self._device)

    @property
    def _part(self) -> int | None:
        return self._place.data

    @property
    def _has_logprobs(self) -> bool:
        return True
