"""Environments of the package `verifiers` as agents, without a system."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from rlboost.agents import Session
from rlboost.agents.verifiers import Environment
from rlboost.services.trainer.adapters.agent_rows import rows_of
from rlboost.shared.data.rows import read_rows
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.agent import load_agent
from rlboost.shared.job.reward import AgentSpec
from rlboost.shared.job.spec import InvalidJob, parse
from rlboost.shared.process.modules import modules_hidden
from rlboost.shared.user_code import VERIFIERS_AGENT, ForbiddenFunction
from tests.support.jobs import job_file

ENVIRONMENTS = "tests.support.verifiers_environments"
NOWHERE = Session("http://127.0.0.1:9/v1", "key", "sample", 0, is_eval=False)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Undo what an environment of `verifiers` does to its process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def agent(function: str = VERIFIERS_AGENT, **arguments: Any) -> AgentSpec:
    return AgentSpec(function=function, arguments=arguments)


def test_rows_of_an_environment_are_read_from_a_process() -> None:
    rows = list(read_rows("agent:rows", "train", agent_rows=rows_of(agent(env_id=ENVIRONMENTS, n=300))))
    assert len(rows) == 300
    assert rows[299].place == "row 300"
    assert rows[5].values["prompt"] == [{"role": "system", "content": "Answer."}, {"role": "user", "content": "1+2?"}]
    assert rows[5].values["example_id"] == 5
    assert rows[5].values["answer"] == "5"


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (agent(env_id="no-such-environment"), "Could not import 'no-such-environment' environment"),
        (agent(env_id="datasets"), "set RLBOOST_TRAINER_USER_MODULES=datasets"),
        (agent("tests.support.agents:run"), "it has no rows: name a class with a method"),
        (agent("tests.support.agents:Dies"), "ended its process, after 256 rows"),
        (agent("tests.support.agents:Dies", values=[3]), "row 1: tests.support.agents:Dies returned no mapping"),
    ],
)
def test_rows_that_cannot_be_read_are_an_error_with_the_cause(spec: AgentSpec, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        list(read_rows("agent:rows", agent_rows=rows_of(spec)))


def test_rows_of_an_agent_need_one_in_the_job_file() -> None:
    with pytest.raises(InvalidJob, match="agent:rows are the rows of the job's agent, and it has none"):
        parse(job_file(data={"train": "agent:rows"}))


async def test_only_faults_of_the_model_are_results() -> None:
    environment = Environment(ENVIRONMENTS, kind="broken")
    sandbox, bug, *_ = environment.rows("train")
    with pytest.raises(RuntimeError, match=r"SandboxError.*no machine is left"):
        await environment(NOWHERE, sandbox)
    with pytest.raises(KeyError):
        await environment(NOWHERE, bug)


@pytest.mark.parametrize(
    ("chain", "is_result"),
    [
        (["EmptyModelResponseError"], True),
        (["OverlongPromptError", "BadRequestError"], True),
        (["ToolCallError", "ValueError"], True),
        (["ToolCallError", "SandboxError"], False),
        (["ModelError", "APIConnectionError"], False),
        (["InvalidModelResponseError"], False),
        (["TunnelError"], False),
    ],
)
def test_error_of_a_rollout_is_a_result_or_a_fault_by_its_causes(chain: list[str], *, is_result: bool) -> None:
    assert Environment(ENVIRONMENTS).is_of_model(chain) == is_result


def test_environment_that_compares_rollouts_is_refused() -> None:
    with pytest.raises(ValueError, match="for all rollouts of a group together"):
        Environment(ENVIRONMENTS, kind="compares")


def test_missing_package_is_named_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "verifiers", raising=False)
    with modules_hidden("verifiers"), pytest.raises(ModuleNotFoundError, match="pip install 'verifiers>="):
        Environment(ENVIRONMENTS)


def test_environment_of_a_module_that_no_job_may_name_is_not_imported() -> None:
    with pytest.raises(ForbiddenFunction, match="standard library"):
        load_agent(VERIFIERS_AGENT, {"env_id": "owner/antigravity"})
