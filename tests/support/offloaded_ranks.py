"""Steps of ranks whose optimizer is offloaded, and what they hold in memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from rlboost.services.trainer.adapters.torch.policy import RanksPolicy
from rlboost.services.trainer.adapters.torch.trainable import MOMENTS, WEIGHT
from tests.support import rank_policies
from tests.support.losses import clipped_loss
from tests.support.policy_comparison import bits
from tests.support.training_rows import rows

RATE = 1e-2


LOSS = clipped_loss(0.2, 0.28)


BATCHES = [rows(5, seed=seed) for seed in range(3)]


def three_steps(policy: RanksPolicy, folder: Path, *, offloaded: bool) -> list[Any]:
    """Return all results; with `offloaded`, offload between any two calls."""

    def offload_if_asked() -> None:
        if offloaded:
            policy.offload()

    seen: list[Any] = []
    for step, batch in enumerate(BATCHES):
        for part in (batch[:3], batch[3:]):
            seen.append(policy.accumulate([part], LOSS))
            offload_if_asked()
        seen += [policy.step(RATE), bits(policy)]
        offload_if_asked()
        seen += [bits(policy), rank_policies.digests(policy)]
        seen.append(policy.logprobs([batch]))
        if policy.settings.reference:
            offload_if_asked()
            seen.append(policy.reference_logprobs([batch]))
        offload_if_asked()
        (folder / str(step)).mkdir(parents=True)
        policy.snapshot()(folder / str(step))
        seen.append(held_by(folder / str(step)))
    return seen


def held_by(checkpoint: Path) -> dict[str, Any]:
    """Return all values of a checkpoint, independent of the order of entries in its files."""
    files = sorted(checkpoint.glob("*.safetensors"))
    assert {file.name.partition("-")[0] for file in files} == {WEIGHT, *MOMENTS}
    return {file.name: {name: value.tolist() for name, value in load_file(file).items()} for file in files}


def resident(policy: RanksPolicy) -> list[int]:
    """Return how much memory each rank's process has."""
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in rank_policies.pids_of(policy)]
    return [n * os.sysconf("SC_PAGESIZE") for n in pages]
