"""Run the demo: a local system, the Countdown job, and a simulated spot market that preempts and adds workers.

Consumes: REST API responses, the job's events, process events.
Produces: a record, the scheduled changes of the fleet, the live view.
Waits for: readiness of the processes, then the next poll (every 0.5 s), then the shutdown.
Ends when: the job has ended, makes no progress for too long, or a signal arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from rlboost.client import Client, ClientError, ServerEvent
from rlboost.demo import workspace
from rlboost.demo.due_changes import JobProgressEstimate, PreemptionSchedule
from rlboost.demo.job import countdown
from rlboost.demo.live import view_of
from rlboost.demo.recorder import Recorder, observation, this_machine
from rlboost.demo.schedule import plan
from rlboost.local.cluster import LocalCluster
from rlboost.local.processes import LocalOptions
from rlboost.local.signals import cancel_on_signals
from rlboost.local.supervisor import ClusterEvent
from rlboost.report.record import Observation, Record, Settings
from rlboost.shared.errors import Fatal
from rlboost.shared.messages import ENDED

LOOK_EVERY_S = 0.5
STALL_LIMIT_S = 300.0
"""Longest step before the run is aborted."""
_LAST_EVENT_LIMIT_S = 5.0
_STEPS_WITH_SAMPLES = 6
"""Maximum number of steps with a preemption whose samples are retained."""
_RESERVED = 1
_SCALE_IN_DELAY_S = "60"
"""The default would outlast the demo."""


@dataclass(frozen=True)
class DemoOptions:
    """Options of a run. `steps` None: the job file's number."""

    state: Path
    steps: int | None = None
    workers: int = 3
    chaos: bool = True
    seed: int = 0
    engine: Literal["torch", "vllm"] = "torch"
    autoscale: int = 0
    """Maximum number of spot workers, which follows the manager's autoscaling; 0: a join follows each preemption."""


def run(options: DemoOptions, console: Console) -> Record | None:
    """Run the demo; return its record, which is also written to the state folder, or None after a signal.

    The first signal stops everything in order, a second one immediately.

    Raises:
        ConfigError: the state folder or the example is unusable.
        StartFailed: a process did not become ready.
        Fatal: the job makes no progress.
        ClientError: the manager does not answer.

    """
    demo = Demo(options, console)

    async def body() -> None:
        cancel_on_signals()
        await demo.run()

    try:
        asyncio.run(body())
    except asyncio.CancelledError:
        return None
    return demo.record


class Demo:
    """A run of the demo."""

    def __init__(self, options: DemoOptions, console: Console) -> None:
        """Hold the options; `run` starts the demo."""
        self._job, goal = countdown(options.steps, options.seed)
        steps: int = self._job["steps"]
        planned = plan(steps, options.workers, options.seed) if options.chaos else []
        if options.autoscale:
            planned = [change for change in planned if change.action != "join"]
            self._job["elastic"]["seeding"] = "auto"  # which learns the number of workers worth having
        self.record = Record(
            settings=Settings(
                steps=steps,
                workers=options.workers,
                reserved=_RESERVED,
                chaos=bool(planned),
                seed=options.seed,
                goal=goal,
            ),
            machine=this_machine(),
            planned=planned,
            began_at=time.time(),
        )
        self._options = options
        self._recorder = Recorder(self.record)
        self._schedule = PreemptionSchedule(planned, options.seed)
        self._progress = JobProgressEstimate()
        self._view = view_of(self.record, console)
        self._phase = "starting"
        self._job_id = ""
        self._has_all_events = asyncio.Event()
        self._unseen: set[int] = set()
        """Steps, from 0, with a preemption whose samples have not been fetched yet."""

    async def run(self) -> None:
        """Run from an empty state folder to completion."""
        local = LocalOptions(
            state_dir=self._options.state,
            reserved=_RESERVED,
            workers=self._options.workers,
            engine=self._options.engine,
            autoscale=self._options.autoscale,
            env={"RLBOOST_MANAGER_SCALE_IN_DELAY_S": _SCALE_IN_DELAY_S} if self._options.autoscale else {},
        )
        cluster = LocalCluster(local)
        workspace.clear(cluster.state)
        cluster.on_event(self._on_process_event)
        try:
            with self._view:
                self._show()
                async with cluster:
                    await self._with(cluster)
                    self._enter("stopping")
                self._recorder.cpu(cluster.processes(), cluster.cpu_seconds(), time.process_time())
                self._enter("stopped")
        finally:
            self._recorder.save(record_file(self._options.state))

    async def _with(self, cluster: LocalCluster) -> None:
        self.record.ready_at = time.time()
        self.record.cpu_to_start_s = sum(cluster.cpu_seconds().values()) + time.process_time()
        with Client(cluster.url, cluster.token) as client:
            created = await asyncio.to_thread(client.jobs.create, self._job)
            self._job_id = created["id"]
            self.record.job_began_at = time.time()
            self._enter("running")
            self._listen(cluster)
            await self._watch(client, cluster)
            self.record.job_ended_at = time.time()
            self.record.audit = await asyncio.to_thread(client.jobs.audit, self._job_id)
            self.record.cost = await asyncio.to_thread(client.jobs.cost, self._job_id)
            self.record.spec = await asyncio.to_thread(client.jobs.spec, self._job_id)
            last = len(self.record.training_rows) - 1
            self._recorder.samples(last + 1, await asyncio.to_thread(client.jobs.samples, self._job_id, last))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_EVENT_LIMIT_S):
                    await self._has_all_events.wait()

    async def _watch(self, client: Client, cluster: LocalCluster) -> None:
        step, moved_at = -1, time.monotonic()
        while True:
            job, workers = await asyncio.to_thread(lambda: (client.jobs.show(self._job_id), client.workers.list()))
            seen = observation(time.time(), job, workers)
            self._recorder.observe(job, seen)
            ended = job["state"] in ENDED
            if job["step"] != step or ended:
                step, moved_at = job["step"], time.monotonic()
                self._recorder.steps(await asyncio.to_thread(client.jobs.metrics, self._job_id))
                await self._look_at_samples(client, step)
            self._show()
            if ended:
                return
            if time.monotonic() - moved_at > STALL_LIMIT_S:
                raise Fatal(_stalled(seen, self._options.state))
            self._act(cluster, seen)
            await asyncio.sleep(LOOK_EVERY_S)

    def _act(self, cluster: LocalCluster, seen: Observation) -> None:
        if seen.job_state != "running":
            return
        for change in self._schedule.due(self._progress.at(seen.step, time.monotonic()), seen.workers):
            name = change.process
            match change.planned.action:
                case "kill":
                    cluster.kill(name)
                case "notice":
                    cluster.notice(name)
                case "join":
                    name = cluster.join_worker()
            self._recorder.changed(time.time(), seen.step, change.planned.action, name)
            if change.planned.action != "join" and len(self.record.samples) < _STEPS_WITH_SAMPLES:
                self._unseen.add(seen.step)

    async def _look_at_samples(self, client: Client, step: int) -> None:
        """Fetch the samples of steps with a preemption after they are done: those of early steps are not retained."""
        for due in {due for due in self._unseen if due < step}:
            self._unseen.remove(due)
            self._recorder.samples(due + 1, await asyncio.to_thread(client.jobs.samples, self._job_id, due))

    # --- events and display --------------------------------------------------------------------------------------

    def _listen(self, cluster: LocalCluster) -> None:
        """Read the job's events in a daemon thread that ends with the job."""
        loop = asyncio.get_running_loop()
        job_id = self._job_id

        def read() -> None:
            # The loop is closed (RuntimeError) or the manager is gone: the run was stopped.
            with contextlib.suppress(ClientError, RuntimeError), Client(cluster.url, cluster.token) as client:
                for event in client.jobs.events(job_id):
                    loop.call_soon_threadsafe(self._recorder.job_event, event)
                    if _is_last(event):
                        loop.call_soon_threadsafe(self._has_all_events.set)
                        return

        threading.Thread(target=read, name="job events", daemon=True).start()

    def _on_process_event(self, event: ClusterEvent) -> None:
        self._recorder.process_event(event)
        self._show()

    def _enter(self, phase: str) -> None:
        self._phase = phase
        self._show()

    def _show(self) -> None:
        self._view.show(self._phase, time.time())


def record_file(state: Path) -> Path:
    """Return the path of a run's record."""
    return state / "record.json"


def _is_last(event: ServerEvent) -> bool:
    fields: dict[str, Any] = event.data["fields"]
    return event.kind == "job_state_changed" and fields["state"] in ENDED


def _stalled(seen: Observation, state: Path) -> str:
    waits = f"it waits for {seen.waiting_for} because {seen.waiting_because}" if seen.waiting_for else "it trains"
    return f"no step in {STALL_LIMIT_S:.0f} s; {waits}: see the logs in {state / 'logs'}"
