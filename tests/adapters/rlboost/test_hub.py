"""Upload of an export to a stand-in of the Hugging Face Hub, by the command as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.hub_server import TOKEN, Hub, running_hub

WEIGHTS = b"\x02" + bytes(7) + b"{}"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as hub:
        yield hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a system that has a finished run."""
    run = tmp_path / ".rlboost/runs/job-1"
    (run / "model").mkdir(parents=True)
    (run / "model/config.json").write_text("{}")
    (run / "model/model.safetensors").write_bytes(WEIGHTS)
    spec = {"kind": "rl", "model": "Qwen/Qwen3-0.6B", "data": {"train": "/home/ann/train.jsonl"}}
    (run / "job.json").write_text(json.dumps(spec))
    return tmp_path


def export(folder: Path, hub: Hub, *options: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlboost", "export", "job-1", "--out", "out", *options]
    environment: dict[str, Any] = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(folder / "hf"),
        "HF_TOKEN": token,
        "HF_HUB_DISABLE_XET": "1",
    }
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "RLBOOST_"))}
    return subprocess.run(command, cwd=folder, env={**kept, **environment}, capture_output=True, text=True, check=False)


def test_export_is_uploaded_with_a_card_into_a_private_repository(folder: Path, hub: Hub) -> None:
    (folder / "out/logs").mkdir(parents=True)
    (folder / "out/logs/secret.txt").touch()
    (folder / "out/.env").touch()
    hub.files |= {"model-00001-of-00002.safetensors": b"", "model.safetensors.index.json": b"", "LICENSE": b""}
    done = export(folder, hub, "--push-to-hub", "me/sums", "--force")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f".rlboost/runs/job-1/model is in out, and at {hub.url}/me/sums\n"
    assert hub.private == {"me/sums": True}
    assert sorted(hub.files) == ["LICENSE", "README.md", "config.json", "model.safetensors"]
    assert hub.files["model.safetensors"] == WEIGHTS
    card = hub.files["README.md"].decode()
    assert card.startswith(
        '---\nlibrary_name: "transformers"\ntags: ["rlboost", "rl"]\nbase_model: "Qwen/Qwen3-0.6B"\n---\n'
    )
    assert "Trained with RLBoost from Qwen/Qwen3-0.6B: the result of job job-1, of kind rl." in card
    assert "/home/ann" not in card
    shown = export(folder, hub, "--push-to-hub", "me/open", "--public", "--force", "--json")
    assert json.loads(shown.stdout)["url"] == f"{hub.url}/me/open"
    assert hub.private["me/open"] is False


@pytest.mark.parametrize(
    ("options", "token", "problem"),
    [
        (["--push-to-hub", "sums"], TOKEN, "--push-to-hub sums: name a repository as OWNER/NAME"),
        (["--public"], TOKEN, "--public is for --push-to-hub OWNER/NAME: give it too"),
        (["--push-to-hub", "me/sums"], "", "--push-to-hub me/sums: there is no token: set HF_TOKEN to a token with"),
        (["--push-to-hub", "me/sums"], "hf_wrong", "--push-to-hub me/sums: the Hub answered 401 ("),
    ],
)
def test_upload_that_cannot_work_is_refused_before_the_export(
    folder: Path, hub: Hub, options: list[str], token: str, problem: str
) -> None:
    done = export(folder, hub, *options, token=token)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"rlboost: {problem}")
    assert "hf_wrong" not in done.stderr
    assert not (folder / "out").exists()


def test_repository_that_the_token_may_not_create_leaves_the_export(folder: Path, hub: Hub) -> None:
    hub.forbidden = True
    done = export(folder, hub, "--push-to-hub", "them/sums")
    assert done.returncode == 2
    assert "them/sums: the Hub answered 403 (" in done.stderr
    assert "the token may not write there" in done.stderr
    assert (folder / "out/model.safetensors").is_file()
