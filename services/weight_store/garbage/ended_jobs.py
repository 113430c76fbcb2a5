"""Which jobs have ended, by the records that the manager stores and the leases that trainers hold."""

from __future__ import annotations

import json
import math
from typing import Any

from rlboost.shared.errors import Conflict
from rlboost.shared.messages import ENDED
from rlboost.shared.streams.bus import Bus
from rlboost.shared.streams.names import JOBS, trainer_lease


class EndedJobs:
    """The jobs of which no more versions are committed."""

    def __init__(self, bus: Bus) -> None:
        """Read from this bus."""
        self._bus = bus

    async def ids(self, before: float = math.inf) -> set[str]:
        """Return the jobs that ended before a time (Unix seconds), or when is not known; raises `BusUnavailable`."""
        records = {job_id: _fields(record) for job_id, record in (await self._bus.hash_all(JOBS)).items()}
        return {
            job_id
            for job_id, record in records.items()
            if record.get("state") in ENDED and not _is_later(record.get("finished_at"), before)
        }

    async def check(self, job_id: str) -> None:
        """Check that a job has ended, or is unknown and no trainer holds it.

        Raises:
            Conflict: it has not.
            BusUnavailable: Redis does not answer.

        """
        record = await self._bus.hash_get(JOBS, job_id)
        (trainer,) = await self._bus.lease_values([trainer_lease(job_id)])
        state = str(_fields(record).get("state", "")) if record is not None else ""
        if trainer is not None or (record is not None and state not in ENDED):
            raise Conflict(
                f"job {job_id} has not ended (state {state or 'unknown'}): cancel it with 'rlboost cancel {job_id}' "
                "and wait until it has ended"
            )


def _fields(record: str) -> dict[str, Any]:
    try:
        fields = json.loads(record)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _is_later(at: object, limit: float) -> bool:
    return isinstance(at, int | float) and at >= limit
