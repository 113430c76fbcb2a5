"""User code: in processes of its own, which may hang, raise, print or die, or on the trainer's tensors (losses)."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgpack
import numpy as np
from torch import Tensor

from rlboost.services.trainer.domain.curriculum import SkipFunction
from rlboost.services.trainer.domain.loss.function import TokenBatch, TokenLoss
from rlboost.services.trainer.ports.samples import Prompt
from rlboost.shared.errors import ConfigError
from rlboost.shared.framing import LENGTH_BYTES, length_of, pack, send
from rlboost.shared.process.waiting import Waits
from rlboost.shared.settings import environment_without_settings
from rlboost.shared.user_code import (
    MAX_CHARS,
    UNISOLATED_SETTING,
    USER_MODULES_SETTING,
    describe_error,
    describe_value,
    load_user_function,
)

# --- The output of user code: what its processes write to standard output and standard error, in a file of its own ----
# The processes write to one pipe, which this process reads, so that a function that prints without end fills no disk
# and cannot slow the trainer down: output beyond a rate is discarded, and the file is rotated.


MAX_FILE_BYTES = 8 << 20
"""Size at which the file is renamed to `NAME.1`, replacing an older one; so up to twice as much is retained."""
RATE_BYTES_PER_S = 64 << 10
BURST_BYTES = 1 << 20
_READ_BYTES = 64 << 10
_MAX_READS = 64
"""Reads per wake-up, so that the event loop's other work is not delayed."""
_TAIL_BYTES = 1_000


class UserCodeLog:
    """The log of some processes of one job."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Write to `path`, created with the first output. `clock` returns seconds."""
        self.path = path
        self._clock = clock
        self._pipe: tuple[int, int] | None = None
        self._allowance = float(BURST_BYTES)
        self._filled_at = clock()
        self._n_discarded = 0
        self._tail = b""

    def open(self) -> int:
        """Return the file descriptor that processes write to. Needs a running event loop; close the log at the end."""
        if self._pipe is None:
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[0], False)
            asyncio.get_running_loop().add_reader(self._pipe[0], self.drain)
        return self._pipe[1]

    def close(self) -> None:
        """Write what is left, and stop reading: a process that still runs gets an error when it prints."""
        if self._pipe is None:
            return
        self.drain()
        self.write(b"")  # how much was discarded at last
        asyncio.get_running_loop().remove_reader(self._pipe[0])
        for descriptor in self._pipe:
            os.close(descriptor)
        self._pipe = None

    def drain(self) -> None:
        """Write the output that is in the pipe."""
        if self._pipe is None:
            return
        for _ in range(_MAX_READS):
            try:
                data = os.read(self._pipe[0], _READ_BYTES)
            except BlockingIOError:
                return
            self.write(data)

    def write(self, data: bytes) -> None:
        """Append output, as far as the rate allows. A full disk loses it."""
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        now = self._clock()
        self._allowance = min(BURST_BYTES, self._allowance + (now - self._filled_at) * RATE_BYTES_PER_S)
        self._filled_at = now
        if len(data) > self._allowance:
            self._n_discarded += len(data)
            return
        self._allowance -= len(data)
        if self._n_discarded:
            note = f"\n[{self._n_discarded} bytes discarded: more than {RATE_BYTES_PER_S} bytes/s]\n"
            data, self._n_discarded = note.encode() + data, 0
        if data:
            with contextlib.suppress(OSError):
                self._append(data)

    def _append(self, data: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size + len(data) > MAX_FILE_BYTES:
            self.path.replace(self.path.with_name(self.path.name + ".1"))
        with self.path.open("ab") as file:
            file.write(data)

    def last_line(self) -> str:
        """Return the last line of output so far, an empty text if there is none."""
        lines = self._tail.decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


# --- A process for user code, which may hang, raise, print, or kill its process. `children.child` runs inside it ------


IMPORT_LIMIT_S = 60.0
_EXIT_LIMIT_S = 1.0
"""How long a process that has closed its output may take to exit by itself, with its own exit code."""
_STACK_LIMIT_S = 0.2
"""How long a process may take to write into its log where it hangs."""


BROKEN = (EOFError, OSError, ValueError, msgpack.UnpackException)
"""What reading from a process raises that has ended, or whose code wrote into the pipe."""


class UserProgram(NamedTuple):
    """What a process runs, and how error messages name it."""

    module: str
    """The child's module, run with `python -m`."""
    argument: str
    field: str
    """The job file's field."""
    functions: str
    """The user's functions, as the field names them."""
    import_limit_s: float = IMPORT_LIMIT_S


class UserCodeFault(Exception):
    """A call of user code failed."""

    def __init__(self, reason: str, detail: str) -> None:
        """Describe the fault.

        Args:
            reason: `unserializable`, `timeout`, `crashed` or `raised`.
            detail: for people.

        """
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


class UserCodeProcess:
    """One process, restarted when it has ended."""

    def __init__(self, program: UserProgram, log: UserCodeLog | None = None) -> None:
        """Start no process yet: see `start`. Its output goes to `log`, or else to this process's standard error."""
        self._program = program
        self._log = log
        self._process: Process | None = None

    @property
    def import_limit_s(self) -> float:
        """Return how long a start may take."""
        return self._program.import_limit_s

    @property
    def is_running(self) -> bool:
        """Return True if the process was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> bool:
        """Start the process unless it runs; return True if it was started.

        Raises:
            ConfigError: the user's code cannot be imported, or is not what the field requires.

        """
        if self.is_running:
            return False
        await self.kill()  # what a process that has ended by itself had started
        module, argument, field, functions, limit_s = self._program
        # Its own process group, to kill what the user's code has started; and no secrets in its environment.
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, argument),
            stdin=PIPE,
            stdout=PIPE,
            stderr=None if self._log is None else self._log.open(),
            start_new_session=True,
            env=environment_without_settings(USER_MODULES_SETTING, UNISOLATED_SETTING),
        )
        try:
            async with asyncio.timeout(limit_s):
                answer = await self.receive()
        except (TimeoutError, EOFError) as error:
            await self.kill()
            reason = f"took longer than {limit_s:g} s" if isinstance(error, TimeoutError) else "ended its process"
            raise ConfigError(f"{field}: importing {functions} {reason}") from error
        except asyncio.CancelledError:
            # A later call would take its first message for an answer.
            await self.kill()
            raise
        if "failed" in answer:
            await self.kill()
            raise ConfigError(f"{field}: {answer['failed']}")
        return True

    async def restart_if_ended(self) -> bool:
        """Start the process again if it has ended; return True if it was started.

        Raises:
            UserCodeFault: it cannot be started.

        """
        try:
            return await self.start()
        except ConfigError as error:
            raise UserCodeFault("crashed", str(error)) from error

    async def call(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Send a request to the running process and return its answer.

        After a timeout, a crash or a cancellation the process is killed, with all processes that it has started.

        Raises:
            UserCodeFault: the request cannot be serialized, the user's code raised or took longer than `limit_s`, or
                the process ended.

        """
        packed = self.pack(request)
        try:
            async with asyncio.timeout(limit_s):
                self.send(packed)
                answer = await self.receive()
        except TimeoutError:
            try:
                where = await self.write_stack()
            finally:
                await self.kill()
            raise UserCodeFault("timeout", f"no answer within {limit_s:g} s; its process was killed{where}") from None
        except BROKEN as error:
            raise UserCodeFault("crashed", await self.describe_end(error)) from error
        except asyncio.CancelledError:
            # The next call would receive the answer of this one.
            await self.kill()
            raise
        if "raised" in answer:
            raise self.raised(answer)
        return answer

    def pack(self, request: dict[str, Any]) -> bytes:
        """Return a request as it is sent.

        Raises:
            UserCodeFault: it cannot be serialized.

        """
        try:
            return pack(request)
        except (OverflowError, TypeError, ValueError) as error:
            raise UserCodeFault(
                "unserializable", f"a column cannot be sent to {self._program.functions}: {error}"
            ) from error

    def raised(self, answer: dict[str, Any]) -> UserCodeFault:
        """Return the fault of user code that raised."""
        return UserCodeFault("raised", str(answer["raised"])[:MAX_CHARS] + self._output_file())

    async def describe_end(self, error: Exception) -> str:
        """Kill what is left of a process that ended; describe its end, which `error` showed."""
        code = await self.kill(patience_s=_EXIT_LIMIT_S)
        return f"its process ended with code {code} ({type(error).__name__})" + self._last_output()

    async def write_stack(self) -> str:
        """Have a process that hangs write its stack into its log; return the end of an error message that says so."""
        if self._log is None or self._process is None:
            return ""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STACK_LIMIT_S):
                await self._process.wait()
        return self.where()

    def where(self) -> str:
        """Return the end of an error message about a call whose stack is in the log."""
        if self._log is None:
            return ""
        self._log.drain()
        return f"; where it was: {self._log.path}"

    def _last_output(self) -> str:
        if self._log is None:
            return ""
        self._log.drain()
        line = self._log.last_line()
        return f"; its last output: {line}" + self._output_file() if line else ""

    def _output_file(self) -> str:
        return f"\noutput of user code: {self._log.path}" if self._log is not None and self._log.path.exists() else ""

    def send(self, packed: bytes) -> None:
        """Send a request to the running process; `receive` raises if it has ended."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(ConnectionError):
                send(self._process.stdin, packed)

    async def receive(self) -> dict[str, Any]:
        """Return the next message of the running process.

        Raises:
            Exception: those of `BROKEN`, if the process has ended.

        """
        if self._process is None or self._process.stdout is None:
            raise EOFError("it was killed")
        output = self._process.stdout
        head = await output.readexactly(LENGTH_BYTES)
        body: dict[str, Any] = msgpack.unpackb(await output.readexactly(length_of(head)))
        return body

    async def kill(self, patience_s: float = 0.0) -> int | None:
        """Close the process's input, wait up to `patience_s` for its exit, and kill its process group.

        Returns:
            The exit code, None if no process was running.

        """
        if self._process is None:
            return None
        process, self._process = self._process, None
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(patience_s):
                await process.wait()
        except TimeoutError:
            pass  # killed below
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return await process.wait()


async def start_all(processes: Iterable[UserCodeProcess], waits: Waits, subject: str) -> None:
    """Start several processes of one job; `subject` names the user's code in the list of waits.

    Raises:
        ConfigError: see `UserCodeProcess.start`.

    """
    starting = [*processes]
    limit_s = max((process.import_limit_s for process in starting), default=IMPORT_LIMIT_S)
    async with waits.on(subject, because="import of the user's code", limit_s=limit_s + 5):
        await asyncio.gather(*(process.start() for process in starting))


# --- The user's function that skips prompts. It runs in the trainer's process, in a thread ----------------------------


_FIELD = "data.curriculum.function"


def load_skip_function(path: str, prompts: Sequence[Prompt]) -> SkipFunction:
    """Return the function `module:function` in the form that the curriculum calls.

    Raises:
        ConfigError: it cannot be imported, is not a function, or does not take the arguments `means`, `step` and
            `columns`. The returned function raises it if the user's function raises, or returns neither True nor False.

    """
    function = load_user_function(_FIELD, path, ("means", "step", "columns"), "curriculum function")

    def skips(means: Sequence[float], step: int, row: int) -> bool:
        try:
            # Copies: what the function changes would reach the reward.
            found = function(list(means), step, copy.deepcopy(prompts[row].columns))
        except Exception as error:
            given = {"prompt": prompts[row].given, **prompts[row].columns, "means": list(means)}
            raise ConfigError(
                f"{_FIELD}: for prompt {row + 1} at step {step + 1}, {path} raised {describe_error(error, given)}"
            ) from error
        if not isinstance(found, bool | np.bool_):
            hint = ": is there a `return`?" if found is None else ": return True or False"
            raise ConfigError(
                f"{_FIELD}: for prompt {row + 1} at step {step + 1}, {path} returned {describe_value(found)}{hint}"
            )
        return bool(found)

    return skips


# --- The user's loss function. It runs in the trainer's process, on the trainer's tensors -----------------------------


def load_loss(path: str) -> TokenLoss:
    """Return the loss function `module:function`.

    Raises:
        ConfigError: it cannot be imported, is not a function, or does not take one micro-batch. The returned function
            raises it if the user's function raises.

    """
    function = load_user_function("algorithm.loss", path, ("batch",), "loss function")

    def loss(batch: TokenBatch) -> Tensor:
        try:
            return cast("Tensor", function(batch))
        except Exception as error:
            raise ConfigError(f"algorithm.loss: {path} raised {describe_error(error)}") from error

    return loss
