"""Which connections go through a proxy, and that nothing else makes HTTP clients."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from rlboost.shared.http.clients import http_client
from rlboost.shared.proxies import UnusableProxy, direct, exclude_metadata, external, internal

ROOT = Path(__file__).parents[3]
PROXY = "http://proxy:3128"


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for scheme in ("http", "https", "all", "no"):
        monkeypatch.delenv(f"{scheme}_proxy", raising=False)
        monkeypatch.delenv(f"{scheme}_proxy".upper(), raising=False)
    monkeypatch.delenv("RLBOOST_PROXY", raising=False)


@pytest.mark.parametrize("value", [PROXY, "socks5://127.0.0.1:9", "foo:bar:baz", "::", "http://[", "\x00", "ftp://x"])
@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"])
def test_internal_connections_ignore_the_environment(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "\x00" not in value:
        monkeypatch.setenv(name, value)
    for url in ("http://10.0.0.5:8700/v1/join", "https://host", "http://127.0.0.1:1", "http://[::1]:1"):
        assert internal(url) is direct(url) is None
    with http_client(internal) as client:
        assert not client.trust_env


def test_internal_connections_take_the_proxy_of_their_own_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLBOOST_PROXY", PROXY)
    proxy = internal("http://10.0.0.5:8700")
    assert proxy is not None
    assert proxy.url == PROXY
    for url in ("http://127.0.0.1:1", "http://localhost:1", "http://169.254.169.254/latest", "http://[::1]:1"):
        assert internal(url) is None
    monkeypatch.setenv("RLBOOST_PROXY", "socks5://u:secret@h:1")
    with pytest.raises(UnusableProxy, match="RLBOOST_PROXY names a proxy of the kind socks5") as error:
        internal("http://10.0.0.5:8700")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("no_proxy", "url", "is_direct"),
    [
        ("", "http://10.1.2.3:80", False),
        ("10.0.0.0/8", "http://10.1.2.3:80", True),
        ("10.0.0.0/8", "http://11.1.2.3:80", False),
        ("10.1.2.3/8", "http://10.9.9.9", True),
        ("fd00::/8", "http://[fd00::5]:80", True),
        ("[fd00::5]:81", "http://[fd00::5]:81", True),
        ("[fd00::5]:81", "http://[fd00::5]:82", False),
        ("10.0.0.0/8", "http://[::ffff:10.0.0.1]", True),
        ("example.com", "https://a.example.com", True),
        (".example.com", "https://example.com", True),
        ("*.example.com", "https://a.example.com", True),
        ("example.com", "https://notexample.com", False),
        ("Example.com:443", "https://EXAMPLE.com", True),
        ("example.com:444", "https://example.com", False),
        ("other, 10.0.0.1", "http://10.0.0.1", True),
        ("*", "http://anything", True),
        ("", "http://127.0.0.1:5", True),
        ("", "http://localhost:5", True),
        ("", "http://169.254.169.254/latest", True),
        ("", "http://metadata.google.internal", True),
    ],
)
def test_external_connections_honour_no_proxy(
    no_proxy: str, url: str, is_direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", no_proxy)
    monkeypatch.setenv("ALL_PROXY", PROXY)
    assert (external(url) is None) is is_direct


@pytest.mark.parametrize("value", ["socks4://127.0.0.1:9", "foo:bar:baz", "http://[", "http://u:pw@", "quic://x"])
def test_error_of_an_external_connection_names_the_variable(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", value)
    with http_client(external) as client, pytest.raises(httpx.TransportError, match="ALL_PROXY") as error:
        client.get("http://rewards.example")
    assert "pw" not in str(error.value)


def test_error_of_a_connection_through_a_proxy_names_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://user:pw@127.0.0.1:9")
    with http_client(external) as client, pytest.raises(httpx.TransportError) as error:
        client.get("http://rewards.example")
    assert "through the proxy http://127.0.0.1:9 of HTTP_PROXY" in str(error.value)


def test_metadata_service_is_excluded_for_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", PROXY)
    monkeypatch.setenv("NO_PROXY", "10.0.0.0/8")
    exclude_metadata()
    exclude_metadata()
    import os  # noqa: PLC0415 - what it changed

    assert os.environ["NO_PROXY"] == "10.0.0.0/8,169.254.169.254,metadata.google.internal"
    monkeypatch.delenv("no_proxy")


def test_only_two_modules_make_http_clients() -> None:
    pattern = re.compile(
        r"httpx\.(Async)?(Client|HTTPTransport)\(|aiohttp\.ClientSession\(|trust_env=True|getproxies|urlopen\("
    )
    sources = [path for top in ("services", "shared", "rlboost") for path in (ROOT / top).rglob("*.py")]
    found = {path.name for path in sources if pattern.search(path.read_text(encoding="utf-8"))}
    assert found == {"clients.py", "proxies.py"}
