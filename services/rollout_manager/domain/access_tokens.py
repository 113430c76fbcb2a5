"""Access tokens: the record of one, which does not contain its secret, and what a secret grants."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict

from rlboost.shared.http.scopes import Principal, TokenScope

SECRET_BYTES = 32


class AccessToken(BaseModel):
    """The stored record of a token. Times are Unix seconds."""

    model_config = ConfigDict(frozen=True)

    id: str
    scope: TokenScope
    name: str
    sha256: str
    """SHA-256 of the secret, in hexadecimal. A secret has 256 random bits, so it cannot be found by trying."""
    created_at: float
    expires_at: float | None
    """None if it does not expire."""

    def is_valid(self, now: float) -> bool:
        """Return True until the token expires."""
        return self.expires_at is None or now < self.expires_at

    def public(self) -> dict[str, Any]:
        """Return the fields of the REST API, times as Unix seconds."""
        return self.model_dump(exclude={"sha256"})


def digest_of_secret(secret: str) -> str:
    """Return the SHA-256 of a secret, in hexadecimal."""
    return hashlib.sha256(secret.encode()).hexdigest()


def principal_of(secret: str, tokens: Iterable[AccessToken], now: float) -> Principal | None:
    """Return the principal of a secret, None if no token has it or the token has expired."""
    digest = digest_of_secret(secret)
    for token in tokens:
        if token.sha256 == digest:
            return Principal(f"token {token.id}", token.scope) if token.is_valid(now) else None
    return None
