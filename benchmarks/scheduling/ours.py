"""Our policy: the manager's domain code, driven as `services/rollout_manager/app.py` drives it.

Messages go in, effects come out, and the records that the manager appends to the token log come back as entries.
Storage, trimming and events are left out: they do not influence decisions.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection

from benchmarks.scheduling.cases import Case
from benchmarks.scheduling.simulation import Turn
from benchmarks.scheduling.trainer import JOB_ID
from benchmarks.scheduling.workload import JOB_NO
from rlboost.services.rollout_manager.domain.apply_messages import apply_message
from rlboost.services.rollout_manager.domain.decide import decide
from rlboost.services.rollout_manager.domain.effects import DeadLetterEntry, Deliver, Record, Send
from rlboost.services.rollout_manager.domain.world import Now, World
from rlboost.shared.job.spec import parse
from rlboost.shared.messages import (
    Admitted,
    Closed,
    GroupRequested,
    JobCommand,
    JobReport,
    Message,
    Placed,
    PreemptionNotice,
    Restated,
    SampleFailed,
    TokenFrame,
    WorkerHeartbeat,
    WorkerJoined,
    WorkerLeft,
)

UNIX_S = 1_750_000_000.0
"""Wall clock at virtual time 0; any will do."""
_LOG = (TokenFrame, SampleFailed, Admitted, Placed, Closed, Restated)
_BEATS = (WorkerJoined, WorkerHeartbeat, PreemptionNotice, WorkerLeft)


class Ours:
    """A manager without Redis."""

    def __init__(self, case: Case) -> None:
        """Know one running job."""
        self.world = World(case.lease_s)
        self.decide_s = 0.0
        """Processor time of the decisions alone."""
        self._entries = 0
        self._records: list[Message] = []
        """Records appended to the log and not read back yet."""
        spec = {
            "model": "simulated",
            "data": {"train": "simulated.jsonl", "prompts_per_step": case.prompts},
            "reward": {"function": "simulated:reward"},
            "algorithm": {"group_size": case.group_size},
            "sampling": {"max_tokens": case.lengths.cap},
            "elastic": {"seeding": "auto"},
            "steps": case.steps,
        }
        text = json.dumps(parse(spec).model_dump(mode="json"))
        create = JobCommand(command_id="c", action="create", job_id=JOB_ID, job_no=JOB_NO, spec_json=text)
        self._first: list[Message] = [create, JobReport(job_id=JOB_ID, state="running", step=0, trainer="trainer")]

    def turn(self, messages: Collection[Message], now: float, leases: Callable[[str], bool]) -> Turn:
        """Read, decide, write."""
        moment = Now(now, UNIX_S + now)
        first, self._first = self._first, []
        records, self._records = self._records, []
        for message in sorted([*first, *records, *messages], key=_apply_order):
            self._entries += 1
            apply_message(self.world, message, f"{int(now * 1000)}-{self._entries}", moment)
        dead = [worker for worker in self.world.fleet.suspects(now) if not leases(worker)]
        began = time.process_time()
        decide(self.world, moment, dead)
        self.decide_s += time.process_time() - began
        turn = Turn()
        for effect in self.world.outbox.take():
            match effect:
                case Record(message):
                    self._records.append(message)
                case Send(worker, message):
                    turn.commands.append((worker, message))
                case Deliver(_, message):
                    turn.deliveries.append(message)
                case DeadLetterEntry(_, _, message, reason):
                    raise AssertionError(f"{message.tag} was dead-lettered: {reason}")
        return turn


def _apply_order(message: Message) -> int:
    # As in the manager: jobs and weights, requests, the token log, beats.
    if isinstance(message, _BEATS):
        return 3
    if isinstance(message, _LOG):
        return 2
    return 1 if isinstance(message, GroupRequested) else 0
