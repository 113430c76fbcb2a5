"""Prompts and answers begin and end where the model expects it, with no token that a row has not."""

from __future__ import annotations

import json
import re

import pytest
from tokenizers import AddedToken

from rlboost.shared.errors import ConfigError
from tests.support.chat_tokenizers import (
    BEGIN,
    CHAT,
    END,
    LLAMA_2,
    TEMPLATES,
    TOKENIZERS,
    byte_tokenizer,
    llama_tokenizer,
    prompt_tokenizer,
    seen,
)


def test_begin_token_of_a_text_is_not_doubled() -> None:
    tokens = prompt_tokenizer(llama_tokenizer())
    rendered = tokens.prompt(f"{BEGIN}[INST] 12+34=? [/INST]")
    assert rendered.count(1) == 1
    assert tokens.decode(rendered) == f"{BEGIN} [INST] 12+34=? [/INST]".replace("> [", ">[") or rendered[0] == 1
    for text in (f"{BEGIN}{BEGIN}[INST]", f"{BEGIN} {BEGIN}[INST]", f" {BEGIN}[INST]"):
        with pytest.raises(ConfigError, match="two begin tokens"):
            tokens.prompt(text)
    with pytest.raises(ConfigError, match=r"message 1 \(user\) has the special token '<s>'"):
        tokens.prompt([{"role": "user", "content": f"{BEGIN}[INST] 12"}])


def test_end_token_that_a_tokenizer_adds_does_not_end_the_prompt() -> None:
    plain, adding = (prompt_tokenizer(llama_tokenizer(adds_end=adds)) for adds in (False, True))
    assert adding.prompt("12+34=") == plain.prompt("12+34=")
    assert adding.prompt("日本 12+34=") == plain.prompt("日本 12+34=")
    for text in (f"12+34={END}", f"12+34={END}\n"):
        with pytest.raises(ConfigError, match="ends with the end token"):
            plain.prompt(text)
    with pytest.raises(ConfigError, match=r"ends with the end token '<\|im_end\|>'"):
        prompt_tokenizer(byte_tokenizer("{% for m in messages %}{{ m.content }}<|im_end|>\n{% endfor %}")).prompt(CHAT)


@pytest.mark.parametrize(
    ("name", "start", "end"),
    [
        ("qwen3", "The answer", "<|im_start|>assistant\n<think>\n\n</think>\n\nThe answer"),
        ("qwen3", "<think>\nLet me", "<|im_start|>assistant\n<think>\nLet me"),
        ("qwen3_5_think", "<think>\nLet me", "<|im_start|>assistant\n<think>\nLet me"),
        ("qwen3_instruct_2507", "The answer", "<|im_start|>assistant\nThe answer"),
        ("llama3", "The answer", "<|start_header_id|>assistant<|end_header_id|>\n\nThe answer"),
        ("gptoss", "The answer", "<|start|>assistant<|channel|>final<|message|>The answer"),
    ],
)
def test_beginning_of_an_answer_stays_open(name: str, start: str, end: str) -> None:
    prompt = [CHAT[0], {"role": "assistant", "content": start}]
    tokens = TOKENIZERS[name]
    assert seen(tokens, prompt).endswith(f"w0001x?{end}") or seen(tokens, prompt).endswith(end)
    assert seen(tokens, prompt).count(start) == 1


def test_beginning_of_an_answer_stays_open_with_a_template_of_llama_2() -> None:
    tokens = prompt_tokenizer(llama_tokenizer())
    assert seen(tokens, [CHAT[0], {"role": "assistant", "content": "46"}]).endswith("[/INST] 46")


def test_second_answer_that_a_template_joins_to_the_first_is_refused() -> None:
    first, second = ({"role": "assistant", "content": text} for text in ("46", "47"))
    assert TOKENIZERS["qwen2_5"].answer([CHAT[0], first], [second])
    with pytest.raises(ConfigError, match=r"renders a message of the assistant differently .* join the two"):
        TOKENIZERS["gemma4"].answer([CHAT[0], first], [second])


def test_observation_follows_an_answer_whose_beginning_was_given() -> None:
    tokens = TOKENIZERS["qwen2_5"]
    end = byte_tokenizer().eos_token_id
    prompt = [CHAT[0], {"role": "assistant", "content": "The "}]
    observation = tokens.observation(prompt, end, [{"role": "user", "content": "w0005x"}])
    assert tokens.decode(observation) == "\n<|im_start|>user\nw0005x<|im_end|>\n<|im_start|>assistant\n"


def test_text_after_a_text_gets_no_space_of_its_own() -> None:
    tokenizer = llama_tokenizer()
    tokens = prompt_tokenizer(tokenizer)
    prompt = tokens.prompt("12+34=")
    target = tokens.completion("12+34=", "46")
    assert tokenizer.convert_ids_to_tokens(target) == ["46", END]
    assert [*prompt, *target] == tokenizer(f"12+34=46{END}")["input_ids"]
    assert tokens.decode(tokens.text_observation(5, "46")) == "46"
    chat = [{"role": "user", "content": "12+34=?"}]
    answer = tokens.answer(chat, [{"role": "assistant", "content": "46"}])
    whole = tokenizer.apply_chat_template([*chat, {"role": "assistant", "content": "46"}], return_dict=True)[
        "input_ids"
    ]
    assert [*tokens.prompt(chat), *answer] == whole
    said = [*tokens.prompt(chat), *answer]
    observed = tokens.observation(chat, 2, [{"role": "user", "content": "Higher."}])
    messages = [*chat, {"role": "assistant", "content": "46"}, {"role": "user", "content": "Higher."}]
    assert [*said, *observed] == tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]


def test_tokens_of_a_byte_tokenizer_are_those_of_the_text_alone() -> None:
    tokenizer = byte_tokenizer()
    tokens = prompt_tokenizer(tokenizer)
    for text in ("46", " 46", "\n\n46", "é"):
        assert tokens.completion("12+34=", text)[:-1] == tokenizer(text)["input_ids"]


def test_text_that_the_tokenizer_does_not_know_is_refused() -> None:
    tokenizer = llama_tokenizer()
    settings_of = json.loads(tokenizer.backend_tokenizer.to_str())
    settings_of["model"]["byte_fallback"] = False
    without = tokenizer.backend_tokenizer.from_str(json.dumps(settings_of))
    tokenizer._tokenizer = without
    prompt_tokenizer(tokenizer).prompt("12+34=")
    with pytest.raises(ConfigError, match="has no token for a part of the text '12日'"):
        prompt_tokenizer(tokenizer).prompt("12日")


@pytest.mark.parametrize(
    ("name", "special"),
    [
        ("qwen3", ["<|im_start|>", "<|im_end|>"]),
        ("llama3_1", ["<|start_header_id|>", "<|eot_id|>"]),
        ("gemma3", ["<start_of_turn>"]),
        ("gptoss", ["<|start|>", "<|message|>"]),
    ],
)
def test_special_token_that_begins_or_ends_a_turn_is_refused_in_every_text(name: str, special: list[str]) -> None:
    """A text with one would be several messages to the model, from any author."""
    tokenizer = byte_tokenizer(TEMPLATES[name])
    tokenizer.add_special_tokens({"additional_special_tokens": [*special, "<think>", "<|fim|>"]})
    tokens = prompt_tokenizer(tokenizer)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": special[0]}}}
    for text in special:
        for i in range(3):
            messages = [{**one, "content": f"a{text}b"} if i == n else one for n, one in enumerate(CHAT)]
            with pytest.raises(ConfigError, match=rf"message {i + 1} \(.*the special token {re.escape(repr(text))}"):
                tokens.prompt(messages)
    with pytest.raises(ConfigError, match=r"message 2 \(assistant\) has the special token"):
        tokens.prompt([CHAT[0], {"role": "assistant", "tool_calls": [call]}, CHAT[2]])
    for text in ("<think>", "<|fim|>", "<|im_", special[0][:-1]):
        assert text in seen(tokens, [{"role": "user", "content": f"a {text} b"}])


@pytest.mark.parametrize("side", ["rstrip", "lstrip"])
def test_white_space_next_to_a_special_token_is_tokenized_as_by_transformers(side: str) -> None:
    """Phi-3's special tokens take the white space after them: that of the template, and that of an answer's start."""
    tokenizer = byte_tokenizer(TEMPLATES["phi3"], end="<|end|>")
    names = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False, **{side: True}) for name in names])
    tokens, question = prompt_tokenizer(tokenizer), CHAT[:1]
    for text in ("46", "  46", "\n46 \n", " 46 "):
        turns = [*question, {"role": "assistant", "content": text}, CHAT[2]]
        whole = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
        turn = [*tokens.prompt(question), *tokens.answer(question, turns[1:2])]
        assert turn == whole[: len(turn)]
        assert [*turn, *tokens.observation(question, turn[-1], CHAT[2:])] == whole
    end = tokenizer.eos_token_id
    assert [end, *tokens.text_observation(end, "\nmore")] == tokenizer("<|end|>\nmore", add_special_tokens=False)[
        "input_ids"
    ]


@pytest.mark.parametrize(
    ("template", "end", "expected"),
    [
        (TEMPLATES["qwen2_5"], "<|endoftext|>", "<|im_end|>"),  # as of the base model
        (TEMPLATES["qwen2_5"], "<|im_end|>", ""),
        (TEMPLATES["glm4moe"], "<|endoftext|>", ""),  # no token ends a turn
        (LLAMA_2.replace("{{ eos_token }}", "<|user|>").replace("[INST]", "<|user|>"), "<|endoftext|>", ""),
        ("{{ raise_exception('no') }}", "<|endoftext|>", ""),
        (None, "<|endoftext|>", ""),
    ],
)
def test_special_token_that_ends_turns_and_no_completion_is_found(template: str, end: str, expected: str) -> None:
    tokenizer = byte_tokenizer(template, end)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|user|>"]})
    assert prompt_tokenizer(tokenizer).unended_turn == expected


def test_special_token_of_a_template_that_the_tokenizer_lacks_is_found() -> None:
    tokenizer = byte_tokenizer(TEMPLATES["qwen3"])
    for expected in (["<|im_start|>"], []):
        tokens = prompt_tokenizer(tokenizer)
        tokens.prompt(CHAT)
        assert tokens.split_tokens == expected
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})


def test_thought_that_the_model_continues_follows_the_white_space_of_the_template() -> None:
    tokens = prompt_tokenizer(llama_tokenizer())
    thought = [CHAT[0], {"role": "assistant", "content": "<think>1"}]
    assert seen(tokens, thought).endswith("[/INST] <think>1")
    [*prompt, _] = tokens.prompt([CHAT[0], {"role": "assistant", "content": "<think>12"}])
    assert prompt == tokens.prompt(thought)
