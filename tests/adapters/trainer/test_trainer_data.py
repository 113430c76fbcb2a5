"""Reading prompts: what goes in as a file comes out as token ids, or as an error that names the line."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from rlboost.services.trainer.adapters.data import find_model, load_data
from rlboost.services.trainer.ports.samples import Data
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.spec import parse
from rlboost.shared.wire import ints
from tests.support.model_folder import with_chat_template, write_model, write_tokenizer

CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}t90{% endif %}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tokenizer(write_model(tmp_path / "model"))


def load(model: Path, lines: list[Any], **changes: Any) -> Data:
    file = model.parent / "train.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    raw = {
        "model": str(model),
        "data": {"train": str(file), **changes.pop("data", {})},
        "reward": {"function": "m:f"},
        "sampling": {"max_tokens": 8},
        "steps": 1,
        **changes,
    }
    return load_data(parse(raw), model)


def test_text_is_tokenized_with_its_special_tokens_and_other_keys_are_columns(model: Path) -> None:
    [prompt] = load(model, [{"prompt": "t5 t7", "answer": "42", "id": 1}]).train
    assert ints(prompt.tokens) == [1, 5, 7]
    assert prompt.given == "t5 t7"
    assert prompt.columns == {"answer": "42", "id": 1}


def test_chat_messages_go_through_the_chat_template(model: Path) -> None:
    with_chat_template(model, CHAT_TEMPLATE)
    messages = [{"role": "user", "content": "t5 t6"}]
    [prompt] = load(model, [{"prompt": messages}]).train
    assert ints(prompt.tokens)[-3:] == [5, 6, 90]
    assert prompt.given == messages


@pytest.mark.parametrize(("system", "begins"), [("t9 t10", [{"role": "system", "content": "t9 t10"}]), ("", [])])
def test_system_prompt_of_the_job_makes_text_a_chat(model: Path, system: str, begins: list[Any]) -> None:
    with_chat_template(model, CHAT_TEMPLATE)
    asked = [{"role": "user", "content": "t5 t6"}]
    rows: list[Any] = [{"prompt": "t5 t6"}, {"prompt": asked}]
    data = {"system_prompt": system, "eval": str(model.parent / "train.jsonl")}
    loaded = load(model, rows, data=data, eval={"every": 1})
    [rendered] = load(model, [{"prompt": [*begins, *asked]}]).train
    for prompt in (*loaded.train, *loaded.evaluation):
        assert (prompt.given, prompt.tokens) == ([*begins, *asked], rendered.tokens)
    assert load(model, [{"prompt": "t5 t6", "chat_template_kwargs": {}}], data=data).train[0].tokens == rendered.tokens
    own = [{"prompt": [{"role": "system", "content": "t7"}, *asked]}]
    with pytest.raises(ConfigError, match=r"line 1: the prompt has a system message of its own"):
        load(model, own, data=data)
    raising = "{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    with_chat_template(model, f"{{% for m in messages %}}{raising}t3 {{{{ m.content }}}} {{% endfor %}}t4")
    if begins:
        with pytest.raises(ConfigError, match=r"line 1: the chat template cannot render .*no system role"):
            load(model, rows, data=data)
    else:
        assert ints(load(model, rows, data=data).train[0].tokens) == [3, 5, 6, 4]


def test_system_prompt_is_for_jobs_that_generate(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.system_prompt"):
        load(model, [], kind="sft", data={"system_prompt": "t9"}, reward=None, sampling=None)


KWARGS_TEMPLATE = CHAT_TEMPLATE.replace("t90", "{% if thinks %}t80{% else %}t{{ level }}{% endif %}")


def test_template_arguments_of_the_job_apply_to_every_chat(model: Path) -> None:
    with_chat_template(model, KWARGS_TEMPLATE)
    asked = [{"role": "user", "content": "t5 t6"}]
    rows = [{"prompt": asked}, {"prompt": asked, "chat_template_kwargs": {"thinks": True}}]
    given = {"chat_template_kwargs": {"level": 70, "thinks": False}}
    data = load(model, rows, data=given, environment={"function": "m:e"})
    assert [ints(prompt.tokens)[-1] for prompt in data.train] == [70, 80], "a row's own come first"
    assert data.train[0].columns == {}
    formatter = data.chat_formatter
    assert formatter is not None
    assert formatter.format_prompt(asked, [], {})[-1] == 70, "what an environment says"
    assert formatter.format_observation(asked, 7, "t9", [], {})[-2:] == [9, 70]


def test_template_arguments_of_the_job_apply_to_sft(model: Path) -> None:
    template = "t{{ level }} {% for m in messages %}{{ m['content'] }} {% endfor %}"
    with_chat_template(model, template)
    row = {"prompt": [{"role": "user", "content": "t5"}], "completion": [{"role": "assistant", "content": "t7"}]}
    data = {"chat_template_kwargs": {"level": 70}}
    [prompt] = load(model, [row], kind="sft", data=data, reward=None, sampling=None).train
    assert (ints(prompt.tokens), ints(prompt.completion)[:1]) == ([70, 5], [7])


def test_template_arguments_that_nothing_reads_are_refused(model: Path) -> None:
    with_chat_template(model, KWARGS_TEMPLATE)
    chat, text = {"prompt": [{"role": "user", "content": "t5"}]}, {"prompt": "t5"}
    with pytest.raises(ConfigError, match=r"line 2: the prompt is text, .*set data\.system_prompt, or remove "):
        load(model, [chat, text], data={"chat_template_kwargs": {"level": 70}})
    with pytest.raises(ConfigError, match="no argument 'levels': remove it from chat_template_kwargs"):
        load(model, [chat], data={"chat_template_kwargs": {"levels": 70}})


def test_empty_lines_are_skipped_and_keys_are_configurable(model: Path) -> None:
    data = load(model, ['{"q": "t5"}', "", '{"q": "t6"}'], data={"prompt_key": "q"})
    assert [ints(prompt.tokens) for prompt in data.train] == [[1, 5], [1, 6]]


def test_completions_are_decoded_with_or_without_special_tokens(model: Path) -> None:
    data = load(model, [{"prompt": "t5"}])
    assert data.decode([7, 2], skip_special_tokens=False) == "t7 <eos>"
    assert data.decode([7, 2], skip_special_tokens=True) == "t7"


def test_vocabulary_is_the_models(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    assert load(model, [{"prompt": "t5"}]).vocab_size == config["vocab_size"]


def test_the_end_token_is_the_tokenizers_and_those_of_the_generation_settings(model: Path) -> None:
    assert load(model, [{"prompt": "t5"}]).stop_token_ids == (2,)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    assert load(model, [{"prompt": "t5"}]).stop_token_ids == (2, 9)


def test_evaluation_prompts_are_read_where_the_job_evaluates(model: Path) -> None:
    file = model.parent / "eval.jsonl"
    file.write_text('{"prompt": "t8"}\n')
    data = load(model, [{"prompt": "t5"}], data={"eval": str(file)}, eval={"samples": 1})
    assert [ints(prompt.tokens) for prompt in data.evaluation] == [[1, 8]]
    assert load(model, [{"prompt": "t5"}], data={"eval": str(file)}).evaluation == []


@pytest.mark.parametrize(
    ("lines", "changes", "text"),
    [
        (["{"], {}, r"train\.jsonl, line 1: not JSON"),
        ([{"prompt": "t5"}, "[1]"], {}, r"train\.jsonl, line 2: a JSON object"),
        ([{"question": "t5"}], {}, r"line 1: no key 'prompt' \(keys: question\).*data\.prompt_key"),
        ([{"prompt": 5}], {}, r"line 1: 'prompt' is neither text nor a list of chat messages"),
        ([{"prompt": [{"text": "a"}]}], {}, r"line 1: 'prompt' is neither"),
        ([{"prompt": [{"role": "user", "content": "t5"}]}], {}, r"line 1: .*chat template"),
        ([{"prompt": "t5", "completions": 1}], {}, r"line 1: a column named 'completions'"),
        ([{"prompt": "t5 " * 155}], {}, r"line 1: 156 prompt tokens .* 160 positions.*sampling\.max_tokens"),
        ([], {}, r"train\.jsonl has no prompts"),
        ([{"prompt": "t5"}], {"data": {"train": "nowhere.jsonl"}}, r"nowhere\.jsonl: No such file"),
        ([{"prompt": "t5"}], {"data": {"train": "no/such/folder"}}, r"no/such/folder: no such file or folder"),
        ([{"prompt": "t5"}], {"data": {"train": "data.txt"}}, r"data\.txt: only \.jsonl"),
    ],
)
def test_invalid_row_error_names_the_line(model: Path, lines: list[Any], changes: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load(model, lines, **changes)


def test_a_tokenizer_that_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    model = write_tokenizer(write_model(tmp_path / "model"), words=200)
    load(model, [{"prompt": "t95"}])
    with pytest.raises(ConfigError, match=r"line 1: token id 150 is outside the model's vocabulary of 96"):
        load(model, [{"prompt": "t150"}])


@pytest.mark.parametrize(
    ("row", "changes"),
    [
        ({"prompt": "t5 t99"}, {}),
        ({"prompt": "t5", "completion": "t99"}, {"kind": "sft", "reward": None, "sampling": None}),
    ],
)
def test_a_text_that_the_tokenizer_cannot_read_is_named(model: Path, row: Any, changes: dict[str, Any]) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"]["unk_token"] = "none"
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(
        ConfigError, match=r"train\.jsonl, line 1: the model's tokenizer cannot tokenize the text \(.*UNK"
    ):
        load(model, [row], **changes)


def test_a_model_without_an_end_token_is_refused(tmp_path: Path) -> None:
    model = write_tokenizer(write_model(tmp_path / "model"), eos=False)
    with pytest.raises(ConfigError, match=r"end token \(eos\)"):
        load(model, [{"prompt": "t5"}])


def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    with pytest.raises(ConfigError, match="tokenizer"):
        load(tmp_path / "model", [{"prompt": "t5"}])


def test_a_model_that_is_neither_here_nor_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_model(str(tmp_path)) == tmp_path
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in ("no/such/model", "nobody/nothing"):
        with pytest.raises(ConfigError, match=f"'{name}' is not a directory"):
            find_model(name)


def test_prompts_have_the_date_on_which_the_job_was_created(model: Path) -> None:
    """Else a job that is resumed on another day has other prompts than its samples and its checkpoint."""
    dated = "{{ 't8' ~ (strftime_now('%d') | int % 9) }} " + CHAT_TEMPLATE
    with_chat_template(model, dated)
    file = model.parent / "train.jsonl"
    file.write_text(json.dumps({"prompt": [{"role": "user", "content": "t5"}]}))
    job = {"model": str(model), "data": {"train": str(file)}, "environment": {"function": "m:f"}, "steps": 1}
    spec = parse({**job, "sampling": {"max_tokens": 8}})
    first, again, later = (load_data(spec, model, datetime(2025, 1, day, tzinfo=UTC)) for day in (1, 1, 2))
    assert [ints(data.train[0].tokens) for data in (first, again, later)] == [[81, 5, 90], [81, 5, 90], [82, 5, 90]]
    assert first.chat_formatter is not None
    assert first.chat_formatter.format_prompt([{"role": "user", "content": "t5"}], ()) == [81, 5, 90]
