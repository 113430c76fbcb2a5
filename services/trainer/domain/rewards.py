"""Combines the rewards of several functions into one per completion, and compares the addresses of services."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

_DEFAULT_PORTS = {"http": 80, "https": 443}


def origin_of(url: str) -> str:
    """Return scheme, host and port of an HTTP URL, such as `https://rewards.example:443`.

    Raises:
        ValueError: it has no such form.

    """
    parts = urlsplit(url)
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname:
        raise ValueError(f"{url!r} is not of the form http://HOST[:PORT] or https://HOST[:PORT]")
    return f"{parts.scheme}://{parts.hostname}:{parts.port or _DEFAULT_PORTS[parts.scheme]}"


def combine(parts: Sequence[Sequence[float | None]], weights: Sequence[float]) -> list[float | None]:
    """Return the weighted sum of the functions' rewards for each completion.

    A function that returned None does not apply to that completion and is left out of its sum, as in TRL. The reward is
    None if no function applies.
    """
    rewards: list[float | None] = []
    for values in zip(*parts, strict=True):
        applying = [value * weight for value, weight in zip(values, weights, strict=True) if value is not None]
        rewards.append(sum(applying) if applying else None)
    return rewards
