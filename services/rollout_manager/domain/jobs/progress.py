"""What the manager tracks of one job while it runs. All of it can be rebuilt from the streams."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from rlboost.services.rollout_manager.domain.scheduling.length_estimates import LengthEstimates
from rlboost.services.rollout_manager.domain.seeding.window import Window
from rlboost.services.rollout_manager.domain.workers.fleet_counts import FleetCounts
from rlboost.shared.ids import step_of
from rlboost.shared.messages import TrainerStatus


@dataclass(slots=True)
class JobProgress:
    """One job's versions, steps, delivered samples, lengths and workers."""

    committed_version: int = -1
    """Newest committed weight version."""
    requested_step: int = -1
    """Newest step that groups were requested for."""
    delivered: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Step -> samples delivered or dropped, for steps that may be requested again."""
    lengths: LengthEstimates = field(default_factory=LengthEstimates)
    window: Window | None = None
    """The seeding window of the current step."""
    fleet: FleetCounts = field(default_factory=FleetCounts)
    step_without_spot_s: float | None = None
    """How long the last measured step would have taken the reserved workers alone; None before one was measured."""
    stalled_since_unix_s: float | None = None
    """Since when (Unix seconds) samples are queued and no worker can take one; None while one can."""
    below_share_since_mono_s: float | None = None
    """Since when (manager's clock) the job has queued samples and fewer workers than its fair share; None otherwise."""

    trainer: TrainerStatus | None = None
    """The value of the trainer's lease on the job, None if no trainer holds it."""
    trainer_renewed_at: float | None = None
    """When the lease was renewed last (Unix); without a renewal, when it was first missed; None before both."""
    trainer_checked_at: float = 0.0
    """When the lease was read last (Unix): no trainer is blamed for an outage of Redis."""

    reported_wait_since: float | None = None
    """When the last wait began (Unix) that was reported to last too long."""

    @property
    def trainer_price_per_hour(self) -> float:
        """Return `TrainerStatus.price_per_hour`, 0 if no trainer holds the job."""
        return self.trainer.price_per_hour if self.trainer else 0.0

    def on_trainer_status(self, status: TrainerStatus | None, now: float) -> None:
        """Record the present value of the trainer's lease, which each renewal changes."""
        self.trainer_checked_at = now
        if self.trainer_renewed_at is None or (status is not None and status != self.trainer):
            self.trainer_renewed_at = now
        self.trainer = status

    def is_delivered(self, sample_id: int) -> bool:
        """Return True if the sample was delivered or dropped."""
        return sample_id in self.delivered.get(step_of(sample_id), ())

    def on_delivered(self, sample_id: int) -> None:
        """Record that the requester of the sample has it, or knows that it was dropped."""
        self.delivered[step_of(sample_id)].add(sample_id)

    def forget_delivered(self, sample_id: int) -> None:
        """Forget one delivered sample."""
        step = step_of(sample_id)
        if step in self.delivered:
            self.delivered[step].discard(sample_id)
            if not self.delivered[step]:
                del self.delivered[step]

    def forget_steps_before(self, step: int) -> None:
        """Forget delivered samples of steps that are not requested again."""
        for old in [old for old in self.delivered if old < step]:
            del self.delivered[old]
