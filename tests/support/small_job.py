"""A Countdown job of a minute, and what its audit and its streams must agree on when it is done."""

from __future__ import annotations

from typing import Any

import yaml

from tests.support.black_box import ROOT, BlackBox, Observer

PROMPTS, GROUP, EVAL_EVERY, EVAL_SAMPLES = 8, 8, 4, 16


def small_job(steps: int, *, elastic: dict[str, Any] | None = None, seed: int = 0) -> dict[str, Any]:
    """Return the example's job, with few prompts a step."""
    spec: dict[str, Any] = yaml.safe_load((ROOT / "examples/countdown/job.yaml").read_text())
    spec["data"]["prompts_per_step"] = PROMPTS
    spec["algorithm"]["group_size"] = GROUP
    spec["trainer"] |= {"checkpoint_every": 2, "seed": seed}
    spec["elastic"] |= elastic or {}
    return {**spec, "steps": steps, "eval": {"every": EVAL_EVERY, "samples": EVAL_SAMPLES}}


def samples_of(spec: dict[str, Any]) -> int:
    """Return how many samples the job asks for, those of its evaluations included."""
    steps = spec["steps"]
    evaluations = sum(1 for step in range(steps + 1) if step % EVAL_EVERY == 0 or step == steps)
    return int(steps * PROMPTS * GROUP + evaluations * EVAL_SAMPLES)


def check(box: BlackBox, job_id: str, observer: Observer, spec: dict[str, Any]) -> dict[str, Any]:
    """Assert that a completed job got everything that it asked for, once; return its audit."""
    observer.close()
    n_samples = samples_of(spec)
    assert observer.check() == n_samples
    audit: dict[str, Any] = box.get(f"/v1/jobs/{job_id}/audit")
    delivered = sum(len(m[0]["tokens"]) // 4 for m in observer.finished.values())
    assert audit["requested"] == audit["delivered"] == n_samples
    assert not audit["dropped"]
    assert audit["in_flight"] == 0
    assert audit["tokens_delivered"] == delivered
    assert audit["tokens_generated"] == delivered + sum(audit["tokens_regenerated"].values())
    rows = box.get(f"/v1/jobs/{job_id}/metrics")
    assert [row["step"] for row in rows] == list(range(spec["steps"] + 1))
    assert all(row["groups/dropped"] == row["samples/duplicates"] == 0 for row in rows)
    return audit
