"""The command line as people use it: real processes of a whole system, each command a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rlboost.client import Client
from rlboost.local.state import ProcessRecord, StateDir
from tests.support.eventually import eventually
from tests.support.redis_server import executable

pytestmark = [
    pytest.mark.skipif(executable() is None and not os.environ.get("CI"), reason="no redis-server here"),
    pytest.mark.timeout(600),
]

ROOT = Path(__file__).parents[2]


class CommandLine:
    """Runs `rlboost` in one folder, with nothing of ours in the environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ours = {name: value for name, value in os.environ.items() if not name.startswith("RLBOOST_")}
        self.env = {**ours, "PYTHONPATH": str(ROOT)}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "rlboost", *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=self.folder, env=self.env, stdout=pipe, stderr=pipe, text=True)

    def __call__(self, *arguments: str, code: int = 0, limit_s: float = 100) -> str:
        """Return what a command prints: to standard output if `code` is 0, else to standard error."""
        with self.start(*arguments) as process:
            out, err = process.communicate(timeout=limit_s)
        assert process.returncode == code, err
        return out if code == 0 else err

    def json(self, *arguments: str) -> Any:
        return json.loads(self(*arguments, "--json"))

    def process(self, name: str) -> ProcessRecord:
        """Return what the state folder says of a process, as `ps` does, only quicker to ask again and again."""
        found = [record for record in StateDir(self.folder / ".rlboost").processes() if record.name == name]
        assert len(found) == 1, f"{name} was never started"
        return found[0]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CommandLine, dict[str, str]]]:
    rlboost = CommandLine(tmp_path_factory.mktemp("system"))
    rlboost("init")
    (rlboost.folder / "chaos.csv").write_text("0,kill,worker-2\n500,add,node7\n")
    for package in ("services", "shared", "examples", "tests"):  # a user's own, with names of folders of ours
        (rlboost.folder / package).mkdir()
        (rlboost.folder / package / "__init__.py").touch()
    (rlboost.folder / "services/reward.py").write_text("def score(completions, **_): return [1.0] * len(completions)\n")
    config = json.loads(rlboost("up", "--workers=2", "--reserved=0", "--chaos=chaos.csv", "--detach", "--json"))
    try:
        yield rlboost, config
    finally:
        pids = [record["pid"] for record in rlboost.json("ps")["processes"] if record["alive"]]
        assert rlboost.json("down") == {"stopped": True}
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_up_prints_the_config_of_a_ready_system(system: tuple[CommandLine, dict[str, str]]) -> None:
    rlboost, config = system
    assert sorted(config) == ["redis_url", "state_dir", "token", "url"]
    assert config["state_dir"] == str(rlboost.folder / ".rlboost")
    shown = rlboost.json("ps")
    assert {"redis", "weight-store", "manager", "trainer", "worker-1"} <= {
        record["name"] for record in shown["processes"]
    }
    assert shown["jobs"] == []
    assert "preemptible" in {worker["role"] for worker in shown["workers"]}


def test_second_up_is_refused_while_a_system_runs(system: tuple[CommandLine, dict[str, str]]) -> None:
    rlboost, config = system
    for flags in ([], ["--detach"]):
        assert f"already runs in {config['state_dir']} at {config['url']}" in rlboost("up", *flags, code=2)


def test_a_job_that_would_fail_is_refused_before_it_is_created(system: tuple[CommandLine, dict[str, str]]) -> None:
    rlboost, config = system
    (rlboost.folder / "my_reward.py").write_text("def score(completions, **_): return [1.0 for _ in completions]\n")
    reward = "reward.function=my_reward:scor"
    arguments = [str(ROOT / "examples/countdown/job.yaml"), f"model={ROOT / 'examples/countdown/base'}", reward]
    refused = rlboost("run", *arguments, code=2)
    assert refused == rlboost("config", "check", *arguments, code=2)
    *_, function, folder = lines = refused.splitlines()
    assert len(lines) == 4  # the data is not in this folder either
    assert f"not from {ROOT / 'examples/countdown'}" in folder
    assert function.endswith("my_reward:scor is not a reward function: my_reward has no 'scor'; did you mean 'score'?")
    with Client(config["url"], config["token"]) as client:
        assert client.jobs.list() == []


@pytest.mark.long
def test_init_warm_up_then_job_raises_its_reward(system: tuple[CommandLine, dict[str, str]]) -> None:
    """The folder of `rlboost init` as its README says, with fewer steps."""
    rlboost, config = system

    def run(*arguments: str) -> str:
        printed = rlboost("run", *arguments, "--follow", limit_s=300)
        return printed.split()[1].rstrip(":")

    warm_up = run("warmup.yaml", "steps=5", "optimizer.warmup_steps=0", "optimizer.lr=1e-4")
    model = f"model=.rlboost/runs/{warm_up}/model"
    job = run("job.yaml", model, "steps=12", "eval=null", "optimizer.decay=0")
    with Client(config["url"], config["token"]) as client:
        rewards = [row["reward/mean"] for row in client.jobs.metrics(job)]
    assert len(rewards) == 12
    # Of 768 samples each: 0.43 and about 0.54, with a standard error of 0.02.
    assert sum(rewards[-3:]) > sum(rewards[:3])


def test_unknown_job_error_is_the_same_for_every_command(system: tuple[CommandLine, dict[str, str]]) -> None:
    rlboost, _ = system
    assert rlboost("status", "a/b", code=1) == rlboost("pause", "a-b", code=1).replace("a-b", "a/b")


async def test_chaos_schedule_removes_one_worker_and_adds_another(
    system: tuple[CommandLine, dict[str, str]],
) -> None:
    rlboost, _ = system
    await eventually(lambda: rlboost.process("worker-3").alive, within_s=120)
    taken = rlboost.process("worker-2")
    assert (taken.alive, taken.restarts, taken.note) == (False, 0, "preempted without notice")


async def test_a_killed_process_comes_back(system: tuple[CommandLine, dict[str, str]]) -> None:
    rlboost, _ = system
    before = rlboost.process("trainer")
    os.kill(before.pid, signal.SIGKILL)
    await eventually(lambda: rlboost.process("trainer").restarts == 1, within_s=120)
    assert rlboost.process("trainer").pid != before.pid


async def test_a_drained_worker_leaves_and_stays_away(system: tuple[CommandLine, dict[str, str]]) -> None:
    rlboost, _ = system
    assert rlboost("worker", "drain", "worker-1").startswith("worker-1-")
    await eventually(lambda: rlboost.process("worker-1").note == "drained", within_s=120)


async def test_this_machine_can_join_twice_by_hand_and_leaves_in_order(
    system: tuple[CommandLine, dict[str, str]],
) -> None:
    rlboost, config = system

    def states() -> list[str]:
        with Client(config["url"], config["token"]) as client:
            return [worker["state"] for worker in client.workers.list() if worker["id"].startswith("by-hand-")]

    with ExitStack() as stack:
        workers = [stack.enter_context(rlboost.start("worker", "join", "--name=by-hand")) for _ in range(2)]
        for worker in workers:
            stack.callback(worker.kill)
        await eventually(lambda: states() == ["joining"] * 2, within_s=120)
        for worker in workers:
            worker.terminate()
        assert [worker.wait(120) for worker in workers] == [0, 0]
    await eventually(lambda: states() == ["left"] * 2, within_s=120)


def test_following_a_job_shows_its_warnings(system: tuple[CommandLine, dict[str, str]]) -> None:
    rlboost, _ = system
    example = ROOT / "examples/countdown"
    paths = (
        f"model={example / 'base'}",
        f"data.train={example / 'train.jsonl'}",
        f"data.eval={example / 'eval.jsonl'}",
        "reward.function=services.reward:score",
    )
    with rlboost.start("run", str(example / "job.yaml"), *paths, "sampling.top_p=0.9", "--follow") as following:
        try:
            assert following.stdout is not None
            assert following.stderr is not None
            job_id = following.stdout.readline().split()[1].rstrip(":")
            checked, followed = following.stderr.readline(), following.stderr.readline()
            assert checked.startswith(f"rlboost: {example / 'job.yaml'}: warning: sampling.top_p below 1 ")
            assert followed.startswith(f"rlboost: {job_id}: warning: sampling.top_p below 1 ")
            rlboost("cancel", job_id)
            assert following.wait(60) == 1
            assert f"\nrlboost: {job_id} cancelled after " in "\n" + following.stderr.read()
        finally:
            following.kill()


@pytest.mark.long
def test_a_system_in_the_foreground_stops_in_order_at_a_signal(tmp_path: Path) -> None:
    rlboost = CommandLine(tmp_path)
    with rlboost.start("up", "--workers=1", "--reserved=0", "--json") as up:
        try:
            assert up.stdout is not None
            assert json.loads(up.stdout.readline())["state_dir"] == str(tmp_path / ".rlboost")
            pids = [record.pid for record in StateDir(tmp_path / ".rlboost").processes()]
            assert len(pids) == 5
            up.send_signal(signal.SIGINT)
            assert up.wait(120) == 0
            assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        finally:
            up.kill()
    assert "was stopped at" in rlboost("ps", code=2)
