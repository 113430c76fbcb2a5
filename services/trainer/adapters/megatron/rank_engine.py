"""A rank of megatron-core. Import after `hook.install()`."""

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from services.trainer.adapters.megatron import hook
from services.trainer.adapters.megatron.model import Network, TrainedNetwork
from services.trainer.adapters.megatron.passes import SchedulePasses
from services.trainer.adapters.megatron.shape import ModelShape
from services.trainer.adapters.megatron.state import OptimizerState
from services.trainer.adapters.ranks.engine import RankEngine
from services.trainer.adapters.ranks.layout import Layout, Place
from services.trainer.adapters.ranks.model import Built, Model, Passes


class MegatronRank(RankEngine):
    """See `RankEngine`."""

    rewritten = hook.rewritten()

    def _joined(self, rank: int, layout: Layout) -> Place:
        parallel_state.initialize_model_parallel(layout.tensor, layout.pipeline)
        model_parallel_cuda_manual_seed(0)
        place = Place.of(rank, layout)
        found = Place(
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(),
        )
        assert found == place, f"megatron-core has put rank {rank} at {found}, not at {place}"
        return place

    def _built(self, model: dict[str, Any]) -> Built:
        shape = ModelShape(*model["shape"])
        network = TrainedNetwork(
            shape, self._layout, self._place, self._dtype, self._optimizer, recomputes=self._recomputes
        )
        return Built(network, SchedulePasses(network, self._temperature), OptimizerState(network, self._held))

    def _frozen(self, model: dict[str, Any]) -> tuple[Model, Passes]:
        network = Network(ModelShape(*model["shape"]), self._layout, self._place, self._dtype)
        return network, SchedulePasses(network, self._temperature)

    @property
    def _part(self) -> int | None:
        return None if self._place.data else self._place.tensor + self._layout.tensor * self._place.pipeline

    @property
    def _has_logprobs(self) -> bool:
        return self._place.tensor == 0
