"""The model of a job as the OpenAI endpoint reads it from a model folder."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import _compile_jinja_template

from rlboost.services.rollout_manager.adapters.text import JinjaChatTemplate, load_model_files
from rlboost.services.rollout_manager.ports import TokenizationError
from rlboost.services.rollout_manager.serving.routes import _find_job
from rlboost.services.rollout_manager.serving.text import ServedModel
from rlboost.shared.messages import JobReport, WeightsCommitted
from rlboost.shared.streams import names
from rlboost.shared.wire import I32, ints, pack
from tests.support.builders import job_created, job_spec
from tests.support.chat_tokenizers import TEMPLATES, byte_tokenizer, llama_tokenizer
from tests.support.manager_fakes import InlineTextProcessor
from tests.support.model_folder import write_tokenizer
from tests.support.serving_rig import Rig

TEMPLATE = (
    "{% for m in messages %}\n"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ bos_token }} {{ m.content }} {{ eos_token }} {% endfor %}"
    "{% if add_generation_prompt %}t7{% endif %}"
)


def load(folder: Path | str) -> ServedModel:
    return ServedModel(load_model_files(str(folder)), InlineTextProcessor(load_model_files))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_tokenizer(tmp_path_factory.mktemp("model"))
    (directory / "config.json").write_text('{"eos_token_id": [2, 5], "vocab_size": 96, "max_position_embeddings": 8}')
    return directory


async def test_served_model_encodes_and_decodes_text(folder: Path) -> None:
    model = load(folder)
    assert await model.encode(["t3 t4"], add_special_tokens=True) == [pack([1, 3, 4], I32)]
    assert model.decode([1, 3, 4, 2]) == "t3 t4"
    assert [model.token_text(token) for token in (3, 2)] == ["t3", "<eos>"]
    assert (model.files.stop_token_ids, model.files.vocab_size, model.files.max_len) == ((2, 5), 96, 8)


async def test_encode_chat_matches_transformers(folder: Path, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    messages = [{"role": "user", "content": "t3"}, {"role": "assistant", "content": "t4 t5"}]
    for template in (TEMPLATE, [{"name": "default", "template": TEMPLATE}, {"name": "rag", "template": ""}]):
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
        theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
            messages, add_generation_prompt=True, chat_template=TEMPLATE, return_dict=True
        )["input_ids"]
        assert ints(await load(tmp_path).encode_chat(messages)) == theirs == [1, 3, 2, 1, 4, 5, 2, 7]
    (tmp_path / "chat_template.jinja").write_text("t9 {% for m in messages %}{{ m.content }} {% endfor %}")
    assert ints(await load(tmp_path).encode_chat(messages)) == [9, 3, 4, 5]


async def test_extend_chat_keeps_the_tokens_of_the_answer(folder: Path, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    model = load(tmp_path)
    messages = [{"role": "user", "content": "t3"}, {"role": "assistant", "content": "t4"}]
    messages.append({"role": "user", "content": "t5"})
    # The answer's tokens stay although no tokenizer yields them; the end token occurs once, generated or not.
    for completion in ([40, 41], [40, 41, 2]):
        tokens = await model.extend_chat(pack([1, 3, 2, *completion], I32), messages, 1)
        assert ints(tokens) == [1, 3, 2, 40, 41, 2, 1, 5, 2, 7]
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(TokenizationError, match=r"message 2 \(assistant\): the chat template does not show"):
        await load(tmp_path).extend_chat(pack([1], I32), messages, 1)


@pytest.mark.parametrize("family", ["phi3", "llama2"])
async def test_extended_chat_has_the_tokens_of_the_whole_conversation(family: str, tmp_path: Path) -> None:
    """Phi-3's special tokens take the white space after them, and Llama 2's tokenizer adds a space to a start."""
    tokenizer = llama_tokenizer() if family == "llama2" else byte_tokenizer(TEMPLATES["phi3"], end="<|end|>")
    if family == "phi3":
        names = ["<|end|>", "<|user|>", "<|assistant|>"]
        tokenizer.add_tokens([AddedToken(name, special=True, normalized=False, rstrip=True) for name in names])
    tokenizer.save_pretrained(tmp_path)
    config = {"eos_token_id": tokenizer.eos_token_id, "vocab_size": len(tokenizer)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    messages = [{"role": role, "content": "46"} for role in ("user", "assistant", "user")]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = tokenizer(whole, add_special_tokens=False)["input_ids"]
    n = expected.index(tokenizer.eos_token_id, len(expected) // 2 if family == "phi3" else 0) + 1
    assert ints(await load(tmp_path).extend_chat(pack(expected[:n], I32), messages, 1)) == expected


async def test_served_model_errors_name_the_problem(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TokenizationError, match="has no chat template"):
        await load(folder).encode_chat([{"role": "user", "content": "t3"}])
    with pytest.raises(TokenizationError, match="send the prompt as token ids"):
        await load("some/where").encode(["t3"], add_special_tokens=True)
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    with pytest.raises(TokenizationError, match="no tools here"):
        await load(tmp_path).encode_chat([{"role": "tool", "content": "t3"}])
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizationError, match="cannot be read"):
        load(tmp_path)


def test_templates_that_mark_generated_parts_are_rendered_as_by_transformers() -> None:
    """As LFM2.5's, and those with which TRL saves what it has fine-tuned; those for images need parts."""
    files = [file for file in (resources.files("trl") / "chat_templates").iterdir() if file.name.endswith(".jinja")]
    marked = {file.name: file.read_text(encoding="utf-8") for file in files}
    marked = {name: text for name, text in marked.items() if "endgeneration" in text}
    assert len(marked) > 20
    marked["scope"] = "{% generation %}{% set a = 1 %}b\n{% endgeneration %}\n{{ a is defined }}"
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    for name, source in marked.items():
        is_parts = name.startswith(("idefics", "llava", "smolvlm"))
        a, b = ([{"type": "text", "text": text}] if is_parts else text for text in "ab")
        turn = {"role": "user", "content": a}
        chat: dict[str, Any] = {"messages": [turn, {"role": "assistant", "content": b}, turn], "tools": None}
        expected = _compile_jinja_template(source).render(add_generation_prompt=True, **chat, **special)
        assert JinjaChatTemplate(source, special).render_unchecked(**chat, is_prompt=True) == expected


async def test_chat_template_runs_in_a_sandbox(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}")
    with pytest.raises(TokenizationError, match="unsafe"):
        await load(tmp_path).encode_chat([{"role": "user", "content": "t3"}])


async def test_job_whose_name_is_the_id_of_another_does_not_take_its_requests() -> None:
    rig = Rig()
    await rig.start()
    await rig.bus.append(names.JOB_COMMANDS, job_created("k", 2, job_spec(name="j")))
    await rig.bus.append(names.JOB_REPORTS, JobReport(job_id="k", state="running", step=0))
    committed = WeightsCommitted(job_id="k", version=0, manifest_digest="", n_bytes=0, at=0.0)
    await rig.bus.append(names.WEIGHTS_COMMITTED, committed)
    await rig.turn()
    assert [_find_job(rig.manager, model).id for model in ("j", "k")] == ["j", "k"]
