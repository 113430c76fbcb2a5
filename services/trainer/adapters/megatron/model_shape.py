"""A model's dimensions from its Hugging Face configuration, and checks that a layout can divide them."""

from __future__ import annotations

from typing import Any, NamedTuple

from rlboost.services.trainer.adapters.torch.ranks import Layout
from rlboost.shared.errors import ConfigError

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Types of rotary positions whose frequencies do not depend on the length of a row."""


class ModelShape(NamedTuple):
    """A Llama-like decoder: RMSNorm, rotary positions, gated SiLU, grouped-query attention.

    In a mixture of experts every layer has `n_experts` gated MLPs, and the router selects some for each token.
    """

    n_layers: int
    hidden: int
    intermediate: int
    """Width of a gated MLP, which is an expert in a mixture of experts."""
    n_heads: int
    n_kv_heads: int
    head_size: int
    vocabulary: int
    max_positions: int
    norm_epsilon: float
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    n_experts: int = 0
    """0 in a dense model."""
    experts_per_token: int = 0
    normalizes_routing: bool = True
    """Whether the weights of a token's experts add up to 1."""
    rope_frequencies: tuple[float, ...] = ()
    """Frequency of each pair of a head's dimensions in radians per token, for rotary positions; see
    `policy.with_frequencies`."""
    rope_scale: float = 1.0
    """Factor of rotated queries and keys."""


def shape_of(config: Any) -> ModelShape:
    """Return the shape of a model with this transformers configuration.

    Raises:
        ConfigError: the model uses a feature that this backend does not support; the text names it.

    """
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"trainer.backend: megatron does not support model type {config.model_type} (supported: "
            f"{', '.join(FAMILIES)}): use trainer.backend: torch"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    rope_type = rope.get("rope_type", "default")
    unsupported = {
        "rope type": rope_type not in _ROPE_TYPES and rope_type,
        "activation": config.hidden_act != "silu" and config.hidden_act,
        "sliding window": getattr(config, "use_sliding_window", False) and config.sliding_window,
        "attention_bias:": getattr(config, "attention_bias", False),
        "mlp_bias:": getattr(config, "mlp_bias", False),
        "dense layers among experts:": getattr(config, "mlp_only_layers", None),
        "decoder_sparse_step": getattr(config, "decoder_sparse_step", 1) != 1 and config.decoder_sparse_step,
    }
    for what, value in unsupported.items():
        if value:
            raise ConfigError(f"trainer.backend: megatron does not support {what} {value}: use trainer.backend: torch")
    is_mixture = config.model_type == "qwen3_moe"
    return ModelShape(
        n_layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.moe_intermediate_size if is_mixture else config.intermediate_size,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocabulary=config.vocab_size,
        max_positions=config.max_position_embeddings,
        norm_epsilon=config.rms_norm_eps,
        tied=config.tie_word_embeddings,
        qkv_bias=config.model_type == "qwen2",
        qk_norm=config.model_type in ("qwen3", "qwen3_moe"),
        n_experts=config.num_experts if is_mixture else 0,
        experts_per_token=config.num_experts_per_tok if is_mixture else 0,
        normalizes_routing=config.norm_topk_prob if is_mixture else True,
    )


def require_divisible(shape: ModelShape, layout: Layout) -> None:
    """Check that the layout divides the model evenly.

    Raises:
        ConfigError: it does not; the text names the setting.

    """
    heads = shape.n_heads // layout.tensor
    divisions = (
        ("tensor_parallel", layout.tensor, "attention heads", shape.n_heads),
        ("tensor_parallel", layout.tensor, "key and value heads", shape.n_kv_heads),
        ("tensor_parallel", layout.tensor, "MLP rows", shape.intermediate),
        ("pipeline_parallel", layout.pipeline, "layers", shape.n_layers),
        ("expert_parallel", layout.expert, "experts", shape.n_experts),
        ("context_parallel", layout.context, "attention heads of a tensor-parallel rank", heads),
    )
    for setting, n, what, total in divisions:
        if total % n:
            raise ConfigError(
                f"trainer.{setting} is {n}, which does not divide the model's {total} {what}: set a divisor"
            )
    if shape.n_experts and layout.tensor > 1 and not layout.sequence_parallel:
        raise ConfigError(
            "trainer.sequence_parallel is false: a mixture of experts with tensor_parallel needs it: set it to true"
        )
