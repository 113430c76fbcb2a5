"""A rank of the megatron-core backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed, vocab_parallel_cross_entropy
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable

from rlboost.services.trainer.adapters.megatron.model import (
    MegatronModel,
    PackedRows,
    RoutedBatch,
    Routers,
    TrainedMegatronModel,
)
from rlboost.services.trainer.adapters.megatron.model_shape import ModelShape
from rlboost.services.trainer.adapters.torch.attention import ContextGroup
from rlboost.services.trainer.adapters.torch.engine import COLLECTIVE_LIMIT, RankEngine
from rlboost.services.trainer.adapters.torch.passes import DUMMY_ROWS, Packed, packed, replayed
from rlboost.services.trainer.adapters.torch.ranks import Coordinates, Layout
from rlboost.services.trainer.adapters.torch.routing import Replay
from rlboost.services.trainer.adapters.torch.trainable import (
    MOMENTS,
    NO_BALANCING,
    WEIGHT,
    Balancing,
    Frozen,
    LossGradientFn,
    MicroBatch,
    Trainable,
)
from rlboost.services.trainer.domain.plan import SequenceRow
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.algorithm import CriticSpec
from rlboost.shared.wire import RoutedShape

# --- Reads and writes the state of megatron-core's optimizers, one whole float32 tensor per parameter -----------------
# With the distributed optimizer each data-parallel rank holds a contiguous range of a parameter's values, or none; of
# an expert's, with expert parallelism, each rank that has the same experts.


_STEP = "step"


class MegatronOptimizerState:
    """`OptimizerState` of one rank."""

    def __init__(self, model: TrainedMegatronModel, local_value: Callable[[Tensor], Tensor]) -> None:
        """Access the model's optimizer; `local_value` reads a tensor that may be offloaded."""
        self._local_value = local_value
        # A second one has the experts if they are divided over data-parallel ranks.
        self._optimizers: list[Any] = model.optimizer.chained_optimizers
        self._distributed = isinstance(self._optimizers[0], DistributedOptimizer)

    def kinds(self, _: Tensor) -> tuple[str, ...]:
        return MOMENTS

    def get(self, parameter: Tensor, kind: str) -> Tensor:
        """Return a master weight or a moment, in the parameter's shape.

        With the distributed optimizer this is a collective call of the ranks that share the parameter.

        Args:
            parameter: a parameter of the model.
            kind: `WEIGHT`, or one of `MOMENTS` after the first step.

        """
        master, span = self._master_of(parameter)
        if not self._distributed:
            assert master is not None
            return self._value(parameter, master, kind)
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if master is not None:
            whole[span] = self._value(parameter, master, kind)
        # Summed as integers, which keeps every bit: all values but one are zero.
        group = (
            parallel_state.get_expert_data_parallel_group()
            if _is_divided_expert(parameter)
            else parallel_state.get_data_parallel_group()
        )
        distributed.all_reduce(whole.view(torch.int32), group=group)
        return whole.view(parameter.shape)

    def set(self, parameter: Tensor, kind: str, value: Tensor) -> None:
        """Overwrite a moment, or a master weight and the parameter with it."""
        master, span = self._master_of(parameter)
        value = value.to(parameter.device)
        if kind == WEIGHT:
            parameter.data.copy_(value)
        if master is not None:
            local = (value.reshape(-1)[span] if self._distributed else value).to(torch.float32)
            if kind == WEIGHT:
                master.data.copy_(local)
            else:
                self._optimizer_of(parameter).optimizer.state[master][kind] = local.clone()

    def set_steps(self, n_steps: int) -> None:
        """Set the number of updates that the moments contain; 0 drops them."""
        for inner in (wrapper.optimizer for wrapper in self._optimizers):
            if not n_steps:
                inner.state.clear()
            if USING_PYTORCH_OPTIMIZER:
                for values in inner.state.values():
                    values[_STEP] = torch.tensor(float(n_steps))
            else:  # TransformerEngine's or apex's
                for group in inner.param_groups:
                    group[_STEP] = n_steps

    def _optimizer_of(self, parameter: Tensor) -> Any:
        return self._optimizers[1 if _is_divided_expert(parameter) else 0]

    def _value(self, parameter: Tensor, master: Tensor, kind: str) -> Tensor:
        if kind == WEIGHT:
            return self._local_value(master)
        return self._local_value(self._optimizer_of(parameter).optimizer.state[master][kind])

    def _master_of(self, parameter: Tensor) -> tuple[Tensor | None, slice]:
        """Return the tensor that this rank's Adam updates, and its range in the flattened parameter."""
        optimizer = self._optimizer_of(parameter)
        if not self._distributed:
            return getattr(parameter, "main_param", parameter), slice(None)
        if parameter not in optimizer.model_param_gbuf_map:
            return None, slice(0)
        group, order = optimizer.model_param_group_index_map[parameter]
        span = optimizer._get_model_param_range_map(parameter)["param"]  # noqa: SLF001 - no public accessor
        return optimizer.optimizer.param_groups[group]["params"][order], slice(span.start, span.end)


def _is_divided_expert(parameter: Tensor) -> bool:
    """Return True for a parameter of an expert that not all data-parallel ranks have; megatron-core marks it."""
    return not getattr(parameter, "allreduce", True)


# --- Forward and backward over packed micro-batches, run by megatron-core's schedules ---------------------------------
# Rows are concatenated without padding, each a sequence of its own. The caller computes the loss and returns its
# gradient with respect to the log-probabilities. With expert parallelism each layer exchanges tokens with the ranks
# that have the other experts, so these ranks make the same number of passes: one with fewer micro-batches adds passes
# of a dummy row.


class PipelineForwardBackward:
    """`ForwardBackward` of one rank."""

    def __init__(
        self,
        model: MegatronModel,
        temperature: float,
        balancing: Balancing = NO_BALANCING,
        replayed: RoutedShape | None = None,
        context: ContextGroup | None = None,
        *,
        entropies: bool = False,
    ) -> None:
        """Register hooks on the routers of a mixture of experts.

        Args:
            model: this rank's part of the model.
            temperature: divides the logits.
            balancing: for a mixture of experts.
            replayed: the shape of the rows' routed experts, which replace those of the routers.
            context: the ranks that divide the tokens of each micro-batch, if any.
            entropies: whether passes with gradients also compute entropies.

        """
        self._model = model
        self._context = context
        self._balancing = balancing
        self._replayed = replayed
        self._routers = Routers(model.chunk, replays=replayed is not None)
        self._temperature = temperature
        self._entropies = entropies
        self._is_first_of_tensor = parallel_state.get_tensor_model_parallel_rank() == 0

    def columns(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return each micro-batch's log-probabilities, [trained tokens], on the last stage; else an empty list."""
        columns: list[Tensor] = []

        def collect(_index: int, logprobs: Tensor) -> Tensor:
            columns.append(logprobs.detach().cpu())
            return logprobs.sum()

        with torch.no_grad():
            self._run(batches, collect, forward_only=True)
        return columns[: len(batches)]

    def accumulate(self, batches: Sequence[MicroBatch], loss_gradient: LossGradientFn) -> dict[str, float]:
        """Run forward and backward, adding to the gradients; return sums about the routers of experts."""

        def loss(index: int, logprobs: Tensor) -> Tensor:
            gradient = torch.zeros_like(logprobs)
            is_first = self._is_first_of_tensor and (self._context is None or self._context.is_first)
            if is_first and index < len(batches):
                gradient.copy_(loss_gradient(index, logprobs.detach()))
            if self._context is not None:
                self._context.broadcast(gradient)
            source = parallel_state.get_tensor_model_parallel_src_rank()
            distributed.broadcast(gradient, source, group=parallel_state.get_tensor_model_parallel_group())
            # A surrogate whose gradient is the loss's.
            return (logprobs * gradient).sum()

        with self._routers.observed() as totals:
            self._run(batches, loss, forward_only=False)
        return totals

    def _run(self, batches: Sequence[MicroBatch], loss: Callable[[int, Tensor], Tensor], *, forward_only: bool) -> None:
        batches = [*batches, *[DUMMY_ROWS] * self._n_dummies(len(batches))]
        if not batches:
            return
        step = partial(self._forward, loss=loss)
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(enumerate(batches)),
            model=[self._model.chunk],
            num_microbatches=len(batches),
            seq_length=1,  # ignored: the stages exchange each micro-batch's length
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _n_dummies(self, n_batches: int) -> int:
        """Return how many dummy passes this rank adds: all of its expert-parallel group make the same number."""
        if self._model.config.expert_model_parallel_size == 1:
            return 0
        most = torch.tensor(n_batches, device=_device())
        distributed.all_reduce(most, distributed.ReduceOp.MAX, group=parallel_state.get_expert_model_parallel_group())
        return int(most) - n_batches

    def _forward(
        self, batches: Iterator[tuple[int, MicroBatch]], chunk: Any, *, loss: Callable[[int, Tensor], Tensor]
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, float]]]]:
        index, rows = next(batches)
        tokens = packed(rows).padded(self._divisor)
        shard, device = self._shard(tokens), _device()
        arrays = tokens.ids, tokens.boundaries, tokens.positions[shard]
        ids, cu_seqlens, positions = (torch.from_numpy(array).to(device) for array in arrays)
        lengths = tuple(np.diff(tokens.boundaries).tolist())
        packed_seq_params = PackedRows(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
            lengths=lengths,
            angles=_angles(self._model.rope_frequencies, positions),
            context=self._context,
        )
        factor = None if rows is DUMMY_ROWS else self._balancing.factor(rows) / len(ids)
        self._routers.begin(RoutedBatch(factor, self._replay(rows, tokens)))
        output = chunk(ids[None, shard], positions[None], None, packed_seq_params=packed_seq_params)

        def loss_of_logits(logits: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
            logprobs = self._logprobs_of(logits[0], ids, tokens)
            return loss(index, logprobs), torch.tensor(logprobs.shape[-1], dtype=torch.int, device=device), {}

        return output, loss_of_logits

    @property
    def _divisor(self) -> int:
        """Return what a micro-batch's number of tokens must be a multiple of.

        Each context-parallel rank has as many tokens as the others and, with sequence parallelism, so has each
        tensor-parallel rank.
        """
        config = self._model.config
        n_in_sequence = config.tensor_model_parallel_size if config.sequence_parallel else 1
        return n_in_sequence * (self._context.size if self._context is not None else 1)

    def _shard(self, tokens: Packed) -> slice:
        """Return which tokens this rank's pipeline computes."""
        n_tokens = len(tokens.ids)
        return slice(0, n_tokens) if self._context is None else self._context.slice_of(n_tokens)

    def _replay(self, rows: Sequence[SequenceRow], tokens: Packed) -> Replay | None:
        """Return the recorded experts of the tokens that this rank routes."""
        if self._replayed is None or (found := replayed(rows, tokens.predicts, self._replayed)) is None:
            return None
        at, experts = found
        shard = self._shard(tokens)
        first, end = shard.start, shard.stop
        if self._model.config.sequence_parallel:
            each = (end - first) // self._model.config.tensor_model_parallel_size
            first += each * parallel_state.get_tensor_model_parallel_rank()
            end = first + each
        own = slice(*np.searchsorted(at, [first, end]))
        positions, recorded = (torch.from_numpy(part).to(_device()) for part in (at[own] - first, experts[own]))
        return Replay(positions, recorded.long())

    def _logprobs_of(self, logits: Tensor, ids: Tensor, tokens: Packed) -> Tensor:
        """Return the log-probabilities of trained tokens from [this rank's tokens, this rank's vocabulary].

        With entropies they are the first row of [2, trained tokens].
        """
        predicts, context = tokens.predicts, self._context
        own = slice(0, len(predicts)) if context is None else context.positions(predicts, len(tokens.ids))
        at = torch.from_numpy(predicts[own]).to(logits.device)
        logprobs = self._logprobs_after(logits[at - self._shard(tokens).start], ids[at + 1])
        return logprobs if context is None else context.joined(logprobs, own, len(predicts))

    def _logprobs_after(self, logits: Tensor, targets: Tensor) -> Tensor:
        selected = logits.float() / self._temperature
        rows, unpadded = self._model.weight_map.vocabulary_rows
        if unpadded < rows:
            selected = selected.masked_fill(torch.arange(rows, device=selected.device) >= unpadded, float("-inf"))
        # `clone`: the function overwrites its input.
        logprobs: Tensor = -vocab_parallel_cross_entropy(selected[:, None].clone(), targets[:, None])[:, 0]
        if not (self._entropies and torch.is_grad_enabled()):
            return logprobs
        entropies: Tensor = _VocabParallelEntropy.apply(selected)  # type: ignore[no-untyped-call]  # torch's
        return torch.stack([logprobs, entropies])


class _VocabParallelEntropy(torch.autograd.Function):
    """The entropy of each row's distribution, [rows], from this rank's part of the logits, [rows, vocabulary]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        group = parallel_state.get_tensor_model_parallel_group()
        highest = logits.max(-1).values
        distributed.all_reduce(highest, distributed.ReduceOp.MAX, group=group)
        p = (logits - highest[:, None]).exp_()
        total = p.sum(-1)
        distributed.all_reduce(total, group=group)
        p.div_(total[:, None])
        entropy: Tensor = torch.special.entr(p).sum(-1)
        distributed.all_reduce(entropy, group=group)
        ctx.save_for_backward(p, entropy)
        return entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        p, entropy = ctx.saved_tensors
        # d H / d logits = -p (log p + H)
        result: Tensor = (torch.special.entr(p) - p * entropy[:, None]).mul_(gradients[0][:, None])
        return result


def _angles(frequencies: Sequence[float], positions: Tensor) -> Tensor:
    """Return the angles of positions, int64 [tokens], in radians: [tokens, 1, 1, head size]."""
    halves = torch.outer(positions.float(), torch.tensor(frequencies, device=positions.device))
    return torch.cat([halves, halves], 1)[:, None, None]


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


# --- A rank of the megatron-core backend ------------------------------------------------------------------------------


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
                model_shard,
                self._settings.temperature,
                self._balancing,
                self._settings.replayed,
                self._context,
                entropies=self._settings.entropies,
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
