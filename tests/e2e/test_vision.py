"""A model that sees images learns to name the color of a square, while a worker dies."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rlboost.shared.data.vision import FAMILIES
from tests.support import tiny_vision, vllm_engines
from tests.support.black_box import black_box, check_engine_and_trainer_agree

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 44


def write_rows(folder: Path, name: str, per_color: int, first_seed: int) -> str:
    """Write rows with images as files, one of them inline as Hugging Face datasets have it, and return their path."""
    (folder / "pictures").mkdir(exist_ok=True)
    lines = []
    for i in range(per_color * len(tiny_vision.COLORS)):
        color = list(tiny_vision.COLORS)[i % len(tiny_vision.COLORS)]
        image = Path("pictures", f"{name}-{i}.png")
        (folder / image).write_bytes(tiny_vision.png(tiny_vision.square(color, first_seed + i)))
        content = [{"type": "image"}, {"type": "text", "text": " which color"}]
        row = {"prompt": [{"role": "user", "content": content}], "images": [str(image)]}
        lines.append(json.dumps({**row, "color": tiny_vision.WORDS.index(color)}))
    file = folder / f"{name}.jsonl"
    file.write_text("\n".join(lines))
    return str(file)


def job(folder: Path, family: str, head_dim: int = 0) -> dict[str, Any]:
    return {
        "name": "colors",
        "model": str(tiny_vision.write(folder / "model", steepness=0.5, family=family, head_dim=head_dim)),
        "data": {
            "train": write_rows(folder, "train", 16, 0),
            "eval": write_rows(folder, "eval", 8, 1000),
            "prompts_per_step": 8,
        },
        "reward": {"function": "tests.support.reward_functions:names_color", "timeout_s": 5},
        "algorithm": {"name": "grpo", "group_size": 8},
        "sampling": {"max_tokens": 2},
        "optimizer": {"lr": 3e-3},
        "trainer": {"checkpoint_every": 10},
        "steps": STEPS,
        "eval": {"every": STEPS // 2, "samples": 64},
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_model_learns_to_name_a_color_while_a_worker_is_killed(tmp_path: Path, family: str) -> None:
    with black_box(tmp_path / "state", workers=2) as box, closing(box.http):
        spec = job(tmp_path / "state", family)
        job_id = box.submit(spec)
        box.until_step(job_id, STEPS // 2)
        assert box.until_busy(job_id)
        box.kill("preemptible")
        box.until_completed(job_id, within_s=600)
        rows = box.get(f"/v1/jobs/{job_id}/metrics")
        audit = box.get(f"/v1/jobs/{job_id}/audit")
        events = box.events(job_id)
    assert audit["requested"] == audit["delivered"] == STEPS * 8 * 8 + 3 * 64
    assert not audit["dropped"]
    rewards = [row["eval/reward_mean"] for row in rows if "eval/reward_mean" in row]
    assert rewards[0] < 0.3
    assert rewards[-1] > 0.4, (rewards, [row.get("reward/mean") for row in rows], events[-3:])


@pytest.mark.parametrize("family", FAMILIES)
def test_images_are_trained_on_with_vllm_while_a_worker_is_killed(tmp_path: Path, family: str) -> None:
    vllm_engines.require_installed()
    with black_box(tmp_path / "state", workers=2, engine="vllm") as box, closing(box.http):
        spec = {**job(tmp_path / "state", family, head_dim=32), "steps": 4}
        del spec["eval"], spec["data"]["eval"]
        check_engine_and_trainer_agree(box, spec)
