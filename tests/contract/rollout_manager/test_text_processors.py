"""What tokenizes for the OpenAI endpoint: one contract for the fake and for processes, and the limits of processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rlboost.services.rollout_manager.adapters.request_bodies import MAX_VALUES, SMALL_BODY_BYTES
from rlboost.services.rollout_manager.adapters.text import PROCESSES, TextProcesses, load_model_files
from rlboost.services.rollout_manager.ports import (
    InvalidJson,
    TemplateOptions,
    TextProcessesBusy,
    TextProcessor,
    TokenizationError,
)
from rlboost.shared.wire import I32, ints, pack
from tests.support import tool_model
from tests.support.manager_fakes import InlineTextProcessor
from tests.support.model_folder import write_tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}{% if m.role == 'bomb' %}{{ m.content * 400000000 }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = write_tokenizer(tmp_path_factory.mktemp("model"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return str(directory)


@pytest.fixture
async def processes() -> AsyncIterator[TextProcesses]:
    processes = TextProcesses()
    yield processes
    await processes.close()


@pytest.fixture(params=["fake", "processes"])
def text(request: pytest.FixtureRequest, processes: TextProcesses) -> TextProcessor:
    return processes if request.param == "processes" else InlineTextProcessor(load_model_files)


async def test_texts_become_tokens_and_conversations_text(text: TextProcessor, folder: str) -> None:
    columns = await text.encode(folder, ["t3 t4", "t5"], add_special_tokens=True)
    assert list(map(ints, columns)) == [[1, 3, 4], [1, 5]]
    assert await text.encode(folder, ["t3"], add_special_tokens=False) == [pack([3], I32)]
    assert await text.render(folder, [{"role": "user", "content": "t3 \u6f22"}]) == "t3 \u6f22"
    assert await text.encode_chat(folder, [{"role": "user", "content": "t3 t5"}]) == pack([3, 5], I32)


async def test_half_of_a_character_is_refused_with_its_place(text: TextProcessor, folder: str) -> None:
    with pytest.raises(TokenizationError, match=r"character 3 is '.ud83d', half of a character"):
        await text.encode(folder, ["t3 \ud83d"], add_special_tokens=True)
    with pytest.raises(TokenizationError, match=r"character 0 is '.ud83d', half of a character"):
        await text.encode_chat(folder, [{"role": "user", "content": "\ud83d"}])


FILLER = "x" * SMALL_BODY_BYTES


def parts(body: str) -> list[bytes]:
    """Return a body as it arrives; the first part ends within a character or a number."""
    encoded = body.encode()
    return [encoded[:11], encoded[11:500], b"", encoded[500:]]


@pytest.mark.parametrize("filler", ["", FILLER], ids=["small", "large"])
async def test_bodies_become_values_and_token_ids_columns(text: TextProcessor, filler: str) -> None:
    given = {"text": "t3 \u6f22", "half": "\ud800", "n": [1, -2, 0.5, None, True], "filler": filler}
    assert await text.parse(parts(json.dumps(given))) == given
    column = pack([3, 4], I32)
    for prompt, parsed in (
        ([3, 4], column),
        ([[3, 4], "t3", []], [column, "t3", []]),
        ("t3", "t3"),
        ([3, True], [3, True]),
        ([-1], [-1]),
        ([1 << 31], [1 << 31]),
        ([], []),
    ):
        assert await text.parse(parts(json.dumps({"prompt": prompt, "filler": filler}))) == {
            "prompt": parsed,
            "filler": filler,
        }
    assert await text.parse([b"[3]"]) == [3]


@pytest.mark.parametrize("filler", ["", FILLER], ids=["small", "large"])
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"a": 3', "JSON decode error: Expecting ',' delimiter: line 1 column"),
        (b'{"a": "\xff', "the text is not UTF-8"),
        (b'{"a": ' + b"[" * 100_000, "too many levels"),
    ],
)
async def test_body_that_is_no_json_is_refused(text: TextProcessor, filler: str, body: bytes, words: str) -> None:
    with pytest.raises(InvalidJson, match=words):
        await text.parse([body, filler.encode()])


async def test_large_body_of_too_many_or_too_large_values_is_refused(text: TextProcessor) -> None:
    with pytest.raises(InvalidJson, match=f"more than {MAX_VALUES} values"):
        await text.parse(parts(json.dumps({"stop_token_ids": [1] * MAX_VALUES})))
    with pytest.raises(InvalidJson, match="a number of more than 64 bits"):
        await text.parse(parts(json.dumps({"filler": FILLER, "n": 1 << 64})))
    assert len((await text.parse(parts(json.dumps({"prompt": [1] * MAX_VALUES}))))["prompt"]) == 4 * MAX_VALUES


async def test_tools_are_rendered_and_the_style_of_calls_is_that_of_the_template(
    text: TextProcessor, folder: str, tmp_path: Path
) -> None:
    model = str(write_tokenizer(tmp_path))
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    (tmp_path / "chat_template.jinja").write_text(tool_model.TEMPLATE.replace(tool_model.END, " <eos> "))
    user = [{"role": "user", "content": "t3"}]
    rendered = await text.render(model, user, TemplateOptions([tool_model.ADD], {"enable_thinking": False}))
    assert '"name": "add"' in rendered
    assert rendered.endswith("<think></think>")
    hints = {"enable_thinking": False, "reasoning_effort": "low"}
    assert await text.render(model, user, TemplateOptions([tool_model.ADD], hints=hints)) == rendered
    with pytest.raises(TokenizationError, match="has no argument 'reasoning_effort'"):
        await text.render(model, user, TemplateOptions([tool_model.ADD], hints))
    style = await text.call_style(model)
    assert (style.format, style.problem) == ("hermes", "")
    assert "does not show tools" in (await text.call_style(folder)).problem
    with pytest.raises(TokenizationError, match="does not show tools"):
        await text.render(folder, user, TemplateOptions([tool_model.ADD]))


async def test_text_without_tokens_is_an_error_that_shows_it(text: TextProcessor, tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path) / "tokenizer.json"
    file.write_text(file.read_text().replace('"unk_token": "<pad>"', '"unk_token": "<none>"'))
    with pytest.raises(TokenizationError, match=r"no tokens for 't3 \u00e9'.*UNK"):
        await text.encode(str(tmp_path), ["t3 \u00e9"], add_special_tokens=True)


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("tokenizer_config.json", {"eos_token": {"id": 2}}, "KeyError: 'content'"),
        ("config.json", {"text_config": 3}, "TypeError: 'int' object is not a mapping"),
        ("config.json", {"architectures": ["LlamaForSequenceClassification"]}, "a reward model, which scores and"),
    ],
)
async def test_model_files_that_cannot_be_read_are_named(
    processes: TextProcesses, tmp_path: Path, file: str, content: dict[str, object], named: str
) -> None:
    (write_tokenizer(tmp_path) / file).write_text(json.dumps(content))
    with pytest.raises(TokenizationError, match=named):
        await processes.encode(str(tmp_path), ["t3"], add_special_tokens=True)
    assert processes._idle[0].returncode is None


@pytest.mark.parametrize("role", ["loop", "bomb"])
async def test_template_without_end_costs_its_request_only(folder: str, role: str) -> None:
    """The manager's loop runs meanwhile, and the next request is served."""
    processes = TextProcesses(limit_s=3.0)
    turns = 0

    async def loop() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.01)

    looping = asyncio.create_task(loop(), name="loop")
    try:
        with pytest.raises(TokenizationError, match="shorten the"):
            await processes.render(folder, [{"role": role, "content": "12345"}])
        assert turns > 3
        assert await processes.render(folder, [{"role": "user", "content": "t3"}]) == "t3"
    finally:
        looping.cancel()
        await processes.close()


async def test_request_waits_for_a_process_up_to_a_limit(folder: str) -> None:
    processes = TextProcesses(limit_s=2.0, queue_limit_s=0.2)
    busy = [
        asyncio.create_task(processes.render(folder, [{"role": "loop", "content": ""}]), name=f"busy-{i}")
        for i in range(PROCESSES)
    ]
    await asyncio.sleep(0)
    with pytest.raises(TextProcessesBusy, match="text process"):
        await processes.encode(folder, ["t3"], add_special_tokens=True)
    for error in await asyncio.gather(*busy, return_exceptions=True):
        assert isinstance(error, TokenizationError)
    await processes.close()


async def test_process_with_much_memory_is_replaced(processes: TextProcesses, folder: str) -> None:
    await processes.encode(folder, ["t3"], add_special_tokens=True)
    (first,) = processes._idle
    await processes.encode(folder, ["t3 " * 500_000], add_special_tokens=True)
    await first.wait()
    assert await processes.encode(folder, ["t3"], add_special_tokens=True) == [pack([1, 3], I32)]


async def test_abandoned_request_leaves_no_answer_to_the_next(processes: TextProcesses, folder: str) -> None:
    abandoned = asyncio.create_task(processes.encode(folder, ["t3 " * 300_000], add_special_tokens=True), name="a")
    await asyncio.sleep(0.3)
    abandoned.cancel()
    assert await processes.encode(folder, ["t4"], add_special_tokens=True) == [pack([1, 4], I32)]
