"""The weight store's client, without a store."""

from __future__ import annotations

import pytest

from rlboost.shared.errors import ConfigError
from rlboost.shared.weights.client import StoreClient


@pytest.mark.parametrize(
    ("url", "token", "text"),
    [
        ("http://127.0.0.1:1", "", "token"),
        ("http://127.0.0.1:1", "with a newline\n", "token"),
        ("127.0.0.1:8701", "secret", "give http://host:port"),
        ("http://127.0.0.1:port", "secret", "give http://host:port"),
    ],
)
def test_store_client_refuses_an_invalid_url_or_token(url: str, token: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        StoreClient(url, token)
