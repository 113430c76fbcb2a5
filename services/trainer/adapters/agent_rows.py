"""The data rows that a job's agent has itself, read from a process that runs the user's code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from threading import Timer
from typing import IO, Any

import msgpack

from rlboost.shared.data.rows import AGENT_ROWS, Row
from rlboost.shared.errors import ConfigError
from rlboost.shared.framing import LENGTH_BYTES, length_of
from rlboost.shared.job.reward import AgentSpec
from rlboost.shared.settings import environment_without_settings
from rlboost.shared.user_code import USER_MODULES_SETTING

LIMIT_S = 1800.0
"""For all rows; the agent may download a data set."""


def rows_of(agent: AgentSpec | None) -> Callable[[str], Iterator[Row]] | None:
    """Return what yields the rows of an agent for a split; None without an agent."""
    return None if agent is None else partial(_read, agent)


def _read(agent: AgentSpec, split: str, limit_s: float = LIMIT_S) -> Iterator[Row]:
    """Yield the rows of an agent.

    Raises:
        ConfigError: it has none, or its code raised, ended its process or took too long.

    """
    module = "rlboost.services.trainer.children.agent_rows"
    process = subprocess.Popen(  # noqa: S603 - our own module; which of the user's it imports, it checks
        [sys.executable, "-m", module, agent.model_dump_json(), split],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env=environment_without_settings(USER_MODULES_SETTING),
    )
    assert process.stdout is not None
    timer = Timer(limit_s, _kill, [process.pid])
    timer.start()
    number = 0
    try:
        while "end" not in (message := _message(process.stdout)):
            if "failed" in message:
                raise ConfigError(f"{AGENT_ROWS}: {message['failed']}")
            for values in message["rows"]:
                if not isinstance(values, dict):
                    raise ConfigError(f"{AGENT_ROWS}, row {number + 1}: {agent.function} returned no mapping")
                number += 1
                yield Row(AGENT_ROWS, f"row {number}", values)
    except EOFError as error:
        why = "ended its process" if timer.is_alive() else f"has not returned all within {limit_s:g} s"
        raise ConfigError(f"{AGENT_ROWS}: {agent.function} {why}, after {number} rows") from error
    finally:
        timer.cancel()
        _kill(process.pid)
        process.stdout.close()
        process.wait()


def _message(output: IO[bytes]) -> dict[str, Any]:
    head = output.read(LENGTH_BYTES)
    body = output.read(length_of(head))
    if len(head) < LENGTH_BYTES or len(body) < length_of(head):
        raise EOFError
    message: dict[str, Any] = msgpack.unpackb(body)
    return message


def _kill(group: int) -> None:
    """Kill a process and what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
