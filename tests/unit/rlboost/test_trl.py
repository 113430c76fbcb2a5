"""What TRL's trainer is refused before it samples on a fleet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import ParallelismConfig

from rlboost.fleet import Fleet
from rlboost.shared.errors import ConfigError
from rlboost.trl import rollout_func


def trainer(processes: int = 1, rank: int = 0, *, parallel: Any = None, **options: Any) -> Any:
    accelerator = {"num_processes": processes, "process_index": rank, "parallelism_config": parallel}
    return SimpleNamespace(args=SimpleNamespace(**options), accelerator=SimpleNamespace(**accelerator))


@pytest.mark.parametrize(
    ("given", "rank", "why"),
    [
        (trainer(repetition_penalty=1.1), 0, r"repetition_penalty: 1\.1 is not supported"),
        (trainer(generation_kwargs={"seed": 1}), 0, "generation_kwargs: not supported"),
        (trainer(4, 0, parallel=ParallelismConfig(tp_size=2)), 0, "parallelism_config: several processes"),
        (trainer(), 1, r"its trainer is alone: .*use_cpu=True"),
        (trainer(2, 1), 0, "this is process 1 of the trainer, and its Fleet has 0: give rank=1"),
    ],
    ids=["repetition_penalty", "generation_kwargs", "parallel", "alone", "other rank"],
)
def test_what_would_be_sampled_otherwise_is_rejected_by_name(given: Any, rank: int, why: str) -> None:
    fleet = Fleet("http://manager.example", "token", job="sums", rank=rank)
    with pytest.raises(ConfigError, match=why):
        rollout_func(fleet)(["1+1="], given)
    fleet._loop.close()
