"""A process for the user's code, which may hang, raise, print, or kill itself. Inside is `children.child`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from typing import Any, NamedTuple

import msgpack

from shared.errors import ConfigError

IMPORT_LIMIT_S = 60.0
_LENGTH_BYTES = 4
_LAST_WORDS_S = 1.0
"""A process that has closed its output gets so long to end with its own exit code."""


class Program(NamedTuple):
    """What is run, and how errors speak of it."""

    module: str
    argument: str
    field: str
    """Of the job file."""
    names: str
    """The functions that it names."""


class Ended(Exception):
    """The process has ended in the middle of a call; says how."""


class OwnProcess:
    """One process, started again when it is gone."""

    def __init__(self, program: Program) -> None:
        """Prepare; `start` starts it."""
        self._program = program
        self._process: Process | None = None

    async def start(self) -> bool:
        """Start the process unless it is there; tell whether it was not.

        Raises:
            ConfigError: the user's code cannot be imported, or is not what it should be.

        """
        if self._process is not None and self._process.returncode is None:
            return False
        await self.kill()  # what one that has ended by itself had started
        module, argument, field, names = self._program
        # Its own process group, so that what the user's code has started goes with it; and no secrets of ours.
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, argument),
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,
            env=_environment(),
        )
        try:
            async with asyncio.timeout(IMPORT_LIMIT_S):
                answer = await self._receive()
        except (TimeoutError, EOFError) as error:
            await self.kill()
            reason = "took too long" if isinstance(error, TimeoutError) else "ended its process"
            raise ConfigError(f"{field}: importing {names} {reason}") from error
        except asyncio.CancelledError:
            # Half started: its first word would be taken for an answer.
            await self.kill()
            raise
        if "failed" in answer:
            await self.kill()
            raise ConfigError(f"{field}: {answer['failed']}")
        return True

    async def call(self, request: bytes, limit_s: float) -> dict[str, Any]:
        """Send a request and return its answer. After any error the process is gone, and all that it has started.

        Raises:
            TimeoutError: none came in time.
            Ended: the process has ended.

        """
        try:
            async with asyncio.timeout(limit_s):
                return await self._exchange(request)
        except TimeoutError:
            await self.kill()
            raise
        except (EOFError, OSError, ValueError, msgpack.UnpackException) as error:
            code = await self.kill(patience_s=_LAST_WORDS_S)
            raise Ended(f"its process ended with code {code} ({type(error).__name__})") from error
        except asyncio.CancelledError:
            # The process is in the middle of an answer that nobody will read.
            await self.kill()
            raise

    async def _exchange(self, request: bytes) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(len(request).to_bytes(_LENGTH_BYTES, "big") + request)
        await self._process.stdin.drain()
        return await self._receive()

    async def _receive(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        head = await self._process.stdout.readexactly(_LENGTH_BYTES)
        body: dict[str, Any] = msgpack.unpackb(await self._process.stdout.readexactly(int.from_bytes(head, "big")))
        return body

    async def kill(self, patience_s: float = 0.0) -> int | None:
        """End the process's input and, when it ends or its time is up, all it started; return its exit code."""
        if self._process is None:
            return None
        process, self._process = self._process, None
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(patience_s):
                await process.wait()
        except TimeoutError:
            pass  # it is killed
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return await process.wait()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("RLBOOST_")}
