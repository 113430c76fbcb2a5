"""Settings: one prefix a service, short names for the few that all need, nothing misspelt, nothing of others."""

from __future__ import annotations

import pytest

from services.rollout_manager.settings import Settings
from shared.errors import ConfigError
from shared.settings import read


def test_flags_win_over_the_environment_and_the_own_prefix_over_the_common_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLBOOST_MANAGER_PORT", "81")
    monkeypatch.setenv("RLBOOST_TOKEN", "common")
    assert read(Settings, []).port == 81
    assert read(Settings, ["--port", "82"]).port == 82
    assert read(Settings, []).token.get_secret_value() == "common"
    monkeypatch.setenv("RLBOOST_MANAGER_TOKEN", "own")
    assert read(Settings, []).token.get_secret_value() == "own"
    assert read(Settings, ["--token", "flag"]).token.get_secret_value() == "flag"


def test_a_variable_of_somebody_else_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "evil")
    monkeypatch.setenv("REDIS_URL", "redis://elsewhere")
    assert read(Settings, []).token.get_secret_value() == ""
    assert read(Settings, []).redis_url == "redis://127.0.0.1:6379/0"


def test_a_misspelt_variable_is_refused_with_the_name_that_was_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLBOOST_MANAGER_PROT", "81")
    with pytest.raises(ConfigError, match="RLBOOST_MANAGER_PROT names no setting; did you mean RLBOOST_MANAGER_PORT"):
        read(Settings, [])


def test_a_wrong_value_names_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLBOOST_MANAGER_LEASE_S", "soon")
    with pytest.raises(ConfigError, match="lease_s"):
        read(Settings, [])
