"""The public key of manifests. The only module of the manager that imports its library, which takes a while."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=1)
def manifest_public_key(token: str) -> str:
    """Return the key with which workers check manifests, in hexadecimal."""
    from rlboost.shared.weights.manifest_key import ManifestKey  # noqa: PLC0415 - not when a manager starts

    return ManifestKey(token).public
