"""Scopes: what the holder of a token may do. Each HTTP route declares the one that it needs."""

from __future__ import annotations

from typing import Literal, NamedTuple

TokenScope = Literal["admin", "job", "read", "worker"]
"""Scope of a token that a user creates: `admin` may do everything, `job` run jobs, `read` see them, `worker` join the
fleet."""
Scope = Literal[TokenScope, "weights"]
"""`weights`: download weights. Only the credentials that the manager issues to workers have it."""

_GRANTED: dict[Scope, frozenset[Scope]] = {
    "admin": frozenset({"admin", "job", "read", "worker", "weights"}),
    "job": frozenset({"job", "read"}),
    "read": frozenset({"read"}),
    "worker": frozenset({"worker"}),
    "weights": frozenset({"weights"}),
}


class Principal(NamedTuple):
    """Who sent a request, and what it may do."""

    name: str
    """The sender's name in logs; never a secret."""
    scope: Scope

    def may(self, needed: Scope) -> bool:
        """Return True if the scope includes the needed one."""
        return needed in _GRANTED[self.scope]


SYSTEM = Principal("system", "admin")
"""The holder of the system token."""
