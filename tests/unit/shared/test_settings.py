"""Settings: prefixes, short names of common settings, and errors for unknown names and invalid values."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlboost.services.rollout_manager.settings import Settings
from rlboost.services.rollout_worker.settings import Settings as WorkerSettings
from rlboost.services.trainer.settings import Settings as TrainerSettings
from rlboost.shared.errors import ConfigError
from rlboost.shared.settings import check, read
from rlboost.shared.variables import COMMON, OTHERS, PREFIX, RENAMED, SERVICE_PREFIXES, ignored


def test_read_prefers_flags_then_the_service_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLBOOST_MANAGER_PORT", "81")
    monkeypatch.setenv("RLBOOST_TOKEN", "common")
    assert read(Settings, []).port == 81
    assert read(Settings, ["--port", "82"]).port == 82
    assert read(Settings, []).token.get_secret_value() == "common"
    monkeypatch.setenv("RLBOOST_MANAGER_TOKEN", "own")
    assert read(Settings, []).token.get_secret_value() == "own"
    assert read(Settings, ["--token", "flag"]).token.get_secret_value() == "flag"


def test_read_ignores_variables_without_the_project_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "evil")
    monkeypatch.setenv("REDIS_URL", "redis://elsewhere")
    assert read(Settings, []).token.get_secret_value() == ""
    assert read(Settings, []).redis_url == "redis://127.0.0.1:6379/0"


def test_read_suggests_the_similar_name_of_a_misspelt_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLBOOST_MANAGER_PROT", "81")
    with pytest.raises(ConfigError, match="did you mean RLBOOST_MANAGER_PORT"):
        read(Settings, [])


@pytest.mark.parametrize("value", ["inf", "nan"])
def test_no_setting_is_without_end(value: str) -> None:
    with pytest.raises(ConfigError, match="RLBOOST_MANAGER_STALL_LIMIT_S"):
        check(Settings, {"RLBOOST_MANAGER_STALL_LIMIT_S": value})


@pytest.mark.parametrize(
    ("kind", "variable"), [(Settings, "RLBOOST_MANAGER_POOLS"), (WorkerSettings, "RLBOOST_WORKER_VLLM_ARGS")]
)
def test_read_names_a_variable_that_is_no_json(kind: type[Settings | WorkerSettings], variable: str) -> None:
    with pytest.raises(ConfigError, match=f"{variable} should be JSON"):
        check(kind, {variable: "[{kind: l4}]"})


def test_read_compares_a_misspelt_variable_without_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """With it, each of a service's variables is similar to each of its settings."""
    monkeypatch.setenv("RLBOOST_MANAGER_TYPO", "1")
    with pytest.raises(ConfigError, match="RLBOOST_MANAGER_TYPO names no setting; remove it or fix its spelling"):
        read(Settings, [])


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("RLBOOST_MANGER_PORT", "did you mean RLBOOST_MANAGER_PORT?"),
        ("RLBOOST_WEIGHTSTORE_MAX_BYTES", "did you mean RLBOOST_WEIGHT_STORE_MAX_BYTES?"),
        ("RLBOOST_WORKERS_SLOTS", "did you mean RLBOOST_WORKER_SLOTS?"),
        ("RLBOOST_URLL", "did you mean RLBOOST_URL?"),
        ("RLBOOST_FOO_BAR", "no service has such a setting"),
    ],
)
def test_variable_that_nothing_reads_is_answered_with_the_nearest_one(name: str, told: str) -> None:
    assert ignored([name, "PATH"]) == [f"environment variable {name} is ignored: {told}"]


def test_variables_of_services_and_of_the_command_line_are_not_ignored() -> None:
    known = [*(f"{PREFIX}{name.upper()}" for name in COMMON), *OTHERS, *(f"{prefix}X" for prefix in SERVICE_PREFIXES)]
    assert ignored([*known, "RLBOOST_FUZZ_EXAMPLES"]) == []


def test_every_variable_in_the_code_is_known() -> None:
    """Each has one of the prefixes or names in `shared/variables.py`."""
    root = Path(__file__).parents[3]
    sources = [*(path for top in ("services", "shared", "rlboost") for path in (root / top).rglob("*.py"))]
    sources += [root / "docker-compose.yml", *(path for path in (root / "deploy").rglob("*") if path.is_file())]
    named = {name for path in sources for name in re.findall(r"RLBOOST_[A-Z][A-Z_]*[A-Z]\b", path.read_text("utf-8"))}
    assert len(named) > 20
    assert ignored(named) == []


def test_check_names_the_variable_of_an_invalid_value_in_another_environment() -> None:
    check(Settings, {"RLBOOST_MANAGER_PORT": "81", "RLBOOST_LOG_LEVEL": "debug"})
    with pytest.raises(ConfigError, match="settings: RLBOOST_MANAGER_LEASE_S: should be a number, not 'soon'"):
        check(Settings, {"RLBOOST_MANAGER_LEASE_S": "soon"})
    with pytest.raises(ConfigError, match="settings: RLBOOST_LOG_LEVEL: 'loud' is unknown"):
        check(Settings, {"RLBOOST_LOG_LEVEL": "loud"})


def test_read_names_the_setting_of_an_invalid_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLBOOST_MANAGER_LEASE_S", "soon")
    with pytest.raises(ConfigError, match="lease_s"):
        read(Settings, [])


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_read_names_the_new_name_of_a_renamed_variable(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(old, "1")
    with pytest.raises(ConfigError, match=f"{old} .*{new}"):
        read(WorkerSettings, [])
    assert new.removeprefix(WorkerSettings.prefix).lower() in WorkerSettings.model_fields


def test_reward_token_origins_have_a_port_after_reading() -> None:
    given = "https://rewards.example/, http://10.0.0.7:8000"
    settings = read(TrainerSettings, ["--reward-token-origins", given])
    assert settings.reward_token_origins == "https://rewards.example:443,http://10.0.0.7:8000"
    with pytest.raises(ConfigError, match=r"reward_token_origins: 'rewards\.example' is not of the form http"):
        read(TrainerSettings, ["--reward-token-origins", "rewards.example"])
