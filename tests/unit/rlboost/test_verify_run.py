"""The record of a run: what the check names, and what a comparison finds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlboost.cli import app
from rlboost.services.trainer.adapters.run_folder import user_code_digests
from rlboost.shared.errors import ConfigError
from rlboost.shared.weights.access import ManifestKey, RecordKey
from rlboost.verify import check, compare, lines_of
from tests.support.recorded_run import KEY, SPEC, TOKEN, RecordedRun


def recorded(folder: Path, **of_run: object) -> Path:
    RecordedRun(folder, folder).train((0, 1, 2), **of_run)  # type: ignore[arg-type]
    return folder


def test_check_of_an_untouched_run_finds_no_problem(tmp_path: Path) -> None:
    record = check(recorded(tmp_path / "run"), KEY.public)
    assert not record.problems
    assert sorted(record.steps) == [0, 1, 2]
    assert record.end is not None
    start = record.starts[0].fields
    assert start["data"] == "digest of the data"
    assert list(start["user_code"]) == ["rlboost.rewards.math:score"]


def test_evaluation_after_the_last_step_is_no_step(tmp_path: Path) -> None:
    RecordedRun(tmp_path / "run", tmp_path, spec=SPEC | {"steps": 2}).train((0, 1, 2))
    assert "run: 2 steps and the evaluation after the last; the job has ended" in next(
        check(tmp_path / "run").summary()
    )


def test_run_is_found_by_the_name_of_its_job(tmp_path: Path) -> None:
    recorded(tmp_path / "runs/recorded-1")
    arguments = ["verify-run", "recorded", "--state", str(tmp_path)]
    assert "3 steps; the job has ended" in CliRunner().invoke(app, arguments).output
    recorded(tmp_path / "runs/recorded-2")
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 2
    assert "2 jobs have the name recorded: give an id: recorded-1, recorded-2" in refused.output


def test_second_row_of_a_step_is_named(tmp_path: Path) -> None:
    file = recorded(tmp_path / "run") / "metrics.jsonl"
    rows = file.read_text().splitlines(keepends=True)
    file.write_text(json.dumps({**json.loads(rows[1]), "reward/mean": 9}) + "\n" + "".join(rows))
    assert any("metrics.jsonl" in problem for problem in check(file.parent).problems)


def test_key_that_is_not_signed_is_named(tmp_path: Path) -> None:
    file = recorded(tmp_path / "run") / "record/chain.jsonl"
    *lines, last = file.read_text().splitlines()
    added = json.dumps({**json.loads(last), "note": ""}, sort_keys=True, separators=(",", ":"))
    file.write_text("\n".join([*lines, added, ""]))
    assert check(file.parents[1]).problems[0].endswith("it is not a link as a trainer writes it")


def test_record_without_an_end_says_what_it_does_not_cover(tmp_path: Path) -> None:
    file = recorded(tmp_path / "run") / "record/chain.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    record = check(file.parents[1])
    assert not record.problems
    assert "; model and adapter are not covered" in next(record.summary())


@pytest.mark.parametrize(
    "path",
    [
        "job.json",
        "metrics.jsonl",
        "record/chain.jsonl",
        "record/step-000000.msgpack",
        "record/step-000002.msgpack",
        "model/model.safetensors",
    ],
)
def test_flipped_byte_is_named_wherever_it_is(tmp_path: Path, path: str) -> None:
    folder = recorded(tmp_path / "run")
    whole = (folder / path).read_bytes()
    for at in range(0, len(whole), max(1, len(whole) // 60)):
        for bit in (0x01, 0x20):  # 0x20 also changes the case of a letter, which JSON reads as the same number
            (folder / path).write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
            problems = check(folder).problems
            assert problems, f"byte {at} of {path}"
            assert problems[0].startswith(path), problems
    (folder / path).write_bytes(whole)
    assert not check(folder).problems


def test_changed_group_and_row_are_named(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "run")
    file = folder / "record/step-000001.msgpack"
    data = file.read_bytes()
    at = data.rindex(b"stop")  # of the last sample
    file.write_bytes(data[:at] + b"STOP" + data[at + 4 :])
    row = folder / "metrics.jsonl"
    row.write_text(row.read_text().replace("0.25", "0.26"))
    problems = check(folder).problems
    assert "metrics.jsonl: the row of step 2 is not the one that was written" in problems
    assert "record/step-000001.msgpack: it is not the file that was written; group 1 has changed" in problems


@pytest.mark.parametrize("path", ["job.json", "record/step-000001.msgpack", "model/model.safetensors"])
def test_missing_file_is_named(tmp_path: Path, path: str) -> None:
    folder = recorded(tmp_path / "run")
    (folder / path).unlink()
    assert check(folder).problems == [f"{path}: it is missing"]


@pytest.mark.parametrize("path", ["record/step-000009.msgpack", "model/other.bin"])
def test_added_file_is_named(tmp_path: Path, path: str) -> None:
    folder = recorded(tmp_path / "run")
    (folder / path).write_bytes(b"")
    assert check(folder).problems == [f"{path}: the record has no such file"]


def test_removed_line_is_named_by_its_successor(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "run")
    chain = folder / "record/chain.jsonl"
    lines = chain.read_bytes().splitlines(keepends=True)
    chain.write_bytes(b"".join(lines[:2] + lines[3:]))
    assert check(folder).problems[0].startswith("record/chain.jsonl, line 3: it does not follow the line before it")


def test_record_that_someone_else_signed_is_refused(tmp_path: Path) -> None:
    RecordedRun(tmp_path / "run", tmp_path, key=RecordKey("another token")).train((0,))
    assert not check(tmp_path / "run").problems
    (problem,) = check(tmp_path / "run", KEY.public).problems
    assert problem.startswith(f"record/chain.jsonl, line 1: it is not signed with the key {KEY.public}, but names")
    with pytest.raises(ConfigError, match="64 hexadecimal digits"):
        check(tmp_path / "run", "secret")


def test_record_has_another_key_than_manifests() -> None:
    assert RecordKey(TOKEN).public != ManifestKey(TOKEN).public


def test_folder_without_a_record_is_refused_with_what_to_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name the folder of a run"):
        check(tmp_path)


def test_resumed_trainer_continues_the_chain_and_says_what_it_repeats(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run", tmp_path)
    run.train((0, 1, 2), end=False)
    with (tmp_path / "run/record/chain.jsonl").open("ab") as chain:
        chain.write(b'{"link":{"kind":"st')  # a trainer that is killed while it writes
    run.train((1,), end=False)
    record = check(tmp_path / "run")
    assert not record.problems
    assert sorted(record.steps) == [0, 1], "step 2 is not trained again yet"
    run.train((1, 2, 3))
    record = check(tmp_path / "run")
    assert not record.problems
    assert (sorted(record.steps), record.n_repeated, record.changed) == ([0, 1, 2, 3], 3, [])
    run.train((3,), logprob=-0.75)
    record = check(tmp_path / "run")
    assert not record.problems
    assert record.changed == [3]
    assert any("trained again with other samples or weights, which count: steps 4" in s for s in record.summary())


def test_record_that_begins_late_is_named(tmp_path: Path) -> None:
    RecordedRun(tmp_path / "run", tmp_path).train((1, 2))
    assert check(tmp_path / "run").problems == [
        "record/chain.jsonl: it begins with step 2: the steps before are recorded where they were trained"
    ]


def test_step_is_shown_with_worker_version_and_prompt(tmp_path: Path) -> None:
    record = check(recorded(tmp_path / "run"))
    first, *others = lines_of(record, 2)
    assert first == (
        "group 0, sample 0: prompt 5, reward 1: 2 tokens by w1 with version 2, 1 tokens by w2 with version 2"
    )
    assert len(others) == 3
    with pytest.raises(ConfigError, match="its last is step 3"):
        list(lines_of(record, 3))


def test_runs_that_differ_only_in_workers_and_times_are_identical(tmp_path: Path) -> None:
    a = check(recorded(tmp_path / "a"))
    b = check(recorded(tmp_path / "b", worker="another", job=2))
    found = compare(a, b)
    assert not found.differences
    assert (found.n_steps, found.n_samples, found.n_tokens) == (3, 12, 36)
    assert list(found.summary()) == ["identical: 3 steps, 12 samples, 36 tokens"]


def test_first_difference_of_each_kind_is_named(tmp_path: Path) -> None:
    spec = {**SPEC, "name": "other", "trainer": {"resume": "never", "seed": 1}}
    other = RecordedRun(tmp_path / "b", tmp_path, spec=spec)
    other.train((0, 1), weights="v", logprob=-0.75)
    found = compare(check(recorded(tmp_path / "a")), check(tmp_path / "b")).differences
    assert found["job file"] == ["trainer.seed: 0 and 1"]
    assert found["log-probabilities"][0] == "step 1, group 0, sample 0, token 1: -0.5 and -0.75"
    assert found["weights"][0] == "step 1: w1 and v1"
    assert found["steps"] == [f"step 3 is only in {tmp_path / 'a'}"]
    assert "tokens" not in found


def test_metric_that_is_not_measured_in_time_is_compared(tmp_path: Path) -> None:
    a, b = (check(recorded(tmp_path / name)) for name in "ab")
    file = tmp_path / "b/metrics.jsonl"
    rows = [{**json.loads(row), "loss": 0.7, "time/step_s": 9.0} for row in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert compare(a, b).differences == {
        "losses and other metrics": [
            "step 1, loss: 0.5 and 0.7",
            "step 2, loss: 0.25 and 0.7",
            "step 3, loss: 0.16666666666666666 and 0.7",
        ]
    }


def test_user_code_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package/reward.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    spec = {"reward": {"functions": [{"function": "my_package.reward:score"}]}, "model": "a:b:c", "other": "no.such:f"}
    assert list(user_code_digests(spec)) == ["my_package.reward:score"]
