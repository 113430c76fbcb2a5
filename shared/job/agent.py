"""The interface of a user's agent: a program that calls the model as OpenAI's API has it, and returns its reward.

Users import `Session` from `rlboost.agents`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from rlboost.shared.job.environment import Step
from rlboost.shared.job.priced_model import BudgetSpent
from rlboost.shared.job.sessions import key_of_start
from rlboost.shared.user_code.errors import describe_error
from rlboost.shared.user_code.functions import MAX_REWARD, InvalidUserFunction, check_arguments, load, split_cost


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


Agent = Callable[[Session, dict[str, Any]], Any]
"""`agent(session, row)` returns the reward, or `{"score": reward, "cost": cost}`, or an awaitable of it. It may have a
method `rows(split)`, which returns its own data rows."""


def agent_factory(path: str, arguments: Mapping[str, Any]) -> Callable[[], AgentRun]:
    """Return what makes the runs of a job file's agent; see `load_agent`."""
    return partial(AgentRun, load_agent(path, arguments))


def load_agent(path: str, arguments: Mapping[str, Any]) -> Agent:
    """Return a job file's agent; this runs the user's code.

    Args:
        path: `package.module:function`, called with a session, a row and the arguments; or a class, whose one instance
            for the process is made with the arguments and called with a session and a row.
        arguments: keyword arguments.

    Raises:
        ForbiddenFunction: a job file may not name it; nothing was imported.
        InvalidUserFunction: it does not take these arguments.
        Exception: whatever the user's code raises.

    """
    function = load(path, "agent")
    check_arguments(path, arguments)
    given = () if isinstance(function, type) else ("session", "row")
    try:
        inspect.signature(function).bind(*given, **arguments)
    except (TypeError, ValueError) as error:
        called = ", ".join((*given, *(f"{name}=..." for name in arguments)))
        raise InvalidUserFunction(f"it is called with ({called}): {error}") from error
    if not isinstance(function, type):
        return partial(function, **arguments)
    if not any("__call__" in vars(base) for base in function.__mro__):  # before its code runs
        raise InvalidUserFunction("its instances cannot be called: give it a method __call__(self, session, row)")
    agent: Agent = function(**arguments)
    return agent


class AgentRun:
    """Runs the agent of one session, as an environment with one turn.

    The turn's text has the session. The step has the reward, and as its observation an `AgentEnd`.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    async def reset(self, row: dict[str, Any], seed: int) -> None:
        """Take the data row."""
        del seed
        self._row = row

    async def step(self, text: str) -> Step:
        """Run the agent to its end."""
        start, given = secrets.token_hex(4), json.loads(text)
        reward, cost, raised = await self.run(Session(**{**given, "key": key_of_start(given["key"], start)}))
        return Step(json.dumps(AgentEnd(start, raised)), reward, done=True, cost=cost)

    async def run(self, session: Session) -> tuple[float, float, str]:
        """Run the agent; return its reward and cost, and what it raised, empty if it returned a reward."""
        try:
            reward, cost = split_cost(await self._result(session))
            return _checked(reward), cost, ""
        except BudgetSpent:  # the job fails, not the session
            raise
        except Exception as error:  # noqa: BLE001 - the user's agent may raise anything
            return 0.0, 0.0, describe_error(error, self._row)

    async def _result(self, session: Session) -> object:
        call = partial(self._agent, session, self._row)
        if inspect.iscoroutinefunction(self._agent) or inspect.iscoroutinefunction(type(self._agent).__call__):
            return await call()
        result = await asyncio.get_running_loop().run_in_executor(None, call)
        return await result if inspect.isawaitable(result) else result


class AgentEnd(NamedTuple):
    """How one start of an agent ended."""

    start: str
    """Its name, which its API key had."""
    raised: str
    """What it raised, for people; empty if it returned a reward."""


def _checked(reward: Any) -> float:
    if reward is None:
        raise TypeError("the agent returned None: return its reward, a finite number")
    if isinstance(reward, str | bytes):
        raise TypeError(f"the agent returned {reward!r}: return its reward, a finite number, as float(...)")
    number = float(reward)
    if not abs(number) <= MAX_REWARD:
        raise ValueError(f"the agent returned the reward {number}: return a finite number, at most {MAX_REWARD:g}")
    return number
