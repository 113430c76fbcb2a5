"""Tools of chats by OpenAI's own client, answered by simulated workers with given tokens."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import BadRequestError

from tests.support.serving_site import Site, running_site
from tests.support.tool_model import ADD, WITHOUT_TOOLS, call_text, tool_files

ASKED: list[Any] = [{"role": "user", "content": "3+4?"}]
END = 0


@pytest.fixture(params=[(), ("<tool_call>", "</tool_call>")], ids=["text", "special"])
async def site(request: pytest.FixtureRequest) -> AsyncIterator[Site]:
    async with running_site("a") as site:
        site.files = tool_files(special=request.param)
        yield site


def tokens_of(site: Site, text: str) -> list[int]:
    assert site.files.tokenizer is not None
    return [*site.files.tokenizer.encode(text, add_special_tokens=False), END]


def text_of(site: Site, tokens: list[int]) -> str:
    assert site.files.tokenizer is not None
    return site.files.tokenizer.decode(tokens, skip_special_tokens=False)


async def chat(site: Site, answer: str = "", *, retries: int = 0, **more: Any) -> Any:
    if answer:
        site.answer(tokens_of(site, answer))
    asked: dict[str, Any] = {"model": "j", "messages": ASKED, "tools": [ADD], "max_tokens": 400, **more}
    asked["extra_body"] = {"return_token_ids": True, **asked.get("extra_body", {})}
    return await site.client().with_options(max_retries=retries).chat.completions.create(**asked)


async def test_answer_with_a_call_has_it_in_openais_form(site: Site) -> None:
    made = await chat(site, f"I add.\n{call_text()}")
    (choice,) = made.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I add.")
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "add")
    assert json.loads(call.function.arguments) == {"a": 3, "b": 4}
    assert choice.token_ids == tokens_of(site, f"I add.\n{call_text()}")
    assert "<tools>" in text_of(site, made.prompt_token_ids)
    assert (await chat(site, call_text())).choices[0].message.content is None


async def test_stream_has_the_text_then_whole_calls_then_the_reason(site: Site) -> None:
    answer = f"I add. {call_text()}{call_text('{}')}"
    chunks = [chunk.choices[0] async for chunk in await chat(site, answer, stream=True)]
    assert chunks[0].delta.role == "assistant"
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "I add."
    calls = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in calls] == [(0, "add"), (1, "add")]
    assert [json.loads(call.function.arguments) for call in calls] == [{"a": 3, "b": 4}, {}]
    assert all(call.id and call.type == "function" for call in calls)
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]
    assert not chunks[-1].delta.tool_calls
    assert [token for chunk in chunks for token in chunk.token_ids] == tokens_of(site, answer)
    shown = next(i for i, chunk in enumerate(chunks) if chunk.delta.content)
    assert shown < len(chunks) - 3, "the text does not wait for the calls"


async def test_answer_without_a_call_is_as_without_tools(site: Site) -> None:
    for tools in ([ADD], []):
        made = await chat(site, "Seven.\n", tools=tools)
        assert made.choices[0].finish_reason == "stop"
        assert made.choices[0].message.content == "Seven.\n"
        assert made.choices[0].message.tool_calls is None


async def test_call_that_is_cut_off_is_text_and_the_reason_its_length(site: Site) -> None:
    made = await chat(site, call_text(), max_tokens=10)
    assert (made.choices[0].finish_reason, made.choices[0].message.tool_calls) == ("length", None)
    made = await chat(site, call_text() + "and more", max_tokens=len(tokens_of(site, call_text())))
    assert (made.choices[0].finish_reason, len(made.choices[0].message.tool_calls)) == ("length", 1)


async def test_tool_choice_none_shows_the_tools_and_reads_no_calls(site: Site) -> None:
    made = await chat(site, call_text(), tool_choice="none")
    assert "<tools>" in text_of(site, made.prompt_token_ids)
    assert made.choices[0].message.tool_calls is None
    assert '"arguments"' in made.choices[0].message.content


async def test_one_call_only_leaves_the_others_in_the_text(site: Site) -> None:
    made = await chat(site, call_text() + call_text("{}"), parallel_tool_calls=False)
    (call,) = made.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"a": 3, "b": 4}
    assert '"arguments": {}' in made.choices[0].message.content


@pytest.mark.parametrize(
    ("more", "text", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice: no worker of this job supports it", "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "has no function that", "tool_choice"),
        ({"tool_choice": "some"}, "should be 'none', 'auto', 'required'", "tool_choice"),
        ({"tools": [ADD, ADD]}, "tools: entry 1 has the name 'add'", "tools"),
        ({"tools": "add"}, "tools: 'add' should be a list", "tools"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "parallel_tool_calls"),
    ],
)
async def test_invalid_tools_are_refused_by_name(site: Site, more: dict[str, Any], text: str, param: str) -> None:
    with pytest.raises(BadRequestError, match=text) as caught:
        await chat(site, **more)
    assert caught.value.param == param


async def test_template_without_tools_is_refused_with_what_to_do(site: Site) -> None:
    site.files = tool_files(WITHOUT_TOOLS)
    with pytest.raises(BadRequestError, match=r"does not show tools to the model.*chat_template\.jinja") as caught:
        await chat(site)
    assert caught.value.param == "tools"


async def test_a_repeated_request_has_the_same_ids_of_calls(site: Site) -> None:
    key = {"Idempotency-Key": "k"}
    # What the first try has generated may not be stored yet: the second is then told to try again.
    one, other = [await chat(site, call_text(), retries=5, extra_headers=key) for _ in range(2)]
    assert one.choices[0].message.tool_calls[0].id == other.choices[0].message.tool_calls[0].id


# --- histories and template arguments ---


async def test_history_is_rendered_as_templates_expect_it(site: Site) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 3, "b": 4}'}}
    history = [
        {"role": "developer", "content": "Be brief."},
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "7"}]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "And?"},
    ]
    text = text_of(site, (await chat(site, "ok", messages=history)).prompt_token_ids)
    assert text.startswith("<|im_start|>system\nBe brief.\n<tools>")
    assert f"<|im_start|>assistant\n{call_text()}<|im_end|>\n<|im_start|>tool\n7<|im_end|>" in text
    assert text.endswith("<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n")


async def test_role_developer_stays_where_the_template_knows_it(site: Site) -> None:
    template = "{% for m in messages %}{% if m.role == 'developer' %}D{% else %}S{% endif %}{{ m.content }}{% endfor %}"
    site.files = tool_files(template)
    messages = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]
    assert text_of(site, (await chat(site, "ok", messages=messages, tools=[])).prompt_token_ids) == "DaSb"


async def test_template_arguments_are_passed_to_the_template(site: Site) -> None:
    def given(kwargs: Any) -> dict[str, Any]:
        return {"extra_body": {"return_token_ids": True, "chat_template_kwargs": kwargs}}

    made = await chat(site, "ok", **given({"enable_thinking": False}))
    assert text_of(site, made.prompt_token_ids).endswith("<|im_start|>assistant\n<think></think>")
    for wrong, text in (
        ("x", "should be an object"),
        ({"messages": []}, "'messages'"),
        ({"tools": []}, "'tools'"),
        ({"add_generation_prompt": False}, "'add_generation_prompt'"),
        ({"enable_thinking": "false"}, "remove the quotes"),
    ):
        with pytest.raises(BadRequestError, match=text) as caught:
            await chat(site, **given(wrong))
        assert caught.value.param == "chat_template_kwargs", wrong
    with pytest.raises(BadRequestError, match="no argument 'enable_thnking': remove it from chat_template_kwargs"):
        await chat(site, **given({"enable_thnking": False}))


async def test_template_arguments_of_the_job_apply_where_a_request_has_none(site: Site) -> None:
    record = site.manager.world.jobs["j"].record
    assert record.spec.kind == "rl"
    data = record.spec.data.model_copy(update={"chat_template_kwargs": {"enable_thinking": False}})
    record.spec = record.spec.model_copy(update={"data": data})
    for kwargs, is_closed in (({}, True), ({"enable_thinking": True}, False)):
        made = await chat(site, "ok", extra_body={"return_token_ids": True, "chat_template_kwargs": kwargs})
        assert text_of(site, made.prompt_token_ids).endswith("<think></think>") is is_closed


# --- conversations ---


class Loop:
    """A conversation by one session id, as an agent has it."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.messages: list[Any] = list(ASKED)
        self.tools: list[Any] = [ADD]
        self.kwargs: dict[str, Any] = {}
        self.tokens: list[int] = []
        """The prompt and the answer of the last turn."""

    async def turn(self, answer: str) -> Any:
        """Return the message of a turn, and keep its tokens."""
        made = await chat(
            self.site,
            answer,
            messages=self.messages,
            tools=self.tools,
            extra_headers={"X-Session-ID": "s"},
            extra_body={"chat_template_kwargs": self.kwargs},
        )
        self.prompt: list[int] = made.prompt_token_ids
        self.continues = bool(self.tokens) and self.prompt[: len(self.tokens)] == self.tokens
        self.tokens = [*self.prompt, *made.choices[0].token_ids]
        return made.choices[0].message

    def extend(self, message: dict[str, Any]) -> None:
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "7"} for call in message.get("tool_calls") or []
        ]
        self.messages += [message, *(results or [{"role": "user", "content": "And now?"}])]


# No template writes a call so.
ODD = '<tool_call>{"arguments":{"b":4,  "a":3},"name":"add"}</tool_call>'


async def test_agent_loop_continues_with_its_exact_tokens(site: Site) -> None:
    loop = Loop(site)
    loop.extend((await loop.turn(f"I add.\n\n{ODD}")).model_dump())
    message = (await loop.turn(ODD + ODD)).model_dump()
    assert loop.continues
    expected = "\n<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(site, loop.prompt).endswith(f"{ODD}<|im_end|>{expected}")
    loop.extend(message)
    loop.extend((await loop.turn("Seven.")).model_dump())
    assert loop.continues
    await loop.turn("Yes.")
    assert loop.continues


async def test_client_may_change_ids_and_write_the_arguments_anew(site: Site) -> None:
    loop = Loop(site)
    await loop.turn(ODD)
    call = {"id": "mine", "type": "function", "function": {"name": "add", "arguments": '{"a":3,\n"b":4}'}}
    loop.extend({"role": "assistant", "content": "", "tool_calls": [call]})
    await loop.turn("Seven.")
    assert loop.continues


@pytest.mark.parametrize("change", ["arguments", "name", "calls", "tools", "kwargs"])
async def test_conversation_starts_over_if_calls_or_tools_change(site: Site, change: str) -> None:
    loop = Loop(site)
    message = (await loop.turn(ODD)).model_dump()
    call = message["tool_calls"][0]["function"]
    if change == "arguments":
        call["arguments"] = '{"a": 3, "b": 4.0}'
    elif change == "name":
        call["name"] = "sub"
    elif change == "calls":
        message["tool_calls"] *= 2
    elif change == "kwargs":
        loop.kwargs = {"enable_thinking": True}
    else:
        loop.tools = [{**ADD, "function": {**ADD["function"], "name": "sum"}}]
    loop.extend(message)
    await loop.turn("Seven.")
    assert not loop.continues
