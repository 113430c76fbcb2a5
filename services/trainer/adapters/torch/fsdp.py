"""A rank of the torch backend: models of transformers, their optimizers, and forward and backward over packed rows.

A rank that is alone has whole tensors, and neither FSDP2 nor a process group. With several ranks FSDP2 (arXiv
2304.11277) gives each a range of rows of every parameter and of its moments; with several groups of ranks (HSDP) each
group has the whole model. Gradients are summed over micro-batches and ranks, and divided once per update.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rlboost.services.trainer.adapters.torch.attention import ContextGroup
from rlboost.services.trainer.adapters.torch.engine import COLLECTIVE_LIMIT, GradientFn, RankEngine
from rlboost.services.trainer.adapters.torch.layers import (
    Adapter,
    checkpoint_activations,
    compile_layers,
    layers_of,
)
from rlboost.services.trainer.adapters.torch.models import (
    empty_critic,
    empty_model,
    file_names,
    freeze_towers,
    initial_head,
    whole_critic,
    whole_model,
)
from rlboost.services.trainer.adapters.torch.passes import DUMMY_ROWS, LogprobPass, ScorePass, ValuePass, with_scores
from rlboost.services.trainer.adapters.torch.ranks import Coordinates, Layout, TensorSlice
from rlboost.services.trainer.adapters.torch.trainable import (
    MOMENTS,
    MOMENTUM,
    NO_BALANCING,
    NO_TENSORS,
    WEIGHT,
    Balancing,
    Frozen,
    LossGradientFn,
    MicroBatch,
    Trainable,
    local_tensor,
)
from rlboost.services.trainer.domain.loss.function import add_sums
from rlboost.shared.job.algorithm import CriticSpec
from rlboost.shared.job.training import OptimizerSpec
from rlboost.shared.model.file_names import NO_NAMES, FileNames, matrices
from rlboost.shared.model.folder import HEAD

# --- Models of transformers, whole on one rank, or sharded by FSDP2 (arXiv 2304.11277) --------------------------------
# A layer's parameters are gathered only while the layer computes.


SETTING = "trainer.data_parallel, trainer.context_parallel"


def shard(module: Any, device: str, mesh: DeviceMesh) -> None:
    """Shard an empty module, in place, and allocate this rank's shards uninitialized. A collective call of all ranks.

    Args:
        module: a causal language model or a critic on the meta device, but for its buffers. Each of its layers is
            gathered by itself, everything else with the module.
        device: `cpu` or `cuda`.
        mesh: the ranks. Its last dimension shares the model; a dimension before it makes it HSDP: gradients are
            also summed over it.

    Raises:
        ConfigError: transformers does not mark the model's layers.

    """
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    for sharded in (*layers_of(module, SETTING), module):
        # The root too: by default it stays gathered until the backward pass, which a frozen model does not have.
        fully_shard(sharded, mesh=mesh, reshard_after_forward=True)
        # By default FSDP2 divides by the number of ranks.
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(1.0)
    module.to_empty(device=device)
    for name, buffer in module.named_buffers():
        buffer.copy_(buffers[name])


def saved_buffers(module: Any) -> dict[str, Tensor]:
    """Return the buffers that checkpoints of the module have."""
    saved = module.state_dict()
    return {name: buffer for name, buffer in module.named_buffers() if name in saved}


# --- A policy's optimizers: AdamW for all parameters; or Muon for hidden matrices and AdamW for the others ------------


def optimizers(
    model: Any, parameters: Sequence[Tensor], spec: OptimizerSpec | CriticSpec, *, fused: bool = True
) -> list[torch.optim.Optimizer]:
    """Return the optimizers of `parameters`, which share one learning rate; each parameter has exactly one.

    Muon (https://kellerjordan.github.io/posts/muon/) orthogonalizes the momentum of a matrix with five Newton-Schulz
    steps in bfloat16. Updates are scaled to the root mean square of AdamW's, 0.2 per entry (Moonlight, arXiv
    2502.16982), so both use `lr` and `weight_decay`. Momentum is 0.95, with Nesterov.

    Args:
        model: a transformers model.
        parameters: the trained parameters.
        spec: the job's settings.
        fused: use AdamW's fused kernel, which is for whole tensors.

    """
    muon = isinstance(spec, OptimizerSpec) and spec.name == "muon"
    matrices = hidden_matrices(model, parameters) if muon else []
    by_muon = {id(matrix) for matrix in matrices}
    others = [parameter for parameter in parameters if id(parameter) not in by_muon]
    adamw = torch.optim.AdamW(others, lr=spec.lr, betas=spec.betas, weight_decay=spec.weight_decay, fused=fused or None)
    if not matrices:
        return [adamw]
    return [
        torch.optim.Muon(matrices, lr=spec.lr, weight_decay=spec.weight_decay, adjust_lr_fn="match_rms_adamw"),
        adamw,
    ]


def hidden_matrices(model: Any, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the two-dimensional parameters except embeddings and the output head."""
    outer = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    heads = (model.get_output_embeddings(), getattr(model, "score", None))
    outer += [head.weight for head in heads if head is not None]
    excluded = {id(weight) for weight in outer}
    return [parameter for parameter in parameters if parameter.ndim == 2 and id(parameter) not in excluded]


# --- One rank's shards, and their optimizers --------------------------------------------------------------------------


class FsdpWeightMap:
    """`WeightMap` of one rank: a range of rows of each parameter, which are whole experts if it has experts."""

    def __init__(
        self,
        shapes: dict[str, tuple[int, ...]],
        rank: int,
        n_ranks: int,
        buffers: frozenset[str] = frozenset(),
        names: FileNames = NO_NAMES,
    ) -> None:
        """Map for a rank of a group that divides rows as `torch.chunk` does: its last ranks may have fewer, or none.

        Args:
            shapes: shapes of all tensors, by name.
            rank: the rank's number in the group.
            n_ranks: the group's number of ranks.
            buffers: names of the tensors that every rank has whole.
            names: their names in files.

        """
        self._is_first, self._buffers = rank == 0, buffers
        self._rows = {
            name: TensorSlice.whole(name, shape) if name in buffers else _rows(name, shape, rank, n_ranks)
            for name, shape in shapes.items()
        }
        self._n_parts = {name: len(names[name]) // shapes[name][0] for name in shapes if len(names.get(name, ())) > 1}
        """Of tensors that are split: the number of matrices of each expert."""
        self._slices = {name: self._in_files(rows, names.get(name, (name,))) for name, rows in self._rows.items()}

    def owns(self, name: str) -> bool:
        """Return True: no other rank of the group has the same rows. Its first exports buffers, which all have."""
        return self._is_first or name not in self._buffers

    def slices(self, name: str) -> list[TensorSlice]:
        """Return this rank's rows: one slice, or the matrices of each of its experts."""
        return self._slices[name]

    def split(self, name: str, value: Tensor) -> list[Tensor]:
        """Return the value as the only slice, or the matrices of its experts."""
        return matrices(value, self._n_parts[name]) if name in self._n_parts else [value]

    def join(self, name: str, values: list[Tensor]) -> Tensor:
        """Join the slices; the inverse of `split`."""
        if name not in self._n_parts:
            (value,) = values
            return value
        shape = self._rows[name].local_shape
        return torch.cat(values).reshape(shape) if values else torch.zeros(shape)

    def _in_files(self, rows: TensorSlice, names: Sequence[str]) -> list[TensorSlice]:
        """Return the rows of a tensor under its name in files, or the matrices of the experts that they are."""
        if (n_parts := self._n_parts.get(rows.name)) is None:
            return [rows._replace(name=names[0])]
        n_rows, n_columns = rows.global_shape[1:]
        of_rows = names[rows.offset[0] * n_parts : rows.end[0] * n_parts]
        return [TensorSlice.whole(name, (n_rows // n_parts, n_columns)) for name in of_rows]


class FsdpModel:
    """One rank's shards of some tensors: of a whole model, of one below an adapter, or of an adapter."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        mesh: DeviceMesh | None,
        buffers: Mapping[str, Tensor] = NO_TENSORS,
        names: FileNames = NO_NAMES,
    ) -> None:
        """Take the parameters of a module, which `shard` has sharded if there is a mesh.

        Args:
            parameters: by their names in the model; `DTensor`s on a mesh.
            mesh: over which they are sharded; None if they are whole.
            buffers: those that checkpoints have.
            names: the names under which they are exported, if those differ.

        """
        self._tensors = {**parameters, **buffers}
        shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        rank, n_ranks = (mesh["shards"].get_local_rank(), mesh["shards"].size()) if mesh is not None else (0, 1)
        self.weight_map = FsdpWeightMap(shapes, rank, n_ranks, frozenset(buffers), names)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters, and the buffers that checkpoints have."""
        yield from self._tensors.items()

    def put(self, parameter: Tensor, value: Tensor) -> None:
        """Overwrite this rank's rows of a parameter."""
        local_tensor(parameter).copy_(value)


class TrainedFsdpModel(FsdpModel):
    """One rank's shards of the trained tensors, with their optimizers."""

    def __init__(
        self,
        module: Any,
        parameters: Mapping[str, Tensor],
        spec: OptimizerSpec | CriticSpec,
        mesh: DeviceMesh | None,
        buffers: Mapping[str, Tensor] = NO_TENSORS,
        names: FileNames = NO_NAMES,
    ) -> None:
        """See `FsdpModel`; the parameters are those of `module`."""
        super().__init__(parameters, mesh, buffers, names)
        self._clip = spec.grad_clip
        self.trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
        """The tensors that the optimizers update."""
        self.optimizers = optimizers(module, self.trained, spec, fused=mesh is None)

    def zero_gradients(self) -> None:
        """Drop the accumulated gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def finish_gradients(self, divisor: int) -> float:
        """Divide the gradients by `divisor` and clip them; return their global norm before clipping."""
        for gradient in self.gradients():
            gradient.div_(divisor)
        norm: Any = torch.nn.utils.clip_grad_norm_(self.trained, self._clip)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def update(self, learning_rate: float) -> None:
        """Apply the gradients."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()

    def gradients(self) -> list[Tensor]:
        """Return this rank's shards of the gradients."""
        return [parameter.grad for parameter in self.trained if parameter.grad is not None]


def _rows(name: str, shape: tuple[int, ...], rank: int, n_ranks: int) -> TensorSlice:
    if n_ranks == 1:
        return TensorSlice.whole(name, shape)
    each = -(-shape[0] // n_ranks)
    first, end = min(shape[0], rank * each), min(shape[0], (rank + 1) * each)
    dims = shape[1:]
    return TensorSlice(name, shape, (first, *(0 for _ in dims)), (end - first, *dims))


# --- Reads and writes one rank's rows of the weights and of the optimizers' moments -----------------------------------


_STEP = "step"


class FsdpOptimizerState:
    """`OptimizerState` of one rank."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], local_value: Callable[[Tensor], Tensor]) -> None:
        """Access `optimizers`; `local_value` reads a tensor that may be offloaded."""
        self._optimizers = {p: one for one in optimizers for group in one.param_groups for p in group["params"]}
        self._local_value = local_value

    def kinds(self, parameter: Tensor) -> tuple[str, ...]:
        if (optimizer := self._optimizers.get(parameter)) is None:
            return ()
        return (MOMENTUM,) if isinstance(optimizer, torch.optim.Muon) else MOMENTS

    def get(self, parameter: Tensor, kind: str) -> Tensor:
        """Return this rank's rows of a weight or a moment, which is 0 if the parameter never had a gradient."""
        if kind == WEIGHT:
            return self._local_value(parameter)
        state = self._optimizers[parameter].state.get(parameter)
        return self._local_value(state[kind]) if state else torch.zeros_like(local_tensor(parameter))

    def set(self, parameter: Tensor, kind: str, value: Tensor) -> None:
        """Overwrite this rank's rows of a weight or a moment."""
        if kind == WEIGHT:
            local_tensor(parameter).copy_(value)
            return
        local = value.to(parameter.device, torch.float32, copy=True)
        if isinstance(parameter, DTensor):
            local = DTensor.from_local(
                local, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
            )
        self._optimizers[parameter].state[parameter][kind] = local

    def set_steps(self, n_steps: int) -> None:
        """Set the number of updates that the moments contain; 0 drops them."""
        for parameter, optimizer in self._optimizers.items():
            if not n_steps:
                optimizer.state.pop(parameter, None)
            elif MOMENTUM not in (state := optimizer.state[parameter]):
                # The fused kernel reads it on the device.
                device = "cpu" if isinstance(parameter, DTensor) else parameter.device
                state[_STEP] = torch.tensor(float(n_steps), device=device)


# --- Forward and backward over each rank's own micro-batches, whose rows are packed -----------------------------------
# A forward pass gathers each layer's parameters from all ranks, so all ranks make the same number of passes: a rank
# with fewer micro-batches than another repeats a dummy row.


class FsdpForwardBackward:
    """`ForwardBackward` of one rank."""

    def __init__(
        self,
        forward: LogprobPass | ValuePass,
        mesh: DeviceMesh | None,
        context: ContextGroup | None,
        balancing: Balancing,
    ) -> None:
        """Use the forward pass of a model.

        Args:
            forward: computes log-probabilities or values.
            mesh: over which the model is sharded; None if it is whole.
            context: divides the tokens of each micro-batch, if any.
            balancing: for a mixture of experts.

        """
        self.forward = forward
        self._mesh = mesh
        self._context = context
        self._balancing = balancing

    def columns(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return each micro-batch's log-probabilities or values, [trained tokens]."""
        with torch.no_grad():
            columns = [self.forward(rows).cpu() for rows in self._with_dummies(batches)]
        return columns[: len(batches)]

    def accumulate(self, batches: Sequence[MicroBatch], loss_gradient: LossGradientFn) -> dict[str, float]:
        """Run forward and backward, adding to the gradients; return sums about the routers of experts."""
        totals: dict[str, float] = {}
        for index, rows in enumerate(self._with_dummies(batches)):
            column = self.forward(rows)
            gradient = torch.zeros_like(column)
            if index < len(batches):
                if self._context is None or self._context.is_first:
                    gradient.copy_(loss_gradient(index, column.detach()))
                if self._context is not None:
                    self._context.broadcast(gradient)
            # A surrogate whose gradient is the loss's.
            surrogate = (column * gradient).sum()
            if (balance := self.forward.balance) is not None and index < len(batches):
                if self._balancing.coefficient:
                    share = balance.n_tokens / sum(row.n_tokens for row in rows)  # of this rank's slice of the tokens
                    surrogate = surrogate + self._balancing.factor(rows) * share * balance.loss
                add_sums(totals, balance.sums())
            surrogate.backward()
        return totals

    def _with_dummies(self, batches: Sequence[MicroBatch]) -> Sequence[MicroBatch]:
        if self._mesh is None:
            return batches
        most = torch.tensor(len(batches), device=self._mesh.device_type)
        distributed.all_reduce(most, distributed.ReduceOp.MAX)
        return [*batches, *[DUMMY_ROWS] * (int(most) - len(batches))]


# --- A rank -----------------------------------------------------------------------------------------------------------


class FsdpRank(RankEngine):
    """`RankEngine` on transformers and FSDP2. Each rank has its own samples or part of them.

    Ranks have disjoint shards of every tensor; with `trainer.fsdp_size` those of a group, and each group all of them.
    A rank that is alone has whole models, which transformers loads.
    """

    _adapter: Adapter | None = None
    module: Any
    """The causal language model of transformers."""
    reference: Any = None
    """A frozen copy of it; None if losses need none or a teacher's, or if an adapter is trained."""

    def _init_parallel(self, rank: int, layout: Layout) -> Coordinates:
        self._context: ContextGroup | None = None
        if layout.context > 1:
            own, _ = distributed.new_subgroups(layout.context, timeout=COLLECTIVE_LIMIT)
            self._context = ContextGroup(own)
        self._mesh = _mesh_of(self._device, layout) if layout.n_ranks > 1 else None
        return Coordinates.of(rank, layout)

    def load_hf(
        self,
        model: dict[str, Any],
        files: Sequence[str] = (),
        shared: str = "",
        teacher: dict[str, Any] | None = None,
        teacher_files: Sequence[str] = (),
    ) -> dict[str, Any]:
        loaded = super().load_hf(model, files, shared, teacher, teacher_files)
        if self._settings.replayed or self._balancing.coefficient:
            self._offloader.onload_weights()
            self.policy.passes.columns([DUMMY_ROWS])  # checks the routers
            self.offload()
        return loaded

    def accumulate(self, batches: Sequence[MicroBatch], gradient: GradientFn) -> dict[str, float]:
        if self._adapter is None:
            return super().accumulate(batches, gradient)
        # The adapter's dropout: a resumed job repeats it, and no two ranks have the same.
        entropy = (self._settings.seed % 2**64, self._n_steps, self._n_accumulated, self._rank)
        torch.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]))
        with self._adapter.training():
            return super().accumulate(batches, gradient)

    @property
    def _reads_files(self) -> bool:
        return self._mesh is not None

    def _build(self, model: dict[str, Any]) -> Trainable:
        settings, source = self._settings, Path(model["source"])
        dtype = self._dtype if settings.lora else torch.float32
        if self._mesh is None:
            module = whole_model(source, model["attention"], dtype, scores=settings.scores).to(self._device)
            if settings.compile:
                torch.compiler.reset()  # the code of earlier jobs counts towards torch's limit of variants
        else:
            module = empty_model(source, model["attention"], dtype, scores=settings.scores)
        freeze_towers(module, all_of_them=settings.freeze_vision_tower)
        head = {HEAD: initial_head(source, settings.seed)} if settings.scores else NO_TENSORS
        self.module = module
        names = file_names(source, scores=settings.scores)
        self._adapter = Adapter(module, settings.lora, names, scores=settings.scores) if settings.lora else None
        if self._mesh is None and settings.reference and self._adapter is None and not settings.teacher:
            self.reference = copy.deepcopy(module).requires_grad_(False)
        self._prepare(module, module)
        passes = self._passes_of(module, balances=bool(self._balancing.coefficient))
        buffers = saved_buffers(module)
        if (adapter := self._adapter) is None:
            parameters = dict(module.named_parameters())
            return self._trainable(
                TrainedFsdpModel(module, parameters, settings.optimizer, self._mesh, buffers, names),
                passes,
                initial=head,
            )
        return self._trainable(
            TrainedFsdpModel(module, adapter.tensors, settings.optimizer, self._mesh),
            passes,
            Frozen(FsdpModel(adapter.frozen, self._mesh, buffers, names), _BasePasses(passes, adapter)),
            adapter.initial_values(settings.seed, head),
            adapter.json,
        )

    def _trainable(self, model: TrainedFsdpModel, passes: FsdpForwardBackward, *others: Any, **more: Any) -> Trainable:
        return Trainable(model, passes, FsdpOptimizerState(model.optimizers, self._local_value), *others, **more)

    def _prepare(self, module: Any, body: Any) -> None:
        """Compile and checkpoint the layers of a module that is trained, those of `body`, as asked; then shard it."""
        if self._settings.compile:
            compile_layers(body, self._device)
        if self._settings.activation_checkpointing:
            checkpoint_activations(body)
        if self._mesh is not None:
            shard(module, self._device, self._mesh)

    def _build_reference(self, model: dict[str, Any]) -> Frozen:
        source, attention = Path(model["source"]), model["attention"]
        dtype = self._dtype if self._settings.teacher else torch.float32
        if self._mesh is not None:
            module = empty_model(source, attention, dtype).requires_grad_(False)
            shard(module, self._device, self._mesh)
        elif self._settings.teacher:
            module = whole_model(source, attention, dtype).to(self._device).requires_grad_(False)
        else:
            module = self.reference
        names = file_names(source)
        parameters = FsdpModel(dict(module.named_parameters()), self._mesh, saved_buffers(module), names)
        return Frozen(parameters, self._passes_of(module))

    def _build_critic(self, model: dict[str, Any], spec: CriticSpec) -> Trainable:
        source, attention = Path(model["source"]), model["attention"]
        if self._mesh is None:
            module = whole_critic(source, attention).to(self._device)
        else:
            module = empty_critic(source, attention)
        self._prepare(module, module.base_model)
        forward = ValuePass(module, dtype=self._dtype, device=torch.device(self._device), context=self._context)
        passes = FsdpForwardBackward(forward, self._mesh, self._context, NO_BALANCING)
        parameters, buffers, names = dict(module.named_parameters()), saved_buffers(module), file_names(source)
        trained = TrainedFsdpModel(module, parameters, spec, self._mesh, buffers, names)
        initial = {f"head.{name}": torch.zeros(value.shape) for name, value in module.head.named_parameters()}
        return self._trainable(trained, passes, initial=initial)

    def _passes_of(self, module: Any, *, balances: bool = False) -> FsdpForwardBackward:
        device, context = torch.device(self._device), self._context
        forward: LogprobPass | ScorePass
        if self._settings.scores:
            with_scores(module)
            forward = ScorePass(module, dtype=self._dtype, device=device, context=context)
        else:
            forward = LogprobPass(module, self._settings, device=device, context=context, balances=balances)
        return FsdpForwardBackward(forward, self._mesh, self._context, self._balancing)

    @property
    def _part_number(self) -> int | None:
        return self._rank if self._rank < self._layout.n_shards else None

    @property
    def _has_logprobs(self) -> bool:
        return self._context is None or self._context.is_first


class _BasePasses:
    """`Forward` of the model below an adapter."""

    def __init__(self, passes: FsdpForwardBackward, adapter: Adapter) -> None:
        self._passes = passes
        self._adapter = adapter

    def columns(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
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
