"""docker-compose.yml and the Dockerfile against the code: as far as they can be checked without a Docker engine."""

from __future__ import annotations

import fnmatch
import inspect
import re
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from packaging.requirements import Requirement

from rlboost.shared.http.guard import Guard
from rlboost.shared.http.server import create_app
from rlboost.shared.process.lifecycle import supervise
from tests.support.compose_file import (
    _DOCKERFILE,
    _VARIABLE,
    FILE,
    OURS,
    ROOT,
    SECRETS,
    Unset,
    compose,
    module_in,
    module_of,
    settings_of,
    stage_named,
    stage_of,
)

_EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]


GPU_FILE = "deploy/docker/gpu.yml"
GPU = compose({}, GPU_FILE)


def test_the_secrets_must_be_set() -> None:
    for missing in SECRETS:
        with pytest.raises(Unset, match=missing):
            compose({name: value for name, value in SECRETS.items() if name != missing})


def test_env_example_lists_the_variables_of_the_compose_file() -> None:
    text = "".join((ROOT / file).read_text(encoding="utf-8") for file in ("docker-compose.yml", GPU_FILE))
    read_here = {found[1] for found in _VARIABLE.finditer(text)} | {"COMPOSE_FILE"}
    example = (ROOT / ".env.example").read_text(encoding="utf-8")
    offered = set(re.findall(r"^(?:# )?([A-Z_]+)=", example, re.MULTILINE))
    assert offered <= read_here
    assert read_here - offered <= {"RLBOOST_LOG_LEVEL", "OMP_NUM_THREADS"}
    assert set(re.findall(r"^([A-Z_]+)=$", example, re.MULTILINE)) == set(SECRETS), "a secret has a value to be copied"


def test_every_role_is_there() -> None:
    modules = sorted(module_of(name).removeprefix("rlboost.services.") for name in OURS)
    assert modules == [*["rollout_manager"] * 2, *["rollout_worker"] * 2, "trainer", "weight_store"]
    roles = {FILE["services"][name]["environment"].get("RLBOOST_WORKER_ROLE") for name in OURS} - {None}
    assert roles == {"reserved", "preemptible"}


def test_standby_manager_needs_its_profile_and_has_its_own_url() -> None:
    manager, standby = FILE["services"]["manager"], FILE["services"]["standby"]
    assert (manager.get("profiles"), standby["profiles"]) == (None, ["standby"])
    assert not standby["ports"], "they cannot both have the port on this machine"
    own = dict(manager["environment"].items() ^ standby["environment"].items())
    assert own.keys() == {"RLBOOST_MANAGER_PUBLIC_URL"}


def test_price_file_is_mounted_where_the_manager_reads_it() -> None:
    manager = compose(SECRETS | {"PRICE_FILE": "./mine.yaml"})["services"]["manager"]
    [mount] = manager["volumes"]
    assert mount == f"./mine.yaml:{manager['environment']['RLBOOST_MANAGER_PRICE_FILE']}:ro"
    assert FILE["services"]["manager"]["environment"]["RLBOOST_MANAGER_PRICE_FILE"] == ""


@pytest.mark.parametrize("service", OURS)
def test_an_image_runs_a_module_that_is_there(service: str) -> None:
    assert find_spec(f"{module_of(service)}.__main__") is not None


@pytest.mark.parametrize("service", OURS)
def test_the_environment_makes_valid_settings(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(service, monkeypatch)
    environment = FILE["services"][service]["environment"]
    is_worker = "RLBOOST_WORKER_URL" in environment
    assert settings.token.get_secret_value() == SECRETS["RLBOOST_JOIN_TOKEN" if is_worker else "RLBOOST_TOKEN"]
    assert not is_worker or not {SECRETS["RLBOOST_TOKEN"], SECRETS["REDIS_PASSWORD"]} & set(environment.values())
    if "RLBOOST_REDIS_URL" in environment:
        assert urlsplit(settings.redis_url).password == SECRETS["REDIS_PASSWORD"]
    for name, url in environment.items():
        if name.endswith("_URL") and url:
            host = str(urlsplit(url).hostname)
            listens: Any = None if host == "redis" else settings_of(host, monkeypatch)
            assert urlsplit(url).port == (listens.port if listens else 6379)


@pytest.mark.parametrize("service", FILE["services"])
def test_ports_are_open_on_this_machine_only(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for published in FILE["services"][service].get("ports", []):
        address, outside, inside = published.split(":")
        assert address == "127.0.0.1"
        assert outside == inside
        if service in OURS:
            settings: Any = settings_of(service, monkeypatch)
            assert (settings.host, settings.port) == ("0.0.0.0", int(inside))


@pytest.mark.parametrize("service", FILE["services"])
def test_a_process_has_time_to_stop(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    period_s = int(FILE["services"][service]["stop_grace_period"].removesuffix("s"))
    own_s = inspect.signature(supervise).parameters["grace_s"].default
    if service in OURS:
        own_s = getattr(settings_of(service, monkeypatch), "grace_s", own_s)
    assert period_s >= own_s + 5


@pytest.mark.parametrize("service", OURS)
def test_a_health_check_asks_the_service_itself(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, python, flag, code = FILE["services"][service]["healthcheck"]["test"]
    assert (kind, python, flag) == ("CMD", "python", "-c")
    compile(code, "<health check>", "exec")
    (url,) = re.findall(r"'(http[^']*)'", code)
    settings: Any = settings_of(service, monkeypatch)
    assert settings.host in {"127.0.0.1", "0.0.0.0"}
    assert urlsplit(url).netloc == f"127.0.0.1:{settings.port}"
    routes = {
        getattr(route, "path", "")
        for route in create_app("any service", guard=Guard.of_token("t"), not_ready_reason=lambda: None).routes
    }
    assert urlsplit(url).path in routes


def test_services_depend_only_on_services_with_health_checks() -> None:
    for service in FILE["services"].values():
        for name, wanted in service.get("depends_on", {}).items():
            assert wanted == {"condition": "service_healthy"}
            assert "healthcheck" in FILE["services"][name]


def test_redis_is_durable_and_requires_a_password() -> None:
    redis = FILE["services"]["redis"]
    lines = FILE["configs"]["redis"]["content"].splitlines()
    secret = f"requirepass {SECRETS['REDIS_PASSWORD']}"
    assert {"appendonly yes", "appendfsync always", "dir /data", secret} <= set(lines)
    assert redis["command"][-1] in [config["target"] for config in redis["configs"]]
    assert "redis:/data" in redis["volumes"]
    assert SECRETS["REDIS_PASSWORD"] not in str(redis["command"]), "flags can be read by every user of the machine"


def test_named_volumes_are_declared_and_their_folders_belong_to_the_user() -> None:
    base = _DOCKERFILE.partition("FROM base AS")[0]
    for name, service in FILE["services"].items():
        for volume in service.get("volumes", []):
            if ":" not in volume:  # anonymous
                assert f" {volume}/" in base, f"{volume} would belong to root"
                continue
            source, target = volume.split(":")[:2]
            assert source in FILE["volumes"] or source.startswith(("./", "/dev/null"))
            if name in OURS and source in FILE["volumes"]:
                assert re.search(rf"mkdir -p .*{re.escape(target)}(\s|$)", base), f"{target} would belong to root"


@pytest.mark.parametrize("service", OURS)
def test_an_image_installs_its_own_extra_and_runs_without_privileges(service: str) -> None:
    stage, target = stage_of(service), FILE["services"][service]["build"]["target"]
    [extras] = re.findall(r"pip install --no-deps .*\[(.+)\]", stage)
    named = extras.split(",")
    assert set(named) <= set(_EXTRAS)
    # By its own name, or as a part of the first.
    assert target == named[0] or f"rlboost[{target}]" in _EXTRAS[named[0]]
    assert re.search(r"^USER rlboost$", stage, re.MULTILINE)


def test_files_copied_into_images_exist_and_are_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    let_in = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    copies = re.findall(r"^COPY (?:--\S+ )*(.+) \S+$", _DOCKERFILE, re.MULTILINE)
    sources = [source for copied in copies for source in copied.split()]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(fnmatch.fnmatch(source, pattern) for pattern in let_in), f"{source} is ignored"


def test_the_job_that_the_file_names_is_in_the_trainers_image() -> None:
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    (job,) = re.findall(r"exec trainer rlboost run (\S+)", text)
    assert (ROOT / job).exists()
    assert re.search(rf"^COPY .*\b{Path(job).parts[0]} {Path(job).parts[0]}$", stage_of("trainer"), re.MULTILINE)


def test_trainer_image_has_the_extras_of_job_files() -> None:
    [extras] = re.findall(r"pip install .*\[(.+)\]", stage_of("trainer"))
    assert set(extras.split(",")) == {"megatron", "data", "logs", "math"}


# --- GPUs -------------------------------------------------------------------------------------------------------------


def test_gpu_file_gives_the_trainer_and_all_workers_gpus() -> None:
    services = GPU["services"]
    workers = {name for name in OURS if "RLBOOST_WORKER_URL" in FILE["services"][name]["environment"]}
    assert services.keys() == {"trainer"} | workers
    for service in services.values():
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    visible = {name: service["environment"]["CUDA_VISIBLE_DEVICES"] for name, service in services.items()}
    assert visible == {"trainer": "0", "reserved": "0", "spot": "1"}


@pytest.mark.parametrize("service", GPU["services"])
def test_gpu_file_makes_valid_settings(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = GPU["services"][service]["environment"]
    monkeypatch.setitem(FILE["services"][service], "environment", FILE["services"][service]["environment"] | changed)
    settings: Any = settings_of(service, monkeypatch)
    assert settings.device == "cuda"
    if service != "trainer":
        assert (settings.engine, settings.dtype) == ("vllm", "bfloat16")
        assert settings.gpu_memory_utilization == (0.4 if settings.role == "reserved" else 0.0)


def test_gpu_images_have_other_names_and_builds_that_exist() -> None:
    for name, service in GPU["services"].items():
        assert service["image"] != FILE["services"][name]["image"], "the CPU's would be replaced"
        if arguments := service["build"].get("args"):
            assert set(arguments) <= set(re.findall(r"^ARG (\w+)", _DOCKERFILE, re.MULTILINE))
        else:
            assert module_in(stage_named(service["build"]["target"])) == "rlboost.services.rollout_worker"


def test_vllm_image_is_of_a_release_that_the_worker_supports() -> None:
    [release] = re.findall(r"^ARG VLLM_IMAGE=vllm/vllm-openai:v(.+)$", _DOCKERFILE, re.MULTILINE)
    [requirement] = [text for text in _EXTRAS["vllm"] if text.startswith("vllm")]
    assert Requirement(requirement).specifier.contains(release)
