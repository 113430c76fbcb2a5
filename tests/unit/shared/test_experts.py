"""Names of experts' weights."""

from __future__ import annotations

import pytest
import torch

from rlboost.shared.errors import ConfigError
from rlboost.shared.model.experts import names_of_expert, require_known_layout, split_experts


def test_split_experts_returns_views_of_each_experts_matrices() -> None:
    fused = torch.arange(2 * 6 * 4.0).reshape(2, 6, 4)
    tensors = {"a.mlp.experts.gate_up_proj": fused, "a.mlp.gate.weight": torch.ones(2, 4)}
    split = split_experts(tensors)
    assert list(split) == [
        "a.mlp.experts.0.gate_proj.weight",
        "a.mlp.experts.0.up_proj.weight",
        "a.mlp.experts.1.gate_proj.weight",
        "a.mlp.experts.1.up_proj.weight",
        "a.mlp.gate.weight",
    ]
    torch.testing.assert_close(split["a.mlp.experts.1.up_proj.weight"], fused[1, 3:])
    split["a.mlp.experts.1.up_proj.weight"].zero_()
    assert not fused[1, 3:].any()
    assert split["a.mlp.gate.weight"] is tensors["a.mlp.gate.weight"]


def test_dense_and_shared_projections_are_not_fused() -> None:
    for name in ("a.mlp.down_proj.weight", "a.mlp.shared_experts.down_proj.weight", "a.mlp.experts.down_proj_bias"):
        assert names_of_expert(name, 0) == []


def test_files_with_other_names_of_experts_are_rejected() -> None:
    names = ["m.experts.0.down_proj.weight", "m.norm.weight"]
    require_known_layout({"model_type": "qwen3_moe", "num_experts": 8}, names)
    require_known_layout({"model_type": "qwen3", "num_experts": 0}, ["m.norm.weight"])
    with pytest.raises(ConfigError, match=r"mixtral: its files have no tensor experts\.0\.down_proj"):
        require_known_layout({"model_type": "mixtral", "num_local_experts": 8}, ["m.experts.0.w2.weight"])
