"""The manifests for Kubernetes: valid, and those of deploy/kubernetes fit each other, the images and the settings."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes_validate import validate

from rlboost.services.rollout_manager.settings import Settings as ManagerSettings
from rlboost.services.rollout_worker.adapters.manager_http import JOIN_LIMIT_S
from rlboost.shared.settings import ServiceSettings, read

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "deploy/kubernetes").glob("*.yaml"))
MACHINES = ROOT / "deploy/multi-node/kubernetes.yaml"
VERSION = "1.37"
"""The version of Kubernetes that docs/kubernetes.md and docs/multi-node.md name."""
SERVICES = {
    "rlboost-weight-store": "weight_store",
    "rlboost-manager": "rollout_manager",
    "rlboost-trainer": "trainer",
    "rlboost-worker": "rollout_worker",
}
"""Deployment -> the service that its image runs."""
IMAGES = {"rlboost-worker": "worker-vllm"}
"""Deployment -> target of the Dockerfile, where it has another name."""
SECRETS = {"token", "join-token", "redis-password"}
"""Keys of the secret that docs/kubernetes.md creates."""


def documents(*files: Path) -> Iterator[dict[str, Any]]:
    for file in files:
        yield from filter(None, yaml.safe_load_all(file.read_text(encoding="utf-8")))


ALL = list(documents(*FILES))
WORKLOADS = {
    f"{one['kind']}/{one['metadata']['name']}": one
    for one in documents(*FILES, MACHINES)
    if one["kind"] in {"Deployment", "StatefulSet"}
}


def named(kind: str) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in ALL if one["kind"] == kind}


def pod(workload: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = workload["spec"]["template"]["spec"]
    return found


def container(name: str) -> dict[str, Any]:
    (found,) = pod(named("Deployment")[name])["containers"]
    return dict(found)


def settings(name: str, monkeypatch: pytest.MonkeyPatch) -> ServiceSettings:
    """Return what a Deployment's service reads from its environment; secrets have their key as value."""
    cls: type[ServiceSettings] = importlib.import_module(f"rlboost.services.{SERVICES[name]}.settings").Settings
    given: dict[str, str] = {}
    for variable in container(name)["env"]:
        secret = variable.get("valueFrom", {}).get("secretKeyRef", {})
        value = variable.get("value", secret.get("key"))
        given[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda found: given[found[1]], value)
    own = {key for key in given if key.startswith(cls.prefix)}
    assert {key.removeprefix(cls.prefix).lower() for key in own} <= set(cls.model_fields)
    for key, value in given.items():
        monkeypatch.setenv(key, value)
    return read(cls, [])


@pytest.mark.parametrize("file", [*FILES, MACHINES], ids=lambda file: f"{file.parent.name}/{file.name}")
def test_manifest_is_valid_and_has_no_unknown_field(file: Path) -> None:
    found = list(documents(file))
    assert found
    for one in found:
        assert validate(one, VERSION, strict=True) == VERSION


def test_pages_name_the_version_that_manifests_are_checked_for() -> None:
    for page, text in (
        ("kubernetes", f"schema of Kubernetes {VERSION}"),
        ("support", f"valid against the schema of {VERSION}"),
        ("notes/test-coverage", f"valid against the schema of {VERSION}"),
    ):
        assert text in " ".join((ROOT / f"docs/{page}.md").read_text().split())


@pytest.mark.parametrize("name", SERVICES)
def test_deployment_sets_known_settings_and_probes_its_port(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: Any = settings(name, monkeypatch)
    one = container(name)
    assert (found.host, found.port) == ("0.0.0.0", one["ports"][0]["containerPort"])
    assert one["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": found.port}
    assert one["image"] == f"REGISTRY/rlboost-{IMAGES.get(name, name.removeprefix('rlboost-'))}"


@pytest.mark.parametrize("name", SERVICES)
def test_urls_name_services_and_their_ports(name: str) -> None:
    ports = {name: service["spec"]["ports"][0]["port"] for name, service in named("Service").items()}
    for variable in container(name)["env"]:
        for host, port in re.findall(r"://(?:[^@/]*@)?([\w-]+):(\d+)", variable.get("value", "")):
            assert ports[host] == int(port), variable


def test_services_select_pods_by_a_port_that_they_have() -> None:
    for name, service in named("Service").items():
        workload = (named("Deployment") | named("StatefulSet"))[name]
        (one,) = pod(workload)["containers"]
        assert service["spec"]["selector"] == workload["spec"]["template"]["metadata"]["labels"]
        assert {port["port"] for port in service["spec"]["ports"]} == {port["containerPort"] for port in one["ports"]}


@pytest.mark.parametrize("name", WORKLOADS)
def test_pod_has_its_volumes_secrets_and_no_service_links(name: str) -> None:
    workload = WORKLOADS[name]
    spec = pod(workload)
    assert workload["spec"]["selector"]["matchLabels"] == workload["spec"]["template"]["metadata"]["labels"]
    # A Service rlboost-manager sets RLBOOST_MANAGER_PORT=tcp://... in pods that have links.
    assert spec["enableServiceLinks"] is False
    (one,) = spec["containers"]
    volumes = {volume["name"] for volume in spec.get("volumes", ())}
    volumes |= {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", ())}
    assert {mount["name"] for mount in one.get("volumeMounts", ())} == volumes
    secrets = [variable["valueFrom"].get("secretKeyRef") for variable in one["env"] if "valueFrom" in variable]
    assert all(secret["name"] == "rlboost" and secret["key"] in SECRETS for secret in secrets if secret)


@pytest.mark.parametrize("name", WORKLOADS)
def test_pod_is_admitted_by_the_restricted_standard_and_has_requests(name: str) -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted, and a read-only root."""
    spec = pod(WORKLOADS[name])
    (one,) = spec["containers"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    own = spec["securityContext"]
    assert own["runAsNonRoot"]
    assert own["runAsUser"] > 0
    assert own["seccompProfile"] == {"type": "RuntimeDefault"}
    assert one["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    kinds = {kind for volume in spec.get("volumes", ()) for kind in volume.keys() - {"name"}}
    assert kinds <= {"emptyDir", "persistentVolumeClaim"}
    assert "/tmp" in {mount["mountPath"] for mount in one["volumeMounts"]}
    assert one["resources"]["requests"].keys() >= {"cpu", "memory"}


@pytest.mark.parametrize("name", ["rlboost-manager", "rlboost-trainer"])
def test_pod_that_downloads_from_the_hub_can_write_there(name: str) -> None:
    one = container(name)
    (home,) = (Path(variable["value"]) for variable in one["env"] if variable["name"] == "HF_HOME")
    assert {Path(mount["mountPath"]) for mount in one["volumeMounts"]} & {*home.parents}


@pytest.mark.parametrize("name", SERVICES)
def test_pod_is_restarted_if_its_process_hangs_and_not_while_it_waits_for_redis(name: str) -> None:
    one = container(name)
    health = {"path": "/healthz", "port": one["ports"][0]["containerPort"]}
    assert one["livenessProbe"]["httpGet"] == one["startupProbe"]["httpGet"] == health
    limits = {
        probe: one[probe]["periodSeconds"] * one[probe]["failureThreshold"]
        for probe in ("startupProbe", "livenessProbe")
    }
    assert limits["startupProbe"] > JOIN_LIMIT_S, "a worker listens once it has joined"
    assert limits["livenessProbe"] >= 60


def test_claims_exist_and_one_pod_at_a_time_uses_them() -> None:
    for deployment in named("Deployment").values():
        claims = [
            volume["persistentVolumeClaim"]["claimName"]
            for volume in pod(deployment).get("volumes", ())
            if "persistentVolumeClaim" in volume
        ]
        assert set(claims) <= set(named("PersistentVolumeClaim"))
        if claims:
            assert (deployment["spec"]["replicas"], deployment["spec"]["strategy"]) == (1, {"type": "Recreate"})


def test_workers_have_no_secret_but_the_join_token() -> None:
    secrets = [
        variable["valueFrom"]["secretKeyRef"]
        for variable in container("rlboost-worker")["env"]
        if "valueFrom" in variable
    ]
    assert secrets == [{"name": "rlboost", "key": "join-token"}]


def test_manager_may_scale_the_deployments_of_its_pools_only(monkeypatch: pytest.MonkeyPatch) -> None:
    found = settings("rlboost-manager", monkeypatch)
    assert isinstance(found, ManagerSettings)
    kinds = [pool.kind for pool in found.pools]
    (role,) = named("Role").values()
    assert role["rules"] == [
        {"apiGroups": ["apps"], "resources": ["deployments/scale"], "resourceNames": kinds, "verbs": ["patch"]}
    ]
    (binding,) = named("RoleBinding").values()
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert [subject["name"] for subject in binding["subjects"]] == list(named("ServiceAccount"))
    accounts = {name: pod(deployment).get("serviceAccountName") for name, deployment in named("Deployment").items()}
    assert {name for name, account in accounts.items() if account} == {"rlboost-manager"}
    for name, deployment in named("Deployment").items():
        assert name == "rlboost-manager" or pod(deployment)["automountServiceAccountToken"] is False
    for kind in kinds:
        worker = {one["name"]: one.get("value") for one in container(kind)["env"]}
        assert worker["RLBOOST_WORKER_KIND"] == kind
        (price,) = (pool.price_per_hour for pool in found.pools if pool.kind == kind)
        assert (price or 0) > 0, "it is charged for each worker"
        assert "RLBOOST_WORKER_PRICE_PER_HOUR" not in worker


def test_redis_has_the_options_that_operations_requires() -> None:
    (redis,) = pod(named("StatefulSet")["rlboost-redis"])["containers"]
    (script,) = redis["args"]
    for option in ("--appendonly yes", "--appendfsync always", "--maxmemory-policy noeviction", "requirepass"):
        assert option in script
