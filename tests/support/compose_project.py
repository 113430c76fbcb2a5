"""One project of Docker Compose, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from tests.support.small_job import samples_of

ROOT = Path(__file__).parents[2]
JOB_LIMIT_S = 600


def run(command: list[str], environment: Mapping[str, str], limit_s: float) -> str:
    """Run a command in the repository and return what it prints; fail with its output."""
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


def docker(*arguments: str) -> str:
    """Run `docker ARGUMENTS` and return what it prints."""
    return run(["docker", *arguments], os.environ, 120)


class Compose:
    """`docker compose` with a project name, files and variables."""

    def __init__(self, project: str, variables: Mapping[str, str], *files: str) -> None:
        self.project, self.variables = project, variables
        self.network = f"{project}_default"
        self._command = ["docker", "compose", "--project-name", project, *(f"--file={file}" for file in files)]

    def __call__(self, *arguments: str, limit_s: float = 120) -> str:
        """Run `docker compose ARGUMENTS` and return what it prints."""
        return run([*self._command, *arguments], {**os.environ, **self.variables}, limit_s)

    def containers(self, service: str) -> list[str]:
        """Return the ids of a service's running containers."""
        return self("ps", "--quiet", service).split()

    def until(self, condition: Callable[[], bool], what: str, within_s: float = JOB_LIMIT_S) -> None:
        """Wait for a condition."""
        limit = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < limit, f"not within {within_s} s: {what}\n{self('logs', '--tail', '30')}"
            time.sleep(0.5)


class System(Compose):
    """docker-compose.yml, and the REST API of its manager."""

    def __init__(self, project: str, variables: Mapping[str, str], url: str) -> None:
        super().__init__(project, variables)
        self.url, self.token = url, variables["RLBOOST_TOKEN"]
        self._http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {self.token}"}, timeout=10)

    def close(self) -> None:
        """Close the connections to the manager."""
        self._http.close()

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

    def rlboost(self, *arguments: str, url: str = "http://manager:8700") -> Any:
        """Run `rlboost ARGUMENTS --json` where the trainer runs, and return what it prints."""
        command = ["exec", "--no-TTY", "--env", f"RLBOOST_URL={url}", "trainer", "rlboost", *arguments, "--json"]
        return json.loads(self(*command))

    def until_step(self, job_id: str, step: int) -> None:
        """Wait until a job has done so many steps."""
        self.until(lambda: self.get(f"/v1/jobs/{job_id}")["step"] >= step, f"step {step} of {job_id}")

    def complete(self, job_id: str, spec: dict[str, Any]) -> dict[str, Any]:
        """Wait for the end of a job; return its audit, by which each sample was delivered once."""
        self.until(lambda: self.get(f"/v1/jobs/{job_id}")["state"] == "completed", f"the end of {job_id}")
        audit: dict[str, Any] = self.get(f"/v1/jobs/{job_id}/audit")
        assert audit["requested"] == audit["delivered"] == samples_of(spec)
        assert not audit["dropped"]
        assert audit["in_flight"] == 0
        return audit
