"""A policy learns which of two models over HTTP to ask: as right as before, for less."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlboost.examples.router.models import Models
from tests.support.black_box import ROOT, black_box

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def test_training_lowers_cost_at_equal_reward_and_survives_its_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec: dict[str, Any] = yaml.safe_load((ROOT / "examples/router/job.yaml").read_text())
    with Models() as models:
        thread = threading.Thread(target=models.serve_forever)
        thread.start()
        monkeypatch.setenv("ROUTER_MODELS_URL", models.url)
        try:
            with black_box(tmp_path / "state", workers=1, reserved=0) as box:
                job = box.submit(spec)
                box.until_step(job, 12, 400)
                box.kill("trainer")
                box.until_completed(job, 800)
                rows = box.get(f"/v1/jobs/{job}/metrics")
                samples = box.get(f"/v1/jobs/{job}/samples")
        finally:
            models.shutdown()
            thread.join()
    evaluated = {row["step"]: row for row in rows if "eval/cost/mean" in row}
    right, cheaper = evaluated[10], evaluated[spec["steps"]]
    assert right["eval/reward_mean"] > 0.95
    assert cheaper["eval/reward_mean"] > 0.95
    assert cheaper["eval/cost/mean"] < 0.85 * right["eval/cost/mean"]
    assert all(row["groups/dropped"] == 0 for row in rows)
    assert {round(sample["cost"], 9) for sample in samples} <= {14e-6, 1300e-6}, "of one answer each"
