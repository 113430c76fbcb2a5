"""What a row says is what the model sees, with the chat templates of all families at hand, or the row is refused."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoTokenizer

from rlboost.jobs.model_check import check_data
from rlboost.services.trainer.adapters import data as data_module
from rlboost.services.trainer.adapters.data import load_data
from rlboost.services.trainer.adapters.tokens import PromptTokenizer
from rlboost.shared.data.examples import prompt_of
from rlboost.shared.data.messages import clean_messages
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.spec import parse
from rlboost.shared.wire import ints
from rlboost.terminal import printable
from tests.support.chat_tokenizers import (
    BEGIN,
    CHAT,
    END,
    NONCE,
    TEMPLATES,
    TOKENIZERS,
    byte_tokenizer,
    llama_tokenizer,
    prompt_tokenizer,
    seen,
)

VISION = {"idefics3", "llava_next", "smolvlm"}
"""Templates that show only lists of parts; they are refused."""
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 12, "b": "w0004x"}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "w0009x",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"w0008x": {"type": "integer", "description": "One."}}},
    },
}


def test_templates_of_many_families_are_at_hand() -> None:
    families = {re.split(r"[\d_.]", name)[0] for name in TEMPLATES}
    assert len(TEMPLATES) >= 30
    assert {"qwen", "llama", "gemma", "glm", "gptoss", "deepseekv", "phi", "cohere", "lfm"} <= families


def test_every_template_shows_a_plain_conversation_and_its_text_parts() -> None:
    parts = [
        {**message, "content": [{"type": "text", "text": part, "image": None} for part in (text[:3], text[3:])]}
        for message in CHAT
        for text in [message["content"]]
    ]
    for name in TEMPLATES.keys() - VISION:
        tokens = TOKENIZERS[name]
        assert NONCE.findall(seen(tokens, CHAT)) == ["w0001x", "w0002x", "w0003x"], name
        assert tokens.prompt(parts) == tokens.prompt(CHAT), name


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "w0001x"}]},
        {"role": "user", "content": [{"type": "audio", "text": "w0001x"}]},
        {"role": "user", "content": ["w0001x"]},
        {"role": "user", "content": {"text": "w0001x"}},
        {"role": "user", "content": 1},
        {"role": "user", "content": None},
        {"role": "user"},
        {"role": "user", "text": "w0001x"},
        {"role": "user", "content": "", "text": "w0001x"},
        {"role": "user", "content": "w0001x", "images": ["a.png"]},
        {"role": None, "content": "w0001x"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": "", "function_call": {"name": "w0001x", "arguments": "{}"}},
        {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": {"b": None}}}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "add", "parameters": {"a": 1}}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "[1"}}]},
        {"role": "assistant", "tool_calls": "add"},
    ],
)
def test_message_without_text_is_refused_by_its_number_for_every_template(message: Any) -> None:
    for tokens in TOKENIZERS.values():
        with pytest.raises(ConfigError, match="message 2"):
            tokens.prompt([CHAT[0], message])


def test_unknown_role_is_shown_or_refused() -> None:
    messages = [CHAT[0], {"role": "assistant", "content": "a"}, {"role": "human", "content": "w0002x"}]
    refusals = {}
    for name, tokens in TOKENIZERS.items():
        try:
            assert NONCE.findall(seen(tokens, messages)) == ["w0001x", "w0002x"]
        except ConfigError as error:
            refusals[name] = str(error)
    assert {"qwen3", "qwen2_5", "glm4moe", "gptoss", "deepseekv3", "phi3"} <= refusals.keys()
    assert not {"llama3_1", "llama3_2", "lfm2"} & refusals.keys()
    for name in refusals.keys() - VISION:
        assert "message 3 (human)" in refusals[name] or "cannot render" in refusals[name]


def test_null_content_of_a_tool_call_is_no_text() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    text = seen(TOKENIZERS["qwen3"], [CHAT[0], call, {"role": "tool", "content": "w0005x"}])
    assert NONCE.findall(text) == ["w0001x", "w0004x", "w0005x"]
    assert "None" not in text


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "glm4moe", "llama3_1", "gptoss", "deepseekv3", "gemma4"])
def test_arguments_as_json_text_give_the_prompt_of_a_mapping(name: str) -> None:
    text = {**CALL, "function": {"name": "add", "arguments": '{"a": 12, "b": "w0004x"}'}}
    bare = {"name": "add", "arguments": {"a": 12, "b": "w0004x"}, "id": "call00001"}
    result = {"role": "tool", "content": "46", "tool_call_id": "call00001"}
    prompts = [
        TOKENIZERS[name].prompt([CHAT[0], {"role": "assistant", "content": "", "tool_calls": [call]}, result])
        for call in (CALL, text, bare)
    ]
    assert prompts[0] == prompts[1] == prompts[2]
    assert "\\" not in TOKENIZERS[name].decode(prompts[0])


@pytest.mark.parametrize("name", ["llama3", "gemma", "phi3", "lfm2", "qwen2_5_vl"])
def test_tool_calls_that_a_template_does_not_show_are_refused(name: str) -> None:
    messages = [CHAT[0], {"role": "assistant", "content": "w0002x", "tool_calls": [CALL]}, CHAT[2]]
    with pytest.raises(
        ConfigError, match=r"message 2 \(assistant\): the chat template does not show the model the tool"
    ):
        TOKENIZERS[name].prompt(messages)


def test_text_next_to_a_call_that_a_template_drops_is_refused() -> None:
    messages = [CHAT[0], {"role": "assistant", "content": "w0002x", "tool_calls": [CALL]}, CHAT[2]]
    with pytest.raises(ConfigError, match=r"message 2 \(assistant\): the chat template does not show .* 'w0002x'"):
        TOKENIZERS["llama3_1"].prompt(messages)


def test_thinking_is_shown_or_refused_except_in_earlier_turns() -> None:
    thought = {"role": "assistant", "content": "w0002x", "reasoning_content": "w0007x"}
    assert NONCE.findall(seen(TOKENIZERS["qwen3"], [CHAT[0], thought, CHAT[2]])) == ["w0001x", "w0002x", "w0003x"]
    with pytest.raises(ConfigError, match="does not show the model reasoning_content 'w0007x'"):
        TOKENIZERS["qwen2_5"].prompt([CHAT[0], thought, CHAT[2]])
    target = TOKENIZERS["qwen3"].answer(CHAT[:1], clean_messages([thought]))
    assert TOKENIZERS["qwen3"].decode(target) == "<think>\nw0007x\n</think>\n\nw0002x<|im_end|>"
    tagged = [{"role": "assistant", "content": "<think>w0007x</think>w0002x"}]
    with pytest.raises(ConfigError, match="does not show the model content '<think>w0007x'"):
        TOKENIZERS["deepseekv3"].answer(CHAT[:1], tagged)
    with pytest.raises(ConfigError, match="does not show the model content 'w0006x'"):
        TOKENIZERS["qwen3"].answer(CHAT[:1], [{"role": "assistant", "content": "w0006x<think>a</think>b"}])


def test_null_of_a_call_is_shown_as_in_json_or_refused() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": None}}}]}
    messages, refused = [CHAT[0], call, {"role": "tool", "content": "None", "name": "add"}, CHAT[2]], set()
    for name, tokens in TOKENIZERS.items():
        try:
            assert "null" in seen(tokens, messages), name
        except ConfigError as error:
            if "writes None for a null in the arguments of the tool call's name" in str(error):
                refused.add(name)
    assert {"qwen3_5_think"} <= refused
    assert not {"qwen3", "llama3_1", "gptoss", "deepseekv3"} & refused


def test_name_of_a_speaker_that_a_template_leaves_out_is_noted() -> None:
    named = [{**CHAT[0], "name": "w0005x"}, CHAT[1], CHAT[2]]
    tokens = prompt_tokenizer(byte_tokenizer(TEMPLATES["qwen3"]))
    assert "w0005x" not in seen(tokens, named)
    assert tokens.ignored_keys == {"name"}
    shown = prompt_tokenizer(byte_tokenizer("{% for m in messages %}{{ m.name }}: {{ m.content }}{% endfor %}"))
    assert "w0005x" in seen(shown, [named[0]])
    assert not shown.ignored_keys


@pytest.mark.parametrize("name", ["llama3", "gemma", "phi3", "deepseekv3", "qwen2_5_vl"])
def test_tools_that_a_template_does_not_show_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="does not show tools"):
        TOKENIZERS[name].prompt(CHAT, [TOOL])


def test_row_prompts_have_tools_and_template_arguments() -> None:
    row = {
        "prompt": CHAT[:1],
        "tools": json.dumps([TOOL]),
        "chat_template_kwargs": {"enable_thinking": False, "x": None},
    }
    text = seen(TOKENIZERS["qwen3"], *prompt_of(row, "prompt"))
    assert NONCE.findall(text)[:2] == ["w0009x", "w0008x"]
    assert text.endswith("<think>\n\n</think>\n\n")
    for kwargs, problem in (
        ({"enable_thinkin": False}, "no argument 'enable_thinkin'"),
        ({"tool_call": False}, "no argument 'tool_call'"),  # a word of the template
        ({"enable_thinking": "False"}, "has enable_thinking: 'False', which is text"),
        ({"add_generation_prompt": False}, "which is set for every prompt"),
        ("[]", "give a mapping"),
    ):
        with pytest.raises(ConfigError, match=problem):
            TOKENIZERS["qwen3"].prompt(*prompt_of({"prompt": CHAT, "chat_template_kwargs": kwargs}, "prompt"))
    for columns in ({"tools": [TOOL]}, {"chat_template_kwargs": {"enable_thinking": False}}):
        with pytest.raises(ConfigError, match="needs a chat template"):
            prompt_of({"prompt": "text", **columns}, "prompt")


@pytest.mark.parametrize("column", ["image", "images", "video", "videos", "audio", "audios"])
def test_media_next_to_a_prompt_are_refused(column: str) -> None:
    with pytest.raises(ConfigError, match=f"the column '{column}' is not shown"):
        prompt_of({"prompt": "what is on it?", column: [{"bytes": "x"}]}, "prompt")
    prompt_of({"prompt": "nothing", column: []}, "prompt")


# --- random conversations and rows ---


class Shown(NamedTuple):
    """A text that a row shows, by the word in it."""

    word: str
    message: int
    place: str
    """`content`, `thinking`, `call` or `system`."""


def shown_by(messages: list[Any]) -> list[Shown]:
    """Return all words of messages, read without the code that is tested."""
    found = []
    for number, message in enumerate(messages):
        for key, value in message.items() if isinstance(message, dict) else ():
            if key in ("id", "name", "tool_call_id"):
                continue
            text = json.dumps(value, ensure_ascii=False)
            place = "call" if key == "tool_calls" else "thinking" if "reason" in key or "think" in key else "content"
            if number == 0 and message.get("role") in ("system", "developer"):
                place = "system"
            cut = max(text.rfind("</think>"), text.rfind("<channel|>")) if message.get("role") == "assistant" else -1
            found += [
                Shown(word.group(), number, "thinking" if place == "content" and word.start() < cut else place)
                for word in NONCE.finditer(text)
            ]
    return found


def require_same_words(text: str, messages: list[Any], may_lack: frozenset[str] = frozenset()) -> None:
    """Assert that a rendered conversation has each word of its messages once and in order, and no other word."""
    shown = shown_by(messages)
    # Some templates print the name of a tool that answers.
    names = set(NONCE.findall(json.dumps([message.get("name") for message in messages], ensure_ascii=False)))
    words = [word for word in NONCE.findall(text) if word not in names]
    last_user = max((i for i, message in enumerate(messages) if message.get("role") == "user"), default=-1)
    by_word = {one.word: one for one in shown}
    assert set(words) <= by_word.keys(), "invented"
    for one in shown:
        if one.place == "thinking" and one.message < last_user:
            continue  # many templates leave out the thinking of earlier turns
        assert one.word in words or one.word in may_lack, f"lost: {one}"
    counts = Counter(words)
    assert all(count == 1 for word, count in counts.items() if by_word[word].place != "call"), "repeated"
    order = [by_word[word] for word in dict.fromkeys(words)]
    numbers = [one.message for one in order if one.place != "system"]
    assert numbers == sorted(numbers), "moved"
    contents = [one.word for one in order if one.place == "content"]
    assert contents == [one.word for one in shown if one.place == "content" and one.word in contents], "moved"
    row = json.dumps(messages, ensure_ascii=False)
    for trace in ("[{'", "{'type'", "'text':"):  # Python's text of a value
        assert trace not in text or trace in row


ODD = [
    "</think>",
    "<think>",
    "<tool_response>",
    "</tool_response>",
    "<|channel>",
    "<channel|>",
    "'",
    '"',
    "\\",
    "\n",
    " ",
]
ODD += ["{{ x }}", "<b>", "é日", "[INST]", "None", "{'a': 1}", "\t", "\u2028", "/nothink", "<tool_call>"]


class Conversations:
    """Random messages, with a word of its own in each text."""

    def __init__(self, randomness: random.Random) -> None:
        self._random = randomness
        self._number = 100

    def text(self) -> str:
        pick, parts = self._random, []
        for _ in range(pick.choice([0, 1, 1, 2, 3])):
            self._number += 1
            parts += [f"w{self._number:04}x", *pick.choices(ODD, k=pick.choice([0, 0, 1, 2]))]
        pick.shuffle(parts)
        return " ".join(parts) if pick.random() < 0.5 else "".join(parts)

    def part(self) -> Any:
        kinds = [{"type": "text", "text": self.text()}] * 6
        return self._random.choice([*kinds, {"type": "image", "text": None}, {"text": self.text()}, self.text()])

    def content(self) -> Any:
        pick = self._random.random()
        if pick < 0.75:
            return self.text()
        if pick < 0.9:
            return [self.part() for _ in range(self._random.choice([0, 1, 2]))]
        return self._random.choice([None, 7, {"text": self.text()}])

    def call(self) -> Any:
        values = [self.text(), 12, 1.5, True, None, [self.text(), 3], {"c": self.text()}]
        arguments = {name: self._random.choice(values) for name in self._random.sample(["b", "a", "z"], k=2)}
        given = json.dumps(arguments) if self._random.random() < 0.3 else arguments
        self._number += 1
        function = {"name": f"w{self._number:04}x", "arguments": given}
        return self._random.choice([{"type": "function", "function": function}, function])

    def message(self) -> dict[str, Any]:
        roles = ["user"] * 5 + ["assistant"] * 5 + ["tool"] * 2 + ["system", "developer", "human"]
        message = {"role": self._random.choice(roles), "content": self.content()}
        if message["role"] == "assistant" and self._random.random() < 0.4:
            message["tool_calls"] = [self.call() for _ in range(self._random.choice([1, 1, 2]))]
        if self._random.random() < 0.15:
            message[self._random.choice(["reasoning_content", "thinking", "text", "name"])] = self.text()
        if self._random.random() < 0.05:
            del message["content"]
        return message

    def conversation(self) -> list[dict[str, Any]]:
        first = [{"role": "system", "content": self.content()}] if self._random.random() < 0.3 else []
        return [
            *first,
            {"role": "user", "content": self.text()},
            *(self.message() for _ in range(self._random.randint(0, 4))),
        ]


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_no_template_loses_or_invents_text_of_a_random_conversation(randomness: random.Random) -> None:
    messages = Conversations(randomness).conversation()
    for tokens in TOKENIZERS.values():
        try:
            text = seen(tokens, messages)
        except ConfigError:
            continue
        require_same_words(text, messages)


def test_many_random_conversations_are_shown() -> None:
    """The check is no refusal of everything: each family shows conversations whose form it knows."""
    randomness, shown = random.Random(3), Counter[str]()
    for _ in range(60):
        messages = Conversations(randomness).conversation()
        for name in ("qwen3", "llama3_1", "gptoss", "glm4moe", "qwen3_5_think", "lfm2_2_5"):
            try:
                text = seen(TOKENIZERS[name], messages)
            except ConfigError:
                continue
            require_same_words(text, messages)
            shown[name] += 1
    assert min(shown.values()) >= 8
    assert len(shown) == 6


FUZZED = ("qwen3", "qwen3_5_think", "qwen2_5", "llama3_1", "gptoss", "deepseekv3", "glm4moe", "gemma3", "llama_2")
NOT_SHOWN = ("answer", "id", "name", "tool_call_id", "chat_template_kwargs", "note", "role", "type")


def rows(talk: Conversations) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield valid rows of data, with the kind of their job."""
    user, answer = {"role": "user", "content": talk.text() or "w9000x"}, {"role": "assistant", "content": talk.text()}
    call = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    result = {"role": "tool", "content": talk.text(), "tool_call_id": "call00001", "name": "add"}
    later = {"role": "user", "content": "w9001x"}
    tail = {"answer": "w9999x", "id": 7}
    yield "rl", {"prompt": talk.text() or "w9000x", **tail}
    yield "rl", {"prompt": [user], **tail}
    yield "rl", {"prompt": [{"role": "system", "content": "w9002x"}, user, answer, later], **tail}
    yield "rl", {"prompt": [user, {**answer, "content": "w9003x and"}], **tail}
    yield "rl", {"prompt": [user, call, result], "tools": [TOOL], **tail}
    yield "rl", {"prompt": [user, {**answer, "reasoning_content": "w9004x"}, later], **tail}
    yield "rl", {"prompt": [user], "chat_template_kwargs": {"enable_thinking": False}, **tail}
    yield "sft", {"prompt": talk.text() or "w9000x", "completion": "w9005x", **tail}
    yield "sft", {"messages": [user, {**answer, "content": "w9005x"}], **tail}
    yield "sft", {"prompt": [user, call, result], "completion": "w9005x", "tools": json.dumps([TOOL]), **tail}
    yield "sft", {"messages": [user, answer, later, {"role": "assistant", "content": "<think>w9006x</think>w9005x"}]}
    yield "sft", {"prompt": [user], "completion": [{**answer, "content": "w9005x", "reasoning_content": "w9006x"}]}


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container in a value with each of its keys."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def mutate(row: dict[str, Any], pick: random.Random) -> None:
    holder, key = pick.choice(list(places(row)) or [(row, row.setdefault("prompt", "prompt"))])
    value = holder[key]
    text = value if isinstance(value, str) else "w8000x"
    changes = [
        *(
            None,
            7,
            "",
            [],
            {},
            [value],
            {"text": value},
            {"a": None},
            text * 2,
            f" {text}\n",
            [{"type": "text", "text": text}],
        ),
        *([{"type": "text", "text": text}, {"type": "image", "image": "a.png"}], [{"type": "image_url"}], [text, text]),
        *(f"{BEGIN}{text}", f"{text}{END}", f"{text}<|im_end|>", f"</think>{text}", f"{text}<think>", "user", "human"),
        *(
            "assistant",
            "tool",
            {"role": "user", "content": "w8001x"},
            [{"role": "user", "content": "w8002x"}],
            json.dumps(value),
        ),
    ]
    match pick.randrange(6):
        case 0 if isinstance(holder, dict):
            holder[pick.choice(["text", "value", "content", "note", "images", "thinking", "role", "name"])] = (
                holder.pop(key)
            )
        case 1:
            del holder[key]
        case 2 if isinstance(holder, list):
            holder.insert(pick.randrange(len(holder) + 1), json.loads(json.dumps(value)))
        case 3:
            row[pick.choice(["images", "audio", "tools", "chat_template_kwargs", "note"])] = pick.choice(changes)
        case _:
            holder[key] = pick.choice(changes)


def words_in(value: Any) -> list[str]:
    """Return the words of a value that the model has to see."""
    if isinstance(value, dict):
        return [word for key, inner in value.items() if key not in NOT_SHOWN for word in words_in(inner)]
    if isinstance(value, list):
        return [word for inner in value for word in words_in(inner)]
    return NONCE.findall(value) if isinstance(value, str) else []


def require_trained_as_shown(row: dict[str, Any], kind: str, prompt: str, targets: list[str], end: str) -> None:
    """Check a row whose last example has this prompt, and whose examples have these targets."""
    is_pair = kind == "rl" or "completion" in row
    given = row["prompt"] if is_pair else row.get("prompt", row.get("messages"))
    completion = row["completion"] if kind == "sft" and is_pair else []
    messages = [*(given if isinstance(given, list) else []), *(completion if isinstance(completion, list) else [])]
    last_user = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    past = {one.word for one in shown_by(messages) if one.place == "thinking" and one.message < last_user}
    whole, shown = prompt + targets[-1], {*words_in(given), *words_in(completion)}
    words, tools = set(NONCE.findall(whole)), set(NONCE.findall(json.dumps(row.get("tools"))))
    assert shown - past <= words, "lost"
    assert words <= tools | set(NONCE.findall(json.dumps([given, completion]))), "invented"
    assert not tools or tools <= words, "tools lost"
    assert not any(trace in whole and trace not in json.dumps(row) for trace in ("[{'", "'type': ", "'text': ", "None"))
    assert not re.match(rf"(?:{BEGIN} ?){{2}}", prompt)
    assert not prompt.rstrip().endswith(end)
    if kind == "sft":
        answer = row.get("completion", messages[-1:])
        assert set(words_in(answer)) <= set(NONCE.findall("".join(targets))), "not trained"
        for target in targets:
            assert target.endswith(end)
            assert target.count(end) == 1


def test_rows_that_pass_the_check_are_trained_as_they_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,000 mutated rows: `config check` refuses one, or the job trains on what it says."""
    pick, passed, refused = random.Random(35), Counter[str](), 0
    file = tmp_path / "train.jsonl"
    made = {name: byte_tokenizer(TEMPLATES[name]) for name in FUZZED[:-1]} | {"llama_2": llama_tokenizer()}
    checked = {name: prompt_tokenizer(tokenizer) for name, tokenizer in made.items()}
    config = SimpleNamespace(vocab_size=2000, eos_token_id=None, max_position_embeddings=1 << 20, to_dict=dict)
    config.get_text_config = lambda: config
    current = ""
    monkeypatch.setattr(data_module, "require_tokenizer", lambda _: None)
    monkeypatch.setattr(data_module, "PromptTokenizer", lambda *_: checked[current])
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *_, **__: config)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: made[current])
    for number in range(2000):
        current = FUZZED[number % len(FUZZED)]
        kind, row = pick.choice(list(rows(Conversations(pick))))
        for _ in range(pick.choice([0, 1, 1, 1, 2, 3])):
            mutate(row, pick)
        file.write_text(json.dumps(row) + "\n")
        job = {"model": str(tmp_path), "data": {"train": str(file)}, "steps": 1}
        rl = {"reward": {"function": "m:f"}, "sampling": {"max_tokens": 8}, "algorithm": {"group_size": 2}}
        rl["data"] = {"train": str(file), "prompts_per_step": 1}
        spec = parse({**job, **(rl if kind == "rl" else {"kind": "sft"})})
        checked[current] = PromptTokenizer(made[current], config, [made[current].eos_token_id])
        found = check_data(spec)
        if found.problem:
            refused += 1
            assert str(file) in found.problem
            continue
        data = load_data(spec, tmp_path)
        texts = [
            [data.decode(ints(ids), skip_special_tokens=False) for ids in (one.tokens, one.completion)]
            for one in data.train
        ]
        (shown, _), targets = texts[-1], [target for _, target in texts]
        for text in texts[0]:
            assert all(line in found.example for line in printable(text).split("\n")) or len(text) > 3000
        try:
            require_trained_as_shown(row, kind, shown, targets, made[current].eos_token)
        except AssertionError as error:
            if "note" not in " ".join(found.notices):
                raise AssertionError(f"{number} {current}: {row} -> {shown!r}, {targets!r}: {error}") from error
        passed[current] += 1
    assert min(passed.values()) > 20, passed
    assert refused > 400
