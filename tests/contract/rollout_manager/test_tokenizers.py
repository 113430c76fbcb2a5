"""Tokenizers of the OpenAI endpoint: one contract for the fake, a model folder's, and one of a Hub."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from rlboost.services.rollout_manager.adapters import model_folders
from rlboost.services.rollout_manager.adapters.model_folders import ModelFolders
from rlboost.services.rollout_manager.adapters.text import MAX_TOKEN_CHARACTERS, load_model_files
from rlboost.services.rollout_manager.ports import TextProcessesBusy, TokenizationError, Tokenizer
from tests.support.hub_server import TOKEN, Hub, running_hub
from tests.support.manager_fakes import FakeTokenizer
from tests.support.model_folder import write_tokenizer

BOS, EOS = 1, 2
LONGER = {"type": "Replace", "pattern": {"String": "t3"}, "content": "t3" * 10}
MODEL = "acme/tiny"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub with a model, for this process."""
    folder = write_tokenizer(tmp_path / "published")
    with running_hub() as hub:
        hub.models[MODEL] = {file.name: file.read_bytes() for file in folder.iterdir()} | {"model.safetensors": b"w"}
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def files_in(folder: str) -> set[str]:
    return {file.name for file in Path(folder).iterdir()}


@pytest.fixture(params=["fake", "folder", "hub"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    if request.param == "fake":
        return FakeTokenizer()
    if request.param == "folder":
        name = str(write_tokenizer(tmp_path / "model"))
    else:
        request.getfixturevalue("hub")
        name = MODEL
    tokenizer = load_model_files(asyncio.run(ModelFolders()("job", name))).tokenizer
    assert tokenizer is not None
    return tokenizer


def test_special_tokens_begin_a_text_where_they_are_asked_for(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("t3 t4", add_special_tokens=False)
    assert BOS not in tokens
    assert tokenizer.encode("t3 t4", add_special_tokens=True) == [BOS, *tokens]


def test_special_tokens_are_no_text_where_they_are_skipped(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("t3 t4", add_special_tokens=False)
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    assert text
    assert tokenizer.decode([BOS, *tokens, EOS], skip_special_tokens=True) == text
    assert tokenizer.decode(tokens, skip_special_tokens=False) == text
    assert tokenizer.decode([BOS, *tokens, EOS], skip_special_tokens=False) != text


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "cannot be read: Precompiled"),
        ({"decoder": {"type": "Sequence", "decoders": [LONGER, {"type": "Fuse"}, LONGER]}}, "100 times as long"),
        ({"decoder": {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "a"}}, "a regular expression"),
    ],
)
def test_tokenizer_that_could_stop_the_manager_is_refused(tmp_path: Path, part: dict[str, Any], says: str) -> None:
    file = write_tokenizer(tmp_path) / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | part))
    with pytest.raises(TokenizationError, match=says):
        load_model_files(str(tmp_path))


def test_fault_of_a_decoder_is_an_error_of_its_request(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path, texts={3: "tttt"}) / "tokenizer.json"
    strip = {"type": "Strip", "content": "t", "start": 100_000, "stop": 100_000}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"decoder": strip}))
    tokenizer = load_model_files(str(tmp_path)).tokenizer
    assert tokenizer is not None
    with pytest.raises(TokenizationError, match="cannot decode these tokens: index out of bounds"):
        tokenizer.decode([3], skip_special_tokens=True)


def test_token_with_a_long_text_is_not_decoded(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, texts={3: "t" * (MAX_TOKEN_CHARACTERS + 1), 4: "u" * MAX_TOKEN_CHARACTERS})
    tokenizer = load_model_files(str(tmp_path)).tokenizer
    assert tokenizer is not None
    for _ in range(2):
        with pytest.raises(TokenizationError, match=f"token 3 has {MAX_TOKEN_CHARACTERS + 1} characters"):
            tokenizer.decode([4, 3], skip_special_tokens=True)
        assert len(tokenizer.decode([4], skip_special_tokens=True)) == MAX_TOKEN_CHARACTERS


async def test_job_keeps_the_files_that_it_was_first_asked_for_with(hub: Hub) -> None:
    folders = ModelFolders()
    first = await folders("one", MODEL)
    assert "model.safetensors" not in files_in(first)
    hub.models[MODEL]["chat_template.jinja"] = b"new"
    assert await folders("one", MODEL) == first
    assert files_in(await folders("two", MODEL)) == {*files_in(first), "chat_template.jinja"}


async def test_files_of_an_earlier_download_serve_without_a_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await ModelFolders()("one", MODEL)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert await ModelFolders()("two", MODEL) == first
    with pytest.raises(TokenizationError, match=r"acme/other is no folder .* give the manager a way to the Hub"):
        await ModelFolders()("three", "acme/other")


async def test_download_that_failed_is_tried_again_later(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folders, model = ModelFolders(), hub.models.pop(MODEL)
    with pytest.raises(TokenizationError, match="cannot be downloaded"):
        await folders("job", MODEL)
    hub.models[MODEL] = model
    with pytest.raises(TokenizationError, match="cannot be downloaded"):
        await folders("job", MODEL)
    monkeypatch.setattr(model_folders, "RETRY_S", 0.0)
    monkeypatch.setattr(model_folders, "WAIT_S", 0.0)
    folders = ModelFolders()
    hub.models.clear()
    assert await outcomes(folders, until="cannot be downloaded") <= {"busy", "cannot be downloaded"}
    hub.models[MODEL] = model
    assert await outcomes(folders, until="found") == {"cannot be downloaded", "found"}, "requests wait for a repeat"


async def outcomes(folders: ModelFolders, until: str) -> set[str]:
    """Return the outcomes of requests to this one."""
    found = set[str]()
    async with asyncio.timeout(30.0):
        while until not in found:
            await asyncio.sleep(0.01)
            try:
                await folders("another", MODEL)
                found.add("found")
            except TextProcessesBusy:
                found.add("busy")
            except TokenizationError:
                found.add("cannot be downloaded")
    return found


async def test_hub_that_is_silent_is_waited_for_with_a_limit(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_folders, "SILENCE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        async with asyncio.timeout(15.0):
            with pytest.raises(TokenizationError, match="cannot be downloaded"):
                await ModelFolders()("job", MODEL)


async def test_few_models_are_downloaded_at_once(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_folders, "MAX_DOWNLOADS", 1)
    monkeypatch.setattr(model_folders, "SILENCE_S", 0.5)
    monkeypatch.setattr(model_folders, "WAIT_S", 0.0)
    folders = ModelFolders()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        for job, says in (("one", "acme/tiny is being downloaded"), ("two", "1 other tokenizers are being downloaded")):
            with pytest.raises(TextProcessesBusy, match=says):
                await folders(job, MODEL)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    assert "found" in await outcomes(folders, until="found")


async def test_download_that_takes_long_says_so(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_folders, "WAIT_S", 0.0)
    folders = ModelFolders()
    with pytest.raises(TextProcessesBusy, match="the tokenizer of acme/tiny is being downloaded"):
        await folders("job", MODEL)
    monkeypatch.setattr(model_folders, "WAIT_S", 60.0)
    assert "tokenizer.json" in files_in(await folders("job", MODEL))


async def test_file_that_is_too_large_is_not_downloaded(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_folders, "MAX_FILE_BYTES", 10)
    with pytest.raises(TokenizationError, match=r"tokenizer\S*json has more than 0 MiB"):
        await ModelFolders()("job", MODEL)


@pytest.mark.parametrize("name", ["/no/folder", "some/where/else", "./model"])
async def test_path_is_returned_as_it_is(name: str) -> None:
    assert await ModelFolders()("job", name) == name
