"""RMSNorm and attention for megatron-core's layer specs, in plain torch.

megatron-core's local spec supports neither packed sequences nor sequence parallelism, and TransformerEngine's layers
need its CUDA kernels. These run on any device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from rlboost.services.trainer.adapters.torch.context_parallel import ContextGroup
from rlboost.services.trainer.adapters.torch.packing import attention

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
        """Take the arguments that megatron-core passes to a core attention."""
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
