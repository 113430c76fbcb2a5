"""What makes Redis accept a rejected command later."""

from __future__ import annotations

from redis.exceptions import ClusterDownError, MasterDownError, OutOfMemoryError, ReadOnlyError, ResponseError

_REMEDIES: dict[type[ResponseError], str] = {
    OutOfMemoryError: "raise its maxmemory; what consumers have read is trimmed in the meantime",
    ReadOnlyError: "it is a replica: waiting for the primary",
    MasterDownError: "waiting for its primary",
    ClusterDownError: "waiting for the cluster",
}
_REMEDIES_BY_CODE = {
    "LOADING": "it loads its data",
    "BUSY ": "it runs a script",
    "MISCONF": "free space on its disk",
    "NOREPLICAS": "start its replicas",
}
"""For the codes of replies that redis-py has no class for; it keeps them in the text."""


def remedy(error: ResponseError) -> str | None:
    """Return what makes Redis accept the command later, None if it never will."""
    if found := _REMEDIES.get(type(error)):
        return found
    # For a command in a transaction, redis-py puts the reply after a description of the command.
    reply = str(error).rpartition("caused error: ('")[2]
    return next((remedy for code, remedy in _REMEDIES_BY_CODE.items() if reply.startswith(code)), None)
