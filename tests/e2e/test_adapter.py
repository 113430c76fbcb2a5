"""A job that trains an adapter: workers fetch the model once, and an adapter a step."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.black_box import Observer, black_box
from tests.support.small_job import check, small_job

pytestmark = pytest.mark.timeout(600)


def test_workers_pull_adapters_and_the_job_completes(tmp_path: Path) -> None:
    spec = small_job(steps=2, elastic={"weights": "lora"})
    spec["lora"] = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}
    with black_box(tmp_path / "state", workers=1) as box:
        job_id = box.submit(spec)
        with closing(Observer(box.redis_url, job_id)) as observer:
            box.until_completed(job_id)
        check(box, job_id, observer, spec)
        saved = {
            e["kind"]: e["fields"]["path"]
            for e in box.events(job_id)
            if e["kind"].endswith("_saved") and "path" in e["fields"]
        }
        logs = "".join(log.read_text() for log in (tmp_path / "state" / "logs").glob("worker*.log"))
    assert (Path(saved["model_saved"]) / "model.safetensors").is_file()
    assert (Path(saved["adapter_saved"]) / "adapter_model.safetensors").is_file()
    pulls = [line for line in logs.splitlines() if "weights_pulled" in line]
    n_bytes = {int(_number("version", line)): int(_number("bytes_dense", line)) for line in pulls}
    assert set(n_bytes) >= {0, spec["steps"]}
    assert all(0 < n < n_bytes[0] / 20 for version, n in n_bytes.items() if version), n_bytes


def _number(name: str, line: str) -> str:
    found = re.search(rf"\b{name}\D+(\d+)", line)
    assert found, line
    return found[1]
