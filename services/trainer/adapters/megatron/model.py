"""A rank's shard of a model and its optimizer, built with megatron-core.

Fused kernels are off: they need TransformerEngine or apex. Gradients are summed over micro-batches and ranks, and
divided once per update.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, distributed
from torch.nn import functional

from rlboost.services.trainer.adapters.megatron.model_shape import ModelShape
from rlboost.services.trainer.adapters.megatron.weight_map import MegatronWeightMap
from rlboost.services.trainer.adapters.torch.attention import ContextGroup, attention
from rlboost.services.trainer.adapters.torch.ranks import Coordinates, Layout
from rlboost.services.trainer.adapters.torch.routing import Balance, Replay, layer_balance, times_selected
from rlboost.services.trainer.domain.loss.function import add_sums
from rlboost.shared.job.training import OptimizerSpec

# --- RMSNorm and attention for megatron-core's layer specs, in plain torch --------------------------------------------
# megatron-core's local spec supports neither packed sequences nor sequence parallelism, and TransformerEngine's layers
# need its CUDA kernels. These run on any device.


# Routers read this name, which megatron-core 0.16 leaves undefined where TransformerEngine is missing.
vars(moe_utils).setdefault("te_general_gemm", None)


class RMSNorm(torch.nn.RMSNorm):
    """Root mean square norm (arXiv 1910.07467)."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        """Take the arguments that megatron-core passes to a norm."""
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        # With sequence parallelism each rank has some of the tokens; this mark makes megatron-core sum the gradients.
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel


@dataclass
class PackedRows(PackedSeqParams):  # type: ignore[misc]  # megatron-core has no types
    """Packed rows: their boundaries on the device, and their lengths on the host.

    Both cover the tokens of all ranks that share them.
    """

    lengths: tuple[int, ...] = ()
    angles: Tensor | None = None
    """Rotary positions of this rank's tokens in radians, [tokens, 1, 1, head size]."""
    context: ContextGroup | None = None
    """The ranks that share the tokens, if any."""


class PackedAttention(torch.nn.Module):
    """Causal attention within each of several concatenated sequences, with rotary positions.

    megatron-core's own rotary positions and context parallelism expect another distribution of the tokens.
    """

    def __init__(self, config: Any, *, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self._config = config
        self._scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any, **__: Any) -> Tensor:
        """Return the attention output.

        Args:
            query: queries of this rank's tokens, [tokens, heads, head size].
            key: [tokens, key heads, head size].
            value: like `key`.
            packed_seq_params: the sequences' boundaries and lengths, `PackedRows`.

        Returns:
            [tokens, heads x head size].

        """
        boundaries, lengths = packed_seq_params.cu_seqlens_q, packed_seq_params.lengths
        query, key = self._rotated(query, packed_seq_params.angles), self._rotated(key, packed_seq_params.angles)
        context: ContextGroup | None = packed_seq_params.context
        if context is None:
            return attention(query, key, value, boundaries, lengths, self._scale).flatten(1)
        query, key, value = (context.tokens_of_heads(shard) for shard in (query, key, value))
        return context.heads_of_tokens(attention(query, key, value, boundaries, lengths, self._scale)).flatten(1)

    def _rotated(self, shard: Tensor, angles: Tensor) -> Tensor:
        rotated: Tensor = apply_rotary_pos_emb(shard[:, None], angles, self._config)
        return rotated[:, 0]


def block_spec(config: Any) -> Any:
    """Return the spec of one pipeline stage's layers."""
    layer = get_gpt_layer_local_spec(config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    n_layers = config.num_layers // config.pipeline_model_parallel_size
    return TransformerBlockSubmodules(layer_specs=[layer] * n_layers, layer_norm=RMSNorm)


# --- The routers of experts of one rank: load-balancing loss, how evenly they spread tokens, and router replay --------


class RoutedBatch(NamedTuple):
    """What routers need to know of a micro-batch."""

    loss_factor: float | None
    """Weight of the load-balancing loss per token, on transformers' scale; None for dummy tokens, which count in no
    loss and no sum."""
    replay: Replay | None = None
    """Recorded experts of this rank's tokens."""


class _ReplayedTopK:
    """Takes the place of megatron-core's `RouterReplay`, which replaces the experts of all tokens or of none."""

    def __init__(self, layer: int) -> None:
        """Select experts for the layer with this number; the model's first is 0."""
        self._layer = layer
        self.replay: Replay | None = None
        self.selected: Tensor | None = None
        """The router's own selection in the newest pass, whatever was replayed: int64 [tokens, experts per token]."""

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return the scores of each token's experts, and the experts, [tokens, `topk`] each.

        Args:
            scores: scores of all experts, [tokens, experts].
            topk: experts per token.
            num_groups: groups of experts, if selection is limited to some groups.
            group_topk: groups per token.
            default_compute_topk: the router's own selection.

        """
        selected_scores, self.selected = default_compute_topk(scores, topk, num_groups, group_topk)
        if self.replay is None:
            return selected_scores, self.selected
        indices = self.selected.index_copy(0, self.replay.at, self.replay.experts[:, self._layer])
        return scores.gather(1, indices), indices


class Routers:
    """The routers of one rank's layers; none in a dense model."""

    def __init__(self, chunk: torch.nn.Module, *, replays: bool = False) -> None:
        """Register hooks on each router of `chunk`; `replays`: whether micro-batches have recorded experts."""
        self._routers: list[Any] = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
        self._totals: dict[str, float] | None = None
        self._batch = RoutedBatch(None)
        """The micro-batch of the next pass without gradients."""
        self._batches: deque[RoutedBatch] = deque()
        """The micro-batch of each pass with gradients through a router to come."""
        self._counts = True
        """False during a pass of dummy tokens."""
        for router in self._routers:
            if replays:
                router.router_replay = _ReplayedTopK(router.layer_number - 1)
            router.register_forward_pre_hook(self._on_input)
            router.register_forward_hook(self._observe)
            # megatron-core computes the loss in training mode only; the rest of the model stays in evaluation mode.
            router.training = router.config.moe_router_load_balancing_type == "aux_loss"

    def begin(self, batch: RoutedBatch) -> None:
        """Set the micro-batch of the next forward pass, and of its recomputation in the backward pass."""
        self._batch = batch
        if self._totals is not None:
            self._batches.extend([batch] * len(self._routers))

    @contextmanager
    def observed(self) -> Iterator[dict[str, float]]:
        """Yield a dictionary that gets the sums of the forward passes within the context, for `add_sums`."""
        self._totals = {}
        try:
            yield self._totals
        finally:
            self._totals = None
            self._batches.clear()

    def _on_input(self, router: Any, _inputs: tuple[Tensor, ...]) -> None:
        # Where layers are recomputed, only the second pass has gradients. Micro-batches go backward in forward order.
        has_gradients = self._totals is not None and torch.is_grad_enabled()
        batch = self._batches.popleft() if has_gradients else self._batch
        if router.router_replay is not None:
            router.router_replay.replay = batch.replay
        if not has_gradients:
            return
        # megatron-core sums over layers, divides by the experts per token, and multiplies by this rank's tokens.
        config, tensor = router.config, parallel_state.get_tensor_model_parallel_world_size()
        self._counts = batch.loss_factor is not None
        config.moe_aux_loss_coeff = (batch.loss_factor or 0.0) * config.moe_router_topk / config.num_layers * tensor

    def _observe(self, router: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        if self._totals is None or not self._counts or not torch.is_grad_enabled():
            return
        with torch.no_grad():
            logits = router.gating(inputs[0]).flatten(0, -2).float()
            replayed = router.router_replay
            routed = output[1].sum(0) if replayed is None else times_selected(replayed.selected, logits.shape[-1])
            counted = torch.stack([torch.softmax(logits, -1).sum(0), routed.float()])
            n_tokens = len(logits)
            if router.config.sequence_parallel:
                distributed.all_reduce(counted, group=parallel_state.get_tensor_model_parallel_group())
                n_tokens *= parallel_state.get_tensor_model_parallel_world_size()
            layer = layer_balance(counted[0], counted[1], n_tokens)
        add_sums(self._totals, Balance.of_layers([layer], n_tokens).sums())


# --- A rank's shard of a model and its optimizer ----------------------------------------------------------------------


class MegatronModel:
    """One rank's shard of a model."""

    def __init__(
        self,
        shape: ModelShape,
        layout: Layout,
        coordinates: Coordinates,
        dtype: torch.dtype,
        *,
        activation_checkpointing: bool = False,
        balances: bool = False,
    ) -> None:
        """Build it with uninitialized weights. A collective call, after megatron-core has its process groups."""
        self.weight_map = MegatronWeightMap(shape, layout, coordinates)
        self.config = _config(
            shape, layout, dtype, activation_checkpointing=activation_checkpointing, balances=balances
        )
        self.rope_frequencies = shape.rope_frequencies
        self.chunk: Any = GPTModel(
            self.config,
            block_spec(self.config),
            vocab_size=self.weight_map.vocabulary_rows[0] * layout.tensor,
            max_sequence_length=shape.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            position_embedding_type="none",  # see `PackedAttention`
            parallel_output=True,
            share_embeddings_and_output_weights=shape.tied,
        )
        if torch.cuda.is_available():
            self.chunk.cuda(torch.cuda.current_device())
        self._parameters: list[tuple[str, Tensor]] = list(self.chunk.named_parameters())
        # In evaluation mode, as in the torch backend.
        self.chunk.eval()

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's parameters by their names in `GPTModel`."""
        yield from self._parameters

    def put(self, parameter: Tensor, value: Tensor) -> None:
        """Overwrite a parameter."""
        parameter.data.copy_(value)


class TrainedMegatronModel(MegatronModel):
    """One rank's shard of the trained model, with its optimizer."""

    def __init__(
        self,
        shape: ModelShape,
        layout: Layout,
        coordinates: Coordinates,
        dtype: torch.dtype,
        optimizer: OptimizerSpec,
        *,
        activation_checkpointing: bool,
        balances: bool,
    ) -> None:
        """Build both. See `MegatronModel`; `balances`: whether there is a load-balancing loss of experts."""
        super().__init__(
            shape, layout, coordinates, dtype, activation_checkpointing=activation_checkpointing, balances=balances
        )
        buffers = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=False,
            use_distributed_optimizer=layout.distributed_optimizer,
        )
        self.chunk = DistributedDataParallel(self.config, buffers, self.chunk)
        self.chunk.eval()
        # megatron-core recomputes in training mode only. Set it on the stack; the layers stay in evaluation mode.
        self.chunk.module.decoder.training = activation_checkpointing
        # Without overrides weight decay applies to all parameters, as in the torch backend.
        self.optimizer: Any = get_megatron_optimizer(
            _optimizer_config(optimizer, layout, dtype), [self.chunk], config_overrides={}
        )
        self.zero_gradients()

    def zero_gradients(self) -> None:
        """Drop the accumulated gradients."""
        self.chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def finish_gradients(self, divisor: int) -> float:
        """Sum the gradients over all ranks, divide them by `divisor`, and return their global norm."""
        finalize_model_grads([self.chunk])
        self.chunk.scale_gradients(1.0 / divisor)
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    def update(self, learning_rate: float) -> None:
        """Clip and apply the gradients."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()

    def gradients(self) -> list[Tensor]:
        """Return the flat gradient buffers, which exist for as long as the model."""
        return [buffer.grad_data for buffer in (*self.chunk.buffers, *self.chunk.expert_parallel_buffers)]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The torch optimizers that megatron-core wraps."""
        return [wrapper.optimizer for wrapper in self.optimizer.chained_optimizers]


def _config(
    shape: ModelShape, layout: Layout, dtype: torch.dtype, *, activation_checkpointing: bool, balances: bool
) -> Any:
    return TransformerConfig(
        num_layers=shape.n_layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.intermediate,
        num_attention_heads=shape.n_heads,
        num_query_groups=shape.n_kv_heads,
        kv_channels=shape.head_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_epsilon,
        qk_layernorm=shape.qk_norm,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # Queries and keys both have the scale of the rotary positions.
        softmax_scale=shape.rope_scale**2 * shape.head_size**-0.5,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        expert_model_parallel_size=layout.expert,
        sequence_parallel=layout.sequence_parallel,
        variable_seq_lengths=True,
        calculate_per_token_loss=True,
        recompute_granularity="full" if activation_checkpointing else None,
        recompute_method="uniform" if activation_checkpointing else None,
        recompute_num_layers=1 if activation_checkpointing else None,
        use_cpu_initialization=not torch.cuda.is_available(),
        # Although weights are loaded later: initialization marks the tensor-parallel parameters.
        perform_initialization=True,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        num_moe_experts=shape.n_experts or None,
        moe_ffn_hidden_size=shape.intermediate if shape.n_experts else None,
        moe_router_topk=shape.experts_per_token or 2,
        moe_router_pre_softmax=not shape.normalizes_routing,
        moe_router_load_balancing_type="aux_loss" if balances else "none",
        moe_token_dispatcher_type="alltoall",  # noqa: S106 - the default needs a CUDA stream
    )


def _optimizer_config(spec: OptimizerSpec, layout: Layout, dtype: torch.dtype) -> Any:
    return OptimizerConfig(
        optimizer="adam",
        lr=spec.lr,
        adam_beta1=spec.betas[0],
        adam_beta2=spec.betas[1],
        adam_eps=1e-8,
        weight_decay=spec.weight_decay,
        clip_grad=spec.grad_clip,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=layout.distributed_optimizer,
    )
