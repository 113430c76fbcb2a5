"""KV-cache blocks that the samples of a group share are counted once by placement."""

from __future__ import annotations

from typing import Any

import pytest

from rlboost.services.rollout_manager.domain.apply_messages import apply_message
from rlboost.services.rollout_manager.domain.decide import decide
from rlboost.services.rollout_manager.domain.effects import Now
from rlboost.services.rollout_manager.domain.workers import Worker
from rlboost.services.rollout_manager.domain.world import World
from rlboost.shared.messages import (
    GroupRequested,
    Message,
    WorkerHeartbeat,
)
from tests.support.builders import group_requested, heartbeat, job_running, worker_joined
from tests.support.scheduler_turns import prove

PROMPT = 321


class Stage:
    """A manager's world with one worker, whose cache holds 1,000 tokens."""

    def __init__(self, **kv: int) -> None:
        self.world = World(lease_s=2.0)
        self._kv: dict[str, Any] = {"kv_tokens": 1000, **kv}
        self._read = 0
        self.apply(*job_running(), worker_joined(slots=64), self.heartbeat())
        prove(self.world)

    @property
    def worker(self) -> Worker:
        return self.world.fleet.workers["w"]

    def apply(self, *messages: Message) -> None:
        for message in messages:
            self._read += 1
            apply_message(self.world, message, f"{self._read}-0", Now(1.0, 1000.0))
        decide(self.world, Now(1.0, 1000.0))

    def heartbeat(self) -> WorkerHeartbeat:
        return heartbeat(**self._kv)


def group(number: int, n: int = 8) -> GroupRequested:
    return group_requested(number, n=n, prompt=[number + 1] * PROMPT, max_tokens=10)


@pytest.mark.parametrize(
    ("kv", "samples"),
    [({}, 3), ({"kv_block_tokens": 16}, 8), ({"kv_block_tokens": 128}, 8), ({"kv_block_tokens": 512}, 3)],
    ids=["not shared", "shared", "large blocks", "no full block"],
)
def test_placement_fills_the_kv_cache_up_to_its_limit(kv: dict[str, int], samples: int) -> None:
    stage = Stage(**kv)
    stage.apply(group(0))
    assert len(stage.worker.samples) == samples, "up to 85 %, with the one that goes beyond"


def test_kv_usage_after_placement_equals_the_recount_at_the_next_heartbeat() -> None:
    stage = Stage(kv_block_tokens=16)
    stage.apply(group(0, n=3))
    stage.apply(group(1, n=1))
    stage.apply(group(2, n=2))
    before = (stage.worker.kv.held, stage.worker.kv.shared)
    assert before == (5 * PROMPT, 2 * 320), "the third prompt's first sample went beyond: its second one waits"
    stage.apply(stage.heartbeat())
    assert (stage.worker.kv.held, stage.worker.kv.shared) == before
