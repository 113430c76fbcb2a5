"""Jobs whose versions do not travel whole: as adapters, and as deltas, which workers build, verify and serve."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rlboost.shared.weights.rest_models import NONCE_FILE
from tests.support.black_box import BlackBox, Observer, black_box
from tests.support.small_job import check, small_job

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlackBox]:
    with black_box(tmp_path_factory.mktemp("system") / "state", workers=1) as box:
        yield box


def completed(box: BlackBox, spec: dict[str, Any]) -> str:
    """Run a job; return its id."""
    job_id = box.submit(spec)
    with closing(Observer(box.redis_url, job_id)) as observer:
        box.until_completed(job_id)
    check(box, job_id, observer, spec)
    return job_id


def logged(box: BlackBox) -> list[str]:
    return [line for log in (box.state / "logs").glob("worker*.log") for line in log.read_text().splitlines()]


def pulls_of(box: BlackBox, job_id: str) -> list[str]:
    return [line for line in logged(box) if "weights_pulled" in line and f'"{job_id}"' in line]


def test_workers_pull_adapters_and_the_job_completes(box: BlackBox) -> None:
    """Workers fetch the model once, and an adapter a step."""
    spec = small_job(steps=2, elastic={"weights": "lora"})
    spec["lora"] = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}
    job_id = completed(box, spec)
    saved = {
        e["kind"]: e["fields"]["path"]
        for e in box.events(job_id)
        if e["kind"].endswith("_saved") and "path" in e["fields"]
    }
    assert (Path(saved["model_saved"]) / "model.safetensors").is_file()
    assert (Path(saved["adapter_saved"]) / "adapter_model.safetensors").is_file()
    n_bytes = {_number("version", line): _number("bytes_dense", line) for line in pulls_of(box, job_id)}
    assert set(n_bytes) >= {0, spec["steps"]}
    assert all(0 < n < n_bytes[0] / 20 for version, n in n_bytes.items() if version), n_bytes


@pytest.mark.long
def test_workers_pull_deltas_and_the_job_completes(box: BlackBox) -> None:
    spec = small_job(steps=3, elastic={"weights": "delta"})
    # What is usual for large models: few of the rounded values move in a step.
    spec["optimizer"]["lr"], spec["trainer"]["dtype"] = 1e-6, "bfloat16"
    # Without it the workers are on other machines, as far as they know.
    (box.state / "weights" / NONCE_FILE).unlink()
    job_id = completed(box, spec)
    pulls = pulls_of(box, job_id)
    assert pulls, logged(box)[-20:]
    assert sum(_number("chunks_delta", line) for line in pulls) > 0
    assert not any("delta_failed" in line for line in logged(box))
    (model,) = [model for model in box.get("/v1/weights")["models"] if model["job_id"] == job_id]
    first, *_, last = model["versions"]
    assert (first["version"], first["pinned"], first["bytes_delta"]) == (0, True, None)
    assert 0 < last["bytes_delta"] < last["bytes_full"]
    assert last["holders"]


def _number(name: str, line: str) -> int:
    found = re.search(rf"\b{name}\D+(\d+)", line)
    assert found, line
    return int(found[1])
