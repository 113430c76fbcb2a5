"""Scopes: what the holder of a token may do. Each HTTP route declares the one that it needs."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

TokenScope = Literal["admin", "agent", "job", "read", "trainer", "worker"]
"""Scope of a token that a user creates: `admin` may do everything, `job` run jobs, `read` see them, `trainer` train one
external job, `worker` join the fleet, `agent` take the sessions of remote agents."""
Scope = Literal[TokenScope, "models", "publish", "session", "weights"]
"""`models`: see which models are served; `publish`: upload and commit weights of one job; `session`: call the model as
one agent; `weights`: download weights. Users do not create tokens of these: a trainer issues keys of sessions, and the
manager gives external trainers and workers credentials for weights."""

_GRANTED: dict[Scope, frozenset[Scope]] = {
    "admin": frozenset(get_args(Scope)),
    "agent": frozenset({"agent"}),
    "job": frozenset({"agent", "job", "models", "read", "session", "trainer"}),
    "models": frozenset({"models"}),
    "publish": frozenset({"publish"}),
    "read": frozenset({"models", "read"}),
    "session": frozenset({"models", "session"}),
    "trainer": frozenset({"trainer"}),
    "worker": frozenset({"worker"}),
    "weights": frozenset({"weights"}),
}


class Principal(NamedTuple):
    """Who sent a request, and what it may do."""

    name: str
    """The sender's name in logs; never a secret."""
    scope: Scope
    subject: str = ""
    """What it is limited to: in the scope `session` a `shared.job.sessions.SessionId`, in `trainer` a job, in `publish`
    a `shared.http.access.Publishing`."""

    def may(self, needed: Scope) -> bool:
        """Return True if the scope includes the needed one."""
        return needed in _GRANTED[self.scope]


SYSTEM = Principal("system", "admin")
"""The holder of the system token."""
