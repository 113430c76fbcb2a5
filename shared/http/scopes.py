"""Scopes: what the holder of a token may do. Each HTTP route declares the one that it needs."""

from __future__ import annotations

from typing import Literal, NamedTuple

TokenScope = Literal["admin", "job", "read", "worker"]
"""Scope of a token that a user creates: `admin` may do everything, `job` run jobs, `read` see them, `worker` join the
fleet."""
Scope = Literal[TokenScope, "session", "weights"]
"""`session`: call the model as one agent; `weights`: download weights. Users do not create tokens of these: a trainer
issues keys of sessions, and the manager gives workers credentials for weights."""

_GRANTED: dict[Scope, frozenset[Scope]] = {
    "admin": frozenset({"admin", "job", "read", "session", "worker", "weights"}),
    "job": frozenset({"job", "read", "session"}),
    "read": frozenset({"read"}),
    "session": frozenset({"session"}),
    "worker": frozenset({"worker"}),
    "weights": frozenset({"weights"}),
}


class Principal(NamedTuple):
    """Who sent a request, and what it may do."""

    name: str
    """The sender's name in logs; never a secret."""
    scope: Scope
    subject: str = ""
    """What a principal of the scope `session` is limited to: a `shared.job.sessions.SessionId`."""

    def may(self, needed: Scope) -> bool:
        """Return True if the scope includes the needed one."""
        return needed in _GRANTED[self.scope]


SYSTEM = Principal("system", "admin")
"""The holder of the system token."""
