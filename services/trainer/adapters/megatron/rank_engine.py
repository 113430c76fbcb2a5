"""A rank of the megatron-core backend."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import distributed

from rlboost.services.trainer.adapters.megatron.forward_backward import PipelineForwardBackward
from rlboost.services.trainer.adapters.megatron.model import MegatronModel, TrainedMegatronModel
from rlboost.services.trainer.adapters.megatron.model_shape import ModelShape
from rlboost.services.trainer.adapters.megatron.state import MegatronOptimizerState
from rlboost.services.trainer.adapters.ranks.engine import COLLECTIVE_LIMIT, RankEngine
from rlboost.services.trainer.adapters.ranks.layout import Coordinates, Layout
from rlboost.services.trainer.adapters.ranks.trainable import Frozen, Trainable
from rlboost.services.trainer.adapters.torch.context_parallel import ContextGroup
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.algorithm import CriticSpec


class MegatronRank(RankEngine):
    """`RankEngine` on megatron-core, which needs CUDA."""

    def _init_parallel(self, rank: int, layout: Layout) -> Coordinates:
        # To megatron-core, context-parallel ranks are data-parallel: it sums the gradients over both. `PackedAttention`
        # exchanges their tokens.
        parallel_state.initialize_model_parallel(
            layout.tensor, layout.pipeline, expert_model_parallel_size=layout.expert
        )
        _seed()
        self._context = _context_group(layout) if layout.context > 1 else None
        coordinates = Coordinates.of(rank, layout)
        found = (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_data_parallel_rank(),
        )
        place = coordinates.tensor, coordinates.pipeline, coordinates.replica_index(layout)
        assert found == place, f"megatron-core put rank {rank} at {found}, expected {place}"
        expert, expected = parallel_state.get_expert_model_parallel_rank(), coordinates.expert_part(layout)
        assert expert == expected, f"megatron-core gave rank {rank} part {expert} of the experts, expected {expected}"
        return coordinates

    def _build(self, model: dict[str, Any]) -> Trainable:
        shape = ModelShape(*model["shape"])
        model_shard = TrainedMegatronModel(
            shape,
            self._layout,
            self._coordinates,
            self._dtype,
            self._settings.optimizer,
            activation_checkpointing=self._settings.activation_checkpointing,
            balances=self._balancing.coefficient > 0,
        )
        return Trainable(
            model_shard,
            PipelineForwardBackward(
                model_shard, self._settings.temperature, self._balancing, self._settings.replayed, self._context
            ),
            MegatronOptimizerState(model_shard, self._local_value),
        )

    def _build_reference(self, model: dict[str, Any]) -> Frozen:
        model_shard = MegatronModel(ModelShape(*model["shape"]), self._layout, self._coordinates, self._dtype)
        passes = PipelineForwardBackward(
            model_shard, self._settings.temperature, replayed=self._settings.replayed, context=self._context
        )
        return Frozen(model_shard, passes)

    def _build_critic(self, model: dict[str, Any], spec: CriticSpec) -> Trainable:  # noqa: ARG002 - of the base class
        raise ConfigError("algorithm.critic needs trainer.backend: torch")

    @property
    def _part_number(self) -> int | None:
        layout, coordinates = self._layout, self._coordinates
        replica = coordinates.replica_index(layout)
        # The first replica, and those with the other experts.
        if replica >= layout.expert:
            return None
        return coordinates.tensor + layout.tensor * (replica + layout.expert * coordinates.pipeline)

    @property
    def _has_logprobs(self) -> bool:
        return self._coordinates.tensor == self._coordinates.context == 0


def _context_group(layout: Layout) -> ContextGroup:
    """Return this rank's group; a collective call. Its ranks are `layout.tensor` apart."""
    blocks = range(0, layout.n_ranks, layout.tensor * layout.context)
    groups = [
        [block + tensor + layout.tensor * context for context in range(layout.context)]
        for block in blocks
        for tensor in range(layout.tensor)
    ]
    own, _ = distributed.new_subgroups_by_enumeration(groups, timeout=COLLECTIVE_LIMIT)
    return ContextGroup(own)


def _seed() -> None:
    """Seed megatron-core's random generators, the first step that needs CUDA.

    Raises:
        ConfigError: there is no GPU.

    """
    try:
        model_parallel_cuda_manual_seed(0)
    except (AssertionError, RuntimeError) as error:
        if torch.cuda.is_available():
            raise
        raise ConfigError(
            "trainer.backend: megatron needs CUDA, and the trainer has no GPU (RLBOOST_TRAINER_DEVICE): use "
            "trainer.backend: torch, with trainer.data_parallel for several processes"
        ) from error
