"""The interface of a user's agent: a program that calls the model as OpenAI's API has it, and returns its reward.

Users import `Session` from `rlboost.agents`.

An agent's calls are part of a sample by their API key. A trainer opens a session for a sample and gives its agent the
manager's URL and a key. Each call of the agent with that key is a turn of the sample: the manager requests it under an
id that follows from the session, and stores it with the session once it is finished. The hash `names.session` has the
record under `SESSION`, each turn that was called for under `names.session_opened`, and each one that has ended under
`names.session_finished`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import re
import reprlib
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from rlboost.shared.http.access import is_valid_signature, sign
from rlboost.shared.ids import SampleId
from rlboost.shared.job.environment import Step
from rlboost.shared.job.priced_model import spent_budget
from rlboost.shared.messages import Sampling
from rlboost.shared.streams import names
from rlboost.shared.user_code import (
    MAX_REWARD,
    InvalidUserFunction,
    check_arguments,
    checked_cost,
    describe_error,
    load,
)

SESSION = "session"
TASK = "task"
"""Field of a session: what the host of a remote agent gets (`SessionTask`)."""
LEASED = "leased"
"""Field of a session: the start of its agent that a host runs; calls of earlier ones are refused."""
REWARDED = "rewarded"
"""Field of a session: how its host has ended it (a `SessionRewarded` as JSON); further calls are refused."""
KEY_PREFIX = "sk-rlboost-session-"
_ANSWER = re.compile(r"(?:cmpl-|resp_|msg_)([0-9a-f]{16})")
_KEY = re.compile(re.escape(KEY_PREFIX) + r"(.+-[0-9a-f]{1,16})-([0-9a-f]{64})(?:\.([0-9A-Za-z]{1,32}))?")


class SessionRecord(BaseModel):
    """One session, as its trainer opened it."""

    model_config = ConfigDict(frozen=True)

    sample: int
    """Its id: the packed id of a sample, or of the first turn that would replace it."""
    version: int
    """The weight version that trains on it."""
    max_staleness: int = 0
    first: int
    """Group number of its first turn."""
    stride: int
    """Distance of the group numbers of its turns."""
    max_turns: int
    """Of one start of its agent."""
    n_ids: int
    """Of turns of all starts."""
    seed: int
    """Of its turns; a turn is drawn by the sum of this and its id."""
    sampling: Sampling
    """Of its turns; `max_tokens` is the most of one turn."""
    vocab_size: int = 0
    max_tokens: int = 0
    """Of one start of its agent, generated in all its turns; 0 for no limit."""
    is_over: bool = False
    """True once its agent has ended: further calls are refused."""

    def turn_id(self, number: int) -> int:
        """Return the packed id of a turn, counted from 0."""
        return SampleId.unpack(self.sample)._replace(group=self.first + number * self.stride, member=0).pack()


class SessionTask(BaseModel):
    """What the host of a remote agent gets with its session."""

    model_config = ConfigDict(frozen=True)

    row: dict[str, Any]
    """The data row, with the prompt under `prompt`."""
    arguments: dict[str, Any] = {}
    """Further arguments of the agent."""
    sample: str
    """Name of the sample, as in events and on the page."""
    step: int
    is_eval: bool
    timeout_s: float


class Offer(BaseModel):
    """A session that hosts may take, and the host that has taken it last."""

    model_config = ConfigDict(frozen=True)

    start: str = ""
    """Name of the start of its agent; empty before the first."""
    until: float = 0.0
    """When its lease ends, unless the host renews it (Unix seconds)."""
    expires_at: float = 0.0
    """When the session's time is over (Unix seconds)."""
    n_starts: int = 0


class SessionId(NamedTuple):
    """Names one session of a job."""

    job_id: str
    sample: int
    start: str = ""
    """Which start of its agent: one that is started again, after a crash, repeats its calls."""

    @property
    def redis_key(self) -> str:
        """Return the key of the session's hash."""
        return names.session(self.job_id, self.sample)

    @property
    def subject(self) -> str:
        """Return the session as text, without the start."""
        return f"{self.job_id}-{self.sample:x}"

    @classmethod
    def parse(cls, text: str) -> SessionId:
        """Invert `str`."""
        subject, _, start = text.rpartition(".")
        job_id, _, sample = subject.rpartition("-")
        return cls(job_id, int(sample, 16), start)

    def __str__(self) -> str:
        """Return the session as text."""
        return f"{self.subject}.{self.start}"


def session_key(token: str, session: SessionId) -> str:
    """Return the API key of a session, which the system's token signs."""
    return f"{KEY_PREFIX}{session.subject}-{sign(token, 'session', session.subject)}"


def key_of_start(key: str, start: str) -> str:
    """Return a session's key for one start of its agent; `start` has letters and digits."""
    return f"{key}.{start}"


def session_of_key(token: str, key: str) -> SessionId | None:
    """Return the session that a key belongs to, None if it is no valid key."""
    if (found := _KEY.fullmatch(key)) is None:
        return None
    subject, signature, start = found.groups(default="")
    if not is_valid_signature(signature, token, "session", subject):
        return None
    return SessionId.parse(f"{subject}.{start}")


def turn_of_answer(answer: str) -> int:
    """Return the packed id of the turn that an answer is; raises ValueError if it is not the `id` of an answer."""
    if (found := _ANSWER.fullmatch(answer)) is None:
        raise ValueError(f"{answer!r} is not an answer's id: give the `id` of a chat completion, response or message")
    return int(found[1], 16)


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
    policies: Mapping[str, Session] = field(default_factory=dict)
    """The job's other policies by name: each has a session of its own, with the same sample and step."""


MAX_REWARDS = 1024
"""Answers of a session with rewards of their own."""
_ALL = '{"reward": 0.5}, which may have "cost" and "rewards": {answer.id: 1.0}'
_POLICIES = '{"reward": 0.5, "policies": {NAME: 1.0}}'

Agent = Callable[[Session, dict[str, Any]], Any]
"""`agent(session, row)` returns the reward, or `{"reward": 0.5}` with `cost` or `rewards` (see `Rewards`), or an
awaitable of either. It may have a method `rows(split)`, which returns its own data rows, and `least_timeout_s`, the
least `agent.timeout_s` that its sessions need."""


def agent_factory(path: str, arguments: Mapping[str, Any], timeout_s: float = math.inf) -> Callable[[], AgentRun]:
    """Return what makes the runs of a job file's agent; see `load_agent` and `check_time`."""
    agent = load_agent(path, arguments)
    check_time(agent, timeout_s)
    return partial(AgentRun, agent)


def check_time(agent: Agent, timeout_s: float) -> None:
    """Raise InvalidUserFunction if an agent's sessions need more time than a job gives them."""
    needed_s = float(getattr(agent, "least_timeout_s", 0.0))
    if timeout_s < needed_s:
        raise InvalidUserFunction(f"agent.timeout_s is {timeout_s:g}: its sessions may need {needed_s:g} s or more")


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
        keys = {name: key_of_start(key, start) for name, key in given.pop("policies", {}).items()}
        session = Session(**{**given, "key": key_of_start(given["key"], start)})
        policies = {name: replace(session, key=key) for name, key in keys.items()}
        returned, raised = await self.run(replace(session, policies=policies))
        end = AgentEnd(start, raised, returned.rewards, returned.policies)
        return Step(json.dumps(end), returned.reward, done=True, cost=returned.cost)

    async def run(self, session: Session) -> tuple[Rewards, str]:
        """Run the agent; return its rewards, and what it raised, empty if it returned them."""
        try:
            return _checked(await self._result(session), session.policies), ""
        except Exception as error:  # the user's agent may raise anything
            if (spent := spent_budget(error)) is not None:  # the job fails, not the session
                raise spent from error
            return NO_REWARDS, describe_error(error, self._row)

    async def _result(self, session: Session) -> object:
        call = partial(self._agent, session, self._row)
        if inspect.iscoroutinefunction(self._agent) or inspect.iscoroutinefunction(type(self._agent).__call__):
            return await call()
        result = await asyncio.get_running_loop().run_in_executor(None, call)
        return await result if inspect.isawaitable(result) else result


class Rewards(NamedTuple):
    """What an agent returned."""

    reward: float
    """Of the session."""
    rewards: Mapping[str, float]
    """Id of an answer -> the reward of what ends with it."""
    cost: float
    """Of the session, such as dollars; not part of the reward."""
    policies: Mapping[str, Rewards] = {}
    """Other policy -> what its session gets."""


NO_REWARDS = Rewards(0.0, {}, 0.0)


class AgentEnd(NamedTuple):
    """How one start of an agent ended."""

    start: str
    """Its name, which its API key had."""
    raised: str
    """What it raised, for people; empty if it returned a reward."""
    rewards: Mapping[str, float]
    """See `Rewards`."""
    policies: Mapping[str, Rewards] = {}
    """See `Rewards`."""


def _checked(returned: Any, policies: Collection[str] = ()) -> Rewards:
    given = returned.get("policies", {}) if isinstance(returned, Mapping) else {}
    if not isinstance(given, Mapping) or given.keys() != set(policies):
        has = ", ".join(sorted(policies)) or "none"
        raise TypeError(
            f"the agent returned {reprlib.repr(returned)}, and the other policies of its job are {has}: reward each of "
            f"them, as {_POLICIES}"
        )
    if policies:
        own = _checked({name: value for name, value in returned.items() if name != "policies"})
        return own._replace(policies={str(name): _checked(value) for name, value in given.items()})
    if not isinstance(returned, Mapping):
        return Rewards(_number(returned), {}, 0.0)
    rewards = returned.get("rewards", {})
    if not {"reward"} <= returned.keys() <= {"reward", "rewards", "cost"} or not isinstance(rewards, Mapping):
        raise TypeError(f"the agent returned {reprlib.repr(returned)}: return its reward, or {_ALL}")
    if len(rewards) > MAX_REWARDS:
        raise ValueError(f"the agent returned rewards of {len(rewards)} answers: at most {MAX_REWARDS} have their own")
    for answer in rewards:
        turn_of_answer(str(answer))
    of_answers = {str(answer): _number(reward) for answer, reward in rewards.items()}
    return Rewards(_number(returned["reward"]), of_answers, checked_cost(returned.get("cost")))


def _number(reward: Any) -> float:
    if reward is None:
        raise TypeError("the agent returned None: return its reward, a finite number")
    if isinstance(reward, str | bytes):
        raise TypeError(f"the agent returned {reward!r}: return its reward, a finite number, as float(...)")
    number = float(reward)
    if not abs(number) <= MAX_REWARD:
        raise ValueError(f"the agent returned the reward {number}: return a finite number, at most {MAX_REWARD:g}")
    return number
