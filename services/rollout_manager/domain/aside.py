"""Jobs whose stored data cannot be read: they stand still, whole, until a manager is there that can read them.

Another version wrote them, or they were damaged. Nothing of such a job is decided, delivered or overwritten. Its
samples stay in the log, with their tokens and without an owner; what its trainer says meanwhile is kept for whoever can
use it.
"""

from __future__ import annotations

from services.rollout_manager.domain.needs import revoke
from services.rollout_manager.domain.world import World
from shared.columns import U32, U64, pack
from shared.messages import Placed


def freeze(world: World) -> None:
    """Take the samples of jobs that are set aside from their workers, and let them be nobody's.

    What their workers still send comes under an old attempt and is refused, so they stay what they are. One that is
    complete loses its last token: that it has ended is in no record but the frame that said so, which would hold up the
    log for ever. It is drawn again, with the same randomness, when the job goes on.
    """
    held = [s for s in world.ledger.samples.values() if world.is_aside(s) and (s.worker or s.finish)]
    if not held:
        return
    for sample in held:
        if owner := world.fleet.workers.get(sample.worker):
            world.send(owner, revoke(sample))
        world.orphan(sample)
    message = Placed(
        worker="",
        samples=pack([sample.id for sample in held], U64),
        attempts=pack([sample.attempt + 1 for sample in held], U32),
        offsets=pack([sample.n_tokens - bool(sample.finish and sample.n_tokens) for sample in held], U32),
    )
    world.ledger.place(message)
    world.record(message)
