"""An agent that solves tasks in Harbor's format: commands in a container, and the task's tests return the reward.

`agent: {function: "rlboost.agents.harbor:Tasks", arguments: {folder: tasks, network: false}}`, with `data: {train:
"agent:rows"}`.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import tomllib
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field, ValidationError, model_validator

from rlboost.agents import Session
from rlboost.sandbox import Sandbox, SandboxBroken, build, require_engine
from rlboost.shared.validation import Section, describe

BASH: Any = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in a shell and return its output.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
MAX_RETRIES = 10
"""Of a call of the model: they outlast a restart of the rollout manager."""
START_LIMIT_S = 120.0
_N_POOLS = 16
_ENDS = ("session_limit", "context_length_exceeded")
"""Refusals of a call after which the task is verified as it is."""
_UNUSED = {"mcp_servers", "skills_dir", "gpu_types", "healthcheck", "artifacts", "steps"}
"""Keys that a file may have without a value."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([MG])(?:i?B)?", re.IGNORECASE)
_PREPARE = (
    "rm -rf /tests /logs/verifier && mkdir -p /tests /logs/verifier && chmod 777 /logs/verifier"  # may run as any user
)


class _Section(Section):
    @model_validator(mode="before")
    @classmethod
    def _without_unused(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if name not in _UNUSED or value not in ([], {}, "")}


def _checked_env(env: dict[str, str]) -> dict[str, str]:
    for name, value in env.items():
        if "${" in value:
            raise ValueError(f"env.{name} is {value!r}: variables of this machine are not supported, write the value")
    return env


Env = Annotated[dict[str, str], AfterValidator(_checked_env)]


class EnvironmentSection(_Section):
    """The container."""

    build_timeout_sec: float = Field(600.0, gt=0)
    docker_image: str | None = None
    cpus: float = Field(1.0, gt=0)
    memory_mb: int = Field(2048, ge=16)
    storage_mb: int | None = None
    storage: str | None = None
    """Neither of the two is enforced."""
    gpus: Literal[0] = 0
    os: Literal["linux"] = "linux"
    network_mode: Literal["public", "no-network"] = "public"
    allow_internet: bool = True
    env: Env = Field(default_factory=dict)
    workdir: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _in_mib(cls, given: Any) -> Any:
        """Read the older key `memory`, such as `2G`."""
        if not isinstance(given, dict) or given.get("memory") is None:
            return given
        if (found := _SIZE.fullmatch(str(given["memory"]))) is None:
            raise ValueError(f"memory is {given['memory']!r}: write memory_mb")
        mib = int(float(found[1]) * (1024 if found[2].upper() == "G" else 1))
        return {**{name: value for name, value in given.items() if name != "memory"}, "memory_mb": mib}

    @property
    def asks_for_internet(self) -> bool:
        """Return True if its commands are meant to reach the internet."""
        return self.allow_internet and self.network_mode == "public"


class AgentSection(_Section):
    """The model's commands."""

    timeout_sec: float = Field(600.0, gt=0)
    user: str | int | None = None


class VerifierSection(AgentSection):
    """The tests."""

    env: Env = Field(default_factory=dict)


class TaskFile(_Section):
    """A task.toml."""

    version: str = "1.0"
    schema_version: str = "1.0"
    source: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    task: dict[str, Any] = Field(default_factory=dict)
    solution: dict[str, Any] = Field(default_factory=dict)
    environment: EnvironmentSection = EnvironmentSection()
    agent: AgentSection = AgentSection()
    verifier: VerifierSection = VerifierSection()


class Task(NamedTuple):
    """A task's folder."""

    folder: Path
    file: TaskFile
    instruction: str

    @classmethod
    def read(cls, folder: Path) -> Task:
        """Read a task; raises ValueError if it cannot be run as it says."""
        try:
            given = tomllib.loads((folder / "task.toml").read_text())
            task = cls(folder, TaskFile.model_validate(given), (folder / "instruction.md").read_text())
        except ValidationError as error:
            raise ValueError(f"{folder}/task.toml: {'; '.join(describe(error, TaskFile, 'file'))}") from error
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder} cannot be read: {error}") from error
        if not (folder / "tests/test.sh").is_file():
            raise ValueError(f"{folder} has no tests/test.sh")
        if found := sorted((folder / "environment").glob("*compose*.y*ml")):
            raise ValueError(f"{found[0]}: tasks of several containers are not supported")
        if task.file.environment.docker_image is None and not (folder / "environment/Dockerfile").is_file():
            raise ValueError(
                f"{folder} has neither environment/Dockerfile nor environment.docker_image in its task.toml"
            )
        return task

    @property
    def limit_s(self) -> float:
        """Return how long its container and its commands may take, without the model."""
        file = self.file
        return file.environment.build_timeout_sec + START_LIMIT_S + file.agent.timeout_sec + file.verifier.timeout_sec


class Tasks:
    """The tasks of a folder. A session is one try at a task, in a container of its own."""

    def __init__(self, folder: str, eval_folder: str | None = None, *, network: bool | None = None) -> None:
        """Read the tasks.

        Args:
            folder: has a folder for each task of `data.train`.
            eval_folder: the same for evaluations.
            network: True lets tasks that ask for the internet reach the network of this machine, False gives none to
                any; needed if a task asks for it.

        Raises:
            ModuleNotFoundError: `openai` is not installed.
            ValueError: a task cannot be run as it says.

        """
        try:
            import openai  # noqa: PLC0415 - an optional package
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{error}: pip install 'openai>=1.60'", name=error.name) from error
        self._openai = openai
        self._network = network
        self._splits = {"train": _read_all(folder)}
        if eval_folder is not None:
            self._splits["eval"] = _read_all(eval_folder)
        self._tasks = {str(task.folder): task for tasks in self._splits.values() for task in tasks}
        asking = [name for name, task in self._tasks.items() if task.file.environment.asks_for_internet]
        if asking and network is None:
            raise ValueError(
                f"{asking[0]} asks for the internet: set network in agent.arguments, true for the network of the "
                "machine that runs the agents, false for none"
            )
        self.least_timeout_s = max(task.limit_s for task in self._tasks.values())
        """See `shared.job.agent.Agent`."""
        self._http = cycle(openai.DefaultAsyncHttpxClient() for _ in range(_N_POOLS))

    def rows(self, split: str) -> Iterator[dict[str, Any]]:
        """Yield a row for each task: those of `folder` for the split `train`, else those of `eval_folder`.

        Raises:
            SandboxUnavailable: no Docker engine answers here.
            ValueError: the split has no tasks.

        """
        name = "train" if split == "train" else "eval"
        if name not in self._splits:
            raise ValueError(f"the split {split!r} has no tasks: set eval_folder in agent.arguments")
        asyncio.run(require_engine())  # a job would lose all of its sessions
        for task in self._splits[name]:
            yield {"prompt": [{"role": "user", "content": task.instruction}], "task": str(task.folder)}

    async def __call__(self, session: Session, row: dict[str, Any]) -> float:
        """Return the reward that the task's tests give.

        Raises:
            SandboxUnavailable: the engine or the container failed.
            RuntimeError: the tests returned no reward.

        """
        task = self._tasks[row["task"]]
        environment = task.file.environment
        image, start_limit_s = environment.docker_image, START_LIMIT_S
        if image is None:
            image = await build(task.folder / "environment", limit_s=environment.build_timeout_sec)
        else:  # it may have to be pulled
            start_limit_s += environment.build_timeout_sec
        async with await Sandbox.start(
            image,
            purpose=session.sample,
            cpus=environment.cpus,
            memory_mb=environment.memory_mb,
            network=bool(self._network) and environment.asks_for_internet,
            env=environment.env,
            start_limit_s=start_limit_s,
        ) as sandbox:
            await self._solve(session, task, list(row["prompt"]), sandbox)
            try:
                return await verified(sandbox, task)
            except SandboxBroken:
                return 0.0

    async def _solve(self, session: Session, task: Task, messages: list[Any], sandbox: Sandbox) -> None:
        """Run the model's commands until it calls none, or a limit is reached."""
        client = self._openai.AsyncOpenAI(
            base_url=session.base_url, api_key=session.key, http_client=next(self._http), max_retries=MAX_RETRIES
        )
        left_s = task.file.agent.timeout_sec
        clock = asyncio.get_running_loop().time
        while left_s > 0:
            try:
                answer = await client.chat.completions.create(model="policy", messages=messages, tools=[BASH])
            except self._openai.BadRequestError as error:
                if error.code in _ENDS:
                    return
                raise
            message: Any = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return
            for call in message.tool_calls:
                started = clock()
                text = await _called(call.function, task, sandbox, left_s)
                left_s -= clock() - started
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


async def _called(function: Any, task: Task, sandbox: Sandbox, left_s: float) -> str:
    """Return what the model gets for a call."""
    try:
        command = json.loads(function.arguments)["command"]
    except (ValueError, TypeError, KeyError):
        command = None
    if function.name != "bash" or not isinstance(command, str):
        return 'Call the tool bash, with {"command": "..."}.'
    if left_s <= 0:
        return "There is no time left."
    result = await sandbox.exec(
        command, timeout_s=left_s, user=_text(task.file.agent.user), workdir=task.file.environment.workdir
    )
    if result.timed_out:
        return f"{result.output}\n[killed: there is no time left]"
    return result.output if result.code == 0 else f"{result.output}\n[exit code {result.code}]"


async def verified(sandbox: Sandbox, task: Task) -> float:
    """Run a task's tests and return their reward.

    Raises:
        SandboxBroken: they cannot be run after what the model did.
        SandboxUnavailable: the engine or the container failed.
        RuntimeError: they returned no reward.

    """
    await sandbox.stop_processes()
    prepared = await sandbox.exec(_PREPARE, user="0")
    if prepared.code != 0:
        raise SandboxBroken(f"the tests cannot be written: {prepared.output}")
    await sandbox.upload(task.folder / "tests", "/tests")
    verifier = task.file.verifier
    result = await sandbox.exec(
        "bash /tests/test.sh",
        timeout_s=verifier.timeout_sec,
        user=_text(verifier.user),
        env=verifier.env,
        workdir=task.file.environment.workdir,
    )
    if result.timed_out:
        raise RuntimeError(f"{task.folder}: the tests have not ended within {verifier.timeout_sec:g} s")
    text = await sandbox.read("/logs/verifier/reward.txt", 4096)
    values = await sandbox.read("/logs/verifier/reward.json", 65536)
    try:
        return reward_of(text, values)
    except ValueError as error:
        raise RuntimeError(f"{task.folder}: {error}: {result.output[-500:]}") from error


def reward_of(text: bytes | None, values: bytes | None) -> float:
    """Return the reward in the files of a verifier: reward.txt, or `reward` in reward.json; ValueError without one."""
    found = list[float]()
    try:
        if text is not None:
            found.append(float(text))
        if values is not None:
            found.append(float(json.loads(values)["reward"]))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"its tests wrote no reward, but {text!r}, {values!r}") from error
    if not found or not all(map(math.isfinite, found)) or len(set(found)) > 1:
        raise ValueError(f"its tests wrote the rewards {found}, not one number")
    return found[0]


def _text(user: str | int | None) -> str | None:
    return None if user is None else str(user)


def _read_all(folder: str) -> list[Task]:
    found = sorted(path.parent for path in Path(folder).glob("*/task.toml"))
    if not found:
        raise ValueError(f"{folder} has no tasks: a folder with a task.toml for each")
    return [Task.read(path) for path in found]
