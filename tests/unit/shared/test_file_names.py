"""Names of a model's tensors in its files."""

from __future__ import annotations

import torch

from rlboost.shared.model.file_names import by_file_name


def test_matrices_of_experts_are_views_under_their_names_in_files() -> None:
    fused = torch.arange(2 * 6 * 4.0).reshape(2, 6, 4)
    names = {
        "layer.experts.gate_up_proj": ("experts.0.w1", "experts.0.w3", "experts.1.w1", "experts.1.w3"),
        "layer.norm": ("old_norm",),
    }
    norm, gate = torch.ones(4), torch.ones(2, 4)
    found = by_file_name({"layer.experts.gate_up_proj": fused, "layer.norm": norm, "layer.gate": gate}, names)
    assert list(found) == [*names["layer.experts.gate_up_proj"], "old_norm", "layer.gate"]
    torch.testing.assert_close(found["experts.1.w3"], fused[1, 3:])
    found["experts.1.w3"].zero_()
    assert not fused[1, 3:].any()
    assert found["old_norm"] is norm
    assert found["layer.gate"] is gate
