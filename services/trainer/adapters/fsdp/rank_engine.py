"""A rank of the FSDP2 backend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlboost.services.trainer.adapters.fsdp.forward_backward import FsdpForwardBackward
from rlboost.services.trainer.adapters.fsdp.model import FsdpModel, TrainedFsdpModel
from rlboost.services.trainer.adapters.fsdp.sharding import (
    add_adapter,
    empty_critic,
    empty_model,
    prepare_layers,
    saved_buffers,
    shard,
)
from rlboost.services.trainer.adapters.fsdp.state import FsdpOptimizerState
from rlboost.services.trainer.adapters.ranks.engine import COLLECTIVE_LIMIT, AskTrainer, RankEngine
from rlboost.services.trainer.adapters.ranks.layout import Coordinates, Layout
from rlboost.services.trainer.adapters.ranks.packed import NO_BALANCING, PackedBatch, pack_rows
from rlboost.services.trainer.adapters.ranks.trainable import Frozen, Trainable
from rlboost.services.trainer.adapters.torch.batch import DUMMY_ROWS
from rlboost.services.trainer.adapters.torch.context_parallel import ContextGroup
from rlboost.services.trainer.adapters.torch.logprobs import LogprobPass
from rlboost.services.trainer.adapters.torch.lora import Adapter
from rlboost.services.trainer.adapters.torch.value_model import ValuePass
from rlboost.shared.job.algorithm import CriticSpec


class FsdpRank(RankEngine):
    """`RankEngine` on FSDP2. Each rank has its own samples or part of them.

    Ranks have disjoint shards of every tensor; with `trainer.fsdp_size` those of a group, and each group all of them.
    """

    _adapter: Adapter | None = None

    def _init_parallel(self, rank: int, layout: Layout) -> Coordinates:
        self._context: ContextGroup | None = None
        if layout.context > 1:
            own, _ = distributed.new_subgroups(layout.context, timeout=COLLECTIVE_LIMIT)
            self._context = ContextGroup(own)
        self._mesh = _mesh_of(self._device, layout)
        return Coordinates.of(rank, layout)

    def load_hf(self, model: dict[str, Any], files: list[str], shared: str) -> dict[str, Any]:
        """See `RankEngine.load_hf`."""
        loaded = super().load_hf(model, files, shared)
        if self._settings.replayed or self._balancing.coefficient:
            self._offloader.onload_weights()
            self._policy.passes.columns([pack_rows(DUMMY_ROWS)])  # checks the routers
            self.offload()
        return loaded

    def accumulate(self, batches: list[list[bytes]], ask: AskTrainer) -> dict[str, float]:
        """See `RankEngine.accumulate`."""
        if self._adapter is None:
            return super().accumulate(batches, ask)
        # The adapter's dropout: a resumed job repeats it, and no two ranks have the same.
        entropy = (self._settings.seed % 2**64, self._n_steps, self._n_accumulated, distributed.get_rank())
        torch.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]))
        with self._adapter.training():
            return super().accumulate(batches, ask)

    def _build(self, model: dict[str, Any]) -> Trainable:
        module = empty_model(Path(model["source"]), model["attention"])
        self._adapter = add_adapter(module, lora, self._dtype) if (lora := self._settings.lora) else None
        prepare_layers(
            module,
            self._device,
            activation_checkpointing=self._settings.activation_checkpointing,
            compiled=self._settings.compile,
        )
        shard(module, self._device, self._mesh)
        passes = self._passes_of(module, balances=bool(self._balancing.coefficient))
        buffers = saved_buffers(module)
        if (adapter := self._adapter) is None:
            whole = TrainedFsdpModel(dict(module.named_parameters()), self._settings.optimizer, self._mesh, buffers)
            return Trainable(whole, passes, FsdpOptimizerState(whole.optimizer, self._local_value))
        trained = TrainedFsdpModel(adapter.tensors, self._settings.optimizer, self._mesh)
        return Trainable(
            trained,
            passes,
            FsdpOptimizerState(trained.optimizer, self._local_value),
            Frozen(FsdpModel(adapter.frozen, self._mesh, buffers), _BasePasses(passes, adapter)),
            adapter.initial_values(self._settings.seed),
            adapter.json,
        )

    def _build_reference(self, model: dict[str, Any]) -> Frozen:
        module = empty_model(Path(model["source"]), model["attention"]).requires_grad_(False)
        shard(module, self._device, self._mesh)
        parameters = FsdpModel(dict(module.named_parameters()), self._mesh, saved_buffers(module))
        return Frozen(parameters, self._passes_of(module))

    def _build_critic(self, model: dict[str, Any], spec: CriticSpec) -> Trainable:
        module = empty_critic(Path(model["source"]), model["attention"])
        prepare_layers(
            module.base_model,
            self._device,
            activation_checkpointing=self._settings.activation_checkpointing,
            compiled=self._settings.compile,
        )
        shard(module, self._device, self._mesh)
        forward = ValuePass(module, dtype=self._dtype, device=torch.device(self._device), context=self._context)
        passes = FsdpForwardBackward(forward, self._device, self._context, NO_BALANCING)
        trained = TrainedFsdpModel(dict(module.named_parameters()), spec, self._mesh, saved_buffers(module))
        initial = {f"head.{name}": torch.zeros(value.shape) for name, value in module.head.named_parameters()}
        return Trainable(trained, passes, FsdpOptimizerState(trained.optimizer, self._local_value), initial=initial)

    def _passes_of(self, module: Any, *, balances: bool = False) -> FsdpForwardBackward:
        forward = LogprobPass(
            module,
            temperature=self._settings.temperature,
            dtype=self._dtype,
            device=torch.device(self._device),
            max_logits=self._settings.max_logits,
            replayed=self._settings.replayed,
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


class _BasePasses:
    """`Forward` of the model below an adapter."""

    def __init__(self, passes: FsdpForwardBackward, adapter: Adapter) -> None:
        self._passes = passes
        self._adapter = adapter

    def columns(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        with self._adapter.without():
            return self._passes.columns(batches)


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
