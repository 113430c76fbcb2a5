"""Our policy: the rollout manager's domain code, driven as `services/rollout_manager/loop.py` drives it.

Messages go in, effects come out, and the records that the manager appends to the token log come back as entries.
Storage, trimming and events are left out: they do not influence decisions.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Iterable

from rlboost.services.rollout_manager.domain.apply_messages import apply_frames, apply_message, apply_order
from rlboost.services.rollout_manager.domain.decide import decide
from rlboost.services.rollout_manager.domain.effects import (
    Deliver,
    Effect,
    Now,
    Record,
    Send,
    Store,
    one_turn,
)
from rlboost.services.rollout_manager.domain.world import World
from rlboost.shared.job.spec import parse
from rlboost.shared.messages import (
    DeadLetter,
    JobCommand,
    JobReport,
    Message,
    TokenFrame,
    WorkerLeft,
)
from rlboost.shared.streams.bus import Append
from rlboost.simulation.environment import LEASE_S
from rlboost.simulation.policies import Policy, Turn
from rlboost.simulation.scenario import JOB_ID, JOB_NO, SimulatedJob

UNIX_S = 1_750_000_000.0
"""Wall clock at virtual time 0; any will do."""
MAX_STEPS = 1 << 20


class DomainManager:
    """A rollout manager without Redis."""

    def __init__(self, job: SimulatedJob, policy: Policy) -> None:
        self._policy = policy
        self.world = World(LEASE_S)
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
        effects = self._apply([*self._first, *records, *messages], moment)
        self._first = []
        dead = [worker for worker in self.world.fleet.silent_workers(now) if not has_lease(worker)]
        self._on_departed(dead)
        if not self._policy.memory:
            self.world.jobs[JOB_ID].record.window_tuner.memory.clear()
        if self._policy.batch_cap:
            for one in self.world.fleet.workers.values():
                one.batch_cap = min(one.batch_cap, self._policy.batch_cap)
        began = time.process_time()
        effects += decide(self.world, moment, dead)
        self.decide_s += time.process_time() - began
        turn = Turn()
        for effect in one_turn(effects):
            match effect:
                case Record(message):
                    self._records.append(message)
                case Send(worker, message):
                    turn.commands.append((worker, message))
                case Deliver(_, message):
                    turn.deliveries.append(message)
                case Store(ops):
                    letters = [op.message for op in ops if isinstance(op, Append) and op.message.tag == DeadLetter.tag]
                    if letters:
                        raise RuntimeError(f"dead-lettered: {letters}")
        return turn

    def _apply(self, messages: list[Message], moment: Now) -> list[Effect]:
        effects: list[Effect] = []
        frames: list[TokenFrame] = []
        for message in sorted(messages, key=apply_order):
            if isinstance(message, TokenFrame):
                frames.append(message)
                continue
            if frames:
                effects += apply_frames(self.world, frames)
                frames = []
            if isinstance(message, WorkerLeft):
                self._on_departed([message.worker])
            self._entries += 1
            effects += apply_message(self.world, message, f"{int(moment.mono * 1000)}-{self._entries}", moment)
        if frames:
            effects += apply_frames(self.world, frames)
        return effects

    def _on_departed(self, workers: Iterable[str]) -> None:
        """Without migration, samples of a preempted worker start again from their prompt."""
        present = [self.world.fleet.workers[worker] for worker in workers if worker in self.world.fleet.workers]
        for sample in (sample for worker in present for sample in worker.in_order()):
            if not (self._policy.migration or sample.finish):
                self.world.ledger.cut(sample, 0)
