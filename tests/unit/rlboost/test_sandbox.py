"""Containers for conversations, without an engine: their options, and the output that is kept."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlboost import sandbox
from rlboost.environments import ToolUnavailable
from rlboost.sandbox import Output, Sandbox, SandboxBroken, SandboxUnavailable, digest, run_options

GIVEN: dict[str, Any] = {
    "name": "box",
    "image": "debian",
    "purpose": "1/2",
    "cpus": 0.5,
    "memory_mb": 64,
    "pids": 32,
    "network": False,
    "env": {},
}


def test_container_has_limits_and_no_network_unless_it_is_asked_for() -> None:
    options = run_options(**GIVEN)
    expected = {
        "--cpus=0.5",
        "--memory=64m",
        "--memory-swap=64m",
        "--pids-limit=32",
        "--network=none",
        "--cap-drop=ALL",
    }
    assert expected | {"--security-opt=no-new-privileges", "--rm", "--interactive"} <= set(options)
    assert "--network=none" not in run_options(**{**GIVEN, "network": True})
    assert "--env=A=b c" in run_options(**{**GIVEN, "env": {"A": "b c"}})


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"image": ""}, "image is ''"),
        ({"image": "--privileged"}, "image is '--privileged'"),
        ({"cpus": 0}, "cpus is 0"),
        ({"cpus": float("nan")}, "cpus is nan"),
        ({"memory_mb": 2}, "memory_mb is 2"),
        ({"pids": 0}, "pids is 0"),
        ({"env": {"A=B": "c"}}, "'A=B' is no environment variable"),
        ({"env": {"A": "b\0"}}, "variable 'A' has a value with a 0 byte"),
    ],
)
def test_options_that_docker_does_not_have_are_refused_by_name(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        run_options(**{**GIVEN, **wrong})


def test_faults_of_the_engine_do_not_count_and_what_the_model_broke_does() -> None:
    assert issubclass(SandboxUnavailable, ToolUnavailable)
    assert not issubclass(SandboxBroken, ToolUnavailable)


@given(st.binary(max_size=200), st.lists(st.integers(1, 40), max_size=40), st.integers(0, 255))
def test_output_ends_with_its_mark_wherever_it_is_cut(written: bytes, sizes: list[int], code: int) -> None:
    output = Output(64, "0123456789abcdef")
    sent = written + b"\n0123456789abcdef %d\n" % code
    found = None
    for size in [*sizes, len(sent)]:
        block, sent = sent[:size], sent[size:]
        found = output.add(block) if found is None else found
    assert found == code
    kept = (
        written
        if len(written) <= 64
        else b"%s\n[%d bytes left out]\n%s"
        % (
            written[:32],
            len(written) - 64,
            written[-32:],
        )
    )
    assert output.text() == kept.decode(errors="replace")


def test_output_that_is_not_wanted_is_not_held() -> None:
    output = Output(0, "0123456789abcdef")
    for _ in range(9):
        output.add(b"x" * 100)
    assert output.text() == "\n[900 bytes left out]\n"


async def test_command_without_a_limit_and_upload_of_no_folder_are_refused(tmp_path: Path) -> None:
    box = Sandbox("none", process=Mock(), pids=64)
    for limit in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="timeout_s is"):
            await box.exec("true", timeout_s=limit)
    with pytest.raises(NotADirectoryError, match="nowhere is no folder"):  # and no SandboxBroken, a result
        await box.upload(tmp_path / "nowhere", "/tests")


async def test_slow_engine_is_not_what_the_model_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\n[ "$1" != cp ] || exec sleep 60\necho true\n')
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    original = sandbox._engine
    monkeypatch.setattr(sandbox, "_engine", partial(original, limit_s=2.0))
    with pytest.raises(SandboxUnavailable, match="docker cp has not ended within 2 s"):
        await Sandbox("none", process=Mock(), pids=64).upload(tmp_path, "/tests")


def test_folder_has_another_digest_for_other_content_modes_and_links(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    (tmp_path / "b").symlink_to("nowhere")
    found = [digest(tmp_path)]
    (tmp_path / "a").chmod(0o755)
    found.append(digest(tmp_path))
    (tmp_path / "a").write_text("2")
    found.append(digest(tmp_path))
    (tmp_path / "b").unlink()
    (tmp_path / "b").symlink_to("a")
    found.append(digest(tmp_path))
    assert len(set(found)) == 4
    assert digest(tmp_path) == found[-1]
