"""`benchmarks/engines` where vLLM is not installed: it says so, and measures the rest."""

from __future__ import annotations

import importlib.util

import pytest

pytest.importorskip("torch")

from benchmarks import engines

find_spec = importlib.util.find_spec


def test_comparison_without_vllm_reports_that_it_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find_spec(name))
    engines.main(["--model", "demo", "--requests", "2", "9", "--prompt", "5", "--tokens", "3", "--rounds", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("vLLM is left out: the vllm engine needs vllm: 'make install-vllm'")
    for n, row in zip(("2", "9"), lines[-2:], strict=True):
        model, requests, ours, vllm, _, plain, ratio, *_ = row.strip("| ").split(" | ")
        assert (model, requests, vllm, ratio) == ("demo", n, "-", "-")
        assert min(int(ours), int(plain)) > 0
