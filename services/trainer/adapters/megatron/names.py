"""Which Hugging Face tensors a parameter of megatron-core consists of, and which part of each a rank has.

Queries, keys and values are one matrix, grouped by key head; so are gate and up projection. Everything else is the
same tensor under another name. Matrices are cut along their first dimension, or their second where the input is cut.
So each rank's part is a box of the whole tensor, and no rank has to talk to another to publish it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from services.trainer.adapters.megatron.shape import ModelShape
from services.trainer.adapters.ranks.layout import Layout, Place
from services.trainer.adapters.ranks.piece import Piece

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_TOP = {
    "embedding.word_embeddings.weight": EMBEDDING,
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": HEAD,
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_QKV = ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias")
_GATE_UP = "mlp.linear_fc1.weight"
_ALONE = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
}


class WeightMap:
    """The parameters of one rank. `name` is everywhere a parameter's name in `GPTModel`."""

    def __init__(self, shape: ModelShape, layout: Layout, place: Place) -> None:
        """Map for the rank at `place`."""
        self._shape = shape
        self._n, self._rank = layout.tensor, place.tensor
        self._is_copy = shape.tied and layout.pipeline > 1 and place.pipeline == layout.pipeline - 1
        self._first_layer = shape.n_layers // layout.pipeline * place.pipeline

    def owns(self, name: str) -> bool:
        """Tell whether this rank is the one that speaks for a parameter, of those that have the same part."""
        if name == "output_layer.weight" and self._is_copy:
            return False
        return self._rank == 0 or any(piece.local_shape != piece.global_shape for piece in self.pieces(name))

    def pieces(self, name: str) -> list[Piece]:
        """Return the boxes that a parameter consists of, in the order of `split` and `join`."""
        if name in _TOP:
            return [self._top(name)]
        shape, (prefix, inner) = self._shape, self._in_layer(name)
        if inner in _QKV:
            kind = inner.rpartition(".")[2]
            rest = () if kind == "bias" else (shape.hidden,)
            heads = {"q": shape.n_heads, "k": shape.n_kv_heads, "v": shape.n_kv_heads}
            return [
                self._rows(f"{prefix}self_attn.{part}_proj.{kind}", n * shape.head_size, rest)
                for part, n in heads.items()
            ]
        if inner == _GATE_UP:
            return [
                self._rows(f"{prefix}mlp.{part}_proj.weight", shape.intermediate, (shape.hidden,))
                for part in ("gate", "up")
            ]
        return [self._alone(prefix, inner)]

    def split(self, name: str, value: Tensor) -> list[Tensor]:
        """Return what of a parameter, or of anything of its shape, belongs to each of its pieces, as views."""
        inner = "" if name in _TOP else self._in_layer(name)[1]
        if inner in _QKV:
            groups = value.reshape(self._groups, -1, *value.shape[1:])
            return [part.reshape(-1, *value.shape[1:]) for part in torch.split(groups, self._group_rows(), 1)]
        if inner == _GATE_UP:
            return list(value.chunk(2, 0))
        return [value[: self.pieces(name)[0].local_shape[0]]]

    def join(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Return the parameter that has these parts; the other way round than `split`, bit for bit."""
        inner = "" if name in _TOP else self._in_layer(name)[1]
        if inner in _QKV:
            rest = parts[0].shape[1:]
            return torch.cat([part.reshape(self._groups, -1, *rest) for part in parts], 1).reshape(-1, *rest)
        if inner == _GATE_UP:
            return torch.cat(list(parts), 0)
        if name in _TOP and parts[0].ndim > 1:
            missing = self._vocabulary_rows - len(parts[0])
            return torch.cat([parts[0], parts[0].new_zeros(missing, self._shape.hidden)]) if missing else parts[0]
        return parts[0]

    @property
    def vocabulary_rows(self) -> tuple[int, int]:
        """Return how many rows of the vocabulary this rank has, and how many of them are real."""
        real = self.pieces("embedding.word_embeddings.weight")[0].local_shape[0]
        return self._vocabulary_rows, real

    @property
    def _vocabulary_rows(self) -> int:
        return -(-self._shape.vocabulary // self._n)

    @property
    def _groups(self) -> int:
        return self._shape.n_kv_heads // self._n

    def _group_rows(self) -> list[int]:
        """Return how many rows of one group are queries, keys, values."""
        size = self._shape.head_size
        return [self._shape.n_heads // self._shape.n_kv_heads * size, size, size]

    def _in_layer(self, name: str) -> tuple[str, str]:
        found = _LAYER.fullmatch(name)
        assert found, name
        return f"model.layers.{int(found[1]) + self._first_layer}.", found[2]

    def _top(self, name: str) -> Piece:
        shape = self._shape
        if "layernorm" in name:
            return _whole(_TOP[name], (shape.hidden,))
        hf = EMBEDDING if shape.tied else _TOP[name]
        # Rows that fill up the last ranks' parts are in no file.
        low, high = (min(rank * self._vocabulary_rows, shape.vocabulary) for rank in (self._rank, self._rank + 1))
        return Piece(hf, (shape.vocabulary, shape.hidden), (low, 0), (high - low, shape.hidden))

    def _alone(self, prefix: str, inner: str) -> Piece:
        shape, hf = self._shape, prefix + _ALONE[inner]
        columns = {
            "self_attention.linear_proj.weight": shape.n_heads * shape.head_size,
            "mlp.linear_fc2.weight": shape.intermediate,
        }
        if inner in columns:
            n = columns[inner] // self._n
            return Piece(hf, (shape.hidden, columns[inner]), (0, n * self._rank), (shape.hidden, n))
        return _whole(hf, (shape.head_size if inner.startswith("self_attention.") else shape.hidden,))

    def _rows(self, hf: str, n_rows: int, rest: tuple[int, ...]) -> Piece:
        n = n_rows // self._n
        return Piece(hf, (n_rows, *rest), (n * self._rank, *(0 for _ in rest)), (n, *rest))


def _whole(name: str, shape: tuple[int, ...]) -> Piece:
    return Piece(name, shape, (0,) * len(shape), shape)
