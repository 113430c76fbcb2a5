"""A process for user code, which may hang, raise, print, or kill its process. `children.child` runs inside it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgpack

from rlboost.services.trainer.adapters.user_code.log import UserCodeLog
from rlboost.shared.errors import ConfigError
from rlboost.shared.process.waiting import Waits
from rlboost.shared.settings import environment_without_settings
from rlboost.shared.user_code.allowed import USER_MODULES_SETTING
from rlboost.shared.user_code.errors import MAX_CHARS
from rlboost.shared.wire.framing import LENGTH_BYTES, length_of, pack

IMPORT_LIMIT_S = 60.0
_EXIT_LIMIT_S = 1.0
"""How long a process that has closed its output may take to exit by itself, with its own exit code."""
_STACK_LIMIT_S = 0.2
"""How long a process may take to write into its log where it hangs."""


class UserProgram(NamedTuple):
    """What a process runs, and how error messages name it."""

    module: str
    """The child's module, run with `python -m`."""
    argument: str
    field: str
    """The job file's field."""
    functions: str
    """The user's functions, as the field names them."""


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

    async def start(self) -> bool:
        """Start the process unless it runs; return True if it was started.

        Raises:
            ConfigError: the user's code cannot be imported, or is not what the field requires.

        """
        if self._process is not None and self._process.returncode is None:
            return False
        await self.kill()  # what a process that has ended by itself had started
        module, argument, field, functions = self._program
        # Its own process group, to kill what the user's code has started; and no secrets in its environment.
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, argument),
            stdin=PIPE,
            stdout=PIPE,
            stderr=None if self._log is None else self._log.open(),
            start_new_session=True,
            env=environment_without_settings(USER_MODULES_SETTING),
        )
        try:
            async with asyncio.timeout(IMPORT_LIMIT_S):
                answer = await self._receive()
        except (TimeoutError, EOFError) as error:
            await self.kill()
            reason = (
                f"took longer than {IMPORT_LIMIT_S:g} s" if isinstance(error, TimeoutError) else "ended its process"
            )
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
        try:
            packed = pack(request)
        except (OverflowError, TypeError, ValueError) as error:
            raise UserCodeFault(
                "unserializable", f"a column cannot be sent to {self._program.functions}: {error}"
            ) from error
        try:
            async with asyncio.timeout(limit_s):
                answer = await self._exchange(packed)
        except TimeoutError:
            try:
                where = await self._write_stack()
            finally:
                await self.kill()
            raise UserCodeFault("timeout", f"no answer within {limit_s:g} s; its process was killed{where}") from None
        except (EOFError, OSError, ValueError, msgpack.UnpackException) as error:
            code = await self.kill(patience_s=_EXIT_LIMIT_S)
            detail = f"its process ended with code {code} ({type(error).__name__})"
            raise UserCodeFault("crashed", detail + self._last_output()) from error
        except asyncio.CancelledError:
            # The next call would receive the answer of this one.
            await self.kill()
            raise
        if "raised" in answer:
            raise UserCodeFault("raised", str(answer["raised"])[:MAX_CHARS] + self._output_file())
        return answer

    async def _write_stack(self) -> str:
        """Have a process that hangs write its stack into its log; return the end of an error message that says so."""
        if self._log is None or self._process is None:
            return ""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STACK_LIMIT_S):
                await self._process.wait()
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

    async def _exchange(self, request: bytes) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(request)
        await self._process.stdin.drain()
        return await self._receive()

    async def _receive(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        head = await self._process.stdout.readexactly(LENGTH_BYTES)
        body: dict[str, Any] = msgpack.unpackb(await self._process.stdout.readexactly(length_of(head)))
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
    async with waits.on(subject, because="import of the user's code", limit_s=IMPORT_LIMIT_S + 5):
        await asyncio.gather(*(process.start() for process in processes))
