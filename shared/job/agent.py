"""The interface of a user's agent: a program that calls the model as OpenAI's API has it, and returns its reward.

Users import `Session` from `rlboost.agents`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlboost.shared.job.environment import Step
from rlboost.shared.job.sessions import key_of_start
from rlboost.shared.user_code.functions import InvalidUserFunction, check_arguments, load

MAX_THREADS = 256
"""Agents without `async` that one process runs at the same time."""


@dataclass(frozen=True, slots=True)
class Session:
    """What an agent needs to call the model: pass `base_url` and `key` to its client of OpenAI's API.

    Each session has its own. Pass them on as arguments, not in environment variables: one process runs many agents.
    """

    base_url: str
    key: str
    """The API key, which is for this session only."""
    sample: str
    """Name of the sample, as in events and on the page."""
    step: int
    is_eval: bool
    """Whether the sample is for an evaluation."""


Agent = Callable[..., Any]
"""`f(session, row, **arguments)` returns the reward, or an awaitable of it."""


def agent_factory(path: str, arguments: Mapping[str, Any]) -> Callable[[], AgentRun]:
    """Return what makes the runs of a job file's agent; this imports the user's code.

    Raises:
        ForbiddenFunction: a job file may not name it; nothing was imported.
        InvalidUserFunction: it does not take a session, a row and the arguments.

    """
    function = load(path, "agent")
    check_arguments(path, arguments)
    try:
        inspect.signature(function).bind(None, None, **arguments)
    except (TypeError, ValueError) as error:
        raise InvalidUserFunction(
            f"it is called with (session, row{''.join(f', {name}=...' for name in arguments)}): {error}"
        ) from error
    return partial(AgentRun, function, arguments)


class AgentRun:
    """Runs the agent of one session, as an environment with one turn.

    The turn's text has the session, and the step the reward and the name of this start.
    """

    _threads: ThreadPoolExecutor | None = None

    def __init__(self, function: Agent, arguments: Mapping[str, Any]) -> None:
        """Run a function, with these arguments after the session and the row."""
        self._function, self._arguments = function, arguments

    async def reset(self, row: dict[str, Any], seed: int) -> None:
        """Take the data row."""
        del seed
        self._row = row

    async def step(self, text: str) -> Step:
        """Run the agent to its end; return its reward."""
        start, given = secrets.token_hex(4), json.loads(text)
        session = Session(**{**given, "key": key_of_start(given["key"], start)})
        call = partial(self._function, session, self._row, **self._arguments)
        if inspect.iscoroutinefunction(self._function):
            reward = await call()
        else:
            if AgentRun._threads is None:
                AgentRun._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="agent")
            reward = await asyncio.get_running_loop().run_in_executor(AgentRun._threads, call)
            if inspect.isawaitable(reward):
                reward = await reward
        if reward is None:
            raise TypeError("the agent returned None: return its reward, a finite number")
        return Step(start, reward, done=True)
