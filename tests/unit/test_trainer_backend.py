"""How a model is cut up: the job file's settings, the shape, the shares of a batch, and the weights' names."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.adapters.fsdp.network import RowMap
from services.trainer.adapters.megatron.names import HEAD, WeightMap
from services.trainer.adapters.megatron.shape import ModelShape, check, shape_of
from services.trainer.adapters.ranks import boxes, wire
from services.trainer.adapters.ranks.boxes import BoxReader
from services.trainer.adapters.ranks.layout import Layout, Place
from services.trainer.adapters.ranks.packed import packed, rows_of
from services.trainer.adapters.ranks.piece import Piece
from services.trainer.domain.spread import spread
from services.trainer.ports import Row
from shared.columns import I32, pack
from shared.errors import ConfigError
from shared.jobspec import parse
from shared.training import TrainerSpec
from tests.support.small_job import small_job

SHAPE = ModelShape(
    n_layers=4,
    hidden=6,
    intermediate=8,
    n_heads=8,
    n_kv_heads=4,
    head_size=2,
    vocabulary=11,
    max_positions=64,
    norm_epsilon=1e-6,
    rope_theta=1e4,
    tied=False,
    qkv_bias=True,
    qk_norm=True,
)
TOP = ("embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight")
IN_LAYER = (
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "self_attention.linear_proj.weight",
    "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm.weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight",
    "input_layernorm.weight",
    "pre_mlp_layernorm.weight",
)

# --- the job file ---


def trainer(**settings: Any) -> TrainerSpec:
    return parse({**small_job(steps=1), "trainer": settings}).trainer


@pytest.mark.parametrize(
    "setting",
    [
        {"tensor_parallel": 2},
        {"pipeline_parallel": 2},
        {"sequence_parallel": True},
        {"distributed_optimizer": True},
    ],
)
def test_what_the_torch_backend_cannot_do_is_refused_there(setting: dict[str, Any]) -> None:
    (name,) = setting
    with pytest.raises(ConfigError, match=f"{name} needs trainer.backend: megatron"):
        trainer(**setting)


def test_settings_that_need_another_setting_say_so() -> None:
    with pytest.raises(ConfigError, match="sequence_parallel is for tensor_parallel above 1"):
        trainer(backend="megatron", sequence_parallel=True)
    with pytest.raises(ConfigError, match="distributed_optimizer is for data_parallel above 1"):
        trainer(backend="megatron", distributed_optimizer=True)
    with pytest.raises(ConfigError, match=r"lora needs trainer.backend: torch"):
        parse({**small_job(steps=1, elastic={"weights": "lora"}), "trainer": {"backend": "megatron"}})
    with pytest.raises(ConfigError, match=r"lora needs trainer.backend: torch in one process"):
        parse({**small_job(steps=1, elastic={"weights": "lora"}), "trainer": {"data_parallel": 2}})


def test_rows_are_shared_out_as_torch_does_it() -> None:
    for n_rows, n_ranks in ((128, 2), (97, 3), (2, 3), (1, 4)):
        maps = [RowMap({"w": (n_rows, 5)}, rank, n_ranks) for rank in range(n_ranks)]
        pieces = [piece for found in maps for piece in found.pieces("w")]
        expected = [len(part) for part in torch.empty(n_rows, 5).chunk(n_ranks)]
        assert [piece.local_shape[0] for piece in pieces] == expected + [0] * (n_ranks - len(expected))
        assert sum(piece.local_shape[0] for piece in pieces) == n_rows
        held = [piece for piece in pieces if piece.local_shape[0]]
        assert [piece.offset[0] for piece in held] == [sum(expected[:i]) for i in range(len(held))]


def test_rows_come_out_of_what_a_rank_is_given_as_they_went_in() -> None:
    given = [
        Row(pack([3, 4], I32), pack([5, 6, 7], I32), b"", 0.0, trained=b"\1\0\1"),
        Row(pack([8], I32), pack([9], I32), b"", 0.0, trained=b"\1"),
    ]
    assert rows_of(packed(given)) == given


def test_a_job_may_ask_for_everything_at_once() -> None:
    numbers = {"tensor_parallel": 2, "pipeline_parallel": 3, "data_parallel": 4}
    spec = trainer(backend="megatron", sequence_parallel=True, distributed_optimizer=True, **numbers)
    layout = Layout.of(spec)
    assert layout.n_ranks == 24
    places = [Place.of(rank, layout) for rank in range(24)]
    assert len(set(places)) == 24
    assert places[1] == (1, 0, 0)
    assert places[2] == (0, 0, 1)
    assert places[8] == (0, 1, 0)


# --- the shape ---


def config(**changed: Any) -> SimpleNamespace:
    values = {
        "model_type": "qwen3",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "hidden_act": "silu",
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 96,
        "max_position_embeddings": 160,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }
    return SimpleNamespace(**(values | changed))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "yarn"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "sliding window of 4096"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
    ],
)
def test_a_model_of_another_kind_is_refused_by_what_is_different(changed: dict[str, Any], named: str) -> None:
    assert shape_of(config()).rope_theta == 1e6
    with pytest.raises(ConfigError, match=f"{named}.*use trainer.backend: torch"):
        shape_of(config(**changed))


def test_a_cut_that_does_not_come_out_even_is_refused() -> None:
    check(SHAPE, Layout(4, 4, 1, False, False))
    with pytest.raises(ConfigError, match="tensor_parallel is 8, but the model's 4 key and value heads"):
        check(SHAPE, Layout(8, 1, 1, False, False))
    with pytest.raises(ConfigError, match="pipeline_parallel is 3, but the model's 4 layers"):
        check(SHAPE, Layout(1, 3, 1, False, False))


# --- the shares of a batch ---


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 6))
def test_every_item_is_in_one_share_and_shares_are_close(sizes: list[int], n_parts: int) -> None:
    parts = spread(sizes, n_parts)
    assert len(parts) == n_parts
    assert sorted(item for part in parts for item in part) == list(range(len(sizes)))
    sums = [sum(sizes[item] for item in part) for part in parts]
    assert max(sums) - min(sums) <= max(sizes, default=0)


# --- the weights' names ---


def names(layout: Layout, place: Place, shape: ModelShape) -> list[str]:
    """Return what a rank's `GPTModel` has."""
    first, last = place.pipeline == 0, place.pipeline == layout.pipeline - 1
    top = [TOP[0]] * first + [TOP[1]] * last + [TOP[2]] * (last and (not shape.tied or layout.pipeline > 1))
    layers = range(shape.n_layers // layout.pipeline)
    return [*top, *(f"decoder.layers.{layer}.{inner}" for layer in layers for inner in IN_LAYER)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (1, 2), (2, 2), (4, 4)])
def test_every_value_is_spoken_for_by_one_rank_and_comes_back_bit_for_bit(layout: tuple[int, int], tied: bool) -> None:
    shape, cut = SHAPE._replace(tied=tied), Layout(*layout, 1, False, False)
    whole: dict[str, torch.Tensor] = {}
    covered: dict[str, torch.Tensor] = {}
    for rank in range(cut.n_ranks):
        place = Place.of(rank, cut)
        weights = WeightMap(shape, cut, place)
        for name in names(cut, place, shape):
            pieces = weights.pieces(name)
            for piece in pieces:
                generator = torch.Generator().manual_seed(sum(map(ord, piece.name)))
                whole.setdefault(piece.name, torch.randn(piece.global_shape, generator=generator))
                covered.setdefault(piece.name, torch.zeros(piece.global_shape))
            parts = [whole[piece.name][box(piece)] for piece in pieces]
            parameter = weights.join(name, parts)
            assert parameter.shape[0] == {TOP[0]: -(-11 // layout[0])}.get(name, parameter.shape[0])
            for piece, part, again in zip(pieces, parts, weights.split(name, parameter), strict=True):
                assert again.shape == piece.local_shape
                assert torch.equal(again, part)
                if weights.owns(name) and math.prod(piece.local_shape):
                    covered[piece.name][box(piece)] += 1
    assert all((count == 1).all() for count in covered.values())
    assert len(whole) == 2 + (not tied) + 14 * shape.n_layers
    assert (HEAD in whole) is not tied


def test_queries_keys_and_values_are_grouped_by_key_head() -> None:
    weights = WeightMap(SHAPE, Layout(1, 1, 1, False, False), Place(0, 0, 0))
    name = "decoder.layers.0.self_attention.linear_qkv.bias"
    parts = [torch.arange(16.0), 100 + torch.arange(8.0), 200 + torch.arange(8.0)]
    first_group = weights.join(name, parts)[:8].tolist()
    assert first_group == [0, 1, 2, 3, 100, 101, 200, 201]


# --- boxes in files ---


def test_a_box_is_read_out_of_boxes_cut_otherwise(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(6, 4)
    boxes.write(tmp_path / "0", {Piece("a", (6, 4), (0, 0), (6, 1)): whole[:, :1]})
    boxes.write(tmp_path / "1", {Piece("a", (6, 4), (0, 1), (6, 3)): whole[:, 1:]})
    with BoxReader([tmp_path / "0", tmp_path / "1"]) as reader:
        assert reader.shapes == {"a": (6, 4)}
        for piece in (Piece("a", (6, 4), (0, 0), (6, 4)), Piece("a", (6, 4), (2, 0), (3, 4))):
            assert torch.equal(reader.read(piece), whole[box(piece)])


def test_what_no_file_has_is_named(tmp_path: Path) -> None:
    boxes.write(tmp_path / "0", {Piece("a", (6, 4), (0, 0), (3, 4)): torch.ones(3, 4)})
    with BoxReader([tmp_path / "0"]) as reader:
        with pytest.raises(ValueError, match="tensor a is not whole"):
            reader.read(Piece("a", (6, 4), (0, 0), (4, 4)))
        with pytest.raises(ValueError, match=r"tensor a of shape \[6, 5\] is wanted, and there it has shape \[6, 4\]"):
            reader.read(Piece("a", (6, 5), (0, 0), (3, 5)))
        with pytest.raises(ValueError, match=r"tensor b .* is not there"):
            reader.read(Piece("b", (6,), (0,), (6,)))


# --- what ranks say ---


def test_an_error_of_ours_crosses_as_itself_and_any_other_with_its_traceback() -> None:
    known = wire.as_error(1, wire.failure(ConfigError("tensor a is wrong"), "Traceback"))
    assert type(known) is ConfigError
    assert str(known) == "tensor a is wrong"
    for error in (KeyError("a"), KeyboardInterrupt()):
        other = wire.as_error(1, wire.failure(error, "Traceback: in this line"))
        assert type(other) is RuntimeError
        assert "rank 1 of the trainer failed:\nTraceback: in this line" in str(other)


def box(piece: Piece) -> tuple[slice, ...]:
    return tuple(slice(low, low + n) for low, n in zip(piece.offset, piece.local_shape, strict=True))
