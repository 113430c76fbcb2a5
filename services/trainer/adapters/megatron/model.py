"""A rank's shard of a model and its optimizer, built with megatron-core.

Fused kernels are off: they need TransformerEngine or apex. Gradients are summed over micro-batches and ranks, and
divided once per update.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn import functional

from rlboost.services.trainer.adapters.megatron.layers import block_spec
from rlboost.services.trainer.adapters.megatron.model_shape import ModelShape
from rlboost.services.trainer.adapters.megatron.weight_map import MegatronWeightMap
from rlboost.services.trainer.adapters.ranks.layout import Coordinates, Layout
from rlboost.shared.job.training import OptimizerSpec


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
