"""What a worker's KV cache keeps once for the samples of a group is counted once when room is looked for."""

from __future__ import annotations

import pytest

from services.rollout_manager.domain.decide import decide
from services.rollout_manager.domain.fleet import Worker
from services.rollout_manager.domain.intake import take
from services.rollout_manager.domain.world import Now, World
from shared.columns import I32, pack
from shared.ids import SampleId
from shared.jobspec import parse, to_json
from shared.messages import (
    GroupRequested,
    JobCommand,
    JobReport,
    Message,
    Sampling,
    WeightsCommitted,
    WorkerBeat,
    WorkerJoined,
)

PROMPT = 321
SPEC = parse({"model": "m", "data": {"train": "t"}, "reward": {"function": "a:b"}, "steps": 9})


class Stage:
    """A manager's world with one worker, whose cache holds 1,000 tokens."""

    def __init__(self, **kv: int) -> None:
        self.world = World(lease_s=2.0)
        self._kv = {"kv_tokens": 1000, **kv}
        self._read = 0
        joined = WorkerJoined(
            worker="w", role="preemptible", kind="k", slots=64, host="h", pid=1, price_per_hour=0.0, at=0.0
        )
        self.take(
            JobCommand(command_id="c", action="create", job_id="j", job_no=1, spec_json=to_json(SPEC)),
            JobReport(job_id="j", state="running", step=0),
            WeightsCommitted(job_id="j", version=0, manifest_digest="d", n_bytes=1, at=0.0),
            joined,
            self.beat(),
        )

    @property
    def worker(self) -> Worker:
        return self.world.fleet.workers["w"]

    def take(self, *messages: Message) -> None:
        for message in messages:
            self._read += 1
            take(self.world, message, f"{self._read}-0", Now(1.0, 1000.0))
        decide(self.world, Now(1.0, 1000.0))
        self.world.take_actions()

    def beat(self) -> WorkerBeat:
        running = {"running": 0, "pending": 0, "tokens_per_s": 0.0, "at": 0.0}
        return WorkerBeat(worker="w", state="ready", job_id="j", version=0, **running, **self._kv)

    def group(self, number: int, n: int = 8) -> GroupRequested:
        return GroupRequested(
            job_id="j",
            group=SampleId(1, False, 0, number, 0).pack(),
            n=n,
            prompt=pack([number + 1] * PROMPT, I32),
            sampling=Sampling(max_tokens=10),
            version=0,
            seed=1,
        )


@pytest.mark.parametrize(
    ("kv", "samples"),
    [({}, 3), ({"kv_page_tokens": 16}, 8), ({"kv_page_tokens": 128}, 8), ({"kv_page_tokens": 512}, 3)],
    ids=["each its own", "shared", "large pages", "no page is full"],
)
def test_a_group_fills_a_cache_by_what_it_takes_there(kv: dict[str, int], samples: int) -> None:
    stage = Stage(**kv)
    stage.take(stage.group(0))
    assert len(stage.worker.samples) == samples, "up to 85 %, with the one that goes beyond"


def test_what_is_counted_at_placement_is_what_the_next_beat_finds() -> None:
    stage = Stage(kv_page_tokens=16)
    stage.take(stage.group(0, n=3))
    stage.take(stage.group(1, n=1))
    stage.take(stage.group(2, n=2))
    before = (stage.worker.kv_held, stage.worker.kv_common)
    assert before == (5 * PROMPT, 2 * 320), "the third prompt's first sample went beyond: its second one waits"
    stage.take(stage.beat())
    assert (stage.worker.kv_held, stage.worker.kv_common) == before
