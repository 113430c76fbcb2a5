"""Secrets from the environment, files and options: stripped, refused by name, and never shown."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog
from typer.testing import CliRunner

from rlboost.cli import app
from rlboost.client import Client
from rlboost.local import doctor
from rlboost.local.state import StateDir
from rlboost.services.rollout_manager.settings import Settings
from rlboost.services.rollout_worker.adapters import manager_http
from rlboost.services.trainer.children.reward import remote
from rlboost.shared.errors import ConfigError
from rlboost.shared.http.server_url import manager_url
from rlboost.shared.process import lifecycle, logs
from rlboost.shared.process.logs import BUFFER
from rlboost.shared.secrets import OTHER_SECRETS, bearer, clean_environment
from rlboost.shared.settings import check
from rlboost.shared.weights.client import StoreClient

ROOT = Path(__file__).parents[3]
SECRET = "rlb-very-secret-4711"
DAMAGED = [f"{SECRET}\n{SECRET}", f"{SECRET} x", f"{SECRET}\x00x", f"{SECRET}é", f"{SECRET}\x7f", f"{SECRET}\u2028x"]


@pytest.fixture(autouse=True)
def restored_logs() -> Iterator[None]:
    """Commands and services configure the logs of their process."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)
    BUFFER.hide(())


def _stored(secret: str, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "token").write_text(secret, encoding="utf-8")
    StateDir(folder).system_token(None)


async def _join(secret: str) -> None:
    await manager_http.join("http://127.0.0.1:9", secret, "w", "preemptible", 0.1)


def _reward(secret: str, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("os.environ", {"REWARD_TOKEN": secret})
    remote({"url": "http://127.0.0.1:9", "gets_token": True, "timeout_s": 1.0, "name": "r"})


@pytest.mark.parametrize("secret", DAMAGED)
def test_damaged_secret_is_refused_everywhere_without_being_shown(
    secret: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries: dict[str, Callable[[], object]] = {
        "client": lambda: Client("http://127.0.0.1:9", secret),
        "doctor": lambda: list(doctor.system_findings("http://127.0.0.1:9", secret)),
        "settings": lambda: check(Settings, {"RLBOOST_TOKEN": secret}),
        "join token": lambda: check(Settings, {"RLBOOST_MANAGER_JOIN_TOKEN": secret}),
        "redis": lambda: check(Settings, {"RLBOOST_REDIS_URL": f"redis://:{secret}\n@h:1/0"}),
        "state": lambda: _stored(secret, tmp_path / "state"),
        "given": lambda: StateDir(tmp_path).system_token(secret),
        "header": lambda: bearer("x", secret),
        "store": lambda: StoreClient("http://127.0.0.1:9", secret)._authorization(),
        "worker": lambda: __import__("asyncio").run(_join(secret)),
        "reward": lambda: _reward(secret, monkeypatch),
        **{name: lambda name=name: clean_environment({name: secret}) for name in OTHER_SECRETS},  # type: ignore[misc]
    }
    for name, enter in entries.items():
        with pytest.raises(ConfigError) as refused, monkeypatch.context():
            enter()
        assert SECRET not in str(refused.value), name


def test_white_space_around_a_secret_is_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text(f"  {SECRET}\r\n")
    assert StateDir(tmp_path).system_token(None) == SECRET
    assert StateDir(tmp_path).system_token(f"{SECRET}\n") == SECRET
    environment = {
        "RLBOOST_TOKEN": f"{SECRET}\n",
        "HF_TOKEN": f" {SECRET}",
        "RLBOOST_URL": "http://h:1\n",
        "X_TOKEN": "\n",
    }
    clean_environment(environment)
    assert environment == {"RLBOOST_TOKEN": SECRET, "HF_TOKEN": SECRET, "RLBOOST_URL": "http://h:1", "X_TOKEN": "\n"}
    assert Settings(token=f"{SECRET}\n", redis_url="redis://h:1\n").token.get_secret_value() == SECRET
    assert Client("http://127.0.0.1:9\n", f"{SECRET}\n")._http.headers["authorization"] == f"Bearer {SECRET}"


@pytest.mark.parametrize("command", [["ps"], ["doctor"], ["worker", "join", "--url", "http://127.0.0.1:9"], ["up"]])
def test_command_with_a_damaged_token_exits_with_2(command: list[str], tmp_path: Path) -> None:
    environment = {"RLBOOST_TOKEN": f"{SECRET}\nx", "RLBOOST_URL": "http://127.0.0.1:9"}
    result = CliRunner().invoke(app, [*command, "--state", str(tmp_path / "s")], env=environment)
    assert result.exit_code == 2
    assert "RLBOOST_TOKEN has a character that no secret may have" in result.output
    assert SECRET not in result.output


def test_service_with_a_damaged_token_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def never(_settings: Settings, _stop: asyncio.Event) -> None:
        raise AssertionError("the service started")

    monkeypatch.setenv("REWARD_TOKEN", f"{SECRET}\nx")
    assert lifecycle.run_service("manager", Settings, never) == 2
    assert "REWARD_TOKEN" in (text := capsys.readouterr().err)
    assert SECRET not in text


def test_url_of_a_manager_with_a_password_is_refused_without_it() -> None:
    with pytest.raises(ConfigError, match="--url has a user name or password") as refused:
        manager_url("--url", f"http://me:{SECRET}@host:1")
    assert SECRET not in str(refused.value)
    assert manager_url("--url", " http://host:1/v1/\n") == "http://host:1"
    assert manager_url("--url", "http://host/base") == "http://host/base"


def test_logs_have_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("test", secrets=[SECRET])
    structlog.get_logger().warning("failed", error=f"header {SECRET}", nested={"deep": [SECRET]})
    line = capsys.readouterr().err.splitlines()[-1]
    assert SECRET not in line
    assert json.loads(line)["error"] == "header ***"


def test_log_for_a_console_does_not_control_its_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Workers and models write reasons and names that are logged."""
    logs.configure("test", form="console")
    structlog.get_logger().warning("dead_lettered", reason="\x1b]0;title\x07", **{"k\x1b[2J": 1})
    shown = capsys.readouterr().err
    assert r"\x1b]0;title\x07" in shown
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", shown)


def test_only_one_function_puts_a_secret_into_a_header() -> None:
    sources = [path for top in ("services", "shared", "rlboost") for path in (ROOT / top).rglob("*.py")]
    found = [path.name for path in sources if re.search(r"""f["']Bearer \{""", path.read_text(encoding="utf-8"))]
    assert sorted(set(found)) == ["secrets.py"]
