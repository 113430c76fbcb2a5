"""The reward, environment and agent sections of a job file.

With judges: how they are asked, and how a verdict is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from string import Formatter
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from rlboost.shared.ids import MAX_GROUP_SIZE
from rlboost.shared.user_code import MAX_REWARD, PROGRAM_AGENT
from rlboost.shared.validation import FunctionPath, Section

MAX_RETRIES = 15
PARSE_S = 1.0
"""How long the search for a verdict may take: some expressions need years for some answers."""
MAX_PROGRAMS = 64
"""Programs that one process runs as agents at the same time, unless the job file says otherwise."""
PROMPT, COMPLETION = "prompt", "completion"
"""What a judge's prompt may name besides the columns of the data."""


class JudgeSpec(Section):
    """A generating model of `models` that reads each completion and writes a verdict."""

    model: str = Field(min_length=1)
    """Name of the model under `models`."""
    prompt: str = Field(min_length=1)
    """What the judge is asked, as a user's message: text with `{prompt}`, `{completion}` and columns of the data, such
    as `{answer}`. A brace is written twice."""
    parse: str = Field(r"-?\d+(?:\.\d+)?", min_length=1)
    """Regular expression that finds the verdict: its last match in the answer counts, or that match's first group. By
    default a number. A search that takes more than a second finds none."""
    values: dict[str, float] = Field(default_factory=dict)
    """Verdict -> its reward, such as `{"yes": 1, "no": 0}`, upper case or lower; without it the verdict is a number."""
    retries: int = Field(2, ge=0, le=MAX_RETRIES)
    """How often the judge is asked again, with another seed, after an answer without a verdict. Then the reward of the
    completion is missing."""
    temperature: float = Field(1.0, ge=0, le=10)
    """Sampling temperature of its answers; 0 is greedy, and needs `retries: 0`."""
    max_tokens: int = Field(256, ge=1)
    """Maximum tokens of an answer."""

    @field_validator("prompt")
    @classmethod
    def _shows_the_completion(cls, value: str) -> str:
        if COMPLETION not in placeholders(value):
            raise ValueError("shows the judge no completion: write {completion} where it belongs")
        return value

    @field_validator("parse")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"is no regular expression: {error}") from error
        return value

    @field_validator("values")
    @classmethod
    def _are_rewards(cls, value: dict[str, float]) -> dict[str, float]:
        for verdict, reward in value.items():
            if not abs(reward) <= MAX_REWARD:
                raise ValueError(f"{verdict!r} is worth {reward}: give a number up to {MAX_REWARD:g}")
        return {verdict.lower(): reward for verdict, reward in value.items()}

    @model_validator(mode="after")
    def _retries_can_differ(self) -> Self:
        if self.temperature == 0 and self.retries:
            raise ValueError("at temperature 0 each answer is the same: set judge.retries to 0")
        return self

    @property
    def tries(self) -> int:
        """Return how often a completion is judged at most."""
        return 1 + self.retries

    def reward_in(self, answer: str) -> float | None:
        """Return the reward that the judge's answer means, None if it has no verdict that is found within a second."""
        import regex  # noqa: PLC0415 - only trainers have it; unlike `re` it has a time limit

        try:
            matches = list(regex.finditer(self.parse, answer, flags=regex.V0, timeout=PARSE_S))
        except (regex.error, TimeoutError):
            return None
        if not matches:
            return None
        text = (matches[-1].group(1) if matches[-1].re.groups else matches[-1].group()) or ""
        if self.values:
            return self.values.get(text.strip().lower())
        try:
            reward = float(text)
        except ValueError:
            return None
        return reward if math.isfinite(reward) and abs(reward) <= MAX_REWARD else None


def placeholders(template: str) -> set[str]:
    """Return the names in braces in a judge's prompt.

    Raises:
        ValueError: a brace is alone, or what is between two is no plain name.

    """
    names = set()
    try:
        parsed = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{error}: write a brace that is meant as text twice") from error
    for _, name, form, conversion in parsed:
        if name is None:
            continue
        if not name or form or conversion or re.search(r"[.\[\]]", name):
            raise ValueError(f"{{{name}}} is no name of a column: write a brace that is meant as text twice")
        names.add(name)
    return names


def column_problem(template: str, columns: Collection[str], where: str) -> str:
    """Return what is wrong with the names in a judge's prompt, empty if `columns` has them; `where` these are."""
    missing = sorted(placeholders(template) - {PROMPT, COMPLETION, *columns})
    if not missing:
        return ""
    return (
        f"reward.judge.prompt: names {', '.join(missing)}, and {where} has "
        f"{', '.join(sorted(columns)) or 'no columns besides the prompt'}: correct the name, or write a brace that is "
        "meant as text twice"
    )


def question(template: str, prompt: object, completion: object, columns: Mapping[str, Any]) -> str:
    """Return what a judge is asked about one completion; chat messages become text.

    Raises:
        KeyError: the template names a column that the row does not have.

    """
    values = {**columns, PROMPT: _text(prompt), COMPLETION: _text(completion)}
    parts = Formatter().parse(template)
    return "".join(text + ("" if name is None else str(values[name])) for text, name, _, _ in parts)


def _text(given: object) -> str:
    """Return text, or chat messages as text: a single one's content, or `role: content` lines."""
    if not isinstance(given, list):
        return str(given)
    if len(given) == 1:
        return str(given[0].get("content") or "")
    return "\n".join(f"{message.get('role')}: {message.get('content') or ''}" for message in given)


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
    model: str | None = Field(None, min_length=1)
    """Reward model that scores each completion, instead of a function: a folder or Hugging Face id, or the name of one
    under `models`, which workers serve."""
    judge: JudgeSpec | None = None
    """Model that scores each completion, instead of a function."""
    weight: float = Field(1.0, ge=-MAX_WEIGHT, le=MAX_WEIGHT)
    """Factor of its rewards in the sum; 0 only logs them."""
    name: str = Field("", pattern=r"^[A-Za-z0-9._-]*$")
    """Logged as `reward/<name>/mean`; by default the function's name, the judge's model, `remote` or `model`."""
    style: RewardStyle = "auto"
    """Calling convention; `auto` detects it by the names of the parameters."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function, in addition to the columns of the data."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum(given is not None for given in (self.function, self.url, self.model, self.judge)) != 1:
            raise ValueError("give either function, url, model or judge")
        if self.function is None and (self.style != "auto" or self.arguments):
            raise ValueError("style and arguments are for a function; a url gets the columns of the data")
        return self

    @property
    def default_name(self) -> str:
        """Return the name of a part that has none of its own."""
        if self.function is not None:
            return self.function.rpartition(":")[2]
        if self.judge is not None:
            return self.judge.model
        return "model" if self.model is not None else "remote"

    @property
    def source(self) -> str:
        """Return the function's path, the url, the model, or the name of the judge's model."""
        return self.function or self.url or self.model or (self.judge.model if self.judge else "")


class RewardSpec(Section):
    """The reward: one function, HTTP service, reward model or judge, or several of them with weights.

    A function has TRL's signature, `f(prompts, completions, completion_ids, **columns)`, or verl's,
    `f(data_source, solution_str, ground_truth, extra_info)`; it may be async.
    """

    function: FunctionPath | None = None
    """`package.module:function`."""
    url: Address = None
    """HTTP service that scores a group, instead of a function."""
    model: str | None = Field(None, min_length=1)
    """Reward model (`kind: reward`) that scores each completion, instead of a function: a folder or Hugging Face id, or
    the name of one under `models`, which workers serve."""
    judge: JudgeSpec | None = None
    """Model that scores each completion, instead of a function."""
    style: RewardStyle = "auto"
    """Calling convention; `auto` detects it by the names of the parameters."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function, in addition to the columns of the data."""
    functions: Annotated[tuple[RewardPart, ...], Field(min_length=1)] | None = None
    """Several functions, services, models or judges, whose weighted sum is the reward; replaces `function`, `url`,
    `model`, `judge`, `style` and `arguments`."""
    timeout_s: float = Field(5.0, gt=0)
    """Seconds for one group, all functions and services together; then the group is dropped."""
    workers: int = Field(1, ge=1, le=MAX_USER_PROCESSES)
    """Processes that run reward functions, each with all reward models that workers do not serve; with `url`,
    concurrent requests. At most 64, or 16 for each CPU."""

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if sum(given is not None for given in (self.function, self.url, self.model, self.judge, self.functions)) != 1:
            raise ValueError(
                "give either function, or functions: a list of {function, weight, name}, or url, or model, or judge"
            )
        if self.functions is not None and (self.style != "auto" or self.arguments):
            raise ValueError("style and arguments belong to each of functions")
        if len(set(names := [part.name for part in self.parts])) < len(names):
            raise ValueError(f"two functions are called {max(names, key=names.count)!r}: give each a name")
        return self

    @property
    def parts(self) -> tuple[RewardPart, ...]:
        """Return all functions, each with a name; a single function has an empty one."""
        if self.functions is None:
            names = ("function", "url", "model", "judge", "style", "arguments")
            return (RewardPart(**{name: getattr(self, name) for name in names}),)
        return tuple(
            part if part.name else part.model_copy(update={"name": part.default_name}) for part in self.functions
        )


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
    """Conversations or sessions that one process serves at a time; by default 64 for agents that are programs."""
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
    leader: str = ""
    """Id of the job whose agent calls this policy: in the jobs that the manager derives from `policies`, in no file."""

    @property
    def runs_here(self) -> bool:
        """Return True if the job's own trainer runs the agent."""
        return not self.remote and not self.leader

    @model_validator(mode="before")
    @classmethod
    def _limit_programs(cls, given: Any) -> Any:
        """Take fewer programs at a time: one takes far more memory than a coroutine."""
        if isinstance(given, dict) and given.get("function") == PROGRAM_AGENT:
            return {"concurrency": MAX_PROGRAMS, **given}
        return given

    @model_validator(mode="after")
    def _runs_in_one_place(self) -> Self:
        if self.remote == (self.function is not None):
            raise ValueError("give either function, or remote: true if hosts elsewhere run the agents")
        defaults = type(self).model_fields
        changed = [name for name in ("workers", "concurrency") if getattr(self, name) != defaults[name].default]
        if self.remote and changed:
            raise ValueError(f"{changed[0]}: a host of agents has its own: remove it, and see 'rlboost agents --help'")
        return self
