"""A real Prometheus scrapes a real system: each query of the board and of the alerts has an answer."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from rlboost.local.state import StateDir
from tests.support.black_box import BlackBox
from tests.support.eventually import eventually
from tests.support.grafana_files import ALERTS, BOARD, GRAFANA
from tests.support.ports import reserved_port
from tests.support.programs import require_program
from tests.support.small_job import small_job

WITHOUT_DATA_HERE = {"Device memory of workers"}
"""Panels that need a GPU."""
ALERT_NAMES = [rule["alert"] for group in ALERTS["groups"] for rule in group["rules"]]


def configuration(box: BlackBox, folder: Path) -> Path:
    """Return the shipped configuration with this system's addresses and tokens, and short intervals."""
    state = StateDir(box.state)
    text = (GRAFANA / "prometheus.yml").read_text(encoding="utf-8")
    config: dict[str, Any] = yaml.safe_load(text.replace("http://manager:8700", box.url))
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(GRAFANA / "alerts.yml")]
    (folder / "token").write_text(box.token)
    for scrape in config["scrape_configs"]:
        for part in (part for part in (scrape, *scrape.get("http_sd_configs", [])) if "authorization" in part):
            part["authorization"]["credentials_file"] = str(
                folder / Path(part["authorization"]["credentials_file"]).name
            )
        for found in scrape.get("http_sd_configs", []):
            found["refresh_interval"] = "1s"
        if scrape.pop("dns_sd_configs", None):
            port = state.ports()[scrape["job_name"]]
            scrape["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    return file


class Prometheus:
    """The HTTP API of a running server."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=10)

    def close(self) -> None:
        self._http.close()

    def get(self, path: str, **parameters: str) -> Any:
        answer = self._http.get(f"/api/v1/{path}", params=parameters)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def answers(self) -> bool:
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def has_data(self, query: str) -> bool:
        return bool(self.get("query", query=query)["result"])

    def up(self) -> dict[str, int]:
        """Return how many targets of each job answer."""
        found = self.get("query", query="sum by (job) (up)")["result"]
        return {series["metric"]["job"]: int(series["value"][1]) for series in found}

    def alerts(self, field: str) -> dict[str, str]:
        """Return a field of each rule that has been evaluated."""
        return {rule["name"]: rule[field] for group in self.get("rules")["groups"] for rule in group["rules"]}

    def active(self) -> set[str]:
        """Return the alerts that are pending or firing."""
        return {name for name, state in self.alerts("state").items() if state != "inactive"}


@contextmanager
def prometheus(config: Path, folder: Path) -> Iterator[Prometheus]:
    """A server that is stopped at the end."""
    with reserved_port() as port, (folder / "prometheus.log").open("wb") as log:
        files = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
        command = [require_program("prometheus"), *files, f"--web.listen-address=127.0.0.1:{port}"]
        process = subprocess.Popen(command, stdout=log, stderr=log)
        server = Prometheus(f"http://127.0.0.1:{port}")
        try:
            yield server
        finally:
            server.close()
            process.terminate()
            process.wait(30)


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_prometheus_answers_every_query_and_alerts_when_the_system_ends(tmp_path: Path) -> None:
    require_program("prometheus")
    queries = [
        target["expr"]
        for panel in BOARD["panels"]
        for target in panel["targets"]
        if panel["title"] not in WITHOUT_DATA_HERE
    ]
    box = BlackBox(tmp_path / "state", workers=2)
    try:
        with prometheus(configuration(box, tmp_path), tmp_path) as server:
            await eventually(server.answers)
            job = box.submit(small_job(steps=2000))
            box.until_step(job, 2)
            await eventually(lambda: server.up() == {"manager": 1, "weight-store": 1, "trainer": 1, "worker": 3})
            box.kill("preemptible")
            preempted = "sum(increase(rlboost_preemptions_total[5m])) > 0"
            await eventually(lambda: not [query for query in [*queries, preempted] if not server.has_data(query)])
            await eventually(lambda: server.alerts("health") == dict.fromkeys(ALERT_NAMES, "ok"))
            # One may be pending since a scrape of a busy machine, or of the worker that died, took too long.
            await eventually(lambda: not server.active())
            box.down()
            unavailable = {"RLBoostServiceDown", "RLBoostNoLeader"}
            await eventually(lambda: server.active() == unavailable)
    finally:
        box.down()
