"""Run the demo: a local system, the Countdown job, and a simulated spot market that preempts and adds workers.

Consumes: REST API responses, the job's events, process events.
Produces: a record, the scheduled changes of the fleet, the live view.
Waits for: readiness of the processes, then the next poll (every 0.5 s), then the shutdown.
Ends when: the job has ended, makes no progress for too long, or a signal arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console

from rlboost.client import Client, ClientError, ServerEvent
from rlboost.demo.live import view_of
from rlboost.demo.summary import Recorder, observation, this_machine
from rlboost.examples import countdown as countdown_example
from rlboost.local.cluster import LocalCluster
from rlboost.local.detached import cancel_on_signals
from rlboost.local.processes import LocalOptions
from rlboost.local.state import StateDir
from rlboost.local.supervisor import ClusterEvent
from rlboost.report import Observation, PlannedChange, Record, SeenWorker, Settings
from rlboost.shared.errors import ConfigError, Fatal
from rlboost.shared.ids import worker_name
from rlboost.shared.job import spec as job_spec
from rlboost.shared.job.file import load
from rlboost.shared.messages import ENDED
from rlboost.shared.process.modules import EngineName
from rlboost.simulation.traces import FleetTrace

# --- The demo's state folder, empty at the start of each run so that no earlier job continues -------------------------


_MARK = "this-is-a-demo"


def clear(state: StateDir) -> None:
    """Remove the state of an earlier demo, and nothing else.

    Raises:
        ConfigError: a system runs in the folder, or it holds something other than a demo's state.

    """
    state.require_free()
    mark = state.path / _MARK
    try:
        if state.path.exists() and any(state.path.iterdir()):
            if not mark.exists():
                raise ConfigError(f"{state.path} is not empty and not a demo's state: name another folder with --state")
            shutil.rmtree(state.path)
        state.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        raise ConfigError(f"state folder {state.path}: {error.strerror}; name another with --state") from error


# --- The demo's job: the Countdown example with its own job file ------------------------------------------------------


GOAL = 0.70
"""Held-out accuracy that the full job reaches; runs ended at 0.75 to 0.88."""

_EVALUATIONS = 2
"""Number of evaluations during a short run."""


def countdown(steps: int | None, seed: int) -> tuple[dict[str, Any], float | None]:
    """Return the job and its target accuracy, None if it is too short for one.

    Args:
        steps: training steps; None for the job file's number.
        seed: determines the order of the prompts, and the samples.

    Raises:
        ConfigError: the example's files are missing.

    """
    folder = Path(str(countdown_example.__file__)).parent
    file = folder / "job.yaml"
    if not file.exists():
        raise ConfigError(f"{file} is missing: install rlboost again")
    raw = load(str(file))
    full: int = raw["steps"]
    # The job file names paths in a checkout; installed, the example is elsewhere.
    raw["model"] = str(folder / Path(raw["model"]).name)
    for part in ("train", "eval"):
        raw["data"][part] = str(folder / Path(raw["data"][part]).name)
    raw["steps"] = steps or full
    # A short run is a prefix of the full run, including its learning-rate schedule.
    raw["optimizer"]["decay"] *= min(1.0, raw["steps"] / full)
    raw["eval"]["every"] = max(1, min(raw["eval"]["every"], raw["steps"] // _EVALUATIONS))
    raw["trainer"]["seed"] = seed
    job: dict[str, Any] = json.loads(job_spec.to_json(job_spec.parse(raw)))
    return job, GOAL if raw["steps"] >= full else None


# --- Decides which changes of the demo's schedule are due, and which worker each preemption hits. Pure ----------------


_FIRST_STEP_S = 4.0
"""Estimated duration of a step until the first one has completed."""


class JobProgressEstimate:
    """Estimates the progress of a job in steps, with fractions. The caller passes the clock."""

    def __init__(self) -> None:
        self._step = 0
        self._since: float | None = None
        self._step_s = _FIRST_STEP_S

    def at(self, step: int, now: float) -> float:
        """Return the progress, given how many steps are done.

        The fraction is relative to the duration of the last step, and stays below one.
        """
        if self._since is None:
            self._since = now
        elif step != self._step:
            self._step_s = (now - self._since) / (step - self._step)
            self._step, self._since = step, now
        return step + min(0.95, (now - self._since) / max(self._step_s, 1e-3))


@dataclass(frozen=True)
class DueChange:
    """A change to apply now; `process` is empty for a join."""

    planned: PlannedChange
    process: str


class PreemptionSchedule:
    """Decides which changes are due. A preemption hits a random worker that is generating."""

    def __init__(self, schedule: Sequence[PlannedChange], seed: int) -> None:
        """Start before the first change; the seed selects the preempted workers."""
        self._preemptions = [change for change in schedule if change.action != "join"]
        self._joins = [change for change in schedule if change.action == "join"]
        self._preempted: set[str] = set()
        self._draw = random.Random(seed)  # noqa: S311 - not a secret

    def due(self, progress: float, workers: Iterable[SeenWorker]) -> list[DueChange]:
        """Return the changes that are due; each is returned once.

        A preemption waits until a worker is generating; joins do not wait.
        """
        victims = sorted(
            {
                worker_name(worker.id)
                for worker in workers
                if worker.role == "preemptible" and worker.state == "ready" and worker.running
            }
            - self._preempted
        )
        changes = []
        while victims and self._preemptions and self._preemptions[0].at_step <= progress:
            victim = victims.pop(self._draw.randrange(len(victims)))
            self._preempted.add(victim)
            changes.append(DueChange(self._preemptions.pop(0), victim))
        while self._joins and self._joins[0].at_step <= progress:
            changes.append(DueChange(self._joins.pop(0), ""))
        return changes


# --- The demo's simulated spot market: changes of the fleet by step of the job ----------------------------------------
# Steps instead of seconds, so that every change happens on fast and slow machines.


STEPS_A_PREEMPTION = 10
FEWEST = 2
FIRST_AT, LAST_AT = 0.06, 0.84
"""Fractions of the job. After the last one there is time to detect it, which without notice takes a lease."""


def plan(steps: int, workers: int, seed: int) -> list[PlannedChange]:
    """Return the ordered schedule: preemptions, every second one without notice, and a join for each.

    A long enough run has a storm that preempts all workers at nearly the same time.

    Args:
        steps: steps of the job.
        workers: initial spot workers; with none the schedule is empty.
        seed: makes the schedule reproducible.

    """
    draw = random.Random(seed)  # noqa: S311 - a schedule, not a secret
    sizes = _sizes(max(min(FEWEST, workers), steps // STEPS_A_PREEMPTION) if workers else 0, workers)
    spacing = (LAST_AT - FIRST_AT) * steps / max(1, len(sizes))
    planned: list[PlannedChange] = []
    taken = 0
    for number, size in enumerate(sizes):
        at = FIRST_AT * steps + (number + draw.uniform(0, 0.6)) * spacing
        if spacing >= 1:
            at = math.floor(at) + draw.uniform(0.2, 0.5)  # during generation
        for _ in range(size):
            planned.append(PlannedChange(at_step=at, action="notice" if taken % 2 else "kill"))
            back_at = at + min(draw.uniform(1, 2), spacing / 4)
            planned.append(PlannedChange(at_step=back_at, action="join"))
            taken += 1
    return sorted(planned, key=lambda change: change.at_step)


def plan_of_trace(trace: FleetTrace, steps: int) -> tuple[int, list[PlannedChange]]:
    """Return the initial workers and the changes of a spot trace, compressed into a job of this many steps.

    Every reclaimed instance is a kill: hours become minutes, in which a notice of 30 s is none.
    """
    first = sum(event.at_s == 0.0 for event in trace.events)
    planned: list[PlannedChange] = []
    for at_s, group in groupby(trace.events[first:], key=lambda event: event.at_s):
        at, events = LAST_AT * steps * at_s / trace.duration_s, list(group)
        times = Counter(event.instance for event in events)
        # An instance that came and went at one time was never there.
        planned += [
            PlannedChange(at_step=at, action="join" if event.kind == "add" else "kill")
            for event in events
            if times[event.instance] == 1
        ]
    return first, planned


def _sizes(preemptions: int, workers: int) -> list[int]:
    """Return the number of workers preempted at each time."""
    singles = preemptions - workers
    if workers < 2 or singles < 3:
        return [1] * preemptions
    sizes = [1] * singles
    sizes.insert(2 * len(sizes) // 3, workers)
    return sizes


# --- The demo ---------------------------------------------------------------------------------------------------------


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
    engine: EngineName = "torch"
    autoscale: int = 0
    """Maximum number of spot workers, which follows the manager's autoscaling; 0: a join follows each preemption."""
    trace: FleetTrace | None = None
    """Replaces `workers` and the generated preemptions."""


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
        self._job, goal = countdown(options.steps, options.seed)
        steps: int = self._job["steps"]
        workers, planned = options.workers, plan(steps, options.workers, options.seed) if options.chaos else []
        if options.trace:
            workers, planned = plan_of_trace(options.trace, steps)
        if options.autoscale:
            planned = [change for change in planned if change.action != "join"]
            self._job["elastic"]["seeding"] = "auto"  # which learns the number of workers worth having
        self.record = Record(
            settings=Settings(
                steps=steps,
                workers=workers,
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
            workers=self.record.settings.workers,
            engine=self._options.engine,
            autoscale=self._options.autoscale,
            env={"RLBOOST_MANAGER_SCALE_IN_DELAY_S": _SCALE_IN_DELAY_S} if self._options.autoscale else {},
        )
        cluster = LocalCluster(local)
        clear(cluster.state)
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
