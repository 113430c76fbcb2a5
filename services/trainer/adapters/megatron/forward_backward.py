"""Forward and backward over packed micro-batches, run by megatron-core's schedules.

Rows are concatenated without padding, each a sequence of its own. The caller computes the loss and returns its gradient
with respect to the log-probabilities. With expert parallelism each layer exchanges tokens with the ranks that have the
other experts, so these ranks make the same number of passes: one with fewer micro-batches adds passes of a dummy row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor, distributed

from rlboost.services.trainer.adapters.megatron.layers import PackedRows
from rlboost.services.trainer.adapters.megatron.model import MegatronModel
from rlboost.services.trainer.adapters.megatron.rope import angles
from rlboost.services.trainer.adapters.megatron.routing import RoutedBatch, Routers
from rlboost.services.trainer.adapters.ranks.packed import (
    NO_BALANCING,
    Balancing,
    LossGradientFn,
    PackedBatch,
    pack_rows,
    unpack_rows,
)
from rlboost.services.trainer.adapters.torch.batch import DUMMY_ROWS, Packed, packed, replayed
from rlboost.services.trainer.adapters.torch.context_parallel import ContextGroup
from rlboost.services.trainer.adapters.torch.routing import Replay
from rlboost.services.trainer.domain.batches.training_row import SequenceRow
from rlboost.shared.wire.routed_experts import RoutedShape

_DUMMY = pack_rows(DUMMY_ROWS)


class PipelineForwardBackward:
    """`ForwardBackward` of one rank."""

    def __init__(
        self,
        model: MegatronModel,
        temperature: float,
        balancing: Balancing = NO_BALANCING,
        replayed: RoutedShape | None = None,
        context: ContextGroup | None = None,
    ) -> None:
        """Register hooks on the routers of a mixture of experts.

        Args:
            model: this rank's part of the model.
            temperature: divides the logits.
            balancing: for a mixture of experts.
            replayed: the shape of the rows' routed experts, which replace those of the routers.
            context: the ranks that divide the tokens of each micro-batch, if any.

        """
        self._model = model
        self._context = context
        self._balancing = balancing
        self._replayed = replayed
        self._routers = Routers(model.chunk, replays=replayed is not None)
        self._temperature = temperature
        self._is_first_of_tensor = parallel_state.get_tensor_model_parallel_rank() == 0

    def columns(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Return each micro-batch's log-probabilities, [trained tokens], on the last stage; else an empty list."""
        columns: list[Tensor] = []

        def collect(_index: int, logprobs: Tensor) -> Tensor:
            columns.append(logprobs.detach().cpu())
            return logprobs.sum()

        with torch.no_grad():
            self._run(batches, collect, forward_only=True)
        return columns[: len(batches)]

    def accumulate(self, batches: Sequence[PackedBatch], loss_gradient: LossGradientFn) -> dict[str, float]:
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

    def _run(
        self, batches: Sequence[PackedBatch], loss: Callable[[int, Tensor], Tensor], *, forward_only: bool
    ) -> None:
        batches = [*batches, *[_DUMMY] * self._n_dummies(len(batches))]
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
        self, batches: Iterator[tuple[int, PackedBatch]], chunk: Any, *, loss: Callable[[int, Tensor], Tensor]
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, float]]]]:
        index, batch = next(batches)
        rows = unpack_rows(batch)
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
            angles=angles(self._model.rope_frequencies, positions),
            context=self._context,
        )
        factor = None if batch is _DUMMY else self._balancing.factor(batch) / len(ids)
        self._routers.begin(RoutedBatch(factor, self._replay(rows, tokens)))
        output = chunk(ids[None, shard], positions[None], None, packed_seq_params=packed_seq_params)

        def loss_of_logits(logits: Tensor) -> tuple[Tensor, Tensor, dict[str, float]]:
            logprobs = self._logprobs_of(logits[0], ids, tokens)
            return loss(index, logprobs), torch.tensor(len(logprobs), dtype=torch.int, device=device), {}

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
        """Return the log-probabilities of trained tokens from [this rank's tokens, this rank's vocabulary]."""
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
        entropy: Tensor = vocab_parallel_cross_entropy(selected[:, None].clone(), targets[:, None])
        return -entropy[:, 0]


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
