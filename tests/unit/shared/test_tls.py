"""Certificates in settings: what is refused, and that plain HTTP stays the default."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlboost.services.rollout_manager.leadership import manager_record
from rlboost.services.rollout_worker.adapters.machine import peer_url
from rlboost.shared.errors import ConfigError
from rlboost.shared.tls import client_context, server_certificate
from tests.support.certificates import make_certificates


def test_server_without_a_certificate_is_plain_http() -> None:
    assert server_certificate("", "") is None


def test_certificate_needs_its_key(tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "tls")
    assert server_certificate(str(made.certificate), str(made.key)) == (str(made.certificate), str(made.key))
    with pytest.raises(ConfigError, match="RLBOOST_TLS_CERT and RLBOOST_TLS_KEY"):
        server_certificate(str(made.certificate), "")
    other = make_certificates(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"KEY_VALUES_MISMATCH.*give a certificate and its unencrypted key"):
        server_certificate(str(made.certificate), str(other.key))


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_unusable_authorities_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("RLBOOST_TLS_CA", str(file))
    with pytest.raises(ConfigError, match=r"RLBOOST_TLS_CA .*ca\.pem cannot be used"):
        client_context()


def test_system_authorities_stay_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLBOOST_TLS_CA", "")
    assert client_context() is None
    made = make_certificates(tmp_path / "tls")
    monkeypatch.setenv("RLBOOST_TLS_CA", str(made.ca))
    context = client_context()
    assert context is not None
    assert context.check_hostname


def test_derived_addresses_have_the_scheme_of_the_server() -> None:
    assert manager_record("10.0.0.5", 8700, "node", tls=True).url == "https://10.0.0.5:8700"
    assert peer_url("", "10.0.0.6", 8710, "https://10.0.0.5:8700", tls=True) == "https://10.0.0.6:8710"
