"""The transaction that relays what workers have reported to the streams that all services may rely on.

A worker can write only to its own stream, so the stream tells who wrote a message. Relayed entries leave the worker's
stream in the same transaction: each is relayed once, whenever the manager is killed, and a stream needs no cursor.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping

from rlboost.services.rollout_manager.domain.relay_rules import Destination, destination
from rlboost.shared.errors import Unprocessable
from rlboost.shared.messages import Role
from rlboost.shared.messages.codec import fields_of
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import AppendRaw, Op, Remove
from rlboost.shared.streams.dead_letters import MAX_DEAD_LETTERS, dead_letter_op, report_dead_letter
from rlboost.shared.streams.entries import RawEntry

_STREAMS: dict[Destination, tuple[str, int | None]] = {
    "token_log": (names.TOKEN_LOG, None),
    "heartbeats": (names.WORKER_HEARTBEATS, None),
    "dead_letters": (names.DEAD_LETTERS, MAX_DEAD_LETTERS),
}


def relay(reports: Iterable[RawEntry], owners: Mapping[str, str], roles: Mapping[str, Role]) -> list[Op]:
    """Return the operations that relay these entries, as they are, and remove them from the workers' streams.

    Args:
        reports: entries of workers' streams, those of one stream in order.
        owners: workers' streams -> their owners, of all streams among these.
        roles: worker id -> its role, of all owners.

    """
    relayed: defaultdict[str, list[str]] = defaultdict(list)
    ops: list[Op] = []
    for report in reports:
        worker = owners[report.stream]
        relayed[report.stream].append(report.id)
        try:
            stream, max_len = _STREAMS[destination(worker, roles[worker], fields_of(report.body))]
        except Unprocessable as error:
            report_dead_letter(report.stream, report.id, str(error))
            ops.append(dead_letter_op(report.stream, report.id, "manager", str(error), report.body, time.time()))
        else:
            ops.append(AppendRaw(stream, report.body, max_len))
    return [*ops, *(Remove(stream, tuple(ids)) for stream, ids in relayed.items())]
