"""The manager and the weight store answer generated requests as their OpenAPI documents say (schemathesis)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlboost.client import Client
from tests.support.black_box import black_box
from tests.support.service_process import TOKEN, ServiceProcess
from tests.support.small_job import small_job

RULES_BEYOND_THE_SCHEMA = (
    "POST /v1/jobs",  # keys of a job file depend on each other
    "POST /v1/tokens",  # scope and job belong together
    "POST /v1/jobs/{job_id}/sessions/next",  # the job must run
    "POST /v1/jobs/{job_id}/sessions/renew",  # sessions are those of a lease
    "POST /v1/sessions/{session}/reward",  # a reward, or why there is none
    "POST /v1/completions",  # the model must be that of a running job
    "POST /v1/chat/completions",
    "POST /v1/responses",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "PUT /v1/chunks/{digest}",  # the body must have the digest
    "PUT /v1/models/{job_id}/versions/{version}/parts/{rank}",  # the body must be that rank's part
)
"""Routes that may reject a request that fits their schema."""


@pytest.fixture
def manager(tmp_path: Path, redis_url: str, store: ServiceProcess) -> Iterator[ServiceProcess]:
    env = {"RLBOOST_MANAGER_WEIGHT_STORE_URL": store.url}
    process = ServiceProcess("rollout_manager", "RLBOOST_MANAGER_", tmp_path, redis_url, env)
    process.start()
    yield process
    process.kill()


def check(url: str, folder: Path, job_id: str, *, max_examples: int, token: str = TOKEN) -> None:
    """Run schemathesis on a service; its report is the error."""
    config = ["[parameters]", f'"path.job_id" = "{job_id}"']
    for route in RULES_BEYOND_THE_SCHEMA:
        config += ["[[operations]]", f'include-name = "{route}"', "checks.positive_data_acceptance.enabled = false"]
    # Their paths are also those of chunks, whose digest is checked first.
    for route in ("POST /v1/chunks/missing", "POST /v1/chunks/apply", "GET /v1/chunk-directory"):
        config += ["[[operations]]", f'include-name = "{route}"']
        config += ["checks.unsupported_method.enabled = false", "checks.allow_header_conformance.enabled = false"]
    file = folder / "schemathesis.toml"
    file.write_text("\n".join(config))
    program = Path(sys.executable).with_name("schemathesis")
    done = subprocess.run(
        [
            *(program, "--config-file", file, "run", f"{url}/openapi.json"),
            *("--header", f"Authorization: Bearer {token}", "--phases", "examples,coverage,fuzzing"),
            *("--max-examples", str(max_examples), "--seed", "1", "--no-color"),
        ],
        cwd=folder,
        env={**os.environ, "NO_PROXY": "127.0.0.1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"Tested: [1-9]", done.stdout), done.stdout


EXAMPLES = [4, pytest.param(25, marks=[pytest.mark.long, pytest.mark.timeout(900)])]


@pytest.mark.parametrize("max_examples", EXAMPLES)
def test_weight_store_answers_as_documented(store: ServiceProcess, tmp_path: Path, max_examples: int) -> None:
    check(store.url, tmp_path, "job-1", max_examples=max_examples)


@pytest.mark.parametrize("max_examples", EXAMPLES)
def test_manager_answers_as_documented(manager: ServiceProcess, tmp_path: Path, max_examples: int) -> None:
    with Client(manager.url, TOKEN) as client:
        job_id = client.jobs.create(small_job(steps=2))["id"]
        client.jobs.cancel(job_id)
    check(manager.url, tmp_path, job_id, max_examples=max_examples)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_manager_answers_about_a_completed_job_as_documented(tmp_path: Path) -> None:
    """The job has metrics, samples, events, logs and a cost, and the fleet has workers."""
    with black_box(tmp_path / "state", workers=1) as box:
        job_id = box.submit(small_job(steps=2))
        box.until_completed(job_id)
        assert box.get(f"/v1/jobs/{job_id}/samples")
        check(box.url, tmp_path, job_id, max_examples=10, token=box.token)
