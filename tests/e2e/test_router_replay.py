"""A job on a mixture of experts whose routers replay the engines' decisions, while a worker is killed."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tests.support.black_box import Observer, black_box
from tests.support.mixture_folder import mixture
from tests.support.small_job import check, small_job

pytestmark = pytest.mark.timeout(900)


@pytest.mark.long
def test_every_trained_token_is_replayed_after_a_worker_is_killed(tmp_path: Path) -> None:
    spec = small_job(steps=3)
    spec["model"] = str(mixture(tmp_path / "model"))
    spec["trainer"] |= {"router_replay": "R3", "router_aux_loss_coef": 0.001}
    spec["algorithm"]["equal_groups"] = "keep"  # a random model earns nothing
    spec["sampling"]["max_tokens"] = 64
    with black_box(tmp_path / "state", workers=2) as box:
        job_id = box.submit(spec)
        with closing(Observer(box.redis_url, job_id)) as observer:
            assert box.until_busy(job_id)
            box.kill("preemptible")
            box.until_completed(job_id)
        check(box, job_id, observer, spec)
        rows = box.get(f"/v1/jobs/{job_id}/metrics")[: spec["steps"]]
    assert [row["moe/replayed"] for row in rows] == [1.0] * spec["steps"]
    assert all(row["mismatch_kl"] < 1e-5 for row in rows)
    assert all(row["moe/max_load"] >= 1 for row in rows)
