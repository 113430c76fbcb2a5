"""What makes Redis accept a rejected command later."""

from __future__ import annotations

import re

from redis.exceptions import ClusterDownError, MasterDownError, OutOfMemoryError, ReadOnlyError, ResponseError

_CODES: dict[type[ResponseError], str] = {
    OutOfMemoryError: "OOM",
    ReadOnlyError: "READONLY",
    MasterDownError: "MASTERDOWN",
    ClusterDownError: "CLUSTERDOWN",
}
"""The codes that redis-py replaces by a class; of other replies it keeps the code in the text."""
_REMEDIES = {
    "OOM": "raise its maxmemory; what consumers have read is trimmed in the meantime",
    "READONLY": "it is a replica: waiting for the primary",
    "MASTERDOWN": "waiting for its primary",
    "CLUSTERDOWN": "waiting for the cluster",
    "LOADING": "it loads its data",
    "BUSY": "it runs a script",
    "MISCONF": "free space on its disk",
    "NOREPLICAS": "start its replicas",
}
_BEFORE_REPLY = re.compile(r""".*(caused error: \(['"]|@user_script: ?\d+: -)""", re.DOTALL)
"""What precedes the reply to a command in a transaction (redis-py) or in a script (before Redis 7)."""


def reply_code(error: ResponseError) -> str:
    """Return the first word of Redis's reply to the command that failed: its code, if the reply has one."""
    return _CODES.get(type(error)) or _BEFORE_REPLY.sub("", str(error), count=1).partition(" ")[0]


def remedy(error: ResponseError) -> str | None:
    """Return what makes Redis accept the command later, None if it never will."""
    return _REMEDIES.get(reply_code(error))
