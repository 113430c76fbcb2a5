"""Maps megatron-core's parameters to slices of Hugging Face tensors.

Queries, keys and values are one matrix, grouped by key head; so are gate and up projection, also of each expert. Every
other parameter is one tensor under another name. Matrices are sharded along their first dimension, or their second if
the input is sharded; data-parallel ranks may have different experts. So each rank's shard is a rectangular slice, and
ranks publish without communicating.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from rlboost.services.trainer.adapters.megatron.model_shape import ModelShape
from rlboost.services.trainer.adapters.torch.ranks import Coordinates, Layout, TensorSlice

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_TOP = {
    "embedding.word_embeddings.weight": EMBEDDING,
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": HEAD,
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_QKV = ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias")
_GATE_UP = "linear_fc1.weight"
_MLP = re.compile(r"mlp\.(?:experts\.local_experts\.(\d+)\.)?(linear_fc[12]\.weight)")
_EXPERT = ".mlp.experts."
_PROJECTION = "self_attention.linear_proj.weight"
_ROUTER = "mlp.router.weight"
_RENAMED = {
    _PROJECTION: "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    _ROUTER: "mlp.gate.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
}


class MegatronWeightMap:
    """`WeightMap` of one rank. `name` is always a parameter's name in `GPTModel`."""

    def __init__(self, shape: ModelShape, layout: Layout, coordinates: Coordinates) -> None:
        """Map the parameters of the rank at `coordinates`."""
        self._shape = shape
        self._n, self._rank = layout.tensor, coordinates.tensor
        self._head_is_copy = shape.tied and layout.pipeline > 1 and coordinates.pipeline == layout.pipeline - 1
        self._first_layer = shape.n_layers // layout.pipeline * coordinates.pipeline
        self._first_expert = shape.n_experts // layout.expert * coordinates.expert_part(layout)
        self._is_first_replica = coordinates.replica_index(layout) == 0
        self._is_first_with_experts = coordinates.replica_index(layout) < layout.expert

    def owns(self, name: str) -> bool:
        """Return True if this rank exports the parameter; of several ranks with the same slices one does."""
        if name == "output_layer.weight" and self._head_is_copy:
            return False
        if not (self._is_first_with_experts if _EXPERT in name else self._is_first_replica):
            return False
        return self._rank == 0 or any(s.local_shape != s.global_shape for s in self.slices(name))

    def slices(self, name: str) -> list[TensorSlice]:
        """Return the slices that make up a parameter, in the order of `split` and `join`."""
        if name in _TOP:
            return [self._top(name)]
        shape, (prefix, inner) = self._shape, self._in_layer(name)
        if inner in _QKV:
            kind = inner.rpartition(".")[2]
            other_dims = () if kind == "bias" else (shape.hidden,)
            heads = {"q": shape.n_heads, "k": shape.n_kv_heads, "v": shape.n_kv_heads}
            return [
                self._rows(f"{prefix}self_attn.{part}_proj.{kind}", n * shape.head_size, other_dims)
                for part, n in heads.items()
            ]
        if match := _MLP.fullmatch(inner):
            expert = f"experts.{int(match[1]) + self._first_expert}." if match[1] else ""
            return self._mlp(f"{prefix}mlp.{expert}", match[2])
        return [self._renamed(prefix, inner)]

    def split(self, name: str, value: Tensor) -> list[Tensor]:
        """Split a value of the parameter's shape into its slices, as views."""
        inner = "" if name in _TOP else self._in_layer(name)[1]
        if inner in _QKV:
            groups = value.reshape(self._groups, -1, *value.shape[1:])
            return [one.reshape(-1, *value.shape[1:]) for one in torch.split(groups, self._group_rows(), 1)]
        if inner.endswith(_GATE_UP):
            return list(value.chunk(2, 0))
        return [value[: self.slices(name)[0].local_shape[0]]]

    def join(self, name: str, values: Sequence[Tensor]) -> Tensor:
        """Join slices into a value of the parameter's shape; the exact inverse of `split`."""
        inner = "" if name in _TOP else self._in_layer(name)[1]
        if inner in _QKV:
            dims = values[0].shape[1:]
            return torch.cat([value.reshape(self._groups, -1, *dims) for value in values], 1).reshape(-1, *dims)
        if inner.endswith(_GATE_UP):
            return torch.cat(list(values), 0)
        if name in _TOP and values[0].ndim > 1:
            n_padding = self._vocabulary_rows - len(values[0])
            return (
                torch.cat([values[0], values[0].new_zeros(n_padding, self._shape.hidden)]) if n_padding else values[0]
            )
        return values[0]

    @property
    def vocabulary_rows(self) -> tuple[int, int]:
        """(rows of the vocabulary on this rank, padding included; rows without padding)."""
        unpadded = self.slices("embedding.word_embeddings.weight")[0].local_shape[0]
        return self._vocabulary_rows, unpadded

    @property
    def _vocabulary_rows(self) -> int:
        return -(-self._shape.vocabulary // self._n)

    @property
    def _groups(self) -> int:
        return self._shape.n_kv_heads // self._n

    def _group_rows(self) -> list[int]:
        """Return the number of query, key and value rows in one group."""
        size = self._shape.head_size
        return [self._shape.n_heads // self._shape.n_kv_heads * size, size, size]

    def _in_layer(self, name: str) -> tuple[str, str]:
        match = _LAYER.fullmatch(name)
        assert match, name
        return f"model.layers.{int(match[1]) + self._first_layer}.", match[2]

    def _top(self, name: str) -> TensorSlice:
        shape = self._shape
        if "layernorm" in name:
            return TensorSlice.whole(_TOP[name], (shape.hidden,))
        hf = EMBEDDING if shape.tied else _TOP[name]
        # Padding rows of the last ranks are in no Hugging Face tensor.
        low, high = (min(rank * self._vocabulary_rows, shape.vocabulary) for rank in (self._rank, self._rank + 1))
        return TensorSlice(hf, (shape.vocabulary, shape.hidden), (low, 0), (high - low, shape.hidden))

    def _mlp(self, prefix: str, inner: str) -> list[TensorSlice]:
        """Return the slices of a matrix of a dense MLP or of an expert."""
        n_rows, n_columns = self._shape.intermediate, self._shape.hidden
        if inner == _GATE_UP:
            return [self._rows(f"{prefix}{part}_proj.weight", n_rows, (n_columns,)) for part in ("gate", "up")]
        return [self._columns(f"{prefix}down_proj.weight", n_rows)]

    def _renamed(self, prefix: str, inner: str) -> TensorSlice:
        shape, hf = self._shape, prefix + _RENAMED[inner]
        if inner == _PROJECTION:
            return self._columns(hf, shape.n_heads * shape.head_size)
        if inner == _ROUTER:
            return TensorSlice.whole(hf, (shape.n_experts, shape.hidden))
        return TensorSlice.whole(hf, (shape.head_size if inner.startswith("self_attention.") else shape.hidden,))

    def _columns(self, hf: str, n_columns: int) -> TensorSlice:
        n, hidden = n_columns // self._n, self._shape.hidden
        return TensorSlice(hf, (hidden, n_columns), (0, n * self._rank), (hidden, n))

    def _rows(self, hf: str, n_rows: int, other_dims: tuple[int, ...]) -> TensorSlice:
        n = n_rows // self._n
        return TensorSlice(hf, (n_rows, *other_dims), (n * self._rank, *(0 for _ in other_dims)), (n, *other_dims))
