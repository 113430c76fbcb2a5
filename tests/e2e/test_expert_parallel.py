"""A job whose two ranks divide the experts of a mixture; one rank is killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.black_box import black_box
from tests.support.killed_rank import events_with_a_killed_rank
from tests.support.megatron_cpu import python_path
from tests.support.mixture_folder import mixture
from tests.support.small_job import small_job

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def test_job_with_divided_experts_survives_a_killed_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path())
    spec = small_job(steps=6)
    base = mixture(tmp_path / "model")
    spec["model"] = str(base)
    spec["trainer"] |= {"backend": "megatron", "data_parallel": 2, "expert_parallel": 2, "dtype": "bfloat16"}
    spec["algorithm"]["equal_groups"] = "keep"  # a random model earns nothing
    spec["sampling"]["max_tokens"] = 64
    with black_box(tmp_path / "state", workers=1) as box:
        events = events_with_a_killed_rank(box, spec)
    (saved,) = [event["fields"]["path"] for event in events if event["kind"] == "model_saved"]
    assert load_file(Path(saved) / "model.safetensors").keys() == load_file(base / "model.safetensors").keys()
