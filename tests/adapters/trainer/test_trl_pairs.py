"""Pairs as TRL's `DPOTrainer` has them: the same token ids, losses, metrics and gradients from the same rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

from rlboost.services.trainer.adapters.data import load_data
from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.domain.loss.policy import PAIR_LOSS
from rlboost.services.trainer.domain.loss.preference import PairLogprobs, pair_losses, pair_metrics, weighted
from rlboost.services.trainer.domain.plan import SequenceRow, TrainingRow
from rlboost.services.trainer.ports.engine import PolicySettings
from rlboost.services.trainer.ports.samples import Prompt
from rlboost.shared.job.algorithm import PreferenceSpec
from rlboost.shared.job.spec import parse
from rlboost.shared.job.training import OptimizerSpec
from rlboost.shared.wire import ints
from tests.support.model_folder import with_chat_template, write_model, write_tokenizer

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ 't90 ' if m['role'] == 'user' else 't91 ' }}{{ m['content'] }} <eos>{% endfor %}"
    "{% if add_generation_prompt %}t91 {% endif %}"
)
TEXTS = [
    {"prompt": "t5 t6", "chosen": " t7 t8 t9", "rejected": " t10"},
    {"prompt": "t11", "chosen": " t12<eos>", "rejected": " t13 t14 t15 t16 t17"},
    {"prompt": "t20 t21 t22", "chosen": " t23 t24", "rejected": " t25 t26 t27"},
]
CHATS = [
    {
        "chosen": [{"role": "user", "content": "t5 t6"}, {"role": "assistant", "content": "t7 t8 t9"}],
        "rejected": [{"role": "user", "content": "t5 t6"}, {"role": "assistant", "content": "t10"}],
    },
    {
        "prompt": [{"role": "user", "content": "t11"}],
        "chosen": [{"role": "assistant", "content": "t12"}],
        "rejected": [{"role": "assistant", "content": "t13 t14"}],
    },
]
SPECS = {
    "sigmoid": PreferenceSpec(beta=0.3),
    "robust": PreferenceSpec(variant="robust", beta=0.3, label_smoothing=0.1),
    "ipo": PreferenceSpec(variant="ipo", beta=0.3),
}
METRICS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen")


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Return the model that training starts from, and one of other weights."""
    start, trained = (write_tokenizer(write_model(tmp_path / str(seed), seed=seed)) for seed in (0, 1))
    with_chat_template(start, CHAT_TEMPLATE)
    return start, trained


def trl_trainer(folders: tuple[Path, Path], rows: list[dict[str, Any]], spec: PreferenceSpec, out: Path) -> DPOTrainer:
    start, trained = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders)
    settings = {"bf16": False, "use_cpu": True, "report_to": "none", "gradient_checkpointing": False}
    loss = {"beta": spec.beta, "loss_type": spec.variant, "label_smoothing": spec.label_smoothing}
    return DPOTrainer(
        model=trained,
        ref_model=start,
        args=DPOConfig(str(out), **settings, **loss),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folders[0]),
    )


def our_pairs(folder: Path, rows: list[dict[str, Any]]) -> list[Prompt]:
    file = folder.parent / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = load_data(parse({"kind": "dpo", "model": "m", "data": {"train": str(file)}, "steps": 1}), folder)
    return list(data.train)


@pytest.mark.parametrize("rows", [TEXTS, CHATS[:1], CHATS[1:]], ids=["text", "implicit", "chat"])
def test_token_ids_are_those_of_trl(folders: tuple[Path, Path], rows: list[dict[str, Any]], tmp_path: Path) -> None:
    theirs = trl_trainer(folders, rows, SPECS["sigmoid"], tmp_path / "out").train_dataset
    ours = [
        {"prompt_ids": ints(pair.tokens), "chosen_ids": ints(pair.completion), "rejected_ids": ints(pair.rejected)}
        for pair in our_pairs(folders[0], rows)
    ]
    assert ours == [{name: row[name] for name in ours[0]} for row in theirs]


@pytest.mark.parametrize("name", sorted(SPECS))
def test_loss_metrics_and_gradient_are_those_of_trl(folders: tuple[Path, Path], name: str, tmp_path: Path) -> None:
    spec = SPECS[name]
    trl = trl_trainer(folders, TEXTS, spec, tmp_path / "out")
    inputs = trl.data_collator([trl.train_dataset[i] for i in range(len(TEXTS))])
    theirs = trl.compute_loss(trl.model.train(), inputs)
    theirs.backward()
    gradients = [parameter.grad for parameter in trl.model.parameters() if parameter.grad is not None]

    engine, other = (
        TorchPolicy(PolicySettings(optimizer=OptimizerSpec(grad_clip=1e6), reference=True), device="cpu") for _ in "ab"
    )
    engine.load_hf(folders[0])
    other.load_hf(folders[1])
    engine.load_shards(other.export_shards())
    sequences = [
        SequenceRow(pair.tokens, tokens, bytes(len(tokens)))
        for pair in our_pairs(folders[0], TEXTS)
        for tokens in (pair.completion, pair.rejected)
    ]
    rows = [TrainingRow.of(sequence, b"") for sequence in sequences]
    rows, sums = weighted(rows, engine.logprobs([rows]), engine.reference_logprobs([rows]), spec)
    assert sums["loss"] / len(rows) == pytest.approx(theirs.item(), abs=1e-6, rel=1e-6)
    for metric in METRICS:
        assert pair_metrics(sums)[metric] == pytest.approx(trl._metrics["train"][metric][0], abs=1e-5), metric
    engine.accumulate([rows[:2], rows[2:]], PAIR_LOSS)
    assert engine.step(1e-6) == pytest.approx(torch.nn.utils.get_total_norm(gradients).item(), rel=1e-4)


def test_label_smoothing_is_trls_loss_of_both_orders(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """TRL has conservative DPO no more: it is a mean of the losses of a pair and of the pair the other way round."""
    swapped = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in TEXTS]
    losses, spec = [], PreferenceSpec(beta=0.3, label_smoothing=0.1)
    for i, rows in enumerate((TEXTS, swapped)):
        trl = trl_trainer(folders, rows, SPECS["sigmoid"], tmp_path / str(i))
        with torch.no_grad():
            losses.append(trl.compute_loss(trl.model, trl.data_collator(list(trl.train_dataset))).item())
    engines = [TorchPolicy(PolicySettings(), device="cpu") for _ in folders]
    pairs = our_pairs(folders[0], TEXTS)
    sequences = [SequenceRow(pair.tokens, tokens) for pair in pairs for tokens in (pair.completion, pair.rejected)]
    for engine, folder in zip(engines, folders, strict=True):
        engine.load_hf(folder)
    start, trained = (engine.logprobs([sequences]) for engine in engines)
    found = pair_losses(PairLogprobs.of(trained, start), spec)
    assert found.losses.mean() == pytest.approx(0.9 * losses[0] + 0.1 * losses[1], abs=1e-6)
