"""The images and docker-compose.yml on a Docker engine: a job survives the loss of containers and of a network.

Runs where an engine answers: `make test-docker`. RLBOOST_TEST_TORCH_INDEX is the build argument TORCH_INDEX. The system
listens on the address of Docker's default bridge, so that containers of another project reach it as other machines do.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.compose_project import JOB_LIMIT_S, Compose, System, docker
from tests.support.grafana_files import ALERTS, BOARD
from tests.support.small_job import small_job

BUILD_LIMIT_S, UP_LIMIT_S = 1800, 300

pytestmark = [pytest.mark.docker, pytest.mark.timeout(BUILD_LIMIT_S + UP_LIMIT_S + 3 * JOB_LIMIT_S)]


@pytest.fixture(scope="module")
def address() -> str:
    """Return this machine's address on Docker's default bridge."""
    gateway, subnet = (
        docker(
            "network", "inspect", "bridge", "--format", "{{with index .IPAM.Config 0}}{{.Gateway}} {{.Subnet}}{{end}}"
        )
        .rstrip("\n")
        .split(" ")
    )
    # A new engine names the gateway only after its first restart: it is the subnet's first address.
    return gateway or str(next(ipaddress.ip_network(subnet).hosts()))


@pytest.fixture(scope="module")
def compose(address: str) -> Iterator[System]:
    named = ("RLBOOST_TOKEN", "RLBOOST_JOIN_TOKEN", "REDIS_PASSWORD")
    variables = {name: secrets.token_hex(24) for name in named}
    variables |= {  # as deploy/README.md has them
        "PUBLISH_ON": address,
        "ADVERTISED_REDIS_URL": f"redis://:{variables['REDIS_PASSWORD']}@{address}:6379/0",
        "ADVERTISED_WEIGHT_STORE_URL": f"http://{address}:8701",
    }
    project = System("rlboost-test", variables, f"http://{address}:8700")
    index = os.environ.get("RLBOOST_TEST_TORCH_INDEX")
    project("build", *([] if index is None else [f"--build-arg=TORCH_INDEX={index}"]), limit_s=BUILD_LIMIT_S)
    try:
        project("up", "--detach", "--wait", "--scale", "spot=3", limit_s=UP_LIMIT_S)
        yield project
    finally:
        project.close()
        project("--profile", "*", "down", "--volumes", "--timeout", "5", limit_s=UP_LIMIT_S)


def test_job_survives_killed_containers_and_a_lost_network(compose: System) -> None:
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
    audit = compose.complete(job_id, spec)
    assert audit["preemptions"]["without_notice"] >= 2


def test_job_continues_after_all_containers_were_removed(compose: System) -> None:
    spec = small_job(steps=12, seed=1)
    job_id = compose.submit(spec)
    compose.until_step(job_id, 3)
    compose("down", "--timeout", "20", limit_s=UP_LIMIT_S)
    compose("up", "--detach", "--wait", "--scale", "spot=1", limit_s=UP_LIMIT_S)
    compose.complete(job_id, spec)


def test_job_runs_on_workers_of_another_compose_project(compose: System) -> None:
    """They know a URL and a join token. One is killed, then the other gets SIGTERM; the reserved worker finishes."""
    token = compose.rlboost("token", "create", "--scope", "worker", "--name", "spot", "--expires", "1d")["secret"]
    variables = {"RLBOOST_TOKEN": token, "RLBOOST_WORKER_URL": compose.url}
    node = Compose("rlboost-test-node", variables, "tests/docker/spot-node.yml")

    def on_node(state: str) -> list[dict[str, Any]]:
        workers = compose.get("/v1/workers")
        return [worker for worker in workers if (worker["kind"], worker["state"]) == ("spot-node", state)]

    compose("up", "--detach", "--no-recreate", "--scale", "spot=0", "spot")
    spec = small_job(steps=24, seed=2)
    try:
        node("up", "--detach", "--scale", "worker=2", limit_s=UP_LIMIT_S)
        compose.until(lambda: len(compose.get("/v1/workers")) >= 3, "two workers of the other project")
        job_id = compose.submit(spec)
        compose.until(lambda: sum(bool(worker["running"]) for worker in on_node("ready")) == 2, "samples on both")
        docker("kill", node.containers("worker")[0])
        compose.until(lambda: bool(on_node("lost")), "the loss of the killed one")
        compose.until(lambda: any(worker["running"] for worker in on_node("ready")), "samples on the other one")
        before = compose.get(f"/v1/jobs/{job_id}/audit")["preemptions"].get("with_notice", 0)
        node("down", "--timeout", "20", limit_s=UP_LIMIT_S)
        audit = compose.complete(job_id, spec)
    finally:
        node("down", "--volumes", "--timeout", "5", limit_s=UP_LIMIT_S)
    assert audit["preemptions"]["with_notice"] > before


def test_standby_takes_over_from_a_killed_manager_and_back(compose: System) -> None:
    compose("--profile", "standby", "up", "--detach", "--wait", "--no-recreate", "standby", limit_s=UP_LIMIT_S)
    spec = small_job(steps=12, seed=3)
    job_id = compose.submit(spec)
    compose.until_step(job_id, 2)
    docker("kill", *compose.containers("manager"))
    at_standby = "http://standby:8700"
    compose.until(lambda: compose.rlboost("status", job_id, url=at_standby)["step"] >= 5, "steps with the standby")
    compose("up", "--detach", "--no-recreate", "manager")
    docker("kill", *compose.containers("standby"))
    compose.complete(job_id, spec)


# --- the profile `monitoring` -----------------------------------------------------------------------------------------


def _can_pull(service: str, compose: System) -> bool:
    """Return True if the service's image is here, or a registry answers."""
    try:
        compose("--profile", "monitoring", "pull", "--policy", "missing", service, limit_s=UP_LIMIT_S)
    except AssertionError:
        return False
    return True


@pytest.fixture(scope="module")
def prometheus(compose: System) -> Iterator[httpx.Client]:
    """Give a client of the running Prometheus: the published image, or Debian's where no registry answers."""
    files = () if _can_pull("prometheus", compose) else ("docker-compose.yml", "tests/docker/debian-prometheus.yml")
    project = Compose(compose.project, compose.variables, *files)
    project("--profile", "monitoring", "up", "--detach", "--wait", "--no-deps", "prometheus", limit_s=UP_LIMIT_S)
    with httpx.Client(base_url="http://127.0.0.1:9090/api/v1/", timeout=10) as client:
        yield client


def test_prometheus_scrapes_each_service_and_worker(compose: System, prometheus: httpx.Client) -> None:
    compose("up", "--detach", "--wait", "--no-recreate", "--scale", "spot=1", limit_s=UP_LIMIT_S)

    def scraped() -> set[str]:
        found = prometheus.get("query", params={"query": "up == 1"}).raise_for_status().json()["data"]["result"]
        targets = [one["metric"] for one in found]
        return {target["instance"] if target["job"] == "worker" else target["job"] for target in targets}

    workers = {worker["id"] for worker in compose.get("/v1/workers") if worker["state"] not in {"lost", "left"}}
    assert len(workers) == 2
    expected = {"manager", "weight-store", "trainer", *workers}
    compose.until(lambda: expected <= scraped(), "all targets", within_s=120)
    groups = prometheus.get("rules").raise_for_status().json()["data"]["groups"]
    rules = {rule["name"]: rule for group in groups for rule in group["rules"]}
    assert rules.keys() == {rule["alert"] for group in ALERTS["groups"] for rule in group["rules"]}
    assert not [rule for rule in rules.values() if rule["health"] == "err"]


def test_grafana_shows_the_board_with_data(address: str, compose: System, prometheus: httpx.Client) -> None:
    if not _can_pull("grafana", compose):
        pytest.skip("no registry answers: the image of Grafana is missing")
    compose("--profile", "monitoring", "up", "--detach", "--no-deps", "grafana", limit_s=UP_LIMIT_S)
    with httpx.Client(base_url=f"http://{address}:3000/api/", auth=("admin", compose.token), timeout=10) as grafana:

        def has_started() -> bool:
            try:
                return grafana.get("health").is_success
            except httpx.TransportError:
                return False

        compose.until(has_started, "Grafana", within_s=120)
        board = grafana.get("dashboards/uid/rlboost").raise_for_status().json()["dashboard"]
        assert [panel["title"] for panel in board["panels"]] == [panel["title"] for panel in BOARD["panels"]]
        answer = grafana.get("datasources/proxy/uid/prometheus/api/v1/query", params={"query": "up"})
        assert answer.raise_for_status().json()["data"]["result"]


# --- images -----------------------------------------------------------------------------------------------------------


def test_containers_have_no_root_user_no_capability_and_no_compiler(compose: System) -> None:
    compose("up", "--detach", "--wait", "--no-recreate", "--scale", "spot=1", limit_s=UP_LIMIT_S)
    for service in ("manager", "weight-store", "trainer", "reserved", "spot"):
        container = compose.containers(service)[0]
        (config,) = json.loads(docker("inspect", container))
        assert config["Config"]["User"] == "rlboost"
        assert config["HostConfig"]["ReadonlyRootfs"]
        assert config["HostConfig"]["CapDrop"] == ["ALL"]
        found = docker("exec", container, "sh", "-c", "command -v gcc cc || true")
        assert not found.strip(), service


def test_images_of_manager_and_weight_store_are_small(compose: System, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {image: _megabytes(image) for image in compose("config", "--images").split() if "rlboost" in image}
    with capsys.disabled():
        print("", *(f"{image}: {size} MB" for image, size in sorted(sizes.items())), sep="\n")
    for image in ("rlboost-manager", "rlboost-weight-store"):
        assert sizes[image] - _megabytes("python:3.11-slim") < 300


def _megabytes(image: str) -> int:
    return int(docker("image", "inspect", "--format", "{{.Size}}", image)) // 10**6
