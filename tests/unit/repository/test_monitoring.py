"""The Grafana board, the alert rules and the scrape configuration against the metrics that the code exports."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import httpx
import promql_parser as promql
import pytest
import yaml
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client import REGISTRY, CollectorRegistry

from rlboost.services.rollout_manager.adapters.prometheus import WorldCollector
from rlboost.services.rollout_manager.api.fleet import scrape_targets
from rlboost.services.rollout_manager.api.jobs import build
from rlboost.services.rollout_manager.domain.jobs import Job
from rlboost.services.rollout_manager.loop import Manager
from rlboost.services.trainer.run import SHOWN, observe_step
from rlboost.shared.errors import WaitTimedOut
from rlboost.shared.http.access import metrics_path, peer_key
from rlboost.shared.http.guard import Guard
from rlboost.shared.http.server import create_app
from rlboost.shared.process.waiting import Waits
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import HashSet
from rlboost.shared.streams.fakes import MemoryBus
from rlboost.shared.weights.peers.directory import PeerDirectory
from tests.support.builders import job_spec
from tests.support.compose_file import FILE, OURS, SECRETS, settings_of
from tests.support.grafana_files import ALERTS, BOARD, GRAFANA
from tests.support.interface_reference import metric_families
from tests.support.programs import output_of, require_program

SCRAPES: list[dict[str, Any]] = yaml.safe_load((GRAFANA / "prometheus.yml").read_text(encoding="utf-8"))[
    "scrape_configs"
]
OF_PROMETHEUS = {"job", "instance"}


@cache
def known() -> dict[str, set[str]]:
    """Return the labels of each metric that Prometheus has."""
    metrics = {family.name: set(family.labels) for family in metric_families()}
    summary = metrics.pop("rlboost_worker_flush_seconds")
    metrics |= {f"rlboost_worker_flush_seconds_{part}": summary for part in ("sum", "count")}
    return metrics | {"up": set(), "process_resident_memory_bytes": set()}


def queries() -> Iterator[tuple[str, str]]:
    """Yield each query with where it is."""
    for panel in BOARD["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def parts(query: str) -> list[Any]:
    """Return all nodes of a query; raises `ValueError` if Prometheus could not parse it."""
    nodes: list[Any] = []
    promql.walk(promql.parse(query), nodes.append)
    return nodes


@pytest.mark.parametrize(("place", "query"), list(queries()))
def test_query_names_metrics_and_labels_that_exist(place: str, query: str) -> None:
    labels: set[str] = set()
    nodes = parts(query)
    selectors = [node for node in nodes if isinstance(node, promql.VectorSelector)]
    assert selectors, place
    for selector in selectors:
        assert selector.name in known(), place
        labels |= known()[selector.name]
        for matcher in selector.matchers.matchers:
            assert matcher.name in known()[selector.name] | OF_PROMETHEUS, place
            if matcher.name == "name":
                assert matcher.value in SHOWN, place
    for node in nodes:
        if isinstance(node, promql.AggregateExpr) and node.modifier:
            assert set(node.modifier.labels) <= labels | OF_PROMETHEUS, place


def test_query_with_an_unknown_metric_is_found() -> None:
    (selector,) = [node for node in parts("sum(rate(rlboost_nothing_total[5m]))") if hasattr(node, "matchers")]
    assert selector.name not in known()
    with pytest.raises(ValueError, match="parenthesis"):
        parts("sum by (rate(")


def test_every_job_in_a_rule_is_scraped() -> None:
    jobs = {scrape["job_name"] for scrape in SCRAPES}
    for place, query in queries():
        for node in parts(query):
            if isinstance(node, promql.VectorSelector):
                named = [matcher.value for matcher in node.matchers.matchers if matcher.name == "job"]
                assert {job for value in named for job in value.split("|")} <= jobs, place


def test_absence_of_each_service_without_a_standby_is_an_alert() -> None:
    (query,) = [query for place, query in queries() if place == "RLBoostServiceDown"]
    for job in ("weight-store", "trainer"):
        assert f'absent(up{{job="{job}"}})' in query


def test_scrapes_reach_every_service_with_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    scraped = set()
    for scrape in SCRAPES:
        for found in scrape.get("dns_sd_configs", []):
            for name in found["names"]:
                scraped.add(name)
                settings: Any = settings_of(name, monkeypatch)
                assert (settings.port, settings.token.get_secret_value()) == (found["port"], token_of(scrape))
                assert settings.host == "0.0.0.0"
    workers = {name for name in OURS if "RLBOOST_WORKER_URL" in FILE["services"][name]["environment"]}
    assert scraped | workers == set(OURS)


def test_workers_are_listed_by_the_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    (scrape,) = [scrape for scrape in SCRAPES if scrape["job_name"] == "worker"]
    for host, listing in zip(("manager", "standby"), scrape["http_sd_configs"], strict=True):
        manager: Any = settings_of(host, monkeypatch)
        app = build(Manager(MemoryBus(), lease_s=1.0, redis_limit_s=1.0), MemoryBus(), manager)
        url = urlsplit(listing["url"])
        assert (url.hostname, url.port) == (host, manager.port)
        assert url.path in app.openapi()["paths"]
        assert token_of(listing) == SECRETS["RLBOOST_TOKEN"]
    for name in ("reserved", "spot"):
        worker: Any = settings_of(name, monkeypatch)
        assert (worker.peer_url, worker.host) == ("", "0.0.0.0"), "it has no address"


async def test_workers_are_scraped_without_a_token_at_a_path_of_their_own() -> None:
    (scrape,) = [scrape for scrape in SCRAPES if scrape["job_name"] == "worker"]
    assert not {"authorization", "basic_auth", "headers", "oauth2"} & scrape.keys()
    path = metrics_path(peer_key("the-token"))
    app = create_app("a worker", guard=Guard.of_token("its-own"), not_ready_reason=lambda: None, metrics_path=path)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://worker") as client:
        assert "process_resident_memory_bytes" in (await client.get(path)).text
        for closed in ("/metrics", metrics_path(peer_key("another"))):
            assert (await client.get(closed)).status_code in {401, 404}


def token_of(part: dict[str, Any]) -> str:
    """Return the token that Prometheus's container sends."""
    configs = {config["target"]: config["source"] for config in FILE["services"]["prometheus"]["configs"]}
    content: str = FILE["configs"][configs[part["authorization"]["credentials_file"]]]["content"]
    return content


async def test_scrape_targets_are_present_workers_with_a_reachable_address() -> None:
    bus = MemoryBus()
    listed = {"a-1": "http://10.0.0.7:8703", "b-1": "https://127.0.0.1:41000", "c-1": "http://127.0.0.1:41000"}
    for name, url in listed.items():
        host = socket.gethostname() if name == "b-1" else "another"
        await bus.transact([HashSet(names.WEIGHT_PEERS, {name: ""})])
        await PeerDirectory(bus, name, host).publish(url, {})
    found = await scrape_targets(bus, ["a-1", "b-1", "c-1"], "/metrics/x")
    path = {"__metrics_path__": "/metrics/x"}
    assert [target.model_dump() for target in found] == [
        {"targets": ["10.0.0.7:8703"], "labels": {**path, "instance": "a-1", "__scheme__": "http"}},
        {"targets": ["127.0.0.1:41000"], "labels": {**path, "instance": "b-1", "__scheme__": "https"}},
    ]
    assert not await scrape_targets(bus, ["another-1"], "/metrics/x")


def test_monitoring_needs_its_profile_and_mounts_files_that_exist() -> None:
    for name in ("prometheus", "grafana"):
        service = FILE["services"][name]
        assert service["profiles"] == ["monitoring"]
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert not source.startswith("./") or (GRAFANA.parents[1] / source).exists()
    assert FILE["services"]["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"] == SECRETS["RLBOOST_TOKEN"]


@pytest.mark.parametrize(
    ("command", "file"), [(["config", "--syntax-only"], "prometheus.yml"), (["rules"], "alerts.yml")]
)
def test_prometheus_accepts_its_files(command: list[str], file: str) -> None:
    code, text = output_of(require_program("promtool"), "check", *command, str(GRAFANA / file))
    assert code == 0, text


def test_board_and_data_source_agree_on_the_uid() -> None:
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text(encoding="utf-8"))[
        "datasources"
    ]
    assert {panel["datasource"]["uid"] for panel in BOARD["panels"]} == {source["uid"]}
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])


def unknown_fields(board: dict[str, Any]) -> list[str]:
    """Return what Grafana's schema of boards does not have, which Grafana would ignore."""
    plugins.register_default_plugins()
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(board)))

    def lost(given: Any, known: Any, place: str) -> Iterator[str]:
        if isinstance(given, dict) and isinstance(known, dict):
            for key, value in given.items():
                yield from lost(value, known.get(key), f"{place}.{key}")
        elif isinstance(given, list) and isinstance(known, list) and len(given) == len(known):
            for index, value in enumerate(given):
                yield from lost(value, known[index], f"{place}[{index}]")
        elif given != known:
            yield place

    return list(lost(board, read, "board"))


def test_board_has_only_fields_of_grafanas_schema() -> None:
    assert unknown_fields(BOARD) == []
    misspelled = deepcopy(BOARD)
    misspelled["panels"][0]["targets"][0]["query"] = "up"
    misspelled["panels"][3]["fieldConfig"]["defaults"]["custom"]["fill"] = 40
    assert unknown_fields(misspelled) == [
        "board.panels[0].targets[0].query",
        "board.panels[3].fieldConfig.defaults.custom.fill",
    ]


# --- what the metrics count -------------------------------------------------------------------------------------------


def test_trainer_exports_the_last_step_without_stale_metrics() -> None:
    before = REGISTRY.get_sample_value("rlboost_trainer_phase_seconds_total", {"phase": "train"}) or 0.0
    steps = REGISTRY.get_sample_value("rlboost_trainer_steps_total") or 0.0
    observe_step({"reward/mean": 0.5, "time/train_s": 2.0, "reward/of_a_user": 1.0}, trained=True)
    observe_step({"eval/reward_mean": 0.25, "time/train_s": 1.0}, trained=False)
    names = {
        sample.labels["name"]: sample.value
        for metric in REGISTRY.collect()
        if metric.name == "rlboost_trainer_step_metric"
        for sample in metric.samples
    }
    assert names == {"eval/reward_mean": 0.25}
    after = REGISTRY.get_sample_value("rlboost_trainer_phase_seconds_total", {"phase": "train"})
    assert after == before + 3.0
    assert REGISTRY.get_sample_value("rlboost_trainer_steps_total") == steps + 1


async def test_waits_are_exported_with_their_age_and_their_timeouts() -> None:
    waits = Waits()
    app = create_app("a service", guard=Guard.of_token("t"), not_ready_reason=lambda: None, waits=waits)

    async def scraped(name: str) -> float:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client:
            text = (await client.get("/metrics", headers={"Authorization": "Bearer t"})).text
        (value,) = [line.split()[1] for line in text.splitlines() if line.startswith(f"{name} ")]
        return float(value)

    timeouts = await scraped("rlboost_wait_timeouts_total")
    assert await scraped("rlboost_wait_oldest_seconds") == 0.0
    async with waits.on("Redis", because="a test", limit_s=60.0):
        age_s, ratio = await scraped("rlboost_wait_oldest_seconds"), await scraped("rlboost_wait_limit_ratio")
        assert age_s > 0.0
        assert 0.0 < ratio < 1.0
    with pytest.raises(WaitTimedOut):
        async with waits.on("Redis", because="a test", limit_s=0.0):
            await asyncio.Event().wait()
    assert await scraped("rlboost_wait_timeouts_total") == timeouts + 1


async def test_counters_of_an_ended_job_stay_and_a_standby_has_none() -> None:
    manager = Manager(MemoryBus(), lease_s=1.0, redis_limit_s=1.0)
    registry = CollectorRegistry()
    registry.register(WorldCollector(lambda: manager.leads, lambda: manager.world))

    def delivered() -> float | None:
        return registry.get_sample_value("rlboost_tokens_total", {"outcome": "delivered"})

    assert await manager.try_lead()
    for number, (job_id, tokens) in enumerate({"a": 3, "b": 4}.items(), 1):
        manager.world.jobs.add(Job(job_id, number, job_spec(), created_at=0.0))
        manager.world.jobs[job_id].audit.tokens_delivered = tokens
    assert delivered() == 7.0
    manager.world.jobs["a"].close_audit()
    assert delivered() == 7.0
    manager._step_down("a test")
    assert delivered() is None
    assert registry.get_sample_value("rlboost_cost_dollars_total") is None
    assert await manager.try_lead()
    assert delivered() == 7.0
