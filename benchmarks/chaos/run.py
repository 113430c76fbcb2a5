"""Plays a schedule of faults against a system that always has a job, and checks every job at the end."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from benchmarks.chaos.faults import Faults, NotPossible
from benchmarks.chaos.schedule import Fault
from benchmarks.chaos.site import Site
from tests.support.black_box import Observer
from tests.support.small_job import check, samples_of, small_job

END_LIMIT_S = 900.0
"""How long the last job may take after the last fault."""
_POLL_S = 0.1
_ASK_EVERY_S = 1.0


@dataclass(slots=True)
class Played:
    """What became of one fault."""

    fault: Fault
    not_possible: str = ""
    ended_at: float | None = None
    delivered: int = 0
    """Samples delivered when it ended."""
    recovered_s: float | None = None
    """From its end to the next delivered sample."""


class Job:
    """One job and what an independent reader saw of it."""

    def __init__(self, site: Site, steps: int) -> None:
        self.spec = small_job(steps, elastic={"weights": "delta"})
        self.id = site.box.submit(self.spec)
        self.observer = Observer(site.box.redis_url, self.id)
        self.audit: dict[str, Any] | None = None
        """None until the job is completed and checked."""


class Run:
    """One run."""

    def __init__(self, site: Site, schedule: Sequence[Fault], duration_s: float, steps: int) -> None:
        self._site, self._duration_s, self._steps = site, duration_s, steps
        self._faults = Faults(site, lambda: self.jobs[-1].id if self.jobs else "")
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._asked_at = 0.0
        self._redis_url = site.box.redis_url
        self.jobs: list[Job] = []
        self.played: list[Played] = []
        for fault in schedule:
            self._at(fault.at_s, lambda fault=fault: self._begin(fault))  # type: ignore[misc]

    def run(self) -> None:
        """Play all faults; return when they have ended and the last job is completed.

        Raises:
            AssertionError: a job failed, or did not get each of its samples exactly once.

        """
        self._began = time.monotonic()
        try:
            while self._due or self._now < self._duration_s or self.jobs[-1].audit is None:
                assert self._now < self._duration_s + END_LIMIT_S, f"no end after {END_LIMIT_S:.0f} s: {self._where()}"
                self._step()
                time.sleep(_POLL_S)
            assert not self._faults.stuck, self._faults.stuck
            for job_id in self._faults.killers:
                self._check_killer(job_id)
        finally:
            self._move_observers()
            for job in self.jobs:
                job.observer.close()

    @property
    def _now(self) -> float:
        return time.monotonic() - self._began

    def _step(self) -> None:
        while self._due and self._due[0][0] <= self._now:
            heapq.heappop(self._due)[2]()
        self._move_observers()
        delivered = self._delivered()
        for played in self.played:
            if played.ended_at is not None and played.recovered_s is None and delivered > played.delivered:
                played.recovered_s = self._now - played.ended_at
        if self._now - self._asked_at > _ASK_EVERY_S:
            self._asked_at = self._now
            if not any(played.fault.kind == "disk_full" for played in self._active()):
                self._site.restart_ended()
            self._follow()

    def _move_observers(self) -> None:
        if self._redis_url != self._site.box.redis_url:
            self._redis_url = self._site.box.redis_url
            for job in self.jobs:
                job.observer.move(self._redis_url)

    def _at(self, at_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (at_s, next(self._numbers), action))

    def _begin(self, fault: Fault) -> None:
        played = Played(fault)
        self.played.append(played)
        details = (str(detail) for detail in (fault.kind, fault.role, fault.duration_s, fault.offset_s) if detail)
        print(f"{self._now:7.1f} s ", *details, flush=True)
        try:
            undo = self._faults.begin(fault)
        except NotPossible as error:
            played.not_possible = str(error)
            print(f"{self._now:7.1f} s  not possible: {error}", flush=True)
            return

        def end() -> None:
            with suppress(NotPossible):
                if undo is not None:
                    undo()
            played.ended_at, played.delivered = self._now, self._delivered()

        if undo is None:
            end()
        else:
            self._at(fault.at_s + fault.duration_s, end)

    def _delivered(self) -> int:
        return sum(len(job.observer.finished) for job in self.jobs)

    def _follow(self) -> None:
        """Check the job if it is completed, and start the next one."""
        job = self.jobs[-1] if self.jobs else None
        if job is not None and job.audit is None:
            state = self._state(job)
            assert state not in {"failed", "cancelled"}, f"{job.id} {state}: {self._where()}"
            if state == "completed" and not self._active():
                job.audit = check(self._site.box, job.id, job.observer, job.spec)
                print(f"{self._now:7.1f} s  {job.id}: {samples_of(job.spec)} samples, each once", flush=True)
        if (job is None or job.audit is not None) and self._now < self._duration_s and not self._active():
            self.jobs.append(Job(self._site, self._steps))

    def _check_killer(self, job_id: str) -> None:
        """Wait until a job that kills its trainer has failed for that reason."""
        box = self._site.box
        box.until(lambda: box.get(f"/v1/jobs/{job_id}")["state"] == "failed", f"{job_id} fails", END_LIMIT_S)
        error = box.get(f"/v1/jobs/{job_id}")["error"]
        assert "its trainer died 3 times" in error, error

    def _active(self) -> list[Played]:
        return [played for played in self.played if played.ended_at is None and not played.not_possible]

    def _state(self, job: Job) -> str | None:
        """Return the state of a job, None while no manager answers."""
        try:
            return str(self._site.box.get(f"/v1/jobs/{job.id}", within_s=0.5)["state"])
        except AssertionError:
            return None

    def _where(self) -> str:
        return f"{self._delivered()} samples delivered{self._site.box.logs()}"
