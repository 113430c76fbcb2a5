"""Authenticates the manager's clients: by the tokens in its settings, and by the access tokens stored in Redis."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

import structlog
from pydantic import ValidationError

from rlboost.services.rollout_manager.domain.access_tokens import AccessToken, principal_of
from rlboost.shared.errors import BusUnavailable
from rlboost.shared.http.authentication import is_token
from rlboost.shared.http.problem import Problem
from rlboost.shared.http.scopes import Principal
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Bus

log = structlog.get_logger(__name__)

REFRESH_S = 2.0
"""How old the table may be: a revoked token is rejected by every manager after at most this time."""


class TokenTable:
    """The access tokens as of the last `REFRESH_S` seconds: requests with unknown tokens cost no request to Redis."""

    def __init__(
        self,
        bus: Bus,
        system_token: str,
        join_token: str = "",
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read nothing before the first request that needs it.

        Args:
            bus: holds the access tokens.
            system_token: grants everything.
            join_token: grants joining; empty for none.
            clock: Unix seconds.
            monotonic: monotonic seconds.

        """
        self._bus = bus
        self._system_token = system_token
        self._join_token = join_token
        self._clock = clock
        self._monotonic = monotonic
        self._tokens: tuple[AccessToken, ...] = ()
        self._read_at_s = -math.inf
        self._invalidations = 0
        self._reading = asyncio.Lock()

    async def authenticate(self, secret: str) -> Principal | None:
        """Return the principal of a token, None if the token is unknown or expired.

        Raises:
            Problem: 503, Redis does not answer, so it is unknown which tokens are valid.

        """
        if is_token(secret, self._system_token):
            return Principal("system", "admin")
        if is_token(secret, self._join_token):
            return Principal("join token", "worker")
        return principal_of(secret, await self.tokens(), self._clock()) if secret else None

    async def tokens(self) -> tuple[AccessToken, ...]:
        """Return all access tokens, oldest first; raises `Problem` as `authenticate` does."""
        async with self._reading:
            now_s = self._monotonic()
            if now_s - self._read_at_s >= REFRESH_S:
                before = self._invalidations
                try:
                    stored = await self._bus.hash_all(names.TOKENS)
                except BusUnavailable as error:
                    raise Problem(503, "No Redis", f"{error}: try again", headers={"Retry-After": "1"}) from error
                parsed = [token for text in stored.values() if (token := _parsed(text))]
                self._tokens = tuple(sorted(parsed, key=lambda token: token.created_at))
                # A change during the reading may not be in it.
                self._read_at_s = now_s if self._invalidations == before else -math.inf
        return self._tokens

    def invalidate(self) -> None:
        """Read the tokens again at the next request: they have changed."""
        self._invalidations += 1
        self._read_at_s = -math.inf


def _parsed(text: str) -> AccessToken | None:
    try:
        return AccessToken.model_validate_json(text)
    except ValidationError as error:
        # Not the error itself: it quotes the record.
        log.warning("token_unreadable", key=names.TOKENS, problems=error.error_count())
        return None
