"""The sizes of a decoder from its Hugging Face configuration, without its weights. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlboost.shared.errors import ConfigError
from rlboost.shared.job.training import LoraSpec

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Model types with grouped-query attention and a gated MLP or experts in every layer."""


@dataclass(frozen=True)
class ModelSize:
    """The dimensions that determine the number of weights and of activations."""

    layers: int
    hidden: int
    query: int
    """Heads times their size."""
    key: int
    """Key heads times their size."""
    mlp: int
    """Width of the MLP, or of one expert."""
    vocabulary: int
    tied: bool = False
    qk_norm: bool = False
    experts: int = 0
    """Experts per layer, 0 in a dense model."""
    experts_per_token: int = 0

    @property
    def embeddings(self) -> int:
        """Return the parameters of the embedding and the output head."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def critic(self) -> int:
        """Return the parameters of a critic: the output head is replaced by one of one value."""
        return self.total - (0 if self.tied else self.vocabulary * self.hidden) + self.hidden + 1

    @property
    def layer(self) -> int:
        """Return the parameters of a layer."""
        return self._layer(max(1, self.experts))

    @property
    def total(self) -> int:
        """Return all parameters, without biases and norms of heads."""
        return self.layers * self.layer + self.embeddings + self.hidden

    @property
    def in_experts(self) -> int:
        """Return the parameters of experts."""
        return self.layers * self.experts * 3 * self.hidden * self.mlp

    @property
    def active(self) -> int:
        """Return the parameters that compute one token."""
        return self.layers * self._layer(max(1, self.experts_per_token)) + self.embeddings + self.hidden

    def _layer(self, n_experts: int) -> int:
        attention = self.hidden * 2 * (self.query + self.key)
        return attention + n_experts * 3 * self.hidden * self.mlp + self.experts * self.hidden + 2 * self.hidden


def adapter_parameters(size: ModelSize, lora: LoraSpec) -> int:
    """Return the parameters of an adapter: its rank times inputs and outputs of each layer that it adapts.

    Experts, which are one tensor per layer, have no adapter.
    """
    widths = {
        "self_attn.q_proj": size.hidden + size.query,
        "self_attn.k_proj": size.hidden + size.key,
        "self_attn.v_proj": size.hidden + size.key,
        "self_attn.o_proj": size.query + size.hidden,
    }
    if not size.experts:
        widths |= {f"mlp.{name}": size.hidden + size.mlp for name in ("gate_proj", "up_proj", "down_proj")}
    layers = {f"model.layers.{i}.{name}": width for i in range(size.layers) for name, width in widths.items()}
    targets = lora.targets
    adapted = [
        width
        for name, width in layers.items()
        if isinstance(targets, str) or any(f".{name}".endswith(f".{target}") for target in targets)
    ]
    return lora.rank * sum(adapted)


def size_of(config: Mapping[str, Any]) -> ModelSize:
    """Return the sizes that `config.json` describes.

    Raises:
        ConfigError: another kind of model, or a key is missing.

    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(f"model type {family}: its memory cannot be computed (known: {', '.join(FAMILIES)})")
    is_mixture = family == "qwen3_moe"
    if is_mixture and (config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1):
        raise ConfigError("mlp_only_layers, decoder_sparse_step: memory is computed for experts in every layer only")
    try:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        head_dim = config.get("head_dim") or hidden // heads
        return ModelSize(
            layers=config["num_hidden_layers"],
            hidden=hidden,
            query=heads * head_dim,
            key=(config.get("num_key_value_heads") or heads) * head_dim,
            mlp=config["moe_intermediate_size" if is_mixture else "intermediate_size"],
            vocabulary=config["vocab_size"],
            tied=config.get("tie_word_embeddings", False),
            qk_norm=family.startswith("qwen3"),
            experts=_n_experts(config) if is_mixture else 0,
            experts_per_token=config["num_experts_per_tok"] if is_mixture else 0,
        )
    except KeyError as error:
        raise ConfigError(f"config.json has no {error.args[0]}: add it") from error


def _n_experts(config: Mapping[str, Any]) -> int:
    # transformers saves the key under another name than the models' authors.
    n: int = config["num_experts"] if "num_experts" in config else config["num_local_experts"]
    return n
