"""What the manager has learned of the kinds of workers that serve a job, for the trainer's `profile.json`."""

from __future__ import annotations

import math
from statistics import median_low

from rlboost.services.rollout_manager.domain.workers.throughput_model import Profile
from rlboost.services.rollout_manager.domain.workers.worker import Worker
from rlboost.services.rollout_manager.domain.world import World
from rlboost.shared.messages import EngineProfile


def engine_profiles(world: World, job_id: str) -> list[EngineProfile]:
    """Return a profile for each role and kind of the job's workers whose throughput is known."""
    members: dict[tuple[str, str], list[Worker]] = {}
    for worker in world.fleet.workers.values():
        if worker.job == job_id and worker.update_s and _is_known(worker.profile):
            members.setdefault((worker.joined.role, worker.joined.kind), []).append(worker)
    return [_profile(workers) for _, workers in sorted(members.items())]


def _profile(workers: list[Worker]) -> EngineProfile:
    joined, profile = workers[0].joined, workers[0].profile
    return EngineProfile(
        kind=joined.kind,
        role=joined.role,
        workers=len(workers),
        slots=min(worker.joined.slots for worker in workers),
        kv_tokens=min(worker.kv.capacity for worker in workers),
        price_per_hour=median_low(worker.price_per_hour for worker in workers),
        step_s=profile.fixed_s,
        per_sample_s=profile.each_s,
        per_kv_token_s=profile.token_s,
        update_s=median_low(worker.update_s for worker in workers),
        update_pause_s=median_low(worker.update_pause_s for worker in workers),
    )


def _is_known(profile: Profile) -> bool:
    # Workers are not trusted: what they report may overflow the fit, and such a message would not decode.
    return profile.known and math.isfinite(profile.step_s(1, 1))
