"""Settings: prefixes, short names of common settings, and errors for unknown names and invalid values."""

from __future__ import annotations

import pytest

from rlboost.services.rollout_manager.settings import Settings
from rlboost.services.rollout_worker.settings import Settings as WorkerSettings
from rlboost.services.trainer.settings import Settings as TrainerSettings
from rlboost.shared.errors import ConfigError
from rlboost.shared.settings import RENAMED, read


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
