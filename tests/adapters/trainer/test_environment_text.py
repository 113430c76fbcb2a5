"""What stands between two turns is what the chat template writes there, and what the model said stays as it is."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlboost.environments import ToolEnvironment
from rlboost.services.trainer.adapters.environment_pool import TokenizerChatFormatter
from rlboost.services.trainer.adapters.tokens import PromptTokenizer
from rlboost.services.trainer.ports.samples import EnvironmentFault

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
CHATML = """
{%- if tools %}{{ '<|im_start|>system\\nTools:' }}{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""In the manner of Qwen: answers of tools in one turn of the user."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    alphabet = {text: i for i, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=IM_END)
    wrapped.add_special_tokens({"additional_special_tokens": [IM_START]})
    wrapped.chat_template = CHATML
    return wrapped


@pytest.fixture
def chat_formatter(tokenizer: Any) -> TokenizerChatFormatter:
    config = SimpleNamespace(vocab_size=len(tokenizer), max_position_embeddings=512)
    return TokenizerChatFormatter(PromptTokenizer(tokenizer, config, [tokenizer.eos_token_id]))


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


ASKED = [{"role": "user", "content": "12+5?"}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 12, "b": 5}}</tool_call>'


async def test_turns_with_tools_match_the_template_of_the_whole_chat(
    chat_formatter: TokenizerChatFormatter, tokenizer: Any
) -> None:
    environment = ToolEnvironment([add])
    ids = chat_formatter.format_prompt(ASKED, environment.tools)
    assert '"name": "add"' in tokenizer.decode(ids)
    messages = list(ASKED)
    for text in (CALL, CALL + CALL):
        said = [*tokenizer.encode(text), tokenizer.eos_token_id]
        step = await environment.step(text)
        assert isinstance(step.observation, list)
        ids = [*ids, *said, *chat_formatter.format_observation(ASKED, said[-1], step.observation, environment.tools)]
        messages += [{"role": "assistant", "content": text}, *step.observation]
        whole = tokenizer.apply_chat_template(
            messages, tools=environment.tools, tokenize=True, add_generation_prompt=True, return_dict=True
        )
        assert ids == list(whole["input_ids"])
    assert tokenizer.decode(ids).count("<tool_response>\n17\n</tool_response>") == 3
    assert (await environment.step("It is 17.")).done


async def test_tool_calls_whose_tags_are_special_tokens_are_parsed() -> None:
    environment = ToolEnvironment([add])
    step = await environment.step(CALL.replace("<tool_call>", "").replace("</tool_call>", ""), text_raw=CALL + IM_END)
    assert step.observation == [{"role": "tool", "name": "add", "content": "17"}]


def test_text_observation_of_a_chat_is_a_user_message(chat_formatter: TokenizerChatFormatter, tokenizer: Any) -> None:
    format_observation = chat_formatter.format_observation(ASKED, tokenizer.eos_token_id, "Higher.", [])
    assert tokenizer.decode(format_observation) == f"\n{IM_START}user\nHigher.{IM_END}\n{IM_START}assistant\n"


def test_missing_end_token_is_added(chat_formatter: TokenizerChatFormatter, tokenizer: Any) -> None:
    format_observation = chat_formatter.format_observation(ASKED, tokenizer.encode("a")[0], "Higher.", [])
    assert tokenizer.decode(format_observation).startswith(f"{IM_END}\n{IM_START}user")


def test_text_observation_of_a_text_prompt_is_that_text(chat_formatter: TokenizerChatFormatter, tokenizer: Any) -> None:
    assert chat_formatter.format_prompt("12+5=", []) == tokenizer.encode("12+5=")
    assert chat_formatter.format_observation("12+5=", tokenizer.eos_token_id, " no, 1", []) == tokenizer.encode(
        " no, 1"
    )
    assert chat_formatter.format_observation("12+5=", tokenizer.eos_token_id, "", []) == []


def test_text_prompt_of_a_job_with_template_arguments_is_a_reason(tokenizer: Any) -> None:
    config, ends = SimpleNamespace(vocab_size=len(tokenizer)), [tokenizer.eos_token_id]
    formatter = TokenizerChatFormatter(PromptTokenizer(tokenizer, config, ends, None, {"add_generation_prompt": True}))
    with pytest.raises(EnvironmentFault, match=r"prompt is text, .*or remove data\.chat_template_kwargs"):
        formatter.format_prompt("12+5=", [])


def test_unformattable_observation_is_a_reason(chat_formatter: TokenizerChatFormatter, tokenizer: Any) -> None:
    end = tokenizer.eos_token_id
    with pytest.raises(EnvironmentFault, match="the prompt is text"):
        chat_formatter.format_observation("12+5=", end, [{"role": "tool", "content": "17"}], [])
    with pytest.raises(EnvironmentFault, match="give the prompt as chat messages"):
        chat_formatter.format_prompt("12+5=", ToolEnvironment([add]).tools)
    with pytest.raises(EnvironmentFault, match=r"message 3 \(tool\) has the content 17, which is no text"):
        chat_formatter.format_observation(ASKED, end, [{"role": "tool", "content": 17}], [])
    tokenizer.chat_template = "{{ messages[-1].content }}"
    try:
        with pytest.raises(EnvironmentFault, match=r"message 1 \(user\): the chat template does not show"):
            chat_formatter.format_observation(ASKED, end, "Higher.", [])
        tokenizer.chat_template = None
        with pytest.raises(EnvironmentFault, match="has none"):
            chat_formatter.format_prompt(ASKED, [])
    finally:
        tokenizer.chat_template = CHATML


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ('{"name": "add", "arguments": {"a": "x", "b": 1}}', "error: a: Input should be a valid integer"),
        ('{"name": "sub", "arguments": {}}', "error: there is no tool 'sub', only add"),
        ("{nonsense", "error: the call cannot be read: it is no JSON"),
        ('{"name": "add", "arguments": {"a": 1}}', "error: b: Missing required"),
    ],
)
async def test_invalid_tool_call_is_answered_with_the_error(call: str, says: str) -> None:
    step = await ToolEnvironment([add]).step(f"Well. <tool_call>\n{call}\n</tool_call>")
    assert not step.done
    assert isinstance(step.observation, list)
    (message,) = step.observation
    assert isinstance(message, dict)
    assert message["role"] == "tool"
    assert says in message["content"]


PIECES = [
    "<tool_call>",
    "</tool_call>",
    '{"name": ',
    '"arguments": ',
    *'[]{}":,',
    "[" * 3000,
    '"add"',
    "null",
    "1",
    "\\ud800",
]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=5)).map("".join), st.booleans())
@example('{"name": ["add"]}', True)
@example('{"name": {"add": 1}}', True)
@example('{"name": "add", "arguments": [1]}', True)
@example('{"name": "say", "arguments": {"text": "\\ud800"}}', True)
@example('{"name": "\\ud800", "arguments": {"\\ud800": 1}}', True)
@example("[" * 100_000, True)
@example('{"name": ' + "[" * 900 + "]" * 900 + "}", True)
async def test_tool_environment_answers_any_text_with_a_serializable_step(text: str, is_call: bool) -> None:
    def say(text: str) -> str:
        return text

    step = await ToolEnvironment([add, say]).step(f"<tool_call>{text}</tool_call>" if is_call else text)
    assert step.done == (not step.observation)
    msgpack.packb(step.observation)


def test_tools_of_the_same_name_are_rejected() -> None:
    other: Any = lambda: 7  # noqa: E731 - what it is called is the point
    other.__name__ = "add"
    with pytest.raises(TypeError, match="add: two tools have this name"):
        ToolEnvironment([add, other])
    with pytest.raises(TypeError, match="a tool is called by its function's name: wrap this in a function with def"):
        ToolEnvironment([partial(add, 1)])


async def test_raising_tool_is_answered_with_the_error_and_async_tool_is_awaited() -> None:
    async def later(text: str) -> dict[str, str]:
        if not text:
            raise ValueError("nothing to do")
        return {"text": text}

    environment = ToolEnvironment([later])
    calls = "".join(
        f'<tool_call>{{"name": "later", "arguments": {{"text": "{text}"}}}}</tool_call>' for text in ("", "é")
    )
    step = await environment.step(calls)
    assert [message["content"] for message in step.observation if isinstance(message, dict)] == [
        "error: ValueError: nothing to do",
        '{"text": "é"}',
    ]
    assert environment.n_calls == 2
    head, row, *_ = step.warning.splitlines()
    assert head.startswith("the tool later raised ValueError: nothing to do (")
    assert row == "row: arguments={'text': ''}"
    assert not (await environment.step(CALL)).warning


async def test_results_that_fit_no_context_are_errors_for_the_model() -> None:
    def read(n: int) -> str:
        if n < 0:
            raise ValueError("a" * -n)
        return "a" * n

    calls = "".join(
        f'<tool_call>{{"name": "read", "arguments": {{"n": {n}}}}}</tool_call>' for n in (1 << 24, 700_000, -700_000, 9)
    )
    step = await ToolEnvironment([read]).step(calls)
    large, fits, second, small = [message["content"] for message in step.observation if isinstance(message, dict)]
    assert large == "error: the result has 16777216 characters, and 1048576 are left: ask for less"
    assert (len(fits), small) == (700_000, "a" * 9)
    assert second == "error: the result has 700019 characters, and 348576 are left: ask for less"
