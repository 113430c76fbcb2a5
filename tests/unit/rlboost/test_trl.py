"""What TRL's trainer is refused before it samples on a fleet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from accelerate import ParallelismConfig
from trl import GRPOConfig

from rlboost.fleet import Fleet
from rlboost.shared.errors import ConfigError
from rlboost.trl import _Rollout, rollout_func


def trainer(processes: int = 1, rank: int = 0, *, parallel: Any = None, **options: Any) -> Any:
    accelerator = {"num_processes": processes, "process_index": rank, "parallelism_config": parallel}
    return SimpleNamespace(args=SimpleNamespace(**options), accelerator=SimpleNamespace(**accelerator))


@pytest.mark.parametrize(
    ("given", "rank", "why"),
    [
        (trainer(repetition_penalty=1.1), 0, r"repetition_penalty: 1\.1 is not supported"),
        (trainer(generation_kwargs={"seed": 1}), 0, "generation_kwargs: seed: a fleet has only max_tokens, min_p"),
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


def test_generation_kwargs_come_before_the_arguments_that_they_repeat() -> None:
    sampled: list[dict[str, Any]] = []

    def generate(_prompts: Any, **options: Any) -> list[Any]:
        sampled.append(options)
        return []

    given = {"top_p": 0.9, "min_tokens": 2, "stop": "\n", "stop_token_ids": [7]}
    args = GRPOConfig(use_cpu=True, bf16=False, temperature=0.7, max_completion_length=32, generation_kwargs=given)
    _Rollout(cast("Fleet", SimpleNamespace(generate=generate)))._sampled([([1], 8)], args, [3])
    options = {"temperature": 0.7, "top_k": 0, "min_p": 0.0, "max_tokens": 32, **given}
    assert sampled == [{"n": 8, **options, "stop_token_ids": [3, 7]}]
