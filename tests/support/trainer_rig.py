"""A trainer with everything around it on fakes: one process after the other on the same bus, and a scripted manager."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from rlboost.services.trainer.app import Limits, Timing, Trainer
from rlboost.services.trainer.domain.loss.function import LossFn
from rlboost.services.trainer.domain.plan import TrainingRow
from rlboost.services.trainer.job.job import LEASE_TTL_S, DeviceThread, Job, RetryingBus
from rlboost.services.trainer.ports.samples import Data, Prompt, RewardBatch, Scores
from rlboost.services.trainer.ports.storage import CheckpointStore, JobResources, TrainState
from rlboost.shared.http.access import signed
from rlboost.shared.job.spec import JobSpec, RlJob, to_json
from rlboost.shared.messages import Event, JobCommand, JobReport, StepReport
from rlboost.shared.process.waiting import Waits
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START, Fence
from rlboost.shared.streams.fenced_lease import FencedLease
from rlboost.shared.wire import I32, pack
from tests.support.decoding import decode_as_numbers
from tests.support.eventually import LIMIT_S, eventually
from tests.support.jobs import parse_rl
from tests.support.memory_bus import MemoryBus
from tests.support.scripted_manager import ScriptedManager
from tests.support.trainer_fakes import FakeEngine, FakeRewards, MemoryCheckpoints, MemoryFolder, MemoryWeights

JOB = "job-1"
TOKEN = "token"
PRICE_PER_HOUR = 2.5


def spec(**changes: Any) -> RlJob:
    raw: dict[str, Any] = {
        "model": "m",
        "data": {"train": "t.jsonl", "prompts_per_step": 4},
        "reward": {"function": "m:f"},
        "algorithm": {"group_size": 2, "updates_per_step": 2},
        "sampling": {"max_tokens": 8},
        "optimizer": {"lr": 0.01},
        "trainer": {"checkpoint_every": 2, "micro_batch_tokens": 16},
        "steps": 5,
    }
    return parse_rl({**raw, **changes})


def by_length(batch: RewardBatch) -> Scores:
    return Scores(tuple(float(len(ids) % 3) for ids in batch.completion_ids))


class WatchedEngine(FakeEngine):
    """Keeps the rows that it was trained on."""

    def __init__(self, rows: list[TrainingRow]) -> None:
        super().__init__()
        self._rows = rows

    def accumulate(self, batches: Any, loss: LossFn) -> dict[str, float]:
        self._rows += [row for rows in batches for row in rows]
        return super().accumulate(batches, loss)


async def succession(bus: MemoryBus) -> tuple[Fence, Fence]:
    """Let one trainer take a job's lease from another; return their fences, of which the first has fallen."""
    fences = []
    for trainer in ("old", "new"):
        epoch = await bus.acquire_fenced("lease", trainer, 5.0, epoch="epoch", replacing="old")
        assert epoch is not None
        fences.append(Fence("epoch", epoch))
    old, new = fences
    return old, new


class Rig:
    """One trainer after the other on the same bus, weights and checkpoints, and a scripted manager."""

    def __init__(
        self,
        folder: Path,
        job: JobSpec | None = None,
        *,
        timing: Timing = Timing(block_s=0.01, lease_renewal_interval_s=0.05),  # noqa: B008 - frozen
    ) -> None:
        self.job: JobSpec = job or spec()
        self.timing = timing
        self.bus = MemoryBus()
        self.weights = MemoryWeights()
        self.checkpoints: CheckpointStore = MemoryCheckpoints(folder)
        self.predecessor: Callable[[], tuple[TrainState, Path]] | None = None
        self.first_row = 0
        """What the first prompt is called: with another, the data are others."""
        self.folder = MemoryFolder()
        self.manager = ScriptedManager(self.bus, JOB)
        self.reward: Callable[[RewardBatch], Scores] = by_length
        self.engine = FakeEngine()
        self.make_engine: Callable[[], FakeEngine] = FakeEngine
        self.n_too_long = 0
        self.advice: list[str] = []
        self.samples_limit_s = 20.0
        self.outage_limit_s = 20.0
        self.shared_device = ""
        self.waits = Waits()
        self._trainers = 0
        self.vocab_size = 100
        self.created: list[datetime] = []
        """What each start of the job got."""

    @property
    def rl_job(self) -> RlJob:
        assert isinstance(self.job, RlJob)
        return self.job

    def build(self, spec: JobSpec, job_id: str, created: datetime) -> JobResources:
        self.created.append(created)
        prompts = [Prompt(f"p{i}", pack([1, i], I32), {"row": i}) for i in range(self.first_row, self.first_row + 10)]
        self.engine = self.make_engine()
        return JobResources(
            engine=self.engine,
            model=Path("m"),
            loss=_no_loss,
            data=Data(
                prompts,
                prompts[:3] * len(self.job.held_out),
                (2,),
                decode_as_numbers,
                [3] * len(self.job.held_out),
                self.n_too_long,
                advice=self.advice,
                vocab_size=self.vocab_size,
            ),
            rewards=FakeRewards(self.reward),
            checkpoints=self.checkpoints,
            weights=self.weights,
            folder=self.folder,
            critic=self.engine,
            predecessor=self.predecessor,
        )

    def claimed(self, device: DeviceThread | None = None, *, no: int = 1, fence: Fence | None = None) -> Job:
        """Return the job as a trainer has claimed it, with its resources; `fence` is that of its lease."""
        job = Job(
            id=JOB,
            no=no,
            spec_json=to_json(self.job),
            command="1-0",
            lease=FencedLease(self.bus, names.trainer_lease(JOB), names.trainer_epoch(JOB), LEASE_TTL_S),
            trainer="t",
            bus=RetryingBus(self.bus, self.waits, self.outage_limit_s),
            device=device or DeviceThread(),
            waits=self.waits,
            limit_s=self.samples_limit_s,
        )
        job.lease._fence = fence
        job.resources = self.build(self.job, JOB, job.created)
        return job

    async def command(self, action: Any, job: JobSpec | None = None, *, job_id: str = JOB) -> None:
        text = to_json(job or self.job) if action == "create" else ""
        await self.append(JobCommand(command_id=action, action=action, job_id=job_id, job_no=1, spec_json=text))

    async def append(self, command: JobCommand) -> None:
        """Append a command as a manager does."""
        stream = names.JOB_COMMANDS if command.action == "create" else names.JOB_CONTROLS
        await self.bus.append(stream, signed(command, TOKEN))

    @asynccontextmanager
    async def trainer(self, *, name: str = "t", killed: bool = False, last_exit: str = "") -> AsyncIterator[Trainer]:
        """Run a trainer, and with the first one the manager; at the end stop it in order, or as SIGKILL would."""
        device, stop = DeviceThread(), asyncio.Event()
        self.waits = Waits()
        trainer = Trainer(
            self.bus,
            self.build,
            device,
            self.waits,
            name=name,
            token=TOKEN,
            limits=Limits(outage_s=self.outage_limit_s, samples_s=self.samples_limit_s),
            timing=self.timing,
            price_per_hour=PRICE_PER_HOUR,
            last_exit=last_exit,
            shared_device=self.shared_device,
        )
        loops = [
            asyncio.create_task(loop(stop)) for loop in (trainer.follow_commands, trainer.run_jobs, trainer.renew_lease)
        ]
        managers = [] if self._trainers else [asyncio.create_task(self.manager.run())]
        self._trainers += 1
        try:
            yield trainer
        finally:
            self._trainers -= 1
            if not killed:
                stop.set()
                _, left = await asyncio.wait(loops, timeout=LIMIT_S)
                assert not left, f"these tasks still run after the stop: {left}"
            for task in (*loops, *managers):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*loops, *managers)
            # Only what was cancelled: another trainer's job continues.
            if jobs := [t for t in asyncio.all_tasks() if t.get_name().startswith("job-") and t.cancelling()]:
                await asyncio.wait(jobs, timeout=LIMIT_S)
            device.close()

    def lease_runs_out(self) -> None:
        """Do at once what time does to a dead trainer's lease."""
        self.bus._leases.clear()

    async def killed_in(self, step: int) -> None:
        """Have a job made, and its trainer killed while it waits for this step's samples; then its lease runs out.

        The checkpoint that was due before the step, if any, is durable.
        """
        self.manager.held = {step}
        due = step - step % self.job.trainer.checkpoint_every
        async with self.trainer(killed=True):
            await self.command("create")
            await self.waits_for(f"samples of step {step + 1}")
            await eventually(lambda: not due or self._is_saved(due))
        self.manager.held = set()
        self.lease_runs_out()

    def _is_saved(self, step: int) -> bool:
        found = self.checkpoints.newest()
        return found is not None and found[0].step == step

    async def waits_for(self, what: str) -> None:
        """Return once the trainer waits for this."""
        await eventually(lambda: what in [wait.subject for wait in self.waits.current()])

    async def reports(self) -> list[JobReport | StepReport]:
        entries = await self.bus.read({names.JOB_REPORTS: START}, count=10_000)
        return [e.message for e in entries if isinstance(e.message, JobReport | StepReport)]

    async def steps(self) -> list[StepReport]:
        return [report for report in await self.reports() if isinstance(report, StepReport)]

    async def states(self) -> list[str]:
        return [report.state for report in await self.reports() if isinstance(report, JobReport)]

    async def ended(self, within_s: float = LIMIT_S) -> JobReport:
        async def last() -> JobReport | None:
            found = [report for report in await self.reports() if isinstance(report, JobReport)]
            return found[-1] if found and found[-1].state in {"completed", "failed", "cancelled"} else None

        report = await eventually(last, within_s=within_s)
        assert report is not None
        return report

    async def run(self) -> JobReport:
        """Create the job, run it to its end, and return its last report."""
        async with self.trainer():
            await self.command("create")
            return await self.ended()

    async def resume(self) -> JobReport:
        """Run the job, which has been created, to its end in another trainer, and return its last report."""
        async with self.trainer():
            return await self.ended()

    async def events(self) -> list[tuple[str, dict[str, Any]]]:
        entries = await self.bus.read({names.job_events(JOB): START}, count=10_000)
        return [(e.message.kind, e.message.fields) for e in entries if isinstance(e.message, Event)]


def _no_loss(*_: Any) -> Any:
    raise AssertionError("the fake engine does not call it")
