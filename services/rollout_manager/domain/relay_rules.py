"""Decides where the manager relays what a worker has reported, and what it does not relay (invariant 9)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from rlboost.shared.errors import Unprocessable
from rlboost.shared.messages import (
    DeadLetter,
    PreemptionNotice,
    Role,
    SampleFailed,
    TokenFrame,
    WorkerEvent,
    WorkerHeartbeat,
    WorkerJoined,
    WorkerLeft,
    WorkerLog,
)

Destination = Literal["token_log", "heartbeats", "dead_letters"]
_DESTINATIONS: dict[str, Destination] = {
    TokenFrame.tag: "token_log",
    SampleFailed.tag: "token_log",
    WorkerJoined.tag: "heartbeats",
    WorkerHeartbeat.tag: "heartbeats",
    WorkerEvent.tag: "heartbeats",
    WorkerLog.tag: "heartbeats",
    PreemptionNotice.tag: "heartbeats",
    WorkerLeft.tag: "heartbeats",
    DeadLetter.tag: "dead_letters",
}


def destination(worker: str, role: Role, fields: Mapping[str, Any]) -> Destination:
    """Return where a message from a worker's own stream belongs.

    Args:
        worker: the stream's owner, the only worker that can write to it.
        role: the worker's.
        fields: the message's fields, which its reader validates.

    Raises:
        Unprocessable: a worker may not send it, or it names another worker.

    """
    tag = str(fields.get("t"))
    if tag not in _DESTINATIONS:
        raise Unprocessable(f"worker {worker} sent a {tag[:100]}, which no worker may send")
    author = fields.get("consumer" if tag == DeadLetter.tag else "worker")
    if author != worker:
        raise Unprocessable(f"worker {worker} sent a {tag} in the name of {str(author)[:100]!r}")
    if tag == WorkerJoined.tag and fields.get("role") != role:
        raise Unprocessable(f"worker {worker} joined as {role}, not as {str(fields.get('role'))[:100]!r}")
    return _DESTINATIONS[tag]
