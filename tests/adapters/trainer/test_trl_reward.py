"""Reward models as TRL's `RewardTrainer` trains them: the same token ids, losses, metrics and gradients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

from rlboost.services.trainer.adapters.data import load_data
from rlboost.services.trainer.adapters.run_folder import LocalRunFolder, RewardModel
from rlboost.services.trainer.adapters.torch.models import classifier_of, initial_head
from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.domain.loss.policy import PAIR_LOSS
from rlboost.services.trainer.domain.loss.preference import score_metrics, weighted_labels, weighted_scores
from rlboost.services.trainer.domain.plan import SequenceRow, TrainingRow
from rlboost.services.trainer.ports.engine import PolicySettings
from rlboost.services.trainer.ports.samples import Data, Prompt
from rlboost.shared.data.examples import LABEL, MARGIN
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.spec import parse
from rlboost.shared.job.training import LoraSpec, OptimizerSpec
from rlboost.shared.model.folder import HEAD, require_scores
from rlboost.shared.weights.access import RecordKey
from rlboost.shared.wire import ints
from tests.support.model_folder import CHAT_TEMPLATE, with_chat_template, write_model, write_tokenizer

TEXTS = [
    {"prompt": "t5 t6", "chosen": " t7 t8 t9", "rejected": " t10", "margin": 0.5},
    {"prompt": "t11", "chosen": " t12<eos>", "rejected": " t13 t14 t15 t16 t17", "margin": 0.0},
    {"prompt": "t20 t21 t22", "chosen": " t23 t24", "rejected": " t23", "margin": 2.0},
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


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return with_chat_template(write_tokenizer(write_model(tmp_path / "model")), CHAT_TEMPLATE)


def load(model: Path, rows: list[dict[str, Any]], **data: Any) -> Data:
    file = model.parent / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = {"kind": "reward", "model": "m", "data": {"train": str(file), **data}, "steps": 1}
    return load_data(parse(job), model)


def whole(pair: Prompt) -> tuple[list[int], list[int]]:
    prompt = ints(pair.tokens)
    return [*prompt, *ints(pair.completion)], [*prompt, *ints(pair.rejected)]


def training_rows(pairs: list[Prompt]) -> list[TrainingRow]:
    parts = [pair.tokens + tokens for pair in pairs for tokens in pair.completions]
    return [TrainingRow.of(SequenceRow(ids[:-4], ids[-4:], bytes(4)), b"") for ids in parts]


def engine_of(model: Path, **settings: Any) -> TorchPolicy:
    engine = TorchPolicy(PolicySettings(scores=True, optimizer=OptimizerSpec(grad_clip=1e6), **settings), device="cpu")
    engine.load_hf(model)
    return engine


def scores_of(engine: TorchPolicy, rows: list[TrainingRow]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(engine.logprobs([rows]))), dtype=torch.float32)


def exported(engine: TorchPolicy, model: Path, to: Path) -> Path:
    pad = AutoTokenizer.from_pretrained(model).pad_token_id
    folder = LocalRunFolder(to, model, RecordKey("secret"), None, RewardModel(classifier_of(model), pad))
    return folder.export(engine.export_shards())


def trl_trainer(folder: Path, rows: list[dict[str, Any]], out: Path, **loss: Any) -> RewardTrainer:
    settings = {"bf16": False, "use_cpu": True, "report_to": "none", "gradient_checkpointing": False}
    return RewardTrainer(
        model=AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32),
        args=RewardConfig(str(out), **settings, **loss),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )


@pytest.mark.parametrize("rows", [TEXTS, CHATS[:1], CHATS[1:]], ids=["text", "implicit", "chat"])
def test_token_ids_are_those_of_trl(model: Path, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    folder = exported(engine_of(model), model, tmp_path / "run")
    theirs = trl_trainer(folder, rows, tmp_path / "out").train_dataset
    assert [whole(pair) for pair in load(model, rows).train] == [
        (row["chosen_ids"], row["rejected_ids"]) for row in theirs
    ]


@pytest.mark.parametrize("center", [0.0, 0.1])
def test_loss_metrics_and_gradient_are_those_of_trl(model: Path, center: float, tmp_path: Path) -> None:
    engine = engine_of(model, seed=3)
    folder = exported(engine, model, tmp_path / "run")
    trl = trl_trainer(folder, TEXTS, tmp_path / "out", center_rewards_coefficient=center or None)
    theirs = trl.compute_loss(trl.model.train(), trl.data_collator(list(trl.train_dataset)))
    theirs.backward()
    gradients = [parameter.grad for parameter in trl.model.parameters() if parameter.grad is not None]

    pairs = list(load(model, TEXTS).train)
    rows = training_rows(pairs)
    margins = [pair.columns[MARGIN] for pair in pairs]
    rows, sums = weighted_scores(rows, engine.logprobs([rows]), margins, center)
    assert sums["loss"] / len(rows) == pytest.approx(theirs.item(), abs=1e-6, rel=1e-6)
    for metric, value in score_metrics(sums).items():
        assert value == pytest.approx(trl._metrics["train"][metric][0], abs=1e-6), metric
    assert len(score_metrics(sums)) == 5
    engine.accumulate([rows[:3], rows[3:]], PAIR_LOSS)  # the second pair is in two micro-batches
    assert engine.step(1e-6) == pytest.approx(torch.nn.utils.get_total_norm(gradients).item(), rel=1e-5)


LABELLED = [
    {"prompt": "t5 t6", "completion": " t7 t8 t9", "label": 1},
    {"prompt": [{"role": "user", "content": "t11"}], "completion": "t12", "label": False},
    {"prompt": "t20 t21 t22", "completion": " t23", "label": 0.0},
]


def test_loss_and_gradient_of_labels_are_those_of_cross_entropy(model: Path, tmp_path: Path) -> None:
    engine = engine_of(model, seed=3)
    loaded: Any = AutoModelForSequenceClassification.from_pretrained(exported(engine, model, tmp_path / "run"))
    pairs = list(load(model, LABELLED).train)
    labels = [pair.columns[LABEL] for pair in pairs]
    assert labels == [1.0, 0.0, 0.0]
    rows = training_rows(pairs)
    ids = [torch.tensor([[*ints(row.prompt), *ints(row.completion)]]) for row in rows]
    assert [one.tolist()[0][-2:] for one in ids] == [[9, 2], [2, 92], [23, 2]]
    scores = torch.cat([loaded(input_ids=one).logits[0] for one in ids])
    loss = functional.binary_cross_entropy_with_logits(scores, torch.tensor(labels))
    loss.backward()
    gradients = [parameter.grad for parameter in loaded.parameters() if parameter.grad is not None]
    rows, sums = weighted_labels(rows, engine.logprobs([rows]), labels)
    assert sums["loss"] / len(rows) == pytest.approx(loss.item(), abs=1e-6)
    found = score_metrics(sums)
    assert found["accuracy"] == pytest.approx(
        ((scores > 0) == torch.tensor([True, False, False])).double().mean().item()
    )
    assert found["mean_reward"] == pytest.approx(scores.mean().item(), abs=1e-6)
    assert sorted(found) == ["accuracy", "max_reward", "mean_reward", "min_reward"]
    engine.accumulate([rows[:1], rows[1:]], PAIR_LOSS)
    assert engine.step(1e-6) == pytest.approx(torch.nn.utils.get_total_norm(gradients).item(), rel=1e-5)


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=2)], ids=["full", "lora"])
def test_the_folder_is_one_of_transformers_and_another_job_starts_from_it(
    model: Path, lora: LoraSpec | None, tmp_path: Path
) -> None:
    engine = engine_of(model, lora=lora)
    rows = training_rows(list(load(model, TEXTS).train))
    first = scores_of(engine, rows)
    for _ in range(3):
        trained, _ = weighted_scores(rows, engine.logprobs([rows]), [0.0] * 3, 0.0)
        engine.accumulate([trained], PAIR_LOSS)
        engine.step(1e-2)
    scores = scores_of(engine, rows)
    folder = exported(engine, model, tmp_path / "run")
    require_scores(folder)
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["pad_token_id"]) == (["Qwen3ForSequenceClassification"], 0)
    loaded, report = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert loaded.config.num_labels == 1
    ids = [torch.tensor([*ints(row.prompt), *ints(row.completion)]) for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=config["pad_token_id"])
    with torch.no_grad():
        theirs = loaded(input_ids=padded, attention_mask=(padded != 0).long()).logits[:, 0]
    assert torch.allclose(theirs, scores, atol=1e-5)
    assert torch.allclose(scores_of(engine_of(folder), rows), scores, atol=1e-5)
    assert not torch.allclose(first, scores, atol=1e-3)


def test_the_head_depends_on_the_seed(model: Path) -> None:
    heads = [initial_head(model, seed) for seed in (0, 0, 1)]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    shards = {shard.name: shard for shard in engine_of(model, seed=1).export_shards()}
    assert shards[HEAD].local_shape == (1, 32)
    assert torch.equal(torch.frombuffer(bytearray(shards[HEAD].data), dtype=torch.float32), heads[2][0])
    assert "lm_head.weight" not in shards


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"prompt": "t5", "chosen": " t7", "rejected": " t7"}, "are equal, so neither is better"),
        ({"prompt": "t5", "chosen": " t7", "rejected": " t7 "}, "line 1: both completions have the same tokens"),
        ({"prompt": "t5", "chosen": " t7", "rejected": " t8", "margin": "1"}, "'margin' is '1', not a number"),
        ({"chosen": "t5 t7", "rejected": "t5 t8"}, "no key 'prompt'"),
        ({"prompt": "t5", "completion": " t7", "label": 0.5}, "'label' is 0.5: give 1 or true for a right"),
        ({"prompt": "t5", "label": 1}, "no key 'completion'"),
    ],
)
def test_a_row_that_is_no_pair_is_refused_by_name(model: Path, row: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        load(model, [row])


def test_rows_of_two_forms_and_settings_of_the_other_form_are_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="some rows have a pair, others a label: give rows of one form"):
        load(model, [TEXTS[0], LABELLED[0]])
    file = model.parent / "pairs.jsonl"
    file.write_text(json.dumps(LABELLED[0]) + "\n")
    algorithm = {"center_rewards_coefficient": 0.1}
    job = {"kind": "reward", "model": "m", "data": {"train": str(file)}, "algorithm": algorithm, "steps": 1}
    with pytest.raises(ConfigError, match=r"algorithm.center_rewards_coefficient is for pairs, and rows have labels"):
        load_data(parse(job), model)


def test_a_folder_whose_head_is_missing_or_has_several_labels_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no reward model: config\.json has Qwen3ForCausalLM"):
        require_scores(model)
    folder = tmp_path / "labels"
    AutoModelForSequenceClassification.from_pretrained(model, num_labels=3).save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"has 3 labels \(score.weight is \[3, 32\]\)"):
        require_scores(folder)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3ForSequenceClassification"]}))
    with pytest.raises(ConfigError, match=r"has no tensor score.weight, the head of a reward model"):
        require_scores(model)
