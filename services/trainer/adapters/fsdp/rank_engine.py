"""A rank of the FSDP2 backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlboost.services.trainer.adapters.fsdp.forward_backward import FsdpForwardBackward
from rlboost.services.trainer.adapters.fsdp.model import FsdpModel, TrainedFsdpModel
from rlboost.services.trainer.adapters.fsdp.state import FsdpOptimizerState
from rlboost.services.trainer.adapters.ranks.engine import COLLECTIVE_LIMIT, RankEngine
from rlboost.services.trainer.adapters.ranks.layout import Coordinates, Layout
from rlboost.services.trainer.adapters.ranks.packed import pack_rows
from rlboost.services.trainer.adapters.ranks.tensor_slice import TensorSlice
from rlboost.services.trainer.adapters.ranks.trainable import ForwardBackward, Model, Trainable
from rlboost.services.trainer.adapters.torch.batch import DUMMY_ROWS
from rlboost.services.trainer.adapters.torch.context_parallel import ContextGroup
from rlboost.services.trainer.adapters.torch.logprobs import LogprobPass


class FsdpRank(RankEngine):
    """`RankEngine` on FSDP2. Each rank has its own samples or part of them.

    Ranks have disjoint shards of every tensor; with `trainer.fsdp_size` those of a group, and each group all of them.
    """

    def _init_parallel(self, rank: int, layout: Layout) -> Coordinates:
        self._context: ContextGroup | None = None
        if layout.context > 1:
            own, _ = distributed.new_subgroups(layout.context, timeout=COLLECTIVE_LIMIT)
            self._context = ContextGroup(own)
        self._mesh = _mesh_of(self._device, layout)
        return Coordinates.of(rank, layout)

    def load_hf(self, model: dict[str, Any], files: list[str], shared: str) -> list[TensorSlice]:
        """See `RankEngine.load_hf`."""
        slices = super().load_hf(model, files, shared)
        if self._replayed or self._balancing.coefficient:
            self._offloader.onload_weights()
            self._passes.logprobs([pack_rows(DUMMY_ROWS)])  # checks the routers
            self.offload()
        return slices

    def _build(self, model: dict[str, Any]) -> Trainable:
        model_shard = TrainedFsdpModel(
            Path(model["source"]),
            self._device,
            model["attention"],
            self._optimizer,
            mesh=self._mesh,
            activation_checkpointing=self._activation_checkpointing,
            compiled=self._compiled,
        )
        passes = self._passes_of(model_shard, balances=bool(self._balancing.coefficient))
        return Trainable(model_shard, passes, FsdpOptimizerState(model_shard.optimizer, self._local_value))

    def _build_reference(self, model: dict[str, Any]) -> tuple[Model, ForwardBackward]:
        model_shard = FsdpModel(Path(model["source"]), self._device, model["attention"], mesh=self._mesh, trained=False)
        return model_shard, self._passes_of(model_shard)

    def _passes_of(self, model_shard: FsdpModel, *, balances: bool = False) -> FsdpForwardBackward:
        forward = LogprobPass(
            model_shard.module,
            temperature=self._temperature,
            dtype=self._dtype,
            device=torch.device(self._device),
            max_logits=self._max_logits,
            replayed=self._replayed,
            context=self._context,
            balances=balances,
        )
        return FsdpForwardBackward(forward, self._device, self._context, self._balancing)

    @property
    def _part_number(self) -> int | None:
        rank = distributed.get_rank()
        return rank if rank < self._layout.n_shards else None

    @property
    def _has_logprobs(self) -> bool:
        return self._context is None or self._context.is_first


def _mesh_of(device: str, layout: Layout) -> DeviceMesh:
    """Return the mesh of FSDP2: `shards`, of neighboring ranks, or (`copies`, `shards`) with several groups of them."""
    n_shards = layout.n_shards
    n_copies = layout.n_ranks // n_shards
    if n_copies == 1:
        return init_device_mesh(device, (n_shards,), mesh_dim_names=("shards",))
    # Groups that `init_device_mesh` makes have the backend's own time limit.
    ranks = torch.arange(layout.n_ranks).view(n_copies, n_shards)
    groups = [
        distributed.new_subgroups_by_enumeration(members.tolist(), timeout=COLLECTIVE_LIMIT)[0]
        for members in (ranks.T, ranks)
    ]
    return DeviceMesh.from_group(groups, device, ranks, mesh_dim_names=("copies", "shards"))
