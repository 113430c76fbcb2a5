"""Docker containers in which agents and environments run what a model writes: one for each conversation.

A container lives as long as its `Sandbox`: its main process reads from a pipe that the program `docker` holds open. If
the process that has started it is killed, the pipe closes, and the engine stops and removes the container.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import secrets
import shlex
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Self

from rlboost.shared.framing import send
from rlboost.shared.job.environment import ToolUnavailable

LABEL = "rlboost.sandbox"
"""Label of all containers; its value says what they are for."""
ENGINE_LIMIT_S = 60.0
"""For the engine to answer, when it runs nothing of the model's."""
GRACE_S = 10.0
"""How long a command that was killed at its limit may take to end."""
MAX_COMMAND_BYTES = 100_000
"""The kernel's limit for one argument is 131,072."""
MAX_OUTPUT_BYTES = 16_384
MAX_FILE_BYTES = 64 << 20
CAPABILITIES = (
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "NET_BIND_SERVICE",
    "SETGID",
    "SETUID",
    "SYS_CHROOT",
)
"""What root has in a container: enough for package managers."""

_MORE_PIDS = 4096
"""More than a fork bomb takes while a command starts."""
_READY = "rlboost-sandbox-ready"
# The kernel ignores signals of other processes in the container to its first one. Bash reaps orphans as they end.
_MAIN = f"""
for program in timeout head mkdir dirname cat; do
  command -v $program > /dev/null || {{ echo "it has no program $program"; exit 1; }}
done
shell=$(command -v bash || command -v sh)
echo {_READY} $shell
exec $shell -c 'trap "" HUP INT QUIT TERM USR1 USR2 ALRM PIPE; while read -r line; do :; done' 2> /dev/null
"""
# The last line ends the output, which processes that the command has left in the background may hold open. Processes of
# other users cannot read its mark, as they could in an argument. When memory runs out, the command's processes are
# killed before the container's first one.
_MARK = "SANDBOX_MARK"
_COMMAND = f"""
exec 2> /dev/null
mark=${_MARK}; unset {_MARK}
echo 900 > /proc/self/oom_score_adj
(timeout -s KILL "$1" "$2" -c "$3" 2>&1)
printf '\\n%s %s\\n' "$mark" $?
"""
_building: dict[str, asyncio.Lock] = {}
_pruned = set[str]()
"""The label, once this process has removed containers that were created and never started."""


class SandboxUnavailable(ToolUnavailable):
    """The engine, an image or a container failed, whatever the model wrote: its conversation is lost, and replaced."""


class SandboxBroken(Exception):
    """The container runs, and is unusable by what the model did in it, such as removing `/bin`: a result."""


class Result(NamedTuple):
    """How a command ended."""

    code: int
    """Exit code; 137 if it was killed, 126 if it could not be started."""
    output: str
    """Standard output and error, the middle left out if it is too long."""
    timed_out: bool = False


class Sandbox:
    """A container. Use it as an async context manager, or call `close`."""

    def __init__(self, name: str, process: Process, pids: int) -> None:
        """See `start`."""
        self.name = name
        self._process = process
        self._pids = pids
        self._shell = ""
        """Path in the container; empty until it has started."""

    @classmethod
    async def start(
        cls,
        image: str,
        *,
        purpose: str = "",
        cpus: float = 1.0,
        memory_mb: int = 2048,
        pids: int = 1024,
        network: bool = False,
        env: Mapping[str, str] | None = None,
        start_limit_s: float = 120.0,
    ) -> Self:
        """Start a container; a missing image is pulled.

        Args:
            image: its name, such as that which `build` returns. Its entry point and command are not run.
            purpose: value of the label `rlboost.sandbox`, such as a session's sample.
            cpus: processors that it may use.
            memory_mb: its memory in MiB, swap included; beyond it the kernel kills a process in it.
            pids: its most processes and threads.
            network: True for the engine's default network, which reaches whatever this machine reaches.
            env: environment variables.
            start_limit_s: for all of this, the pull included.

        Raises:
            SandboxUnavailable: it did not start.
            ValueError: an argument that Docker does not have.

        """
        name = f"rlboost-sandbox-{secrets.token_hex(8)}"
        options = run_options(name, image, purpose, cpus, memory_mb, pids, network=network, env=env or {})
        if LABEL not in _pruned:  # such as that of a process that was killed in this moment
            _pruned.add(LABEL)
            with contextlib.suppress(SandboxUnavailable):
                await _engine("container", "prune", "--force", f"--filter=label={LABEL}", "--filter=until=10m")
        sandbox = cls(name, await _docker("run", *options, image, "-c", _MAIN, stdin=PIPE), pids)
        try:
            async with asyncio.timeout(start_limit_s):
                sandbox._shell = await _wait_until_ready(sandbox._process, image)
        except TimeoutError as error:
            raise SandboxUnavailable(f"no container of {image} has started within {start_limit_s:g} s") from error
        finally:
            if not sandbox._shell:
                await sandbox.close()
        return sandbox

    async def __aenter__(self) -> Self:
        """Return the container."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Remove the container."""
        await self.close()

    async def exec(
        self,
        command: str,
        *,
        timeout_s: float = 60.0,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        stdin: bytes | None = None,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
    ) -> Result:
        """Run a command with `bash` if the image has it, else with `sh`.

        It ends when its shell does; what it has left in the background runs on. After `timeout_s` it is killed, which
        is a result.

        Args:
            command: any text, as the model wrote it.
            timeout_s: its limit.
            user: name or number; None for the image's.
            env: environment variables, in addition to the container's.
            workdir: a folder; None for the image's.
            stdin: its standard input; None for none.
            max_output_bytes: of the output; from longer ones the middle is left out.

        Raises:
            SandboxUnavailable: the container has ended, or the engine does not answer.
            ValueError: an argument that Docker does not have, or no limit.

        """
        if not 0 < timeout_s < float("inf"):
            raise ValueError(f"timeout_s is {timeout_s}: give a finite number above 0")
        text = command.encode(errors="replace")
        if len(text) > MAX_COMMAND_BYTES or b"\0" in text:
            return Result(126, f"a command has at most {MAX_COMMAND_BYTES} bytes, none of them 0: write a file first")
        options = [] if stdin is None else ["--interactive"]
        options += [] if user is None else [f"--user={user}"]
        options += [] if workdir is None else [f"--workdir={workdir}"]
        mark = secrets.token_hex(8)
        options += [f"--env={variable}" for variable in _variables({**(env or {}), _MARK: mark})]
        arguments = ("sh", "-c", _COMMAND, "sh", f"{timeout_s:g}", self._shell, text)
        started = asyncio.get_running_loop().time()
        process = await _docker("exec", *options, self.name, *arguments, stdin=DEVNULL if stdin is None else PIPE)
        output, code = Output(max_output_bytes, mark), None
        try:
            async with asyncio.timeout(timeout_s + GRACE_S):
                code, _ = await asyncio.gather(_read(process, output), _write(process, stdin or b""))
                if code is None:  # its shell was killed, or has not started
                    code = await process.wait()
        except TimeoutError:  # a command of the model's holds its output open
            code = 137
        finally:
            await _end(process)
        if code != 0:
            await self._check()
        timed_out = code != 0 and asyncio.get_running_loop().time() - started >= timeout_s
        return Result(code, output.text(), timed_out)

    async def read(self, path: str, max_bytes: int = MAX_FILE_BYTES) -> bytes | None:
        """Return the first `max_bytes` of a file and one more; None without such a file.

        Raises:
            SandboxUnavailable: the container has ended, or the engine does not answer.

        """
        arguments = ("--user=0", self.name, "timeout", "-s", "KILL", f"{ENGINE_LIMIT_S:g}", "head", "-c")
        process = await _docker("exec", *arguments, str(max_bytes + 1), path, stderr=DEVNULL)
        assert process.stdout is not None
        content = bytearray()
        try:
            async with asyncio.timeout(ENGINE_LIMIT_S + GRACE_S):
                while len(content) <= max_bytes and (block := await process.stdout.read(1 << 16)):
                    content += block
                code = 0 if len(content) > max_bytes else await process.wait()
        except TimeoutError:
            code = 137
        finally:
            await _end(process)
        if code == 0:
            return bytes(content[: max_bytes + 1])
        await self._check()
        return None

    async def write(self, path: str, content: bytes) -> None:
        """Write a file as root; its folder is made.

        Raises:
            SandboxBroken: it cannot be written.
            SandboxUnavailable: the container has ended, or the engine does not answer.

        """
        quoted = shlex.quote(path)
        script = f'mkdir -p "$(dirname {quoted})" && cat > {quoted}'
        result = await self.exec(script, user="0", stdin=content, timeout_s=ENGINE_LIMIT_S)
        if result.code != 0:
            raise SandboxBroken(f"{path} cannot be written: {result.output}")

    async def upload(self, source: Path, path: str) -> None:
        """Copy a folder's content into a folder of the container, which is made.

        Raises:
            NotADirectoryError: `source` is no folder.
            SandboxBroken: it cannot be written.
            SandboxUnavailable: the container has ended, or the engine does not answer.

        """
        if not await asyncio.to_thread(source.is_dir):
            raise NotADirectoryError(f"{source} is no folder: it cannot be copied into a container")
        await self.exec(f"mkdir -p {shlex.quote(path)}", user="0", timeout_s=ENGINE_LIMIT_S)
        try:
            await _engine("cp", f"{source}/.", f"{self.name}:{path}")
        except SandboxUnavailable as error:
            await self._check()
            if isinstance(error.__cause__, TimeoutError):  # the engine is slow, or the folder large
                raise
            raise SandboxBroken(f"{path} cannot be written: {error}") from error

    async def stop_processes(self) -> None:
        """Kill what commands have left, such as a fork bomb, so that commands of yours run as in a fresh container.

        Call it after the model's last command. What the model has written stays.

        Raises:
            SandboxBroken: they cannot be killed.
            SandboxUnavailable: the container has ended, or the engine does not answer.

        """
        reason: SandboxUnavailable | None = None
        for _ in range(3):
            self._pids += _MORE_PIDS
            try:
                await _engine("update", f"--pids-limit={self._pids}", self.name)
                await _engine("exec", "--user=0", self.name, "sh", "-c", "kill -9 -1; exit 0")
            except SandboxUnavailable as error:
                await self._check()
                reason = error
            else:
                return
        raise SandboxBroken(f"its processes cannot be killed: {reason}") from reason

    async def close(self) -> None:
        """Remove the container, also if it is lost already."""
        await asyncio.shield(asyncio.ensure_future(self._close()))

    async def _close(self) -> None:
        if not self._shell:  # the engine may be about to create it
            await _end(self._process)
            await asyncio.sleep(1.0)
        with contextlib.suppress(SandboxUnavailable):
            await _engine("rm", "--force", "--volumes", self.name)
        await _end(self._process)

    async def _check(self) -> None:
        """Raise if the container has ended."""
        try:
            state = await _engine("inspect", "--format={{.State.Running}}", self.name)
        except SandboxUnavailable as error:
            raise SandboxUnavailable(f"the container {self.name} is lost: {error}") from error
        if state != "true":
            raise SandboxUnavailable(f"the container {self.name} has ended")


def run_options(
    name: str,
    image: str,
    purpose: str,
    cpus: float,
    memory_mb: int,
    pids: int,
    *,
    network: bool,
    env: Mapping[str, str],
) -> list[str]:
    """Return the options of `docker run` for a container; raises ValueError as `Sandbox.start`."""
    if not image or image.startswith("-"):
        raise ValueError(f"image is {image!r}: give the name of an image")
    if not 0 < cpus < float("inf"):
        raise ValueError(f"cpus is {cpus}: give a number above 0")
    if memory_mb < 16:
        raise ValueError(f"memory_mb is {memory_mb}: give at least 16")
    if pids < 16:
        raise ValueError(f"pids is {pids}: give at least 16")
    limits = [f"--cpus={cpus:g}", f"--memory={memory_mb}m", f"--memory-swap={memory_mb}m", f"--pids-limit={pids}"]
    rights = ["--security-opt=no-new-privileges", "--cap-drop=ALL", *(f"--cap-add={name}" for name in CAPABILITIES)]
    return [
        *("--rm", "--interactive", f"--name={name}", f"--label={LABEL}={purpose}", "--no-healthcheck"),
        *limits,
        *rights,
        *([] if network else ["--network=none"]),
        *(f"--env={variable}" for variable in _variables(env)),
        "--entrypoint=sh",
    ]


async def require_engine() -> None:
    """Raise SandboxUnavailable if this process reaches no engine."""
    try:
        await _engine("version", "--format={{.Server.Version}}")
    except SandboxUnavailable as error:
        raise SandboxUnavailable(
            f"{error}: containers need the program docker and an engine that this user may use (DOCKER_HOST, group "
            "docker), on the machine that runs the agents"
        ) from error


async def build(folder: Path, *, limit_s: float = 600.0) -> str:
    """Return the image that a folder's `Dockerfile` makes, which is built once for each content of the folder.

    Raises:
        SandboxUnavailable: it cannot be built, or not in time.

    """
    tag = f"rlboost-sandbox:{await asyncio.to_thread(digest, folder)}"
    async with _building.setdefault(tag, asyncio.Lock()):
        if not await _engine("images", "--quiet", tag):
            await _engine("build", "--quiet", f"--tag={tag}", str(folder), limit_s=limit_s)
    return tag


def digest(folder: Path) -> str:
    """Return a name for a folder's content: paths, modes, and what files and links have."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            content = str(path.readlink()).encode()
        elif path.is_file():
            content = path.read_bytes()
        else:
            continue
        found.update(f"{path.relative_to(folder)}\0{path.lstat().st_mode:o}\0{len(content)}\0".encode() + content)
    return found.hexdigest()[:32]


class Output:
    """The beginning and the end of what a command writes, up to the line that its mark begins."""

    def __init__(self, max_bytes: int, mark: str) -> None:
        """Begin empty."""
        self._n_head = max_bytes // 2
        self._n_tail = max_bytes - self._n_head
        self._mark = re.compile(rb"\n%s (\d{1,3})\n" % mark.encode())
        self._margin = len(mark) + 8
        """Bytes that may be the beginning of the line."""
        self._head, self._tail, self._n = b"", b"", 0
        self._pending = b""

    def add(self, block: bytes) -> int | None:
        """Add what was read; return the exit code once the last line is there."""
        self._pending += block
        if found := self._mark.search(self._pending):
            self._append(self._pending[: found.start()])
            self._pending = b""
            return int(found[1])
        cut = max(0, len(self._pending) - self._margin)
        self._append(self._pending[:cut])
        self._pending = self._pending[cut:]
        return None

    def _append(self, block: bytes) -> None:
        taken = block[: max(0, self._n_head - len(self._head))]
        self._head += taken
        self._tail += block[len(taken) :]
        self._tail = self._tail[max(0, len(self._tail) - self._n_tail) :]
        self._n += len(block)

    def text(self) -> str:
        """Return it, with the number of bytes that were left out between its two parts."""
        self._append(self._pending)
        self._pending = b""
        left_out = self._n - len(self._head) - len(self._tail)
        middle = f"\n[{left_out} bytes left out]\n".encode() if left_out else b""
        return (self._head + middle + self._tail).decode(errors="replace")


def _variables(env: Mapping[str, str]) -> list[str]:
    for name, value in env.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{name!r} is no environment variable: a name has letters, digits and underscores")
        if "\0" in value:
            raise ValueError(f"the environment variable {name!r} has a value with a 0 byte: leave it out")
    return [f"{name}={value}" for name, value in env.items()]


async def _docker(*arguments: str | bytes, stdin: int = DEVNULL, stderr: int = STDOUT) -> Process:
    try:
        return await asyncio.create_subprocess_exec("docker", *arguments, stdin=stdin, stdout=PIPE, stderr=stderr)
    except FileNotFoundError as error:
        raise SandboxUnavailable("there is no program docker: install Docker's command line") from error


async def _engine(*arguments: str, limit_s: float = ENGINE_LIMIT_S) -> str:
    """Return what a command of the engine prints."""
    process = await _docker(*arguments)
    output = Output(MAX_OUTPUT_BYTES, secrets.token_hex(8))
    try:
        async with asyncio.timeout(limit_s):
            await _read(process, output)
            code = await process.wait()
    except TimeoutError as error:
        raise SandboxUnavailable(f"docker {arguments[0]} has not ended within {limit_s:g} s") from error
    finally:
        await _end(process)
    if code != 0:
        raise SandboxUnavailable(f"docker {arguments[0]} failed: {output.text().strip()[-2000:]}")
    return output.text().strip()


async def _wait_until_ready(process: Process, image: str) -> str:
    """Return the shell of a container that has started."""
    assert process.stdout is not None
    lines = list[str]()
    while line := (await process.stdout.readline()).decode(errors="replace"):
        if line.startswith(_READY):
            return line.split()[1]
        lines = [*lines[-20:], line.strip()]
    raise SandboxUnavailable(f"no container of {image} has started: {' '.join(lines)}")


async def _read(process: Process, output: Output) -> int | None:
    """Read to the end, or to the line with the exit code, which is returned."""
    assert process.stdout is not None
    while block := await process.stdout.read(1 << 16):
        if (code := output.add(block)) is not None:
            return code
    return None


async def _write(process: Process, content: bytes) -> None:
    if process.stdin is not None:
        with contextlib.suppress(ConnectionError):  # it need not read
            send(process.stdin, content)
            await process.stdin.drain()
            process.stdin.close()


async def _end(process: Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(GRACE_S):
            await process.wait()
