"""Which tensors an adapter changes, and which adapters are refused."""

from __future__ import annotations

import json

import pytest

from rlboost.shared.errors import ConfigError
from rlboost.shared.weights.lora import Factors, adapter_of, wrapped_names

MODEL = {"model.q.weight": (6, 4), "model.k.weight": (2, 4), "model.norm.weight": (4,)}
Q = "base_model.model.model.q"
TENSORS = {f"{Q}.lora_A.weight": (3, 4), f"{Q}.lora_B.weight": (6, 3)}
CONFIG = {"peft_type": "LORA", "r": 3, "lora_alpha": 12, "bias": "none", "use_dora": False, "task_type": "CAUSAL_LM"}


def test_each_pair_changes_the_weight_of_its_layer() -> None:
    adapter = adapter_of(json.dumps(CONFIG), TENSORS, MODEL)
    assert adapter.scaling == 4.0
    assert adapter.factors == {"model.q.weight": Factors(f"{Q}.lora_A.weight", f"{Q}.lora_B.weight")}


@pytest.mark.parametrize(
    "change",
    [
        {"peft_type": "IA3"},
        {"r": 0},
        {"lora_alpha": None},
        {"bias": "all"},
        {"use_dora": True},
        {"use_rslora": True},
        {"fan_in_fan_out": True},
        {"modules_to_save": ["lm_head"]},
        {"rank_pattern": {"q": 4}},
        {"alpha_pattern": {"q": 4.0}},
    ],
    ids=str,
)
def test_adapter_other_than_plain_lora_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=rf"adapter_config\.json: {next(iter(change))}"):
        adapter_of(json.dumps(CONFIG | change), TENSORS, MODEL)


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_adapter_of_invalid_config_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"adapter_config\.json"):
        adapter_of(text, TENSORS, MODEL)


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({f"{Q}.lora_A.weight": (3, 4)}, "do not fit"),
        ({**TENSORS, f"{Q}.lora_B.weight": (5, 3)}, "do not fit"),
        ({**TENSORS, f"{Q}.lora_A.weight": (2, 4)}, "do not fit"),
        ({"base_model.model.other.lora_A.weight": (3, 4)}, "do not fit other.weight"),
        ({"base_model.model.model.norm.lora_A.weight": (3, 4)}, "do not fit model.norm.weight"),
        ({**TENSORS, f"{Q}.lora_magnitude_vector": (6,)}, "not a LoRA tensor"),
        ({"model.q.weight": (6, 4)}, "not a LoRA tensor"),
    ],
)
def test_tensors_that_do_not_belong_to_the_model_are_refused(tensors: dict[str, tuple[int, ...]], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        adapter_of(json.dumps(CONFIG), tensors, MODEL)


def test_names_of_a_wrapped_model_are_those_of_its_checkpoint_and_of_one_adapter() -> None:
    found = wrapped_names(
        [
            f"{Q}.base_layer.weight",
            "base_model.model.model.norm.weight",
            f"{Q}.lora_A.default.weight",
            f"{Q}.lora_B.ref.weight",  # of an adapter that is not trained
            "base_model.model.model.embed_tokens.lora_embedding_A.default",
        ],
        "default",
    )
    assert found.model == {
        f"{Q}.base_layer.weight": "model.q.weight",
        "base_model.model.model.norm.weight": "model.norm.weight",
    }
    assert found.adapter == {
        f"{Q}.lora_A.default.weight": f"{Q}.lora_A.weight",
        "base_model.model.model.embed_tokens.lora_embedding_A.default": (
            "base_model.model.model.embed_tokens.lora_embedding_A"
        ),
    }
