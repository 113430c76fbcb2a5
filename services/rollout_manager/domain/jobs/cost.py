"""What a job costs: the time of its trainer and of the workers that serve it, and its price."""

from __future__ import annotations

from pydantic import BaseModel

from rlboost.shared.units import HOUR_S


class WorkerTime(BaseModel):
    """Time of the workers of one role and kind, or of the trainer, and its price."""

    role: str
    kind: str
    """Kind of the workers; empty for the trainer."""
    seconds: float = 0.0
    dollars: float = 0.0


class Cost(BaseModel):
    """Time of the trainer, and of all workers that served one job."""

    charged_until: float = 0.0
    """Unix seconds; 0 before the first charge."""
    workers: dict[str, WorkerTime] = {}
    """'{role} {kind}' -> its time."""
    budget_reached: bool = False
    """True once the job's remaining budget only just pays for draining its workers. It stays so."""
    reserved_only_s: float = 0.0
    """Estimated duration of the `estimated_steps` with the job's trainer and reserved workers alone."""
    reserved_only_dollars: float = 0.0
    """Estimated price of these steps with the job's trainer and reserved workers alone."""
    estimated_steps: int = 0

    def charge(self, role: str, kind: str, price_per_hour: float, seconds: float) -> None:
        """Add the time of one worker, or of the trainer."""
        key = f"{role} {kind}"
        time = self.workers.get(key)
        if time is None:
            time = self.workers[key] = WorkerTime(role=role, kind=kind)
        time.seconds += seconds
        time.dollars += seconds / HOUR_S * price_per_hour

    def add_estimate(self, steps: int, step_s: float, dollars: float) -> None:
        """Estimate the time and cost of the steps since the last estimate without preemptible workers.

        Args:
            steps: completed steps of the job.
            step_s: duration of one of the new steps without preemptible workers.
            dollars: price of one of them.

        """
        new = steps - self.estimated_steps
        self.reserved_only_s += new * step_s
        self.reserved_only_dollars += new * dollars
        self.estimated_steps = steps

    @property
    def dollars(self) -> float:
        """Return the sum over the trainer and all workers."""
        return sum(time.dollars for time in self.workers.values())
