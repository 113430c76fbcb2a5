"""Tool calls of real chat templates: those that TRL ships, with a tokenizer made here."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import get_json_schema

from rlboost.environments import ToolEnvironment, ToolUnavailable
from rlboost.services.trainer.adapters.environment_pool import TokenizerChatFormatter
from rlboost.services.trainer.adapters.tokens import PromptTokenizer
from rlboost.services.trainer.ports.samples import EnvironmentFault
from rlboost.shared.data.examples import ChatExample, examples_of
from rlboost.shared.data.messages import clean_messages
from rlboost.shared.errors import ConfigError
from rlboost.shared.model.tool_call_formats import FORMATS as FORMATS_READ
from rlboost.shared.model.tool_calls import CallStyle, called, opens_thought, read_calls, result

FOLDER = Path(importlib.util.find_spec("trl").submodule_search_locations[0], "chat_templates")  # type: ignore[union-attr,index]
ENDS = re.compile(
    r"<\|(?:im_end|eot_id|call|return|tool_response|observation|user|eot)\|?>|<turn\|>|<EOS>|"
    "<\uff5cend▁of▁sentence\uff5c>"
)
"""Tokens with which the models of these templates end a turn."""
FORMATS = {
    "diffusion_gemma": "gemma4",
    "gemma4": "gemma4",
    "gemma4_v2": "gemma4",
    "gemma4_v3": "gemma4",
    "gemma4_v4": "gemma4",
    "gemma4_v5": "gemma4",
    "glm4moe": "glm",
    "gptoss": "harmony",
    "lfm2_2_5": "lfm2",
    "lfm2_2_5_v2": "lfm2",
    "lfm2_2_5_vl": "lfm2",
    "lfm2_v2": "lfm2",
    "llama3_1": "llama3_json",
    "llama3_2": "llama3_json",
    "muse_glimmer": "invoke",
    "nemotron_3_5_lightning": "qwen3_coder",
    "nemotron_3_nano": "qwen3_coder",
    "nemotron_3_super": "qwen3_coder",
    "nemotron_3_ultra": "qwen3_coder",
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_5_nothink": "qwen3_coder",
    "qwen3_5_think": "qwen3_coder",
    "qwen3_6": "qwen3_coder",
    "qwen3_8": "qwen3_coder",
    "qwen3_instruct_2507": "hermes",
    "qwen3_vl": "hermes",
}
WITHOUT_TOOLS = {
    "cohere",
    "cohere2",
    "deepseek_r1_distill",
    "deepseekv3",  # writes calls, but shows no tools
    "gemma",
    "gemma3",
    "idefics3",
    "lfm2",
    "llama3",
    "llava_next",
    "phi3",
    "phi3_5",
    "qwen2_5_vl",
    "smolvlm",
}
ASKED = [{"role": "user", "content": "12+34?"}]
ARGUMENTS = {"a": 12, "b": 34, "note": 'x "y" <z>\n7'}


def add(a: int, b: int, note: str = "") -> int:
    """Add two numbers."""
    assert note in ("", ARGUMENTS["note"])
    return a + b


def tokenizer_of(name: str) -> Any:
    """A tokenizer of bytes, with a template's own end tokens."""
    template = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    alphabet = {text: i for i, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<BOS>", eos_token="<EOS>", pad_token="<PAD>")
    found.add_special_tokens({"additional_special_tokens": sorted({*ENDS.findall(template)} - {"<EOS>"})})
    found.chat_template = template
    return found


def end_ids_of(tokenizer: Any) -> list[int]:
    return [i for token, i in tokenizer.get_added_vocab().items() if ENDS.fullmatch(token)]


def call_style_of(tokenizer: Any, end_ids: list[int]) -> CallStyle:
    return PromptTokenizer(tokenizer, SimpleNamespace(vocab_size=len(tokenizer)), end_ids or [0]).call_style


def rendered(tokenizer: Any, messages: list[dict[str, Any]], tools: Any, *, prompted: bool) -> str:
    return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompted))


def test_every_template_of_trl_is_among_those_tried() -> None:
    names = {path.stem for path in FOLDER.glob("*.jinja")} - {p.stem for p in FOLDER.glob("*_training.jinja")}
    assert names == {*FORMATS, *WITHOUT_TOOLS}


@pytest.mark.parametrize("name", [*FORMATS])
async def test_call_that_a_template_writes_is_answered_once(name: str) -> None:
    """What the model says is what the template writes; the result follows as the template writes it."""
    tokenizer = tokenizer_of(name)
    ends = end_ids_of(tokenizer)
    style = call_style_of(tokenizer, ends)
    assert (style.format, style.problem) == (FORMATS[name], "")
    environment = ToolEnvironment([add])
    environment.call_style = style
    call = called([("add", ARGUMENTS)], as_text=style.as_text)
    whole = rendered(tokenizer, [*ASKED, call, result(0, "add", "46")], environment.tools, prompted=True)
    after = whole.rpartition("12+34?")[2]
    found = read_calls(after, style, environment.tools)
    said = after[found[0].start : found[0].end]
    environment.in_thought = opens_thought(rendered(tokenizer, ASKED, environment.tools, prompted=True))
    thought = "I add: " + said + "</think>" if environment.in_thought else "<think>or " + said + "</think>Well. "
    turn = thought + said
    step = await environment.step(turn, text_raw=turn)
    assert [message["content"] for message in step.observation if isinstance(message, dict)] == ["46"]
    end = next(token for token in tokenizer(after[found[0].start :])["input_ids"] if token in ends)
    formatter = TokenizerChatFormatter(PromptTokenizer(tokenizer, SimpleNamespace(vocab_size=len(tokenizer)), ends))
    observation = formatter.format_observation(ASKED, end, step.observation, environment.tools)
    text = tokenizer.decode(observation)
    assert text.count("46") == 1
    assert whole.endswith(text)
    between = whole.removesuffix(text).rpartition(said)[2]
    assert between.strip() == ("" if said.endswith(tokenizer.decode([end])) else tokenizer.decode([end]))
    two = [*step.observation, {"role": "tool", "name": "add", "content": "47"}]
    text = tokenizer.decode(formatter.format_observation(ASKED, end, two, environment.tools))
    assert [text.count(content) for content in ("46", "47")] == [1, 1]
    environment.in_thought = opens_thought(text)
    assert (await environment.step("It is 46.", text_raw="It is 46." + tokenizer.decode([end]))).done


@pytest.mark.parametrize("name", sorted(WITHOUT_TOOLS))
def test_template_without_tools_is_refused_by_name(name: str) -> None:
    tokenizer = tokenizer_of(name)
    style = call_style_of(tokenizer, end_ids_of(tokenizer))
    assert not style.format
    assert re.search("does not (show tools|write tool calls)", style.problem)


def test_format_that_no_reader_reads_is_shown() -> None:
    tokenizer = tokenizer_of("qwen2_5")
    tokenizer.chat_template = tokenizer.chat_template.replace("<tool_call>", "<do>").replace('"name"', '"tool"')
    assert "writes calls as '<|im_end|>\\n<|im_start|>assistant\\n<do>" in call_style_of(tokenizer, []).problem
    assert "which no reader reads" in call_style_of(tokenizer, []).problem


def test_turn_with_a_call_that_could_not_end_is_refused() -> None:
    tokenizer = tokenizer_of("gptoss")
    ends = [tokenizer.convert_tokens_to_ids("<|return|>")]
    assert "add the one that follows a call to eos_token_id" in call_style_of(tokenizer, ends).problem
    assert "<|call|>" in call_style_of(tokenizer, ends).problem


def test_template_that_drops_the_result_is_refused() -> None:
    tokenizer = tokenizer_of("lfm2_v2")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        '{%- if message["role"] == "tool" -%}', '{%- if message["role"] == "tool" -%}{%- continue -%}'
    )
    assert "leaves out the results" in call_style_of(tokenizer, end_ids_of(tokenizer)).problem


def test_observation_that_a_template_drops_is_a_reason() -> None:
    tokenizer = tokenizer_of("llama3_1")
    tokenizer.chat_template = "{% for m in messages if m.role != 'critic' %}{{ m.content }}<EOS>{% endfor %}"
    formatter = TokenizerChatFormatter(
        PromptTokenizer(tokenizer, SimpleNamespace(vocab_size=len(tokenizer)), [tokenizer.eos_token_id])
    )
    with pytest.raises(EnvironmentFault, match="does not show the model"):
        formatter.format_observation(ASKED, tokenizer.eos_token_id, [{"role": "critic", "content": "no"}], [])


# --- calls as models write them ---


def typed(text: str, n: int | None = None, values: list[str] | None = None, flag: bool = False) -> str:
    """Say it.

    Args:
        text: What to say.
        n: How often.
        values: More to say.
        flag: Whether to.

    Returns:
        What was said.
    """
    return json.dumps([text, n, values, flag])


TYPED = ToolEnvironment([typed]).tools
XML = (
    "<tool_call>\n<function=typed>\n<parameter=text>\n12\n</parameter>\n<parameter=n>\n{}\n</parameter>\n"
    "</function>\n</tool_call>"
)
HARMONY = (
    "<|channel|>analysis<|message|>to=functions.f {}<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.f <|constrain|>json<|message|>{"t": 1}<|call|>'
)
GEMMA = (
    '<|channel>thought\n<|tool_call>call:f{}<tool_call|><channel|><|tool_call>call:f{t:<|"|>{,}<|"|>,'
    "o:{k:[1,true]}}<tool_call|>"
)
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"t": 1}<|tool_call_end|><|tool_calls_section_end|>'
)
MINIMAX = '<m:tool_call>\n<invoke name="typed">\n<parameter name="n">7</parameter>\n</invoke>\n</m:tool_call>'
QUOTES_A_TAG = '<think>x</think><tool_call>{"name": "f", "arguments": {"t": "<think>"}}</tool_call>'


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"t": "</tool_call>"}}</tool_call>', [{"t": "</tool_call>"}]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "f", "arguments": {}}', [{}, {}]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call> or <think><tool_call>{"name": "f"}</tool_call>', [{}]),
        ("hermes", QUOTES_A_TAG, [{"t": "<think>"}]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call><|im_end|>', [{}]),
        ("hermes", 'Use <tool_call>{"name": "f"', "it is no JSON"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', "to be a JSON object"),
        ("hermes", "<tool_call>\n<function=f>\n</function>\n</tool_call>", "it is no JSON"),
        ("qwen3_coder", XML.format("3"), [{"text": "12", "n": 3}]),
        ("qwen3_coder", XML.format("None"), [{"text": "12", "n": None}]),
        ("qwen3_coder", XML.removeprefix("<tool_call>\n").format("3"), [{"text": "12", "n": 3}]),
        ("qwen3_coder", XML.format("three"), [{"text": "12", "n": "three"}]),
        ("qwen3_coder", XML.format("3") * 2, [{"text": "12", "n": 3}] * 2),
        ("qwen3_coder", '<tool_call>\n{"name": "typed"}\n</tool_call>', "its name is missing"),
        ("qwen3_coder", "<tool_call>\n<function=typed>\n<parameter=text>\n12\n</tool_call>", "after 0 arguments"),
        ("glm", "<tool_call>typed<arg_key>flag</arg_key><arg_value>true</arg_value></tool_call>", [{"flag": True}]),
        ("glm", '<tool_call>{"name": "typed"}</tool_call>', "its name is missing"),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"t": "{"}}<|eom_id|>', [{"t": "{"}]),
        ("llama3_json", '{"type": "function", "name": "f", "parameters": {}}; {"name": "f"}', [{}, {}]),
        ("llama3_json", '{"name": "Bob", "age": 3}', []),
        ("llama3_json", '<|python_tag|>search.call(query="x")<|eom_id|>', "it is no JSON"),
        ("harmony", HARMONY, [{"t": 1}]),
        ("harmony", HARMONY.partition("<|start|>")[0] + "<|start|>assistant<|channel|>final<|message|>x", []),
        ("gemma4", GEMMA, [{"t": "{,}", "o": {"k": [1, True]}}]),
        ("gemma4", '<|tool_call>call:f{t:<|"|>x}<tool_call|>', "text is to end"),
        ("functiongemma", "<start_function_call>call:f{t:<escape>x<escape>}<end_function_call>", [{"t": "x"}]),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "123456789"}]</s>', [{}]),
        ("mistral_args", '[TOOL_CALLS]f[ARGS]{"t": 1}[TOOL_CALLS]f[CALL_ID]abc[ARGS]{}</s>', [{"t": 1}, {}]),
        ("lfm2", "<|tool_call_start|>[f(t='a\nb', n=-1, l=[true, None]), f()]<|tool_call_end|>",
         [{"t": "a\nb", "n": -1, "l": [True, None]}, {}]),
        ("lfm2", "<|tool_call_start|>[f(1)]<|tool_call_end|>", "given by name"),
        ("lfm2", "<|tool_call_start|>[f(t=" + "-" * 9000 + "1)]<|tool_call_end|>", "is no Python"),
        ("lfm2", "<|tool_call_start|>[f(t={[1]: 2})]<|tool_call_end|>", "keys are to be text"),
        ("lfm2", "<|tool_call_start|>[f(t=open('x'))]<|tool_call_end|>", "is no value"),
        ("pythonic", "[f(t=1)]<|eot|>", [{"t": 1}]),
        ("granite", '<|tool_call|>[{"name": "f", "arguments": {}}]<|end_of_text|>', [{}]),
        ("cohere", '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {}}]<|END_ACTION|>', [{}]),
        ("kimi_k2", KIMI, [{"t": 1}]),
        ("invoke", MINIMAX, [{"n": 7}]),
    ],
)  # fmt: skip
def test_calls_are_read_with_their_types_or_named_malformed(form: str, text: str, calls: Any) -> None:
    found = read_calls(text, CallStyle(form), TYPED)
    if isinstance(calls, str):
        assert len(found) == 1
        assert calls in found[0].problem
    else:
        assert [call.problem for call in found] == [""] * len(calls)
        assert json.dumps([call.arguments for call in found]) == json.dumps(calls)
        assert {call.name for call in found} <= {"f", "typed"}


BEGUN = {
    "hermes": '<tool_call>{"name": "f"}',
    "qwen3_coder": "<tool_call><function=f>",
    "glm": "<tool_call>f<arg_key>",
    "invoke": '<function_calls><invoke name="f">',
    "gemma4": "<|tool_call>call:f{",
    "functiongemma": "<start_function_call>call:f{",
    "harmony": "to=functions.a <|message|>{}",
    "deepseek_v3": "<\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>f\n```json\n{}",
    "deepseek_v31": "<\uff5ctool▁call▁begin\uff5c>f<\uff5ctool▁sep\uff5c>{}",
    "kimi_k2": "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}",
    "mistral": "[TOOL_CALLS][]",
    "mistral_args": "[TOOL_CALLS]f{}",
    "cohere": "<|START_ACTION|>[]",
    "toolcall": "<TOOLCALL>[]",
    "jamba": "<tool_calls>[]",
    "granite": "<|tool_call|>[]",
    "functools": "functools[]",
    "lfm2": "<|tool_call_start|>[f()]",
    "olmo3": "<function_calls>f()",
    "llama3_json": '<|python_tag|>{"name": "f"}',
    "pythonic": "[f()]",
}
"""Format -> a call that has no end yet."""
REPEATED = [
    "\n",
    "<a>",
    "\\'",
    "to=functions.a ",
    "to=functions.",
    "<function=",
    "</arg_key><arg_value>",
    "<function=f><parameter=a></function>",
    "<tool_call>x</tool_call>\n",
    "<think></think>",
]


@pytest.mark.parametrize("form", FORMATS_READ)
def test_hostile_text_of_200k_characters_is_read_in_linear_time(form: str) -> None:
    for part in REPEATED:
        much = part * (200_000 // len(part))
        for text in (f"{BEGUN[form]}{much}y", f"{BEGUN[form]}x{much}y", f"{much}{BEGUN[form]}"):
            began = time.process_time()
            read_calls(text, CallStyle(form))
            # In quadratic time minutes; Python's own parser takes a second.
            assert time.process_time() - began < 10, (part, text[:40])


def test_turn_with_many_malformed_calls_is_not_read_further() -> None:
    found = read_calls("<tool_call>x</tool_call>" * 100, CallStyle())
    assert len(found) == 16
    assert all(call.problem for call in found)


def test_call_inside_an_open_thought_is_not_executed() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    assert not read_calls(f"Maybe {call}", CallStyle(), in_thought=True)
    assert len(read_calls(f"Maybe {call}</think>{call}", CallStyle(), in_thought=True)) == 1


async def test_malformed_call_is_answered_with_the_format_of_the_template() -> None:
    tokenizer = tokenizer_of("qwen3_5_nothink")
    environment = ToolEnvironment([add])
    environment.call_style = call_style_of(tokenizer, end_ids_of(tokenizer))
    step = await environment.step('<tool_call>\n{"name": "add"}\n</tool_call>')
    assert isinstance(step.observation, list)
    assert "write it as <tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE" in step.observation[0]["content"]


# --- schemas ---


def test_schema_describes_a_tool_as_that_of_transformers() -> None:
    ours, theirs = TYPED[0]["function"], get_json_schema(typed)["function"]
    assert ours["description"] == theirs["description"] == "Say it."
    described = {name: one["description"] for name, one in theirs["parameters"]["properties"].items()}
    assert {name: one["description"] for name, one in ours["parameters"]["properties"].items()} == described
    assert set(described) == {"text", "n", "values", "flag"}


# --- supervised fine-tuning on every turn ---

TRACE = [
    *ASKED,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": json.dumps(ARGUMENTS)}}],
    },
    {"role": "tool", "name": "add", "content": "46"},
    {"role": "assistant", "content": "It is 46."},
]
"""As data sets have it, with the arguments as JSON text."""


@pytest.mark.parametrize("row", [{"messages": TRACE}, {"prompt": TRACE[:1], "completion": TRACE[1:]}])
@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_instruct_2507", "qwen3", "llama3_1", "gptoss", "glm4moe"])
def test_every_turn_of_the_assistant_is_trained_with_its_call(name: str, row: dict[str, Any]) -> None:
    tokenizer = tokenizer_of(name)
    tokens = PromptTokenizer(tokenizer, SimpleNamespace(vocab_size=len(tokenizer)), end_ids_of(tokenizer))
    tools = ToolEnvironment([add]).tools
    found = examples_of({**row, "tools": tools}, "prompt", "completion", every_turn=True)
    assert [len(example.prompt) for example in found] == [1, 3]
    targets = []
    for example in found:
        assert isinstance(example, ChatExample)
        targets.append(tokens.answer(*example))
    (call,) = read_calls(tokenizer.decode(targets[0]), tokens.call_style, tools)
    assert (call.name, call.arguments) == ("add", ARGUMENTS)
    assert "It is 46." in tokenizer.decode(targets[1])
    assert not any(">46<" in tokenizer.decode(target) for target in targets)


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_instruct_2507"])
def test_trained_tokens_are_those_of_the_assistant_mask_of_trl(name: str) -> None:
    """Where a template renders earlier turns unchanged, `assistant_only_loss` of TRL trains the same tokens."""
    tokenizer = tokenizer_of(name)
    tokens = PromptTokenizer(tokenizer, SimpleNamespace(vocab_size=len(tokenizer)), end_ids_of(tokenizer))
    examples = examples_of({"messages": TRACE}, "prompt", "completion", every_turn=True)
    ours = [(tokens.prompt(one.prompt), tokens.answer(*one)) for one in examples if isinstance(one, ChatExample)]
    tokenizer.chat_template = (FOLDER / f"{name}_training.jinja").read_text(encoding="utf-8")
    whole = tokenizer.apply_chat_template(
        clean_messages(TRACE), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = list(whole["input_ids"]), list(whole["assistant_masks"])
    theirs = [i for i, is_trained in enumerate(mask) if is_trained]
    for prompt, target in ours:
        assert ids[: len(prompt) + len(target)] == prompt + target
        span = range(len(prompt), len(prompt) + len(target))
        assert set(span) <= set(theirs)
        theirs = [i for i in theirs if i not in span]
    assert {tokenizer.decode([ids[i]]) for i in theirs} <= {"\n"}  # which the template writes after the end of a turn


def test_conversation_without_a_turn_to_train_is_refused() -> None:
    for row, why in (
        ({"messages": TRACE[:1]}, "no message is the assistant's"),
        ({"messages": TRACE[3:]}, "begin with the message that it answers"),
        ({"prompt": "12+34?", "completion": "46"}, "assistant_only_loss needs chat messages"),
        ({"prompt": TRACE, "completion": 0}, "assistant_only_loss needs chat messages"),
        ({"prompt": "12+34?", "completion": None}, "assistant_only_loss needs chat messages"),
    ):
        with pytest.raises(ConfigError, match=why):
            examples_of(row, "prompt", "completion", every_turn=True)


@pytest.mark.parametrize("completion", [None, []])
def test_null_or_empty_completion_counts_as_none(completion: object) -> None:
    for key in ("prompt", "messages"):
        found = examples_of({key: TRACE, "completion": completion}, "prompt", "completion", every_turn=True)
        assert found == examples_of({"messages": TRACE}, "prompt", "completion", every_turn=True)


def test_completion_that_is_text_is_trained_as_without_the_option() -> None:
    row = {"prompt": [*TRACE, ASKED[0]], "completion": "46"}
    examples = examples_of(row, "prompt", "completion", every_turn=True)
    assert examples == examples_of(row, "prompt", "completion", every_turn=False)


async def test_tool_that_is_unavailable_within_a_group_of_exceptions_loses_the_conversation() -> None:
    async def ask() -> str:
        raise ExceptionGroup("calls", [ToolUnavailable("down")])

    with pytest.raises(ExceptionGroup, match="calls"):
        await ToolEnvironment([ask]).step('<tool_call>{"name": "ask", "arguments": {}}</tool_call>')
