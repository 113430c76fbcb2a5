"""The images and docker-compose.yml on a Docker engine: a job survives the loss of containers and of a network.

Runs where an engine answers: `make test-docker`. RLBOOST_TEST_TORCH_INDEX is the build argument TORCH_INDEX.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.small_job import samples_of, small_job

ROOT = Path(__file__).parents[2]
BUILD_LIMIT_S, UP_LIMIT_S, JOB_LIMIT_S = 1800, 300, 600
MANAGER = "http://127.0.0.1:8700"

pytestmark = [pytest.mark.docker, pytest.mark.timeout(BUILD_LIMIT_S + UP_LIMIT_S + 3 * JOB_LIMIT_S)]


class Compose:
    """One compose project."""

    def __init__(self, project: str, secrets: dict[str, str]) -> None:
        self._command = ["docker", "compose", "--project-name", project]
        self._environment = {**os.environ, **secrets}
        self.network = f"{project}_default"
        headers = {"Authorization": f"Bearer {secrets['RLBOOST_TOKEN']}"}
        self._http = httpx.Client(base_url=MANAGER, headers=headers, timeout=10)

    def __call__(self, *arguments: str, limit_s: float = 120) -> str:
        """Run `docker compose ARGUMENTS` and return what it prints."""
        return _run([*self._command, *arguments], self._environment, limit_s)

    def close(self) -> None:
        """Close the connections to the manager."""
        self._http.close()

    def containers(self, service: str) -> list[str]:
        """Return the ids of a service's running containers."""
        return self("ps", "--quiet", service).split()

    def get(self, path: str) -> Any:
        """GET from the manager as JSON, for a while again if it does not answer."""
        found: list[Any] = []

        def answered() -> bool:
            try:
                answer = self._http.get(path)
            except httpx.TransportError:
                return False
            if answer.status_code == 200:
                found.append(answer.json())
            return bool(found)

        self.until(answered, f"an answer to {path}")
        return found[0]

    def submit(self, spec: dict[str, Any]) -> str:
        """Create a job; return its id."""
        answer = self._http.post("/v1/jobs", json=spec)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def until(self, condition: Callable[[], bool], what: str, within_s: float = JOB_LIMIT_S) -> None:
        """Wait for a condition."""
        limit = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < limit, f"not within {within_s} s: {what}\n{self('logs', '--tail', '30')}"
            time.sleep(0.5)

    def until_step(self, job_id: str, step: int) -> None:
        """Wait until a job has done so many steps."""
        self.until(lambda: self.get(f"/v1/jobs/{job_id}")["step"] >= step, f"step {step} of {job_id}")


def _engine_answers() -> bool:
    return subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0


def docker(*arguments: str) -> str:
    return _run(["docker", *arguments], dict(os.environ), 120)


def _run(command: list[str], environment: dict[str, str], limit_s: float) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def compose() -> Iterator[Compose]:
    if shutil.which("docker") is None or not _engine_answers():
        pytest.skip("no Docker engine answers")
    named = ("RLBOOST_TOKEN", "RLBOOST_JOIN_TOKEN", "REDIS_PASSWORD")
    project = Compose("rlboost-test", {name: secrets.token_hex(24) for name in named})
    arguments = (
        [f"--build-arg=TORCH_INDEX={os.environ['RLBOOST_TEST_TORCH_INDEX']}"]
        if ("RLBOOST_TEST_TORCH_INDEX" in os.environ)
        else []
    )
    project("build", *arguments, limit_s=BUILD_LIMIT_S)
    try:
        project("up", "--detach", "--wait", "--scale", "spot=3", limit_s=UP_LIMIT_S)
        yield project
    finally:
        project.close()
        project("down", "--volumes", "--timeout", "5", limit_s=UP_LIMIT_S)


def test_job_survives_killed_containers_and_a_lost_network(compose: Compose) -> None:
    spec = small_job(steps=24)
    job_id = compose.submit(spec)
    compose.until_step(job_id, 2)
    killed, cut_off, _ = compose.containers("spot")
    docker("kill", killed)
    docker("network", "disconnect", compose.network, cut_off)
    compose.until_step(job_id, 5)
    docker("network", "connect", compose.network, cut_off)
    for step, service in ((7, "manager"), (10, "redis"), (13, "weight-store"), (16, "trainer"), (19, "reserved")):
        compose.until_step(job_id, step)
        docker("kill", *compose.containers(service))
        compose("up", "--detach", "--no-recreate", service)  # an engine does not restart what was killed by hand
    compose.until(lambda: compose.get(f"/v1/jobs/{job_id}")["state"] == "completed", f"the end of {job_id}")
    audit = compose.get(f"/v1/jobs/{job_id}/audit")
    assert audit["requested"] == audit["delivered"] == samples_of(spec)
    assert not audit["dropped"]
    assert audit["in_flight"] == 0
    assert audit["preemptions"]["without_notice"] >= 2


def test_job_continues_after_all_containers_were_removed(compose: Compose) -> None:
    spec = small_job(steps=12, seed=1)
    job_id = compose.submit(spec)
    compose.until_step(job_id, 3)
    compose("down", "--timeout", "20", limit_s=UP_LIMIT_S)
    compose("up", "--detach", "--wait", "--scale", "spot=1", limit_s=UP_LIMIT_S)
    compose.until(lambda: compose.get(f"/v1/jobs/{job_id}")["state"] == "completed", f"the end of {job_id}")
    audit = compose.get(f"/v1/jobs/{job_id}/audit")
    assert audit["requested"] == audit["delivered"] == samples_of(spec)


def test_containers_have_no_root_user_no_capability_and_no_compiler(compose: Compose) -> None:
    for service in ("manager", "weight-store", "trainer", "reserved", "spot"):
        container = compose.containers(service)[0]
        (config,) = json.loads(docker("inspect", container))
        assert config["Config"]["User"] == "rlboost"
        assert config["HostConfig"]["ReadonlyRootfs"]
        assert config["HostConfig"]["CapDrop"] == ["ALL"]
        found = docker("exec", container, "sh", "-c", "command -v gcc cc || true")
        assert not found.strip(), service
