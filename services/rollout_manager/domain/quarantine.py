"""Quarantines jobs whose stored data cannot be parsed, until a manager starts that can parse them.

Another version wrote the data, or it is damaged. The manager decides, delivers and overwrites nothing of such a job.
Its samples stay in the log with their tokens and without an owner; messages about it are stored for a later manager.
"""

from __future__ import annotations

from rlboost.services.rollout_manager.domain.world import World
from rlboost.shared.messages import Placed
from rlboost.shared.wire.columns import U32, U64, pack


def detach_samples(world: World) -> None:
    """Revoke the running and complete samples of quarantined jobs; begin an attempt of each, without a worker.

    Frames that their workers still send belong to an earlier attempt and are refused, so the samples do not change. A
    complete one loses its last token: only its last frame records that it is complete, and that frame would block the
    trimming of the log forever. The token is regenerated with the same randomness when the job resumes.
    """
    assigned = [s for s in world.ledger.samples.values() if world.is_quarantined(s) and (s.worker or s.finish)]
    if not assigned:
        return
    for sample in assigned:
        world.revoke(sample)
        world.unassign(sample)
    message = Placed(
        worker="",
        samples=pack([sample.id for sample in assigned], U64),
        attempts=pack([sample.attempt + 1 for sample in assigned], U32),
        offsets=pack([sample.n_tokens - bool(sample.finish and sample.n_tokens) for sample in assigned], U32),
    )
    world.ledger.place(message)
    world.outbox.record(message)
