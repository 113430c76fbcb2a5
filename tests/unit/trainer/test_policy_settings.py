"""The settings of a policy: what a job gives, and how they reach a rank."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from pydantic import ValidationError

from rlboost.services.trainer.ports.engine import PolicySettings
from rlboost.shared.job.algorithm import CriticSpec
from rlboost.shared.job.spec import parse
from rlboost.shared.job.training import LoraSpec, OptimizerSpec
from rlboost.shared.wire import RoutedShape

SHAPE = RoutedShape(4, 2, 8)


def test_settings_are_equal_after_the_way_to_a_rank() -> None:
    given = PolicySettings(
        optimizer=OptimizerSpec(lr=1e-7, betas=(0.1, 0.3)),
        temperature=0.7,
        lora=LoraSpec(targets=("q_proj", "v_proj")),
        critic=CriticSpec(value_clip="off"),
        aggregation="constant",
        replayed=SHAPE,
    )
    received = PolicySettings.model_validate(msgpack.unpackb(msgpack.packb(given.model_dump())))
    assert received == given
    assert isinstance(received.replayed, RoutedShape)


@pytest.mark.parametrize("wrong", [{"temprature": 1.0}, {"dtype": "float16"}, {"lora": {"rank": 0}}])
def test_invalid_settings_are_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        PolicySettings.model_validate(wrong)


def test_settings_of_a_job_have_all_of_its_choices() -> None:
    trainer = {"dtype": "bfloat16", "seed": 3, "offload": "all", "activation_checkpointing": True}
    job = {"model": "m", "data": {"train": "t"}, "steps": 1, "optimizer": {"lr": 0.5}, "trainer": trainer}
    algorithm = {"name": "ppo", "kl_coef": 0.1, "entropy_coef": 0.01}
    rl = {"reward": {"function": "a:b"}, "algorithm": algorithm, "sampling": {"temperature": 0.6}}
    found = PolicySettings.of(parse({**job, **rl}), "sequence_sum", SHAPE)
    common = {**trainer, "optimizer": OptimizerSpec(lr=0.5)}
    assert found == PolicySettings(
        **common,
        temperature=0.6,
        critic=CriticSpec(),
        reference=True,
        aggregation="sequence_sum",
        entropies=True,
        replayed=SHAPE,
    )
    assert PolicySettings.of(parse({**job, "kind": "sft"}), "token_mean", None) == PolicySettings(**common)
    pairs = PolicySettings.of(parse({**job, "kind": "dpo"}), "sequence_sum", None)
    assert pairs == PolicySettings(**common, reference=True, aggregation="sequence_sum")
    scores = PolicySettings.of(parse({**job, "kind": "reward"}), "sequence_sum", None)
    assert scores == PolicySettings(**common, scores=True, aggregation="sequence_sum")
