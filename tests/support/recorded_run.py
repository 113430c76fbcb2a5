"""A run's folder with a record, as a trainer writes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlboost.services.trainer.adapters.run_folder import LocalRunFolder
from rlboost.services.trainer.domain.groups import ScoredGroup, recorded
from rlboost.shared.ids import SampleId
from rlboost.shared.job.run_record import pack_groups
from rlboost.shared.messages import SampleFinished
from rlboost.shared.weights.access import RecordKey
from rlboost.shared.wire import F32, I32, pack

TOKEN = "token of the system"
KEY = RecordKey(TOKEN)
SPEC: dict[str, Any] = {
    "name": "recorded",
    "trainer": {"resume": "auto", "seed": 0},
    "reward": {"function": "rlboost.rewards.math:score"},
}


def groups(step: int, *, logprob: float = -0.5, worker: str = "w1", job: int = 1) -> list[ScoredGroup]:
    """Return two groups of two samples with three tokens each."""
    found = []
    for number in range(2):
        ids = [SampleId(job, False, step, number, member).pack() for member in range(2)]
        samples = tuple(
            SampleFinished(
                sample=sample,
                tokens=pack([step, number, 7], I32),
                logprobs=pack([-1.0, logprob, -0.25], F32),
                finish="stop",
                spans=[(worker, step, 2), ("w2", step, 1)],
                attempts=1,
                group_done=True,
            )
            for sample in ids
        )
        found.append(ScoredGroup(ids[0], samples, (1.0, 0.0), prompt=pack([1, 2], I32), row=5 + number))
    return found


class RecordedRun:
    """A run of three steps that wrote its model; `folder` has it."""

    def __init__(self, folder: Path, base: Path, *, spec: dict[str, Any] | None = None, key: RecordKey = KEY) -> None:
        self.folder = folder
        self._spec = json.dumps(spec or SPEC)
        self._base, self._key = base, key

    def train(self, steps: Sequence[int], *, end: bool = True, weights: str = "w", **of_groups: Any) -> None:
        """Begin at the first of these steps, as a new trainer, and record them."""
        folder = LocalRunFolder(self.folder, self._base, self._key)
        folder.begin(self._spec, steps[0], "digest of the data")
        for step in steps:
            metrics = {"loss": 0.5 / (1 + step), "time/step_s": 1.25}
            folder.log_step(step, metrics)
            packed = pack_groups(map(recorded, groups(step, **of_groups)))
            folder.record_step(step, metrics, packed, f"{weights}{step + 1}")
        if end:
            (self.folder / "model").mkdir(exist_ok=True)
            (self.folder / "model/model.safetensors").write_bytes(b"the weights")
            folder.record_end(f"{weights}{steps[-1] + 1}")
