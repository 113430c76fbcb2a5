"""An agent that is a program: `agent: {function: "rlboost.agents.program:run", arguments: {command: [./agent.sh]}}`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from typing import Any

from rlboost.agents import Session
from rlboost.shared.framing import send

MAX_OUTPUT_BYTES = 1 << 20
"""The most that a program may write to its standard output."""
END_LIMIT_S = 5.0
"""How long a killed program may take to end."""


async def run(session: Session, row: dict[str, Any], command: Sequence[str]) -> float:
    """Run a program for one session, and return the number in the last line of its standard output.

    It finds the session in `OPENAI_BASE_URL` and `OPENAI_API_KEY`, as OpenAI's library does, or in `ANTHROPIC_BASE_URL`
    and `ANTHROPIC_AUTH_TOKEN`, and reads the data row as one line of JSON from its standard input. What it writes to
    standard error goes to the agent's log. Processes that it has started end with it.

    Args:
        session: the session.
        row: the data row.
        command: the program's file, in the folder in which the trainer was started, and its arguments.

    Raises:
        RuntimeError: it ended with another code than 0.
        ValueError: the last line is no number, or it wrote too much.

    """
    environment = {
        # Anthropic's library would send both.
        **{name: value for name, value in os.environ.items() if name != "ANTHROPIC_API_KEY"},
        "OPENAI_BASE_URL": session.base_url,
        "OPENAI_API_KEY": session.key,
        "ANTHROPIC_BASE_URL": session.base_url.removesuffix("/v1"),
        "ANTHROPIC_AUTH_TOKEN": session.key,
        "SESSION_SAMPLE": session.sample,
    }
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, env=environment, start_new_session=True)
    )
    try:
        process = await asyncio.shield(starting)
    except asyncio.CancelledError:  # the program may run already
        await _end(await starting)
        raise
    try:
        output, _ = await asyncio.gather(_read(process), _write(process, json.dumps(row).encode() + b"\n"))
        code = await process.wait()
    finally:
        await _end(process)
    if code != 0:
        raise RuntimeError(f"{command[0]} ended with code {code}")
    lines = output.decode(errors="replace").strip().splitlines()
    try:
        return float(lines[-1] if lines else "")
    except ValueError as error:
        raise ValueError(
            f"the last line that {command[0]} wrote is {lines[-1:]}: print the reward, a number"
        ) from error


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill a program and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):  # a process in a session of its own may hold its output open
        async with asyncio.timeout(END_LIMIT_S):
            await process.communicate()


async def _read(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    output = b""
    while block := await process.stdout.read(1 << 16):
        output += block
        if len(output) > MAX_OUTPUT_BYTES:
            raise ValueError(f"it wrote more than {MAX_OUTPUT_BYTES} bytes to standard output: write to standard error")
    return output


async def _write(process: asyncio.subprocess.Process, line: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):  # it need not read
        send(process.stdin, line)
        await process.stdin.drain()
        process.stdin.close()
