"""OpenAI's own client as an agent with tools, against a real manager and workers with a random model.

The tokens of the model are whole calls, words and ends of turns, so that its random answers have calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError

from tests.support.doc_snippets import blocks_in
from tests.support.generated_docs import ROOT
from tests.support.serving_system import CALLS, System, calling_system
from tests.support.tool_model import ADD


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with calling_system(tmp_path_factory.mktemp("tools")) as system:
        yield system


def test_agent_continues_with_exact_tokens_after_its_calls_streamed_or_not(system: System) -> None:
    messages: list[Any] = [{"role": "user", "content": "t3 t4"}]
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": messages,
        "tools": [ADD],
        "extra_headers": {"X-Session-ID": "agent"},
        "extra_body": {"return_token_ids": True},
    }
    tokens: list[int] = []
    n_calls = 0
    for seed in range(12):
        made: Any = system.openai.chat.completions.create(**asked, seed=seed)
        (choice,) = made.choices
        assert made.prompt_token_ids[: len(tokens)] == tokens
        calls = choice.message.tool_calls or []
        written = [token for token in choice.token_ids if token in CALLS]
        assert [json.loads(call.function.arguments)["a"] for call in calls] == written
        assert choice.finish_reason == ("tool_calls" if calls else "stop")
        assert "<tool_call>" not in (choice.message.content or "")

        chunks: list[Any] = list(system.openai.chat.completions.create(**asked, seed=seed, stream=True))
        streamed = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        assert [call.function.arguments for call in streamed] == [call.function.arguments for call in calls]
        assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == choice.token_ids

        tokens = [*made.prompt_token_ids, *choice.token_ids]
        n_calls += len(calls)
        messages.append(choice.message.model_dump())
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "t5"} for call in calls]
        messages += [] if calls else [{"role": "user", "content": "t6"}]
    assert n_calls > 2


def test_agent_by_responses_continues_with_its_session(system: System) -> None:
    items: list[Any] = [{"role": "user", "content": "t3 t4"}]
    tool = {"type": "function", **ADD["function"]}
    asked: dict[str, Any] = {"model": "tiny", "input": items, "tools": [tool], "store": False}
    asked["extra_headers"] = {"X-Session-ID": "responses"}
    n_before, n_calls = 0, 0
    for _ in range(8):
        with system.openai.responses.stream(**asked) as stream:
            kinds = [event.type for event in stream]
            made: Any = stream.get_final_response()
        assert kinds[0] == "response.created"
        assert kinds[-1] == f"response.{made.status}"
        assert made.usage.input_tokens > n_before
        n_before = made.usage.total_tokens
        calls = [item for item in made.output if item.type == "function_call"]
        assert {json.loads(call.arguments)["a"] for call in calls} <= set(CALLS)
        n_calls += len(calls)
        items += [item.model_dump(exclude={"parsed_arguments"}) for item in made.output]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "t5"} for call in calls]
        items += [] if calls else [{"role": "user", "content": "t6"}]
    assert n_calls


def test_wrong_tools_are_refused_by_name(system: System) -> None:
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("tool_choice", {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}}),
        ("tools", {"tools": [ADD, ADD]}),
        ("chat_template_kwargs", {"extra_body": {"chat_template_kwargs": {"messages": []}}}),
    ]
    for param, more in wrong:
        with pytest.raises(BadRequestError) as caught:
            system.openai.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "t3"}], **more)
        assert caught.value.param == param


def test_call_that_no_token_of_the_model_can_begin_is_refused(system: System) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "t3"}], "tools": [ADD]}
    with pytest.raises(BadRequestError, match="allows none of the model's tokens"):
        system.openai.chat.completions.create(model="tiny", tool_choice="required", **asked)


def test_models_have_their_context_where_the_manager_can_read_it(system: System) -> None:
    lengths = {model.id: model.model_dump()["max_model_len"] for model in system.openai.models.list()}
    config = json.loads((system.model / "config.json").read_text())
    assert lengths == {system.job: config["max_position_embeddings"], system.remote: None}


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_documented_agent_runs(system: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".rlboost").mkdir()
    (tmp_path / ".rlboost" / "config.json").write_text('{"url": "", "token": ""}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("openai.OpenAI", lambda **_: system.openai)
    block = blocks_in(ROOT / "docs" / "agents.md", "python")[0]
    module: dict[str, Any] = {}
    for _ in range(12):
        exec(block.replace('model="agent"', 'model="tiny"'), module)
        assert len(module["messages"]) == 2 + len(module["answer"].choices[0].message.tool_calls or [])
