"""Data in several files: which ones, in which order, and what is told of one that is wrong."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from pyarrow import parquet

from rlboost.jobs import check as jobcheck
from rlboost.jobs.file import complete
from rlboost.services.trainer.adapters.data import load_data
from rlboost.services.trainer.job.checkpoints import fingerprint
from rlboost.services.trainer.ports.samples import Data
from rlboost.shared.data.rows import is_remote, read_rows
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.spec import parse, to_json
from tests.support.jobs import job_file
from tests.support.model_folder import write_model, write_tokenizer


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def write(file: Path, *prompts: str, **columns: Any) -> None:
    rows = [{"prompt": prompt, **columns} for prompt in prompts]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if file.name.endswith(".parquet"):
        parquet.write_table(
            pa.Table.from_pylist(rows, schema=None if rows else pa.schema({"prompt": pa.string()})), file
        )
    elif file.name.endswith(".gz"):
        file.write_bytes(gzip.compress(text.encode()))
    else:
        file.write_text(text)


def prompts(source: Any) -> list[str]:
    return [row.values["prompt"] for row in read_rows(source)]


def job(**data: Any) -> dict[str, Any]:
    reward = {"function": "rlboost.rewards.code:score"}
    return job_file(model="base", data=data, reward=reward, sampling={"max_tokens": 4}, steps=1)


def test_shards_follow_each_other_as_their_numbers_do(folder: Path) -> None:
    for number in (10, 9, 2, 1):
        write(folder / f"part-{number}.jsonl", f"t{number}")
    assert prompts("data/part-*.jsonl") == ["t1", "t2", "t9", "t10"]
    assert prompts("data") == ["t1", "t2", "t9", "t10"]
    assert prompts(("data/part-9.jsonl", "data/part-1*.jsonl")) == ["t9", "t1", "t10"]
    assert prompts(str(folder / "part-[12].jsonl")) == ["t1", "t2"]


def test_files_of_all_kinds_are_shards_and_an_empty_one_has_no_rows(folder: Path) -> None:
    write(folder / "1.parquet", "t1")
    write(folder / "2.jsonl.gz", "t2", "t3")
    write(folder / "3.jsonl")
    write(folder / "4.parquet")
    write(folder / "5.jsonl", "t4")
    (folder / "_SUCCESS").touch()
    (folder / ".2.jsonl.crc").touch()
    assert prompts("data") == ["t1", "t2", "t3", "t4"]
    assert [(row.source, row.place) for row in read_rows("data/*.gz")] == [
        ("data/2.jsonl.gz", "line 1"),
        ("data/2.jsonl.gz", "line 2"),
    ]


def test_arrays_tables_of_text_and_zstandard_are_read_as_single_files(folder: Path) -> None:
    rows = [{"prompt": "t1", "answer": 3}, {"prompt": "t2", "answer": 4}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "1.json").write_text(json.dumps(rows, indent=1), encoding="utf-8-sig")
    (folder / "2.json").write_text(lines)
    (folder / "3.csv").write_text("prompt,answer\nt1,3\nt2,4\n")
    with pa.output_stream(folder / "4.jsonl.zst", compression="zstd") as file:
        file.write(lines.encode())
    for name in ("1.json", "2.json", "3.csv", "4.jsonl.zst"):
        assert [row.values for row in read_rows(f"data/{name}")] == rows, name
    [first, _] = read_rows("data/1.json")
    assert first.place == "row 1"


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(folder: Path) -> None:
    write(folder / "part[1].jsonl", "t1")
    write(folder / "part1.jsonl", "t2")
    assert prompts("data/part[1].jsonl") == ["t1"]
    (folder / "part[1].csv").write_text("prompt\nt1\n")
    (folder / "part1.csv").write_text("prompt\nt2\n")
    assert prompts("data/part[1].csv") == ["t1"]


def test_name_of_a_table_of_text_is_no_url(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.csv").write_text("prompt\nt1\n")
    for scheme in ("file:", "file://", "local:", "zip::", "file::", "simplecache::file:"):
        with pytest.raises(ConfigError, match="No such file or directory"):
            prompts(f"{scheme}{tmp_path}/secret.csv")


@pytest.mark.parametrize("name", ["all.csv", "all.json"])
def test_folder_named_like_a_file_is_read_as_a_folder(folder: Path, name: str) -> None:
    (folder / name).mkdir()
    write(folder / name / "train-1.jsonl", "t1")
    assert prompts(f"data/{name}") == ["t1"]


@pytest.mark.parametrize("name", ["train-1.jsonl", "x_test.jsonl", "README.md"])
def test_folder_with_splits_or_other_files_needs_the_datasets_library(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder / "1.jsonl", "t1")
    write(folder / name, "t2")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="needs the library datasets"):
        prompts("data")


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("data/x-*.jsonl", r"^data/x-\*\.jsonl: no file matches"),
        (["data/1.jsonl", "data/none.jsonl"], r"^data/none\.jsonl: No such file"),
        ("data/[12].jsonl", r"^data/2\.jsonl, line 2: not JSON"),
        ("data/*.gz", r"^data/3\.jsonl\.gz is not a gzip file that can be read"),
        (
            "data/*.txt",
            r"^data/4\.txt: only \.jsonl, \.jsonl\.gz, \.parquet, \.json, \.csv, \.jsonl\.zst files are read",
        ),
        ("data/5.jsonl", r"^data/5\.jsonl, line 1: a JSON array begins: name such a file \.json, or "),
        ("data/6.json", r"^data/6\.json, row 2: a JSON object is expected"),
        ("data/7.json", r"^data/7\.json is not JSON: "),
        ("data/8.jsonl.zst", r"^data/8\.jsonl\.zst: .*: name a file that the trainer can read"),
        ("data/9.json", r"^data/9\.json is one JSON object of several lines: give an array"),
        ("data/none.csv", r"^data/none\.csv: No such file or directory: name a file"),
    ],
)
def test_invalid_shard_error_names_the_shard(folder: Path, source: Any, problem: str) -> None:
    write(folder / "1.jsonl", "t1")
    (folder / "2.jsonl").write_text('{"prompt": "t2"}\n{"prompt": \n')
    (folder / "3.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "t3"}\n' * 1000)[:-12])
    (folder / "4.txt").touch()
    (folder / "5.jsonl").write_text(json.dumps([{"prompt": "t5"}], indent=1))
    (folder / "6.json").write_text('[{"prompt": "t6"}, "t7"]')
    (folder / "7.json").write_text('[{"prompt": "t7"}')
    (folder / "8.jsonl.zst").write_bytes(b'{"prompt": "t8"}')
    (folder / "9.json").write_text(json.dumps({"data": [{"prompt": "t9"}]}, indent=1))
    with pytest.raises(ConfigError, match=problem):
        prompts(source)


def test_data_source_is_a_list_or_a_pattern(folder: Path) -> None:
    write(folder / "1.jsonl", "t1")
    spec = parse(job(train=["data/1.jsonl", "data/2.jsonl"], eval="data/*.jsonl"))
    assert parse(json.loads(to_json(spec))) == spec
    for wrong in (5, [], [""], [5], {"a": 1}):
        with pytest.raises(ConfigError, match=r"^data\.train: give the name of a file"):
            parse(job(train=wrong))
    # What is here becomes absolute, since the trainer may run in another folder.
    resolved = complete(job(train=["data/1.jsonl", "openai/gsm8k", "other/*.jsonl"], eval="data/*.jsonl"))["data"]
    assert resolved["train"] == [str(folder / "1.jsonl"), "openai/gsm8k", "other/*.jsonl"]
    assert resolved["eval"] == str(folder / "*.jsonl")
    assert not is_remote("other/*.jsonl")


def test_config_check_names_the_shard(folder: Path) -> None:
    base = folder.parent / "base"
    write_tokenizer(write_model(base))
    write(folder / "1.jsonl", "t5")
    (folder / "2.jsonl").write_text('{"prompt": "t6"}\n{"question": "t7"}\n')
    (folder.parent / "job.yaml").write_text(yaml.safe_dump(job(train="data/*.jsonl")))
    [problem] = jobcheck.check(Path("job.yaml"), []).problems
    assert problem.startswith("data.train: data/2.jsonl line 2: no key 'prompt'")


def test_shards_may_differ_in_columns_and_row_errors_name_the_shard(folder: Path) -> None:
    write(folder / "1.jsonl", "t5", answer="5")
    write(folder / "2.jsonl", "t6", tests="assert True")
    model = write_tokenizer(write_model(folder.parent / "base"))
    data = load(model, "data")
    assert [prompt.columns for prompt in data.train] == [{"answer": "5"}, {"tests": "assert True"}]
    write(folder / "3.jsonl", "t7", "t8 " * 500)
    with pytest.raises(ConfigError, match=r"^data/3\.jsonl, line 2: 501 prompt tokens"):
        load(model, "data")


def test_data_digest_depends_on_row_order_but_not_on_sharding(folder: Path) -> None:
    """An interrupted job resumes only on the same rows in the same order."""
    model = write_tokenizer(write_model(folder.parent / "base"))
    write(folder / "all.jsonl", "t5", "t6", "t7")
    write(folder / "1.jsonl", "t5")
    write(folder / "2.jsonl", "t6", "t7")
    whole = digest(load(model, "data/all.jsonl"))
    assert digest(load(model, "data/[12].jsonl")) == whole
    assert digest(load(model, ["data/2.jsonl", "data/1.jsonl"])) != whole
    write(folder / "2.jsonl", "t6", "t8")
    assert digest(load(model, "data/[12].jsonl")) != whole


def load(model: Path, source: Any) -> Data:
    return load_data(parse({**job(train=source), "model": str(model)}), model)


def digest(data: Data) -> str:
    return fingerprint((row.tokens, row.completion, row.columns) for row in data.train)


def test_data_files_that_datasets_would_leave_out_are_refused(folder: Path) -> None:
    """It reads only the files of one kind, and those whose names denote a split if there are any."""
    (folder / "README.md").write_text("# Sums\n")
    (folder / "notes.txt").write_text("of 2026\n")
    (folder / ".cache").mkdir()
    write(folder / ".cache/old.jsonl", "t0")
    write(folder / "train.jsonl", "t1")
    assert prompts("data") == ["t1"]
    write(folder / "more.jsonl", "t2")
    with pytest.raises(
        ConfigError, match=r"data: Hugging Face datasets reads 1 of its files and leaves out more.jsonl"
    ):
        prompts("data")
    (folder / "more.jsonl").rename(folder / "test.jsonl")
    assert prompts("data") == ["t1"]
    write(folder / "more.parquet", "t3")
    with pytest.raises(ConfigError, match=r"leaves out more.parquet: name the files"):
        prompts("data")
    for name in ("more.arrow", "MORE.JSONL"):
        next(folder.glob("more.*")).rename(folder / name)
        with pytest.raises(ConfigError, match=f"leaves out {name}: name the files"):
            prompts("data")
    (folder / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: train.jsonl\n---\n# Sums\n")
    assert prompts("data") == ["t1"]


@pytest.mark.parametrize("rows", ["Now, 1+1=,2\nNow, 1+2=,3\n", "1+1=,2,\n"])
def test_rows_with_more_fields_than_the_header_are_refused(folder: Path, rows: str) -> None:
    """Pandas takes the first field for a name of the row, and shifts the others."""
    for name, source in (("train.csv", "data"), ("a.csv", "data/a.csv")):
        (folder / name).write_text(f"prompt,answer\n{rows}")
        with pytest.raises(ConfigError, match=f"{source}: rows have more fields than .*, and none __index_level_0__"):
            prompts(source)
    (folder / "a.csv").write_text(f"prompt,answer\nx,1\n{rows}")
    with pytest.raises(ConfigError, match=r"Expected 2 fields in line 3, saw 3"):
        prompts("data/a.csv")


def test_map_of_a_parquet_file_is_a_mapping(folder: Path) -> None:
    kind = pa.map_(pa.string(), pa.string())
    message, solution = [("role", "user"), ("content", "t5")], [("ground_truth", "2")]
    table = {"prompt": pa.array([[message]], pa.list_(kind)), "reward_model": pa.array([solution], kind)}
    parquet.write_table(pa.table(table), folder / "a.parquet")
    [row] = read_rows("data/a.parquet")
    assert row.values == {"prompt": [{"role": "user", "content": "t5"}], "reward_model": {"ground_truth": "2"}}
    parquet.write_table(pa.table({"reward_model": pa.array([solution * 2], kind)}), folder / "a.parquet")
    with pytest.raises(ConfigError, match=r"data/a.parquet .*duplicate keys"):
        list(read_rows("data/a.parquet"))


def test_two_columns_of_one_name_are_refused(folder: Path) -> None:
    columns = [pa.array(["1+1="]), pa.array(["2"]), pa.array(["3"])]
    parquet.write_table(pa.Table.from_arrays(columns, names=["prompt", "answer", "answer"]), folder / "a.parquet")
    (folder / "a.csv").write_text("prompt,answer,answer\n1+1=,2,3\n")
    for name in ("data/a.parquet", "data/a.csv"):
        with pytest.raises(ConfigError, match=f"{name}: the column 'answer' is there twice: remove or rename one"):
            prompts(name)
