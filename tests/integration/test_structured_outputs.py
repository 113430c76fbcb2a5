"""OpenAI's own client asks a real manager and real torch workers for JSON, while workers are killed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from openai import BadRequestError
from pydantic import BaseModel, Field

from rlboost.services.rollout_worker.adapters.manager_http import fetch_tokenizer
from tests.support.doc_snippets import blocks_in
from tests.support.generated_docs import ROOT
from tests.support.model_folder import write_character_tokenizer
from tests.support.service_process import TOKEN
from tests.support.serving_system import TEMPLATE, System, until
from tests.support.tool_model import ADD

pytest.importorskip("xgrammar")

MESSAGES: list[Any] = [{"role": "user", "content": "Who is it?"}]


class Friend(BaseModel):
    name: str = Field(min_length=1, max_length=12)
    likes: list[Literal["tea", "chess"]] = Field(max_length=3)
    age: int = Field(ge=0, le=130)


LONG: dict[str, Any] = {
    "type": "object",
    "properties": {
        "names": {
            "type": "array",
            "items": {"type": "string", "minLength": 12, "maxLength": 12},
            "minItems": 24,
            "maxItems": 24,
        }
    },
    "required": ["names"],
}


def json_schema(schema: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    system = System(tmp_path_factory.mktemp("structured"), TEMPLATE)
    write_character_tokenizer(system.model)
    try:
        system.start()
        until(lambda: len(system.openai.models.list().data) == 2)
        until(lambda: any(worker["state"] == "ready" for worker in system.http.get("/v1/workers").json()))
        yield system
    finally:
        system.close()


@pytest.mark.parametrize("seed", range(4))
def test_random_model_answers_with_the_fields_of_a_class(system: System, seed: int) -> None:
    made = system.openai.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Friend, max_tokens=400, seed=seed
    )
    assert made.choices[0].finish_reason == "stop"
    assert isinstance(made.choices[0].message.parsed, Friend)
    by_responses = system.openai.responses.parse(
        model="tiny", input="Who is it?", text_format=Friend, max_output_tokens=400
    )
    assert isinstance(by_responses.output_parsed, Friend)


@pytest.mark.parametrize("form", [{"type": "json_object"}, json_schema({"type": "object"})])
def test_any_object_is_an_object(system: System, form: Any) -> None:
    made = [
        system.openai.chat.completions.create(
            model="tiny", messages=MESSAGES, response_format=form, max_tokens=200, seed=seed
        ).choices[0]
        for seed in range(6)
    ]
    whole = [choice.message.content or "" for choice in made if choice.finish_reason == "stop"]
    assert whole
    assert all(isinstance(json.loads(text), dict) for text in whole)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "([+-]?(0|[1-9][0-9]{0,9}))"}, r"[+-]?(0|[1-9][0-9]{0,9})"),
        ({"choice": ["tea", 'a "b\\"', "green tea"]}, r'tea|a "b\\"|green tea'),
    ],
)
def test_text_of_vllms_other_forms_is_whole(system: System, form: Any, pattern: str) -> None:
    for seed in range(4):
        made = system.openai.chat.completions.create(
            model="tiny", messages=MESSAGES, extra_body={"structured_outputs": form}, max_tokens=40, seed=seed
        ).choices[0]
        assert made.finish_reason == "stop"
        assert re.fullmatch(pattern, made.message.content or "")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_forced_call_is_made(system: System, choice: Any) -> None:
    other = {"type": "function", "function": {"name": "stop"}}
    tools: Any = [ADD, other]
    made: Any = system.openai.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=tools, tool_choice=choice, max_tokens=400, seed=1
    ).choices[0]
    (call,) = made.message.tool_calls or []
    arguments = json.loads(call.function.arguments)
    assert made.finish_reason == "tool_calls"
    assert call.function.name in (("add", "stop") if choice == "required" else ("add",))
    assert call.function.name == "stop" or {type(arguments[name]) for name in ("a", "b")} == {int}


def test_answer_with_tools_is_a_call_or_the_json(system: System) -> None:
    kinds, tools = set(), list[Any]([ADD])
    for seed in range(8):
        message = (
            system.openai.chat.completions.create(
                model="tiny",
                messages=MESSAGES,
                tools=tools,
                response_format=json_schema(Friend.model_json_schema()),
                max_tokens=400,
                seed=seed,
            )
            .choices[0]
            .message
        )
        if not message.tool_calls:
            Friend.model_validate_json(message.content or "")
        kinds.add(bool(message.tool_calls))
    assert kinds == {True, False}


def test_anthropics_form_of_the_answer_is_kept(system: System) -> None:
    form = {"format": {"type": "json_schema", "schema": Friend.model_json_schema()}}
    body = {"model": "tiny", "max_tokens": 400, "messages": MESSAGES, "output_config": form}
    answer = system.http.post("/v1/messages", json=body).json()
    Friend.model_validate_json(answer["content"][0]["text"])


def test_json_is_whole_and_has_all_logprobs_after_a_worker_was_killed(system: System) -> None:
    text, places, killed, finish = "", list[Any](), False, None
    for chunk in system.openai.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        response_format=json_schema(LONG),
        max_tokens=900,
        logprobs=True,
        top_logprobs=3,
        temperature=0.8,
        stream=True,
    ):
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        places += choice.logprobs.content or [] if choice.logprobs else []
        finish = choice.finish_reason or finish
        if not killed and len(text) > 60:
            system.kill_the_worker_that_runs()
            killed = True
    assert finish == "stop"
    assert [len(name) for name in json.loads(text)["names"]] == [12] * 24
    assert system.audit()["migrations"] == 1
    assert "".join(place.token for place in places).removesuffix("<eos>") == text
    for place in places:
        values = [one.logprob for one in place.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert place.logprob <= values[0]


def test_schema_that_cannot_be_enforced_is_refused_before_any_worker(system: System) -> None:
    before = system.audit()["serving"]["requested"]
    schema = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 3}}}
    with pytest.raises(BadRequestError, match=r"response_format: schema\.properties\.n: multipleOf") as caught:
        system.openai.chat.completions.create(model="tiny", messages=MESSAGES, response_format=json_schema(schema))
    assert caught.value.param == "response_format"
    with pytest.raises(BadRequestError, match="ends with a stop token"):
        system.openai.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            response_format={"type": "json_object"},
            extra_body={"ignore_eos": True},
        )
    with pytest.raises(BadRequestError, match="top_logprobs: give logprobs"):
        system.openai.chat.completions.create(model="tiny", messages=MESSAGES, top_logprobs=3)
    assert system.audit()["serving"]["requested"] == before


def test_documented_answer_is_an_object(system: System) -> None:
    block = blocks_in(ROOT / "docs" / "agents.md", "python")[1]
    module: dict[str, Any] = {"client": system.openai, "messages": MESSAGES}
    exec(block.replace('model="agent"', 'model="tiny", max_tokens=900, seed=3'), module)
    assert isinstance(module["parsed"].choices[0].message.parsed, module["Guess"])


async def test_tokenizer_that_cannot_be_fetched_is_empty(system: System) -> None:
    for url, job in ((system.manager.url, system.remote), ("http://127.0.0.1:1", system.job)):
        assert await fetch_tokenizer(url, TOKEN, job, limit_s=1.0) == ""
    assert json.loads(await fetch_tokenizer(system.manager.url, TOKEN, system.job))["model"]["type"] == "WordLevel"
