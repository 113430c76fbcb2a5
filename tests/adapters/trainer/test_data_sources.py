"""Data that is not `.jsonl`: parquet with verl's columns as they are, and Hugging Face datasets in folders."""

from __future__ import annotations

import datetime as dt
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from rlboost.services.trainer.adapters.data import load_data
from rlboost.services.trainer.ports.samples import Data
from rlboost.shared.data.rows import is_remote, read_rows
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.spec import parse
from rlboost.shared.wire import ints
from tests.support.model_folder import with_chat_template, write_model, write_tokenizer

CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}t90{% endif %}"


def verl_row(question: str, answer: str, index: int) -> dict[str, Any]:
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"index": index, "split": "train"},
    }


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = write_tokenizer(write_model(tmp_path / "model"))
    return with_chat_template(folder, CHAT_TEMPLATE)


def write_parquet(file: Path, rows: list[dict[str, Any]]) -> str:
    parquet.write_table(pa.Table.from_pylist(rows), file)
    return str(file)


def load(model: Path, source: str, evaluation: str | None = None, **data: Any) -> Data:
    raw = {
        "model": str(model),
        "data": {"train": source, "eval": evaluation, **data},
        "reward": {"function": "m:f"},
        "sampling": {"max_tokens": 8},
        "steps": 1,
        **({"eval": {"samples": 1}} if evaluation else {}),
    }
    return load_data(parse(raw), model)


def test_verls_parquet_is_read_as_it_is(model: Path, tmp_path: Path) -> None:
    source = write_parquet(tmp_path / "train.parquet", [verl_row("t5 t6", "11", 0), verl_row("t7", "7", 1)])
    first, second = load(model, source).train
    assert ints(first.tokens)[-3:] == [5, 6, 90]
    assert second.given == [{"role": "user", "content": "t7"}]
    assert second.columns == {
        "data_source": "openai/gsm8k",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "7"},
        "extra_info": {"index": 1, "split": "train"},
    }


def test_parquet_message_has_no_keys_that_the_row_lacks(model: Path, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "t5"}, {"role": "user", "content": "t6", "name": "ann"}]
    source = write_parquet(tmp_path / "train.parquet", [{"prompt": messages}])
    assert load(model, source).train[0].given == messages


def test_a_saved_dataset_is_read_by_its_splits(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    splits = {"train": ["t5", "t6"], "test": ["t7"], "dev": ["t8"]}
    datasets.DatasetDict(
        {name: datasets.Dataset.from_dict({"question": texts}) for name, texts in splits.items()}
    ).save_to_disk(folder)
    data = load(model, str(folder), str(folder), prompt_key="question")
    assert [prompt.given for prompt in data.train] == ["t5", "t6"]
    assert [prompt.given for prompt in data.evaluation] == ["t7"]
    other = load(model, str(folder), str(folder), prompt_key="question", train_split="test", eval_split="dev")
    assert [prompt.given for prompt in (*other.train, *other.evaluation)] == ["t7", "t8"]
    with pytest.raises(ConfigError, match=r"no split 'none', but train, test, dev: set data\.train_split"):
        load(model, str(folder), train_split="none")


def test_held_out_sets_have_rows_and_limits_of_their_own(model: Path, tmp_path: Path) -> None:
    source = write_parquet(tmp_path / "train.parquet", [{"prompt": "t5"}])
    math = write_parquet(tmp_path / "math.parquet", [{"problem": "t6", "level": 2}, {"problem": "t7 t8", "level": 3}])
    sets: dict[str, Any] = {"math": {"data": math, "prompt_key": "problem"}, "own": {"data": source}}
    raw = {"model": str(model), "data": {"train": source, "eval": source}, "reward": {"function": "m:f"}, "steps": 1}

    def load_sets() -> Data:
        return load_data(parse({**raw, "sampling": {"max_tokens": 8}, "eval": {"sets": sets}}), model)

    data = load_sets()
    assert [prompt.given for prompt in data.evaluation] == ["t5", "t6", "t7 t8", "t5"]
    assert (data.n_evaluation, data.evaluation[2].columns) == ([1, 2, 1], {"level": 3})
    sets["math"]["sampling"] = {"max_tokens": 100_000}
    with pytest.raises(ConfigError, match=r"math\.parquet.* eval\.sets\.math\.sampling\.max_tokens 100000 do not fit"):
        load_sets()


def test_a_saved_dataset_without_splits_and_a_folder_of_files_are_read_whole(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.Dataset.from_dict({"prompt": ["t5", "t6"]}).save_to_disk(tmp_path / "saved")
    assert [prompt.given for prompt in load(model, str(tmp_path / "saved")).train] == ["t5", "t6"]
    for named, problem in (({"train_split": "test"}, "saved has no splits"), ({"subset": "main"}, "no configurations")):
        with pytest.raises(ConfigError, match=problem):
            load(model, str(tmp_path / "saved"), **named)
    datasets.DatasetDict(small=datasets.Dataset.from_dict({"prompt": ["t7"]})).save_to_disk(tmp_path / "splits")
    assert [prompt.given for prompt in load(model, str(tmp_path / "splits"), train_split="small").train] == ["t7"]
    (tmp_path / "files").mkdir()
    write_parquet(tmp_path / "files/train.parquet", [{"prompt": "t9"}])
    assert [row.values["prompt"] for row in read_rows(str(tmp_path / "files"))] == ["t9"]


def test_prompts_that_are_too_long_are_left_out_and_counted(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "t5 " * n, "n": n} for n in (1, 5, 200, 3, 4)]
    source = write_parquet(tmp_path / "train.parquet", rows)
    data = load(model, source, source, max_prompt_tokens=5)
    assert [prompt.columns["n"] for prompt in data.train] == [1, 3, 4]
    assert (data.n_too_long, data.n_too_long_eval) == (2, 2)
    with pytest.raises(ConfigError, match=r"all 5 prompts have more than 1 tokens \(data\.max_prompt_tokens\)"):
        load(model, source, max_prompt_tokens=1)
    with pytest.raises(ConfigError, match=r"row 3: 201 prompt tokens .* set data\.max_prompt_tokens"):
        load(model, source)


def test_a_row_without_the_key_an_empty_table_and_a_date_are_named(model: Path, tmp_path: Path) -> None:
    source = write_parquet(tmp_path / "train.parquet", [{"question": "t5"}])
    with pytest.raises(ConfigError, match=r"row 1: no key 'prompt' \(keys: question\)"):
        load(model, source)
    write_parquet(tmp_path / "train.parquet", [{"prompt": "t5", "day": dt.date(2026, 1, 1)}])
    with pytest.raises(ConfigError, match="row 1: column 'day' cannot be sent"):
        load(model, source)
    parquet.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "train.parquet")
    with pytest.raises(ConfigError, match="has no prompts"):
        load(model, source)
    (tmp_path / "train.parquet").write_bytes(b"no parquet at all")
    with pytest.raises(ConfigError, match="is not a parquet file"):
        load(model, source)
    with pytest.raises(ConfigError, match="No such file"):
        load(model, str(tmp_path / "nowhere.parquet"))


def test_a_library_that_is_missing_is_named_with_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library, source in (("pyarrow", "x.parquet"), ("datasets", str(tmp_path))):
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(ConfigError, match=r"pip install -c constraints.txt -e '\.\[data\]'"):
            next(iter(read_rows(source)))


def test_is_remote_accepts_only_dataset_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert is_remote("openai/gsm8k")
    for source in ("gsm8k", "here/data.csv", "nobody/data.csv", "here/train", "a/b/c", "train.jsonl", "x/y.parquet"):
        assert not is_remote(source), source


def test_an_id_that_cannot_be_loaded_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, name: str | None) -> None:
        raise datasets.exceptions.DatasetNotFoundError(f"{source} {name} is not on the Hub")

    monkeypatch.setattr(datasets, "load_dataset_builder", refuse)
    with pytest.raises(ConfigError, match=r"nobody/nothing: .*DatasetNotFoundError.*data\.subset"):
        next(iter(read_rows("nobody/nothing", subset="main")))
