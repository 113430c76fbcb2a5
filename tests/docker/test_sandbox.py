"""Containers for conversations, on a Docker engine: what a command can do, and what is left of them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rlboost.agents import Session
from rlboost.sandbox import LABEL, Sandbox, SandboxBroken, SandboxUnavailable, build
from tests.support.compose_project import docker
from tests.support.doc_snippets import blocks_in
from tests.support.eventually import eventually
from tests.support.generated_docs import ROOT

pytestmark = [pytest.mark.docker, pytest.mark.timeout(180)]

IMAGE = "python:3.11-slim"
TEST = "sandbox-test"
OWNER = f"""
import asyncio
from rlboost.sandbox import Sandbox
async def main():
    async with await Sandbox.start("{IMAGE}", purpose="{TEST}"):
        print("up", flush=True)
        await asyncio.sleep(120)
asyncio.run(main())
"""


def left() -> list[str]:
    return docker("ps", "--all", "--quiet", "--filter", f"label={LABEL}={TEST}").split()


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    async with await Sandbox.start(IMAGE, purpose=TEST, memory_mb=256, pids=64) as started:
        yield started
    assert not left()


async def test_command_ends_with_its_code_and_output(sandbox: Sandbox) -> None:
    assert await sandbox.exec("echo $A; pwd; echo err >&2; exit 3", env={"A": "b c"}, workdir="/usr") == (
        3,
        "b c\n/usr\nerr\n",
        False,
    )
    assert (await sandbox.exec("cat", stdin=b"given")).output == "given"
    assert (await sandbox.exec("cat")).output == ""
    assert (await sandbox.exec("id -u", user="33")).output == "33\n"
    assert (await sandbox.exec("printf '\\0\\377'; kill -9 $$")) == (137, "\0\N{REPLACEMENT CHARACTER}", False)


async def test_command_that_leaves_a_process_behind_ends_at_once(sandbox: Sandbox) -> None:
    async with asyncio.timeout(30):
        assert await sandbox.exec("sleep 100 & echo started", timeout_s=90) == (0, "started\n", False)
    assert (await sandbox.exec("pgrep -c sleep")).output == "1\n"
    await sandbox.stop_processes()
    assert (await sandbox.exec("pgrep -c sleep")).output == "0\n"


async def test_command_is_killed_at_its_limit_with_what_it_wrote(sandbox: Sandbox) -> None:
    assert await sandbox.exec("echo begun; sleep 60", timeout_s=1) == (137, "begun\n", True)
    assert await sandbox.exec("echo still here") == (0, "still here\n", False)


async def test_output_is_bounded(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo first; yes | head -c 300000000; echo last")
    assert result.code == 0
    assert len(result.output) < 17_000
    assert result.output.startswith("first\ny\n")
    assert result.output.endswith("y\nlast\n")
    assert "bytes left out]" in result.output


async def test_commands_that_no_program_can_be_given_are_results(sandbox: Sandbox) -> None:
    assert (await sandbox.exec("a" * 200_000)).code == 126
    assert (await sandbox.exec("a\0b")).code == 126
    assert (await sandbox.exec("echo '\ud800'")).output == "?\n"


async def test_model_cannot_end_the_container(sandbox: Sandbox) -> None:
    kills = "; ".join(f"kill -{number} 1" for number in range(1, 32) if number not in (17, 18, 19))
    assert "alive" in (await sandbox.exec(f"{kills}; echo alive")).output
    assert (await sandbox.exec("python3 -c 'x = bytearray(1 << 30)'")).code == 137
    many = "for i in $(seq 60); do python3 -c 'import time; x = bytes(9 << 20); time.sleep(3)' & done; wait"
    await sandbox.exec(many, timeout_s=10)
    await sandbox.exec("kill -9 -1")
    assert (await sandbox.exec("echo alive")).output == "alive\n"


@pytest.mark.parametrize(
    "bomb", ["bomb() { bomb | bomb & }; bomb; sleep 30", "while true; do setsid sleep 100 & done 2> /dev/null"]
)
async def test_commands_run_after_a_fork_bomb(sandbox: Sandbox, bomb: str) -> None:
    await sandbox.exec(bomb, timeout_s=3)
    await sandbox.stop_processes()
    assert (await sandbox.exec("echo a | cat | cat")).output == "a\n"
    n_processes = await sandbox.exec("ls -d /proc/[0-9]* | wc -l")
    assert int(n_processes.output) < 10  # orphans are reaped


async def test_container_without_its_programs_is_broken_by_the_model(sandbox: Sandbox) -> None:
    await sandbox.exec("touch /tests; rm -rf /bin /usr/bin")
    assert (await sandbox.exec("echo")).code != 0
    with pytest.raises(SandboxBroken):
        await sandbox.stop_processes()
    with pytest.raises(SandboxBroken):
        await sandbox.write("/a", b"")
    with pytest.raises(SandboxBroken):
        await sandbox.upload(Path(__file__).parent, "/tests")
    assert await sandbox.read("/etc/passwd") is None


async def test_container_has_no_network_and_few_rights(sandbox: Sandbox) -> None:
    assert (await sandbox.exec("ls /sys/class/net")).output == "lo\n"
    assert (await sandbox.exec("mount -t tmpfs none /mnt")).code != 0
    assert "NoNewPrivs:\t1" in (await sandbox.exec("cat /proc/self/status")).output


async def test_program_of_another_user_cannot_end_a_verifiers_command(sandbox: Sandbox) -> None:
    program = "tr '\\0' '\\n' < $f | sed 's/^SANDBOX_MARK=//' | grep -x '[0-9a-f]\\{16\\}'"
    seen = f"for f in /proc/[0-9]*/cmdline /proc/[0-9]*/environ; do {program}; done 2> /dev/null"
    await sandbox.write("/seen", seen.encode())
    assert len((await sandbox.exec("sh /seen")).output.split()) == 1  # root's own
    assert (await sandbox.exec("setpriv --reuid=65534 --clear-groups sh /seen; exit 3"))[:2] == (3, "")


async def test_files_are_written_and_read(sandbox: Sandbox, tmp_path: Path) -> None:
    for content in (b"", b"12\0", b"x" * 300_000):
        await sandbox.write("/logs/a b/x", content)
        assert await sandbox.read("/logs/a b/x") == content
    assert await sandbox.read("/logs/a b/x", 10) == b"x" * 11
    assert await sandbox.read("/nowhere") is None
    (tmp_path / "test.sh").write_text("echo tested")
    await sandbox.upload(tmp_path, "/made/tests")
    assert (await sandbox.exec("sh /made/tests/test.sh")).output == "tested\n"


async def test_container_that_is_killed_is_unavailable(sandbox: Sandbox) -> None:
    running = asyncio.create_task(sandbox.exec("echo begun > /begun; sleep 60"))
    await eventually(lambda: sandbox.read("/begun"))
    docker("kill", sandbox.name)
    with pytest.raises(SandboxUnavailable, match=f"{sandbox.name} (is lost|has ended)"):
        await running
    for call in (sandbox.read("/a"), sandbox.write("/a", b""), sandbox.stop_processes()):
        with pytest.raises(SandboxUnavailable, match=sandbox.name):
            await call


async def test_container_ends_with_the_process_that_started_it() -> None:
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", OWNER, stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert await owner.stdout.readline() == b"up\n"
    assert len(left()) == 1
    owner.kill()
    await owner.wait()
    await eventually(lambda: not left(), within_s=30)


async def test_start_that_is_cancelled_leaves_no_container() -> None:
    async def start() -> None:
        async with await Sandbox.start(IMAGE, purpose=TEST):
            await asyncio.sleep(60)

    for after_s in (0.05, 0.1, 0.2, 0.3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(start(), after_s)
    assert not left()


async def test_folder_is_built_once_for_each_content(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {IMAGE}\nWORKDIR /app\nCOPY a .\nENTRYPOINT false\n")
    (tmp_path / "a").write_text(TEST)
    first, again = await asyncio.gather(build(tmp_path), build(tmp_path))
    assert first == again
    async with await Sandbox.start(first, purpose=TEST) as sandbox:
        assert (await sandbox.exec("pwd; cat a")).output == f"/app\n{TEST}"
    (tmp_path / "a").write_text("other")
    other = await build(tmp_path)
    assert other != first
    docker("rmi", first, other)


async def test_shown_agent_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = (block for block in blocks_in(ROOT / "docs/train-agents.md", "python") if "rlboost.sandbox" in block)
    module: dict[str, Any] = {"__name__": "shown"}
    exec(block, module)
    (tmp_path / "task/tests").mkdir(parents=True)
    (tmp_path / "task/Dockerfile").write_text(f"FROM {IMAGE}\n")
    (tmp_path / "task/tests/run.sh").write_text("test -e /made")
    monkeypatch.chdir(tmp_path)
    session = Session("http://127.0.0.1:9/v1", "key", TEST, 0, is_eval=False)
    assert await module["tested"](session, "touch /made") == 1.0
    assert await module["tested"](session, "touch /other") == 0.0


@pytest.mark.parametrize(
    ("dockerfile", "why"),
    [
        (f"FROM {IMAGE}\nRUN echo because; exit 7\n", "exit code: 7"),
        (f"FROM {IMAGE}\nRUN rm $(command -v timeout)\n", "it has no program timeout"),
    ],
)
async def test_image_that_cannot_be_used_is_unavailable_with_the_cause(
    tmp_path: Path, dockerfile: str, why: str
) -> None:
    (tmp_path / "Dockerfile").write_text(dockerfile)
    with pytest.raises(SandboxUnavailable, match=why):
        await Sandbox.start(await build(tmp_path), purpose=TEST)
    assert not left()


async def test_engine_that_does_not_answer_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    with pytest.raises(SandboxUnavailable, match=r"has started: .*nowhere.sock"):
        await Sandbox.start(IMAGE, purpose=TEST)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxUnavailable, match="there is no program docker"):
        await Sandbox.start(IMAGE, purpose=TEST)
