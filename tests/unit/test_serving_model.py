"""What serving reads of a model folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from services.rollout_manager.serving_model import Untranslatable, load
from tests.support.model_folder import write_tokenizer

TEMPLATE = (
    "{% for m in messages %}\n"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ bos_token }} {{ m.content }} {{ eos_token }} {% endfor %}"
    "{% if add_generation_prompt %}t7{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_tokenizer(tmp_path_factory.mktemp("model"))
    (directory / "config.json").write_text('{"eos_token_id": [2, 5], "vocab_size": 96, "max_position_embeddings": 8}')
    return directory


def test_text_becomes_tokens_as_in_training_and_back(folder: Path) -> None:
    model = load(str(folder))
    assert model.encode("t3 t4", special=True) == [1, 3, 4]
    assert model.decode([1, 3, 4, 2]) == "t3 t4"
    assert [model.piece(token) for token in (3, 2)] == ["t3", "<eos>"]
    assert (model.stop_token_ids, model.vocabulary, model.max_len) == ((2, 5), 96, 8)


def test_a_chat_is_rendered_as_transformers_does(folder: Path, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    messages = [{"role": "user", "content": "t3"}, {"role": "assistant", "content": "t4 t5"}]
    for template in (TEMPLATE, [{"name": "default", "template": TEMPLATE}, {"name": "rag", "template": ""}]):
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
        theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
            messages, add_generation_prompt=True, chat_template=TEMPLATE, return_dict=True
        )["input_ids"]
        assert load(str(tmp_path)).chat(messages) == theirs == [1, 3, 2, 1, 4, 5, 2, 7]
    (tmp_path / "chat_template.jinja").write_text("t9")
    assert load(str(tmp_path)).chat(messages) == [9]


def test_a_chat_goes_on_behind_the_tokens_that_an_answer_was_made_of(folder: Path, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    model = load(str(tmp_path))
    messages = [{"role": "user", "content": "t3"}, {"role": "assistant", "content": "t4"}]
    messages.append({"role": "user", "content": "t5"})
    # Tokens that no tokenizer makes of the answer's text stay; the end token stands once, made by the model or not.
    for made in ([40, 41], [40, 41, 2]):
        assert model.chat_after([1, 3, 2, *made], messages, 1) == [1, 3, 2, 40, 41, 2, 1, 5, 2, 7]
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(Untranslatable, match="X-Session-ID"):
        load(str(tmp_path)).chat_after([1], messages, 1)


def test_what_can_not_be_translated_says_why(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(Untranslatable, match="has no chat template"):
        load(str(folder)).chat([{"role": "user", "content": "t3"}])
    with pytest.raises(Untranslatable, match="send the prompt as token ids"):
        load("some/where").encode("t3", special=True)
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    with pytest.raises(Untranslatable, match="no tools here"):
        load(str(tmp_path)).chat([{"role": "tool", "content": "t3"}])
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(Untranslatable, match="cannot be read"):
        load(str(tmp_path))
