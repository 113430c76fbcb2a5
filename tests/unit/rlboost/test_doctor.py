"""What `rlboost doctor` makes of a machine and of a system's answers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from rlboost.cli import app
from rlboost.local import doctor, redis_server
from rlboost.local.doctor import Finding, Library
from tests.support import fake_gpus

CPU_TORCH, CUDA_TORCH = Library("2.13.0+cpu"), Library("2.13.0", "13.0", 8)
GIB = 1 << 30


@pytest.mark.parametrize(
    ("library", "n_gpus", "status", "text"),
    [
        (CUDA_TORCH, 8, "ok", "2.13.0, CUDA 13.0 build, sees 8 GPUs"),
        (CPU_TORCH, 0, "ok", "2.13.0+cpu, CPU build"),
        (CPU_TORCH, 8, "problem", "2.13.0+cpu, CPU build, and this machine has 8 GPUs"),
        (CUDA_TORCH, 0, "warning", "2.13.0, CUDA 13.0 build, and this machine has no GPU"),
        (Library("2.13.0", "13.0", 0), 2, "problem", "2.13.0, CUDA 13.0 build, but it sees none of 2 GPUs"),
        (Library("2.13.0", error="no libcudart"), 2, "problem", "2.13.0 cannot be imported: no libcudart"),
        (Library(), 0, "problem", "not installed"),
    ],
)
def test_torch_build_is_compared_with_the_machine(library: Library, n_gpus: int, status: str, text: str) -> None:
    found = doctor.torch(library, n_gpus)
    assert (found.status, found.text) == (status, text)
    assert bool(found.advice) == (status != "ok")


@pytest.mark.parametrize(
    ("version", "status", "text"),
    [
        ((7, 2), "ok", "7.2, /bin/redis-server"),
        ((10, 0), "ok", "10.0, /bin/redis-server"),
        ((6, 2), "warning", "6.2, /bin/redis-server"),
        ((0, 0), "warning", "/bin/redis-server, of an unknown version"),
    ],
)
def test_redis_before_version_7_is_a_warning(version: tuple[int, int], status: str, text: str) -> None:
    found = doctor.redis_server("/bin/redis-server", version)
    assert (found.status, found.text) == (status, text)
    assert bool(found.advice) == (status != "ok")


@pytest.mark.parametrize(
    ("library", "n_gpus", "status"),
    [
        (Library("0.32.0", "cuda"), 8, "ok"),
        (Library("0.32.1", "cpu"), 0, "ok"),
        (Library(), 0, "ok"),
        (Library(), 8, "warning"),
        (Library("0.32.0", "cpu"), 8, "problem"),
        (Library("0.32.0", "cuda"), 0, "warning"),
        (Library("0.40.0", "cuda"), 8, "warning"),
        (Library("0.32.0", error="undefined symbol"), 8, "problem"),
    ],
)
def test_vllm_is_compared_with_the_machine(library: Library, n_gpus: int, status: str) -> None:
    found = doctor.vllm(library, n_gpus)
    assert found.status == status
    assert bool(found.advice) == (status != "ok")


def test_gpus_are_counted_by_kind() -> None:
    found = doctor.gpus(fake_gpus.gpus(8), "", has_driver=True)
    assert found == Finding("gpus", "ok", "8 x NVIDIA H100 80GB HBM3 (80 GiB), driver 570.86.15")
    assert doctor.gpus([], "no driver", has_driver=False).status == "ok"
    broken = doctor.gpus([], "nvidia-smi failed with exit code 9: no; check NVIDIA's driver", has_driver=True)
    assert (broken.status, broken.advice) == ("problem", "check NVIDIA's driver")


@pytest.mark.parametrize(
    ("finding", "status"),
    [
        (doctor.disk("/s", 100 * GIB), "ok"),
        (doctor.disk("/s", 5 * GIB), "warning"),
        (doctor.disk("/s", GIB // 2), "problem"),
        (doctor.shared_memory(64 << 20, 1), "ok"),
        (doctor.shared_memory(64 << 20, 2), "warning"),
        (doctor.shared_memory(None, 0), "warning"),
        (doctor.ports([8700], [8700]), "warning"),
        (doctor.clock(-1.5), "ok"),
        (doctor.clock(30), "warning"),
        (doctor.clock(-900), "problem"),
    ],
)
def test_limits_separate_ok_from_warnings_and_problems(finding: Finding, status: str) -> None:
    assert finding.status == status
    assert bool(finding.advice) == (status != "ok")


# --- a system ---------------------------------------------------------------------------------------------------------

JOINED = {"redis_url": "redis://:secret@10.0.0.1:6379/0", "weight_store_url": "http://10.0.0.1:8701", "protocol": 2}


def asked(answer: Callable[[httpx.Request], httpx.Response]) -> dict[str, Finding]:
    found = list(doctor.system_findings("http://10.0.0.1:8700", "t", httpx.MockTransport(answer)))
    return {finding.name: finding for finding in found}


@pytest.fixture(autouse=True)
def redis_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def not_ready_reason(url: str) -> str | None:
        assert url == JOINED["redis_url"]
        return "Connection refused"

    monkeypatch.setattr(redis_server, "not_ready_reason", not_ready_reason)


def test_reachable_system_is_checked_part_by_part() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer t"
        if request.url.path == "/healthz":
            return httpx.Response(502)
        return httpx.Response(200, json=JOINED, headers={"date": formatdate(time.time() - 60)})

    found = asked(answer)
    assert {name: finding.status for name, finding in found.items()} == {
        "manager": "ok",
        "clock": "warning",
        "weight store": "problem",
        "redis": "problem",
    }
    assert found["redis"].text == "10.0.0.1:6379: Connection refused"
    assert "secret" not in str(found)


@pytest.mark.parametrize(
    ("response", "text"),
    [
        (httpx.Response(401), "rejects the token"),
        (httpx.Response(409), "has another protocol"),
        (httpx.Response(200, text="<html>"), "status 200, not as a rollout manager"),
        (httpx.Response(404, json={}), "status 404, not as a rollout manager"),
    ],
)
def test_wrong_answer_of_the_manager_is_a_problem(response: httpx.Response, text: str) -> None:
    found = asked(lambda _: response)["manager"]
    assert found.status == "problem"
    assert text in found.text


def test_manager_that_does_not_answer_is_a_problem() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectTimeout("timed out", request=request)

    assert asked(answer).keys() == {"manager"}


# --- the command ------------------------------------------------------------------------------------------------------


def test_doctor_on_a_gpu_machine_with_a_cpu_build_exits_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{fake_gpus.install(tmp_path / 'bin', 2)}:/usr/bin:/bin")
    for variable in ("CUDA_VISIBLE_DEVICES", "RLBOOST_URL"):
        monkeypatch.delenv(variable, raising=False)
    libraries = {"torch": CPU_TORCH, "vllm": Library("0.32.0", "cuda")}
    monkeypatch.setattr(doctor, "_library", lambda name, *_: libraries[name])
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0] == "ok       gpus: 2 x NVIDIA H100 80GB HBM3 (80 GiB), driver 570.86.15"
    assert lines[1].startswith("problem  torch: 2.13.0+cpu, CPU build, and this machine has 2 GPUs -> in a new env")
    assert lines[2] == "ok       vllm: 0.32.0 for cuda"
    shown = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert not shown["ok"]
    assert [check["name"] for check in shown["checks"]][:3] == ["gpus", "torch", "vllm"]


def test_library_that_fails_to_import_is_reported_in_one_line() -> None:
    assert doctor._library("json", ("pip",), "raise ImportError('undefined symbol')").error.endswith("undefined symbol")
    assert doctor._library("no_such_module", (), "") == Library()
    assert doctor._library("json", ("pip",), "import os; os.abort()").error
