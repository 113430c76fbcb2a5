"""Our policy: the rollout manager's domain code, driven as `services/rollout_manager/app.py` drives it.

Messages go in, effects come out, and the records that the manager appends to the token log come back as entries.
Storage, trimming and events are left out: they do not influence decisions.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection

from rlboost.services.rollout_manager.domain.apply_messages import apply_frames, apply_message
from rlboost.services.rollout_manager.domain.apply_order import Order
from rlboost.services.rollout_manager.domain.decide import decide
from rlboost.services.rollout_manager.domain.effects import DeadLetterEntry, Deliver, Record, Send
from rlboost.services.rollout_manager.domain.scheduling.length_estimates import LengthEstimates
from rlboost.services.rollout_manager.domain.scheduling.queue import SampleQueue, SampleQueues
from rlboost.services.rollout_manager.domain.scheduling.requirements import requirement_of
from rlboost.services.rollout_manager.domain.token_log.sample import Sample
from rlboost.services.rollout_manager.domain.workers.worker import Worker
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
    StepReport,
    TokenFrame,
    WeightsCommitted,
    WorkerHeartbeat,
    WorkerJoined,
    WorkerLeft,
)
from rlboost.simulation.environment import LEASE_S
from rlboost.simulation.job import JOB_ID, JOB_NO, SimulatedJob
from rlboost.simulation.policies import Policy
from rlboost.simulation.policies.turn import Turn

UNIX_S = 1_750_000_000.0
"""Wall clock at virtual time 0; any will do."""
MAX_STEPS = 1 << 20
_ORDER_OF: dict[type[Message], Order] = {
    **dict.fromkeys((JobCommand, JobReport, StepReport, WeightsCommitted), Order.JOBS),
    GroupRequested: Order.REQUESTS,
    **dict.fromkeys((TokenFrame, SampleFailed, Admitted, Placed, Closed, Restated), Order.TOKEN_LOG),
    **dict.fromkeys((WorkerJoined, WorkerHeartbeat, PreemptionNotice, WorkerLeft), Order.WORKERS),
}
"""Message type -> when the manager applies the entries of the stream that has such messages."""


class DomainManager:
    """A rollout manager without Redis."""

    def __init__(self, job: SimulatedJob, policy: Policy) -> None:
        """Know one running job."""
        self._policy = policy
        self.world = World(LEASE_S) if policy.migration else _RegeneratingWorld(LEASE_S)
        if not policy.order:
            self.world.queues = _FifoQueues()
        if not policy.balancing:
            self.world.periodic.rebalanced_at = math.inf
        self.decide_s = 0.0
        """Processor time of the decisions alone."""
        self._entries = 0
        self._records: list[Message] = []
        """Records appended to the log and not read back yet."""
        spec = {
            "model": "simulated",
            "data": {"train": "simulated.jsonl", "prompts_per_step": job.prompts},
            "reward": {"function": "simulated:reward"},
            "algorithm": {"group_size": job.group_size},
            "sampling": {"max_tokens": job.lengths.cap},
            "elastic": {"seeding": "auto" if policy.seeding else "off", "max_staleness": policy.staleness},
            "steps": MAX_STEPS,
        }
        text = json.dumps(parse(spec).model_dump(mode="json"))
        create = JobCommand(command_id="c", action="create", job_id=JOB_ID, job_no=JOB_NO, spec_json=text)
        self._first: list[Message] = [create, JobReport(job_id=JOB_ID, state="running", step=0, trainer="trainer")]

    def turn(self, messages: Collection[Message], now: float, has_lease: Callable[[str], bool]) -> Turn:
        """Take one turn: read, decide, write."""
        moment = Now(now, UNIX_S + now)
        records, self._records = self._records, []
        self._apply([*self._first, *records, *messages], moment)
        self._first = []
        dead = [worker for worker in self.world.fleet.silent_workers(now) if not has_lease(worker)]
        if not self._policy.memory:
            self.world.jobs[JOB_ID].window_tuner.memory.clear()
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
                    raise RuntimeError(f"{message.tag} was dead-lettered: {reason}")
        return turn

    def _apply(self, messages: list[Message], moment: Now) -> None:
        frames: list[TokenFrame] = []
        for message in sorted(messages, key=_apply_order):
            if isinstance(message, TokenFrame):
                frames.append(message)
                continue
            if frames:
                apply_frames(self.world, frames)
                frames = []
            self._entries += 1
            apply_message(self.world, message, f"{int(moment.mono * 1000)}-{self._entries}", moment)
        if frames:
            apply_frames(self.world, frames)


def _apply_order(message: Message) -> Order:
    return _ORDER_OF[type(message)]


# --- ablations --------------------------------------------------------------------------------------------------------


class _RegeneratingWorld(World):
    """Samples of a preempted worker start again from their prompt."""

    def unassign_all(self, worker: Worker, now: Now, cause: str) -> None:
        if cause in {"lost", "left"}:
            for sample in (self.ledger.samples[i] for i in worker.samples):
                if not sample.finish:
                    self.ledger.cut(sample, 0)
        super().unassign_all(worker, now, cause)


class _FifoQueue(SampleQueue):
    """Starts groups in the order in which they were requested."""

    def next_group(self) -> int:
        return next(iter(self.unstarted))


class _FifoQueues(SampleQueues):
    def add(self, sample: Sample, lengths: LengthEstimates) -> None:
        self.setdefault(requirement_of(sample), _FifoQueue())
        super().add(sample, lengths)
