"""One training step: trains on scored groups as they are completed, as soon as the trainer has the device.

*Collect*. Consumes: `rollouts.finished`, through `Intake`. Produces: scoring tasks (`StepIntake.take`). Waits for: the
next entry (`Intake.read`); if groups may be replaced, the scores that decide it (`StepIntake.wait_until_decided`),
while it reads entries of later steps. Ends when: every group of the step is complete or dropped, and seeding is over;
then `Intake.read_ahead` reads entries of later steps until training ends.

*Train*. Consumes: scored groups in order of completion (`StepIntake.next_group`). Produces: optimizer steps.
Waits for: the next group, until its scoring task ends; the device (`DeviceTurn.run`), until *collect* reads
`SeedingEnded` and calls `DeviceTurn.set_owned`. Ends when: the last group of the step is trained.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from rlboost.services.trainer.domain.batches import Accumulate, OptimizerStep, TrainingRow, UpdatePlanner
from rlboost.services.trainer.domain.loss.function import MISMATCH, add_sums
from rlboost.services.trainer.domain.metrics import Durations, StepTally
from rlboost.services.trainer.domain.plan import learning_rate
from rlboost.services.trainer.job.job import Job
from rlboost.services.trainer.ports.engine import NotFinite
from rlboost.services.trainer.step.intake import Intake, StepIntake
from rlboost.services.trainer.step.training_rows import TrainingRows
from rlboost.shared.errors import Fatal, WaitTimedOut
from rlboost.shared.progress import CountProgress

T = TypeVar("T")


# --- The trainer's turns on a device that it shares with reserved engines ---------------------------------------------


class DeviceTurn:
    """The trainer's turn on a device that it shares with the reserved engines, during one step."""

    def __init__(self, job: Job, step: int) -> None:
        """Start without the device. The engine is offloaded when a turn ends before the step does."""
        self._job = job
        self._step = step
        self._offloading: Future[object] | None = None
        self._owned = asyncio.Event()
        self._step_ended = False
        self._began = self._since = time.monotonic()
        self.waited_s: float | None = None
        """Time from the start of the step to the first turn; None before it."""
        self.held_s = 0.0
        """Total duration of the turns that have ended."""
        self.busy_s = 0.0
        """How long the device computed."""
        self._computes_since: float | None = None
        self.shared_wait_s = 0.0
        """How long calls waited while jobs of other trainers had the device."""

    @property
    def idle_s(self) -> float:
        """Return how long the trainer has had the device until now without computing."""
        now = time.monotonic()
        held_s = self.held_s + (now - self._since if self._owned.is_set() else 0.0)
        busy_s = self.busy_s + (0.0 if self._computes_since is None else now - self._computes_since)
        return max(0.0, held_s - busy_s - self.shared_wait_s)

    def set_owned(self, *, owned: bool) -> None:
        """Set whether the trainer has the device; without effect once the step's last turn has ended."""
        if self._step_ended:
            return
        now = time.monotonic()
        if owned and not self._owned.is_set():
            self._since = now
            if self.waited_s is None:
                self.waited_s = now - self._began
            self._owned.set()
        elif not owned and self._owned.is_set():
            self._end_turn()
            self._offloading = self._job.device.post(self._job.resources.engine.offload)

    def end_step(self) -> None:
        """End the step's last turn. Nothing is offloaded, because the weights are published from the device."""
        self._step_ended = True
        if self._owned.is_set():
            self._end_turn()

    def _end_turn(self) -> None:
        self.held_s += time.monotonic() - self._since
        self._owned.clear()

    async def run(self, call: Callable[[], T]) -> T:
        """Run a call on the device during a turn; the end of the turn does not interrupt a started call.

        Raises:
            Fatal: the reserved engines did not release the device within the limit.

        """
        # The turn may end again during either wait.
        while not self._owned.is_set() or self._offloading is not None:
            if self._offloading is not None:
                offloading, self._offloading = self._offloading, None
                await asyncio.wrap_future(offloading)
            else:
                await self._turn()
        device = self._job.device
        began, waited_s = time.monotonic(), device.waited_s
        self._computes_since = began
        try:
            return await device.compute(call)
        finally:
            self._computes_since = None
            waited_s = device.waited_s - waited_s
            self.shared_wait_s += waited_s
            self.busy_s += time.monotonic() - began - waited_s

    async def _turn(self) -> None:
        because = f"the reserved engines generate for step {self._step + 1} on it"
        try:
            async with self._job.waits.on("the device", because=because, limit_s=self._job.limit_s):
                await self._owned.wait()
        except WaitTimedOut as error:
            raise Fatal(f"{error}: check that the rollout manager runs, and that no worker hangs") from error


# --- The step ---------------------------------------------------------------------------------------------------------


class StepRun:
    """One step, from its first sample to its last optimizer step."""

    def __init__(self, all_steps: Intake, intake: StepIntake) -> None:
        """Bind to the step of `intake`; `run` runs it."""
        job = self._job = all_steps.job
        self._all_steps = all_steps
        self._intake = intake
        self._step = intake.step
        rate = learning_rate(job.generating_spec.optimizer, intake.step, job.spec.steps)
        self._tally = StepTally(step=intake.step, learning_rate=rate, hardware=job.resources.hardware)
        self._turn = DeviceTurn(job, intake.step)
        self._idle_before_s: float | None = None
        """Idle time of the device until all initial groups were complete."""
        self._weights_changed = False
        """True once the weights differ from those at the start of the step."""
        self._rows = TrainingRows.of(job, self._tally, self._turn.run)
        self._rows_since_update: list[TrainingRow] = []
        """Rows accumulated since the last optimizer step."""

    async def run(self) -> StepTally:
        """Collect and train; return the tally of the step.

        Raises:
            Fatal: no sample came within the limit, the stream is inconsistent, no group could be scored, or a loss is
                not finite.
            ExceptionGroup: one or more of the errors above, from the step's tasks.

        """
        async with asyncio.TaskGroup() as tasks:
            training = tasks.create_task(self._train(), name=f"train-{self._step}")
            await self._collect()
            reading_ahead = tasks.create_task(self._all_steps.read_ahead(), name=f"read-ahead-{self._step}")
            await training
            reading_ahead.cancel()
        rollouts = self._tally.rollouts = await self._intake.finish()
        self._tally.durations = self._durations()
        needed = rollouts.evaluated if self._job.spec.kind == "eval" else rollouts.scored
        if not needed and (self._intake.n_train or self._job.spec.kind == "eval"):
            raise self._nothing_scored(rollouts.dropped, rollouts.first_detail)
        return self._tally

    def _nothing_scored(self, reasons: Counter[str], detail: str) -> Fatal:
        return Fatal(
            f"no group of step {self._step + 1} could be scored ({dict(reasons)}): check {self._suspect(reasons)}; "
            f"the first: {detail or 'no detail'}"
        )

    def _suspect(self, reasons: Counter[str]) -> str:
        if set(reasons) == {"stale"}:
            return "for workers with old weights, or raise elastic.max_staleness"
        if set(reasons) == {"teacher"}:
            return f"the teacher, models.{self._job.spec.served_teacher}, and the workers that serve it"
        section = "environment" if self._job.spec.agent is None else "agent"
        if (conversation := self._job.spec.conversation) and any(section in why for why in reasons):
            return f"{section}.function {conversation.function}" if conversation.function else "the hosts of agents"
        parts = self._job.spec.reward_parts
        kinds = {kind for kind in ("function", "url", "model", "judge") for part in parts if getattr(part, kind)}
        field = kinds.pop() if len(kinds) == 1 else "functions"
        return f"reward.{field} {', '.join(part.source for part in parts)}"

    # --- collect ---

    async def _collect(self) -> None:
        groups, progress = self._intake.groups, CountProgress("samples")
        subject = f"samples of step {self._step + 1}" if self._intake.n_train else "samples of the evaluation"
        while True:
            self._turn.set_owned(owned=groups.trainer_has_device)
            if self._job.device.is_shared and any(engine.role == "reserved" for engine in groups.engines):
                raise Fatal(
                    "a reserved worker generates on the device that this trainer shares with other trainers "
                    "(RLBOOST_TRAINER_SHARED_DEVICE), which may be training: stop it, and use spot workers"
                )
            if self._idle_before_s is None and not self._intake.n_initial_pending:
                self._idle_before_s = self._turn.idle_s
            waits_for_device = self._intake.n_train and not groups.trainer_has_device and not self._intake.judging
            if not groups.complete or waits_for_device:
                progress.update(groups.n_arrived, groups.n_samples)
                if self._intake.n_train and groups.complete and not groups.n_whole and groups.drops:
                    raise self._nothing_scored(Counter(drop.reason for drop in groups.drops), groups.drops[0].detail)
                await self._all_steps.read(subject, groups.arrived_text(), progress.rate_text)
            elif self._intake.judging:
                await self._read_or_judge()
            elif self._intake.n_undecided:
                await self._read_until_decided()
            else:
                return

    async def _read_or_judge(self) -> None:
        """Read the next entry, or return once a group is judged: reserved workers may need the device for a judge."""
        reading = asyncio.create_task(self._all_steps.read_next(), name=f"read-while-judging-{self._step}")
        try:
            await asyncio.wait({reading, *self._intake.judging}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                await reading
        finally:
            reading.cancel()

    async def _read_until_decided(self) -> None:
        """Read entries of later steps until no group can be replaced any more, or a replacement is pending."""
        async with asyncio.TaskGroup() as tasks:
            reading_ahead = tasks.create_task(self._all_steps.read_ahead(), name=f"read-ahead-{self._step}")
            await self._intake.wait_until_decided()
            reading_ahead.cancel()

    # --- train ---

    async def _train(self) -> None:
        n_groups, spec = self._intake.n_train, self._job.generating_spec
        planner: UpdatePlanner[TrainingRow] = UpdatePlanner(
            n_groups, spec.algorithm.updates_per_step, spec.trainer.micro_batch_tokens
        )
        done: list[Accumulate[TrainingRow] | OptimizerStep] = []
        rows_by_group = None
        if self._rows.needs_all_groups:
            rows_by_group = await self._rows.build([await self._intake.next_group() for _ in range(n_groups)])
        for number in range(n_groups):
            if rows_by_group is not None:
                rows = rows_by_group[number]
            else:
                (rows,) = await self._rows.build([await self._intake.next_group()])
            for work in planner.add(rows):
                await self._run_work(work)
                if spec.algorithm.epochs > 1:
                    done.append(work)
        for work in done * (spec.algorithm.epochs - 1):
            await self._run_work(work)
        self._turn.end_step()

    async def _run_work(self, work: Accumulate[TrainingRow] | OptimizerStep) -> None:
        engine, loss = self._job.resources.engine, self._job.resources.loss
        if isinstance(work, OptimizerStep):
            norm = await self._finite(lambda: engine.step(self._tally.learning_rate), self._rows_since_update)
            self._weights_changed = self._weights_changed or bool(self._rows_since_update)
            self._rows_since_update = []
            if norm:
                self._tally.grad_norms.append(norm)
            return
        for batch in await self._rows.micro_batches(work):
            # One call per micro-batch: the turn may end between two.
            numbers = await self._finite(partial(engine.accumulate, [batch], loss), batch)
            self._rows_since_update += batch
            if self._weights_changed and not all(row.proximal for row in batch):
                del numbers[MISMATCH]  # the row was scored by weights that this step has updated
            else:
                numbers["mismatch_tokens"] = numbers["tokens"]
            if self._job.resources.replayed is not None:
                numbers["replayed_tokens"] = sum(row.n_loss_tokens for row in batch if row.routed_experts)
            numbers["all_tokens"] = sum(row.n_tokens for row in batch)
            add_sums(self._tally.loss_sums, numbers)

    async def _finite(self, call: Callable[[], T], rows: Sequence[TrainingRow]) -> T:
        """Run a call on the device; if its loss or gradients are not finite, dump the rows for debugging."""
        try:
            return await self._turn.run(call)
        except NotFinite as error:
            folder, name = self._job.resources.folder, f"not-finite-step-{self._step}.jsonl"
            path = await self._job.device.run(lambda: folder.dump_batch(name, rows))
            raise Fatal(
                f"step {self._step + 1}: {error}; version {self._step} stays the newest. Look for bad data among the "
                f"{len(rows)} samples in {path}, or lower optimizer.lr"
            ) from error

    def _durations(self) -> Durations:
        wait_s = max(0.0, self._turn.held_s - self._turn.busy_s - self._turn.shared_wait_s)
        before_s = wait_s if not self._tally.rollouts.resampled or self._idle_before_s is None else self._idle_before_s
        return Durations(
            seeding_s=self._turn.waited_s or 0.0,
            wait_s=wait_s,
            resample_s=max(0.0, wait_s - before_s),
            train_s=self._turn.busy_s,
            device_wait_s=self._turn.shared_wait_s if self._job.device.is_shared else None,
        )
