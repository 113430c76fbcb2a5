"""The reward, environment and agent sections of a job file."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from rlboost.shared.ids import MAX_GROUP_SIZE
from rlboost.shared.job.judge import JudgeSpec
from rlboost.shared.validation import FunctionPath, Section

SPARE_TURNS = 4
"""Turns of a session beyond `agent.max_turns`, for an agent that is started again and does not repeat its calls."""
REPLACEMENTS = 2
"""Conversations of a group that begin again, unless the job file says otherwise."""
MAX_USER_PROCESSES = 4096
"""Of one kind; a trainer allows fewer on a small machine."""
MAX_CONCURRENCY = 65_536
"""Calls in flight in one process; more would only fill its memory."""
MAX_THREADS = 1024
"""Threads of one process that runs environments."""
RewardStyle = Literal["auto", "trl", "verl"]
"""The calling convention of a reward function; `auto` detects it by the names of the parameters."""


def _address(value: str | None) -> str | None:
    if value is not None and not re.fullmatch(r"https?://[^\s/]+.*", value):
        raise ValueError(f"{value!r} is not of the form http://host:port/path")
    return value


Address = Annotated[str | None, AfterValidator(_address)]


MAX_WEIGHT = 1e15
"""So that no weighted reward is infinite."""


class RewardPart(Section):
    """One of several reward functions."""

    function: FunctionPath | None = None
    """`package.module:function`."""
    url: Address = None
    """HTTP service that scores a group, instead of a function."""
    judge: JudgeSpec | None = None
    """Model that scores each completion, instead of a function."""
    weight: float = Field(1.0, ge=-MAX_WEIGHT, le=MAX_WEIGHT)
    """Factor of its rewards in the sum; 0 only logs them."""
    name: str = Field("", pattern=r"^[A-Za-z0-9._-]*$")
    """Logged as `reward/<name>/mean`; by default the function's name, the judge's model, or `remote`."""
    style: RewardStyle = "auto"
    """Calling convention; `auto` detects it by the names of the parameters."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function, in addition to the columns of the data."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum(given is not None for given in (self.function, self.url, self.judge)) != 1:
            raise ValueError("give either function, url or judge")
        if self.function is None and (self.style != "auto" or self.arguments):
            raise ValueError("style and arguments are for a function; a url gets the columns of the data")
        return self

    @property
    def source(self) -> str:
        """Return the function's path, the url, or the name of the judge's model."""
        return self.function or self.url or (self.judge.model if self.judge else "")


class RewardSpec(Section):
    """The reward: one function, one HTTP service, one judge, or several of them with weights.

    A function has TRL's signature, `f(prompts, completions, completion_ids, **columns)`, or verl's,
    `f(data_source, solution_str, ground_truth, extra_info)`; it may be async.
    """

    function: FunctionPath | None = None
    """`package.module:function`."""
    url: Address = None
    """HTTP service that scores a group, instead of a function."""
    judge: JudgeSpec | None = None
    """Model that scores each completion, instead of a function."""
    style: RewardStyle = "auto"
    """Calling convention; `auto` detects it by the names of the parameters."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function, in addition to the columns of the data."""
    functions: Annotated[tuple[RewardPart, ...], Field(min_length=1)] | None = None
    """Several functions, services or judges, whose weighted sum is the reward; replaces `function`,
    `url`, `judge`, `style` and `arguments`."""
    timeout_s: float = Field(5.0, gt=0)
    """Seconds for one group, all functions and services together; then the group is dropped."""
    workers: int = Field(1, ge=1, le=MAX_USER_PROCESSES)
    """Processes that run reward functions; with `url`, concurrent requests. At most 64, or 16 for each CPU."""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if sum(given is not None for given in (self.function, self.url, self.judge, self.functions)) != 1:
            raise ValueError("give either function, or functions: a list of {function, weight, name}, or url, or judge")
        if self.functions is not None and (self.style != "auto" or self.arguments):
            raise ValueError("style and arguments belong to each of functions")
        if len(set(names := [part.name for part in self.parts])) < len(names):
            raise ValueError(f"two functions are called {max(names, key=names.count)!r}: give each a name")
        return self

    @property
    def parts(self) -> tuple[RewardPart, ...]:
        """Return all functions, each with a name; a single function has an empty one."""
        if self.functions is None:
            given = {name: getattr(self, name) for name in ("function", "url", "judge", "style", "arguments")}
            return (RewardPart(**given),)
        return tuple(
            part if part.name else part.model_copy(update={"name": _default_name(part)}) for part in self.functions
        )


def _default_name(part: RewardPart) -> str:
    return part.judge.model if part.judge else (part.function or ":remote").rpartition(":")[2]


class ConversationSpec(Section):
    """What environments and agents have in common."""

    function: FunctionPath | None = None
    """`package.module:function`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""
    max_turns: int = Field(8, ge=1)
    """Maximum number of model turns in one conversation."""
    timeout_s: float = Field(30.0, gt=0)
    """Seconds for one step of the environment."""
    workers: int = Field(1, ge=1, le=MAX_USER_PROCESSES)
    """Processes that run its code. At most 64, or 16 for each CPU."""
    concurrency: int = Field(1024, ge=1, le=MAX_CONCURRENCY)
    """Conversations or sessions that one process serves at the same time."""
    replacements: int | None = Field(None, ge=0, le=MAX_GROUP_SIZE)
    """Conversations or sessions of each group that begin again in place of one that a fault ended: user code
    raised, took too long, or its process died. By default 2, or fewer if a step has too many turns for more."""
    min_group_size: int | None = Field(None, ge=1, le=MAX_GROUP_SIZE)
    """A training group trains without the samples that were lost for good, if it has at least this many others; else
    it is dropped. By default half of `algorithm.group_size`, at least two."""

    def least(self, group_size: int) -> int:
        """Return the least samples with which a training group is trained."""
        return min(group_size, self.min_group_size or max(2, (group_size + 1) // 2))


class EnvironmentSpec(ConversationSpec):
    """The environment of multi-turn jobs; see `shared.job.environment`."""

    function: FunctionPath
    """`package.module:function`, or a class, that returns a new environment for each conversation."""
    threads: int = Field(1, ge=1, le=MAX_THREADS)
    """Threads of one process that run methods and tools without `async`, which block theirs; with
    more than one, their code must be thread-safe."""


class AgentSpec(ConversationSpec):
    """The agent of a job; see `shared.job.agent`."""

    function: FunctionPath | None = None
    """`package.module:function`, called with a session and the data row, that runs the agent and
    returns its reward; may be async. Or a class: its one instance for each process is called so."""
    remote: bool = False
    """Hosts elsewhere take the sessions and run the agents (`rlboost agents`), in place of `function`."""
    max_turns: int = Field(16, ge=1)
    """Maximum number of calls of the model in one session, repeated ones not counted."""
    max_tokens: int | None = Field(None, ge=1)
    """Maximum number of tokens that the model generates in one session; no limit by default."""
    timeout_s: float = Field(600.0, gt=0)
    """Seconds for one session."""

    @model_validator(mode="after")
    def _runs_in_one_place(self) -> Self:
        if self.remote == (self.function is not None):
            raise ValueError("give either function, or remote: true if hosts elsewhere run the agents")
        defaults = type(self).model_fields
        changed = [name for name in ("workers", "concurrency") if getattr(self, name) != defaults[name].default]
        if self.remote and changed:
            raise ValueError(f"{changed[0]}: a host of agents has its own: remove it, and see 'rlboost agents --help'")
        return self
