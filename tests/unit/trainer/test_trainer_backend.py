"""How a model is sharded: settings, model shape, split of a batch, and weight maps."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlboost.services.trainer.adapters.megatron.model_shape import ModelShape, require_divisible, shape_of
from rlboost.services.trainer.adapters.megatron.weight_map import HEAD, MegatronWeightMap
from rlboost.services.trainer.adapters.torch import ranks
from rlboost.services.trainer.adapters.torch.fsdp import FsdpWeightMap
from rlboost.services.trainer.adapters.torch.ranks import Coordinates, Layout, TensorSlice, rank_environment
from rlboost.services.trainer.adapters.torch.tensors import SliceReader, write_slices
from rlboost.services.trainer.domain.plan import partition
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.spec import parse
from rlboost.shared.job.training import TrainerSpec
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
        {"expert_parallel": 2},
        {"sequence_parallel": True},
        {"distributed_optimizer": True},
    ],
)
def test_torch_backend_rejects_megatron_settings(setting: dict[str, Any]) -> None:
    (name,) = setting
    with pytest.raises(ConfigError, match=f"{name} needs trainer.backend: megatron"):
        trainer(**setting)


def test_setting_without_its_prerequisite_is_rejected_by_name() -> None:
    with pytest.raises(ConfigError, match="sequence_parallel is for tensor_parallel above 1"):
        trainer(backend="megatron", sequence_parallel=True)
    with pytest.raises(ConfigError, match="distributed_optimizer is for data_parallel or context"):
        trainer(backend="megatron", distributed_optimizer=True)
    with pytest.raises(ConfigError, match=r"lora needs trainer.backend: torch"):
        parse({**small_job(steps=1, elastic={"weights": "lora"}), "trainer": {"backend": "megatron"}})


@pytest.mark.parametrize("setting", [{"data_parallel": 4, "nodes": 2, "fsdp_size": 2}, {"context_parallel": 2}])
def test_adapter_trains_in_several_torch_processes(setting: dict[str, Any]) -> None:
    job = parse({**small_job(steps=1, elastic={"weights": "lora"}), "trainer": setting})
    assert job.adapter is not None


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"data_parallel": 3, "nodes": 2}, "nodes is 2.* 3 processes"),
        ({"data_parallel": 2, "nodes": 2, "min_nodes": 3}, "min_nodes is 3"),
        ({"backend": "megatron", "pipeline_parallel": 2, "nodes": 2, "min_nodes": 1}, "min_nodes below nodes"),
        (
            {"backend": "megatron", "data_parallel": 4, "expert_parallel": 4, "nodes": 2, "min_nodes": 1},
            "expert_parallel is 4 and a machine has 2 replicas",
        ),
    ],
)
def test_nodes_that_do_not_divide_the_processes_are_rejected(setting: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        trainer(**setting)
    assert trainer(data_parallel=4, nodes=2, min_nodes=1).fewest_nodes == 1


def test_rank_environment_has_the_trusted_authority_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLBOOST_TLS_CA", "/ca.pem")
    monkeypatch.setenv("RLBOOST_TOKEN", "secret")
    found = rank_environment("cpu", interface="eth0")
    assert {name for name in found if name.startswith("RLBOOST_")} == {"RLBOOST_TLS_CA"}
    assert (found["CUDA_VISIBLE_DEVICES"], found["GLOO_SOCKET_IFNAME"]) == ("", "eth0")


def test_fsdp_weight_map_divides_rows_as_torch_chunk() -> None:
    for n_rows, n_ranks in ((128, 2), (97, 3), (2, 3), (1, 4)):
        maps = [FsdpWeightMap({"w": (n_rows, 5)}, rank, n_ranks) for rank in range(n_ranks)]
        slices = [s for one in maps for s in one.slices("w")]
        expected = [len(part) for part in torch.empty(n_rows, 5).chunk(n_ranks)]
        assert [s.local_shape[0] for s in slices] == expected + [0] * (n_ranks - len(expected))
        assert sum(s.local_shape[0] for s in slices) == n_rows
        not_empty = [s for s in slices if s.local_shape[0]]
        assert [s.offset[0] for s in not_empty] == [sum(expected[:i]) for i in range(len(not_empty))]


def test_layout_combines_all_kinds_of_parallelism() -> None:
    numbers = {"tensor_parallel": 2, "pipeline_parallel": 3, "data_parallel": 4}
    spec = trainer(backend="megatron", sequence_parallel=True, distributed_optimizer=True, **numbers)
    layout = Layout.of(spec)
    assert layout.n_ranks == 24
    places = [Coordinates.of(rank, layout) for rank in range(24)]
    assert len(set(places)) == 24
    assert places[1] == (1, 0, 0, 0)
    assert places[2] == (0, 0, 1, 0)
    assert places[8] == (0, 1, 0, 0)


def test_layout_divides_experts_over_neighboring_replicas() -> None:
    numbers = {"tensor_parallel": 2, "data_parallel": 4, "expert_parallel": 2}
    layout = Layout.of(trainer(backend="megatron", sequence_parallel=True, **numbers))
    assert layout.n_ranks == 8
    assert [Coordinates.of(rank, layout).expert_part(layout) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    with pytest.raises(ConfigError, match=r"expert_parallel is 3, which does not divide data_parallel, which is 4"):
        trainer(backend="megatron", data_parallel=4, expert_parallel=3)


def test_layout_gives_a_replica_neighboring_context_ranks() -> None:
    layout = Layout.of(trainer(context_parallel=2, data_parallel=3))
    assert layout.n_ranks == 6
    assert [Coordinates.of(rank, layout)[2:] for rank in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_context_ranks_hold_copies_of_the_model() -> None:
    layout = Layout.of(trainer(backend="megatron", tensor_parallel=2, context_parallel=2, data_parallel=2))
    assert [Coordinates.of(rank, layout).replica_index(layout) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


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
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e6}}, "rope type longrope"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "sliding window 4096"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
    ],
)
def test_unsupported_model_is_rejected_by_the_feature(changed: dict[str, Any], named: str) -> None:
    assert shape_of(config()).qk_norm
    with pytest.raises(ConfigError, match=f"{named}.*use trainer.backend: torch"):
        shape_of(config(**changed))


def test_layout_that_does_not_divide_the_model_is_rejected() -> None:
    require_divisible(SHAPE, Layout(4, 4, 1, False, False))
    with pytest.raises(ConfigError, match=r"tensor_parallel is 8.* 4 key and value heads"):
        require_divisible(SHAPE, Layout(8, 1, 1, False, False))
    with pytest.raises(ConfigError, match=r"pipeline_parallel is 3.* 4 layers"):
        require_divisible(SHAPE, Layout(1, 3, 1, False, False))
    with pytest.raises(ConfigError, match=r"context_parallel is 4.* 2 attention heads of a tensor-parallel rank"):
        require_divisible(SHAPE, Layout(4, 1, 1, False, False, context=4))
    mixture = SHAPE._replace(n_experts=6, experts_per_token=2)
    with pytest.raises(ConfigError, match=r"expert_parallel is 4.* 6 experts"):
        require_divisible(mixture, Layout(1, 1, 4, False, False, expert=4))


# --- the split of a batch ---


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 6))
def test_spread_puts_each_item_in_one_part_of_similar_size(sizes: list[int], n_parts: int) -> None:
    parts = partition(sizes, n_parts)
    assert len(parts) == n_parts
    assert sorted(item for part in parts for item in part) == list(range(len(sizes)))
    sums = [sum(sizes[item] for item in part) for part in parts]
    assert max(sums) - min(sums) <= max(sizes, default=0)


# --- weight maps ---


def names(layout: Layout, place: Coordinates, shape: ModelShape) -> list[str]:
    """Return the parameters of a rank's `GPTModel`."""
    first, last = place.pipeline == 0, place.pipeline == layout.pipeline - 1
    top = [TOP[0]] * first + [TOP[1]] * last + [TOP[2]] * (last and (not shape.tied or layout.pipeline > 1))
    layers = range(shape.n_layers // layout.pipeline)
    return [*top, *(f"decoder.layers.{layer}.{inner}" for layer in layers for inner in IN_LAYER)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (1, 2), (2, 2), (4, 4)])
def test_megatron_weight_map_exports_each_value_once_and_exactly(layout: tuple[int, int], tied: bool) -> None:
    shape, parallel = SHAPE._replace(tied=tied), Layout(*layout, 1, False, False)
    whole: dict[str, torch.Tensor] = {}
    covered: dict[str, torch.Tensor] = {}
    for rank in range(parallel.n_ranks):
        place = Coordinates.of(rank, parallel)
        weights = MegatronWeightMap(shape, parallel, place)
        for name in names(parallel, place, shape):
            slices = weights.slices(name)
            for s in slices:
                generator = torch.Generator().manual_seed(sum(map(ord, s.name)))
                whole.setdefault(s.name, torch.randn(s.global_shape, generator=generator))
                covered.setdefault(s.name, torch.zeros(s.global_shape))
            parts = [whole[s.name][index(s)] for s in slices]
            parameter = weights.join(name, parts)
            assert parameter.shape[0] == {TOP[0]: -(-11 // layout[0])}.get(name, parameter.shape[0])
            for s, part, again in zip(slices, parts, weights.split(name, parameter), strict=True):
                assert again.shape == s.local_shape
                assert torch.equal(again, part)
                if weights.owns(name) and all(s.local_shape):
                    covered[s.name][index(s)] += 1
    assert all((count == 1).all() for count in covered.values())
    assert len(whole) == 2 + (not tied) + 14 * shape.n_layers
    assert (HEAD in whole) is not tied


def test_megatron_weight_map_groups_qkv_by_key_head() -> None:
    weights = MegatronWeightMap(SHAPE, Layout(1, 1, 1, False, False), Coordinates(0, 0, 0))
    name = "decoder.layers.0.self_attention.linear_qkv.bias"
    parts = [torch.arange(16.0), 100 + torch.arange(8.0), 200 + torch.arange(8.0)]
    first_group = weights.join(name, parts)[:8].tolist()
    assert first_group == [0, 1, 2, 3, 100, 101, 200, 201]


# --- sharded tensors in files ---


def test_slice_reader_joins_slices_of_another_layout(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(6, 4)
    write_slices(tmp_path / "0", {TensorSlice("a", (6, 4), (0, 0), (6, 1)): whole[:, :1].contiguous()})
    write_slices(tmp_path / "1", {TensorSlice("a", (6, 4), (0, 1), (6, 3)): whole[:, 1:].contiguous()})
    with SliceReader([tmp_path / "0", tmp_path / "1"]) as reader:
        assert reader.shapes == {"a": (6, 4)}
        for s in (TensorSlice("a", (6, 4), (0, 0), (6, 4)), TensorSlice("a", (6, 4), (2, 0), (3, 4))):
            assert torch.equal(reader.read(s), whole[index(s)])


def test_slice_reader_names_a_missing_or_incomplete_tensor(tmp_path: Path) -> None:
    write_slices(tmp_path / "0", {TensorSlice("a", (6, 4), (0, 0), (3, 4)): torch.ones(3, 4)})
    with SliceReader([tmp_path / "0"]) as reader:
        with pytest.raises(ValueError, match="tensor a is incomplete"):
            reader.read(TensorSlice("a", (6, 4), (0, 0), (4, 4)))
        with pytest.raises(ValueError, match=r"tensor a has shape \[6, 4\], expected \[6, 5\]"):
            reader.read(TensorSlice("a", (6, 5), (0, 0), (3, 5)))
        with pytest.raises(ValueError, match="tensor b is missing"):
            reader.read(TensorSlice("b", (6,), (0,), (6,)))


# --- errors of ranks ---


def test_rank_error_keeps_its_known_class_or_its_traceback() -> None:
    known = ranks.decode_error(1, ranks.encode_error(ConfigError("tensor a is wrong"), "Traceback"))
    assert type(known) is ConfigError
    assert str(known) == "tensor a is wrong"
    for error in (KeyError("a"), KeyboardInterrupt()):
        other = ranks.decode_error(1, ranks.encode_error(error, "Traceback: in this line"))
        assert type(other) is RuntimeError
        assert "rank 1 of the trainer failed:\nTraceback: in this line" in str(other)


def index(s: TensorSlice) -> tuple[slice, ...]:
    return tuple(slice(low, low + n) for low, n in zip(s.offset, s.local_shape, strict=True))
