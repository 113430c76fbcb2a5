"""The fork server with real processes: what it forks is what Python would have started."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlboost.local import fork_server as fork_server_module
from rlboost.local.child import Child, Exit
from rlboost.local.fork_server import RUN_TIME_VARIABLES, ForkServer
from rlboost.local.processes import ProcessSpec
from tests.support import forked_probe, forked_probe_server
from tests.support.eventually import eventually
from tests.support.probes import probe, use_probes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it forks on Linux only")

_LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def _probes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SERVICES", "MODULE"):  # to have them back afterwards
        monkeypatch.setattr(fork_server_module, name, getattr(fork_server_module, name))
    use_probes()


@pytest.fixture
def forks(tmp_path: Path) -> Iterator[ForkServer]:
    """A server that is ready."""
    variables = (*RUN_TIME_VARIABLES, "PYTEST_")  # one of which names the phase of the test
    forks = ForkServer(os.environ, tmp_path / "fork-server.log", run_time_variables=variables)
    forks.start()
    assert forks.is_ready(_LIMIT_S), (tmp_path / "fork-server.log").read_text()
    yield forks
    forks.close()


async def run(spec: ProcessSpec, forks: ForkServer | None) -> tuple[Child, Exit]:
    child = Child(spec, forks)
    async with asyncio.timeout(_LIMIT_S):
        return child, await child.wait()


async def described(spec: ProcessSpec, forks: ForkServer | None) -> dict[str, Any]:
    """Return what a process says of itself, with its id as `child`."""
    child, end = await run(spec, forks)
    (line,) = child.output(10)  # of this run
    assert end.code == 0, line
    return {**json.loads(line), "child": child.pid}


async def test_forked_process_is_like_an_executed_one(tmp_path: Path, forks: ForkServer) -> None:
    spec = probe(tmp_path, "describe", {"RLBOOST_X": "1", "CUDA_VISIBLE_DEVICES": "3"})
    forked, executed = await described(spec, forks), await described(spec, None)
    for told, imported in ((forked, True), (executed, False)):
        pids = {told.pop("child"), told.pop("pid"), told.pop("session")}
        assert len(pids) == 1
        assert told.pop("imported") is imported
    assert forked == executed
    assert forked["parent"] == os.getpid()
    assert forked["environment"]["CUDA_VISIBLE_DEVICES"] == "3"


async def test_forked_process_reports_its_end_and_only_its_own_cpu_time(tmp_path: Path, forks: ForkServer) -> None:
    _, end = await run(probe(tmp_path, "fail"), forks)
    assert end.code == forked_probe.CODE
    _, end = await run(probe(tmp_path, "killed"), forks)
    assert str(end) == "killed by SIGKILL"
    _, end = await run(probe(tmp_path, "busy"), forks)
    assert 0.9 * forked_probe.BUSY_CPU_S <= end.cpu_s < forked_probe_server.CPU_S
    used_s = forks.cpu_s()
    assert used_s >= 0.9 * forked_probe_server.CPU_S
    forks.close()
    assert forks.cpu_s() >= used_s


async def test_forked_processes_draw_different_random_numbers(tmp_path: Path, forks: ForkServer) -> None:
    draws = [json.loads((await run(probe(tmp_path, "draw", log=log), forks))[0].output(1)[0]) for log in ("1", "2")]
    assert draws[0]["random"] != draws[1]["random"]
    assert draws[0]["numpy"] != draws[1]["numpy"]


async def test_edited_user_code_counts_at_the_next_start(tmp_path: Path, forks: ForkServer) -> None:
    for text in ("first", "second, longer"):
        (tmp_path / "my_reward.py").write_text(f"NAME = {text!r}\n")
        child, _ = await run(probe(tmp_path, "user_code", {"RLBOOST_FOLDER": str(tmp_path)}, log=text), forks)
        assert child.output(10) == [text]


async def test_killed_fork_server_harms_no_process_and_is_replaced(tmp_path: Path, forks: ForkServer) -> None:
    survivor = Child(probe(tmp_path, "wait"), forks)
    killed = forks.pid
    os.kill(killed, signal.SIGKILL)
    assert not (await described(probe(tmp_path, "describe", log="executed"), forks))["imported"]
    assert forks.is_ready(_LIMIT_S)
    assert forks.pid != killed
    assert (await described(probe(tmp_path, "describe", log="forked"), forks))["imported"]
    assert survivor.alive
    survivor.send(signal.SIGTERM)
    assert (await survivor.wait()).code == -signal.SIGTERM


async def test_hung_fork_server_starts_no_process_twice(
    tmp_path: Path, forks: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server_module, "_FORK_LIMIT_S", 0.1)
    hung = forks.pid
    os.kill(hung, signal.SIGSTOP)
    assert not (await described(probe(tmp_path, "describe"), forks))["imported"]
    assert forks.pid != hung


def test_fork_server_killed_while_it_imports_is_replaced(tmp_path: Path) -> None:
    forks = ForkServer(os.environ, tmp_path / "fork-server.log")
    forks.start()
    killed = forks.pid
    os.kill(killed, signal.SIGKILL)
    assert not forks.is_ready(_LIMIT_S)
    assert forks.pid not in {0, killed}
    assert forks.is_ready(_LIMIT_S)
    forks.close()


async def test_process_with_other_import_variables_is_executed(tmp_path: Path, forks: ForkServer) -> None:
    assert not (await described(probe(tmp_path, "describe", {"OMP_NUM_THREADS": "7"}), forks))["imported"]


async def test_process_with_too_many_variables_is_executed(tmp_path: Path, forks: ForkServer) -> None:
    env = {"RLBOOST_A": "a" * 100_000, "RLBOOST_B": "b" * 100_000}
    server = forks.pid
    _, end = await run(probe(tmp_path, "fail", env), forks)
    assert end.code == forked_probe.CODE
    assert forks.pid == server


@pytest.mark.parametrize("fault", ["thread", "descriptor"])
def test_server_with_unforkable_imports_refuses_to_serve(tmp_path: Path, fault: str) -> None:
    log = tmp_path / "fork-server.log"
    forks = ForkServer({**os.environ, "PROBE_FAULT": fault}, log)
    forks.start()
    assert not forks.is_ready(_LIMIT_S)
    assert forks.pid == 0
    assert fault in log.read_text()


def test_forked_process_dies_with_its_launcher(tmp_path: Path) -> None:
    command = [sys.executable, "-m", forked_probe.MODULE, "launch", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pids = json.loads(launcher.stdout.readline())
        assert all(map(_runs, pids))
        launcher.kill()
    asyncio.run(eventually(lambda: not any(map(_runs, pids))))


def _runs(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


@pytest.mark.long
def test_preloading_imports_nothing_of_the_user_and_leaves_cuda_alone(tmp_path: Path) -> None:
    code = (
        "import json, sys\n"
        "from rlboost.local.fork_server_process import MODULES, import_modules\n"
        "import_modules(MODULES)\n"
        "import torch\n"
        "files = [getattr(module, '__file__', None) for module in sys.modules.values()]\n"
        "print(json.dumps([torch.cuda.is_initialized(), *filter(None, files)]))\n"
    )
    for name in ("my_reward", "my_loss"):
        (tmp_path / f"{name}.py").write_text("raise AssertionError\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    is_initialized, *files = json.loads(told.stdout)
    assert is_initialized is False
    assert "torch" in {Path(file).parent.name for file in files}
    assert not [file for file in files if file.startswith(str(tmp_path))]
