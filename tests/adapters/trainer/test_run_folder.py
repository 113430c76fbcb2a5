from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlboost.services.trainer.adapters import run_folder
from rlboost.services.trainer.adapters.run_folder import LocalRunFolder
from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.domain.plan import SequenceRow, TrainingRow
from rlboost.services.trainer.ports.engine import PolicySettings
from rlboost.shared.errors import DiskFull, Fatal
from rlboost.shared.job.run_profile import RunProfile
from rlboost.shared.job.training import OptimizerSpec
from rlboost.shared.weights.access import RecordKey
from rlboost.shared.weights.manifest import Shard
from rlboost.shared.wire import F32, I32, pack
from tests.support.losses import clipped_loss
from tests.support.model_folder import write_model, write_tokenizer
from tests.support.small_disk import small_disk
from tests.support.training_rows import rows, training_row

KEY = RecordKey("secret")


def test_run_folder_has_job_file_and_metrics(tmp_path: Path) -> None:
    folder = LocalRunFolder(tmp_path / "run", tmp_path, KEY)
    folder.begin('{"name": "countdown"}', 0)
    folder.log_step(0, {"loss": 1.0})
    folder.log_step(1, {"loss": 0.5})
    assert json.loads((tmp_path / "run/job.json").read_text()) == {"name": "countdown"}
    assert _rows(tmp_path) == [{"step": 0, "loss": 1.0}, {"step": 1, "loss": 0.5}]


def test_profile_is_replaced(tmp_path: Path) -> None:
    profile = RunProfile(
        steps=1,
        step_s=2.0,
        engines=(),
        prompt_tokens=(3, 4),
        completion_quantiles=((0.0, 1.0), (1.0, 5.0)),
        train_s_per_token=0.02,
        update_s=0.5,
    )
    folder = LocalRunFolder(tmp_path / "run", tmp_path, KEY)
    folder.begin("{}", 0)
    folder.write_profile(profile)
    folder.write_profile(later := profile.model_copy(update={"steps": 2}))
    assert RunProfile.model_validate_json((tmp_path / "run/profile.json").read_text()) == later


def test_begin_drops_rows_of_steps_to_train_again(tmp_path: Path) -> None:
    folder = LocalRunFolder(tmp_path / "run", tmp_path, KEY)
    folder.begin("{}", 0)
    for step in range(4):
        folder.log_step(step, {})
    with (tmp_path / "run/metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    folder.begin("{}", 2)
    folder.log_step(2, {})
    assert [row["step"] for row in _rows(tmp_path)] == [0, 1, 2]


def test_full_disk_loses_no_row_and_no_model(tmp_path: Path) -> None:
    base = write_tokenizer(write_model(tmp_path / "base"))
    engine = TorchPolicy(PolicySettings(), device="cpu")
    engine.load_hf(base)
    with small_disk(tmp_path / "run", 8 << 20) as disk:
        folder = LocalRunFolder(disk.path, base, KEY)
        folder.begin("{}", 0)
        for step in range(50):
            folder.log_step(step, {"loss": 1.0})
        disk.fill()
        metrics = {f"metric-{n}": float(n) for n in range(400)}  # more than a page
        with pytest.raises(DiskFull, match="No space left on device"):
            folder.log_step(50, metrics)
        with pytest.raises(DiskFull, match="No space left on device"):
            folder.export(engine.export_shards())
        disk.free()
        folder.log_step(50, metrics)
        assert [row["step"] for row in _rows(tmp_path)] == [*range(51)]
        exported: Any = AutoModelForCausalLM.from_pretrained(folder.export(engine.export_shards()))
    assert set(exported.state_dict()) >= set(load_file(base / "model.safetensors"))


def _rows(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]


def test_export_writes_a_hugging_face_directory(tmp_path: Path) -> None:
    base = write_tokenizer(write_model(tmp_path / "base"))
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    of_old_weights = {"README.md", "trainer_state.json", "training_args.bin"}  # as other trainers write them
    for name in of_old_weights:
        (base / name).write_text("")
    engine = TorchPolicy(PolicySettings(optimizer=OptimizerSpec(lr=1e-2)), device="cpu")
    engine.load_hf(base)
    engine.accumulate([rows()], clipped_loss(0.2, 0.28))
    engine.step(1e-2)
    folder = LocalRunFolder(tmp_path / "run", base, KEY)
    folder.begin("{}", 0)
    folder.export(engine.export_shards())
    path = folder.export(engine.export_shards())
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    state = model.state_dict()
    for shard in engine.export_shards():
        assert state[shard.name].numpy().tobytes() == bytes(shard.data), shard.name
    assert state["lm_head.weight"].equal(state["model.embed_tokens.weight"])
    assert tokenizer("t5")["input_ids"] == [1, 5]
    assert {file.name for file in path.iterdir()} == {file.name for file in base.iterdir()} - of_old_weights


def test_unwritable_run_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Fatal, match=r"run's folder .*file/run cannot be written"):
        LocalRunFolder(tmp_path / "file" / "run", tmp_path, KEY).begin("{}", 0)


def test_export_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A completed job has its model after a power failure, too."""
    synced: list[str] = []

    def sync(path: Path) -> None:
        assert path.exists()
        synced.append(str(path.relative_to(tmp_path)))

    monkeypatch.setattr(run_folder, "sync_path", sync)
    folder = LocalRunFolder(tmp_path / "run", tmp_path, KEY)
    data = bytes(16)
    shard = Shard("a", "float32", (2, 2), (0, 0), (2, 2), memoryview(data))
    folder.export_adapter([shard], "{}")
    *content, temporary, parent = synced
    files = {"adapter_model.safetensors", "adapter_config.json"}
    assert {*content} == {f"{temporary}/{name}" for name in files}
    assert (temporary, parent) == ("run/unfinished-adapter", "run")


def test_export_adapter_writes_a_peft_directory(tmp_path: Path) -> None:
    folder = LocalRunFolder(tmp_path / "run", tmp_path, KEY)
    for value in (b"\x00\x00\x00\x00", b"\x00\x00\x80?"):
        shard = Shard("base_model.model.q.lora_A.weight", "float32", (1, 1), (0, 0), (1, 1), value)
        path = folder.export_adapter([shard], '{"r": 1}')
    assert path == tmp_path / "run/adapter"
    assert json.loads((path / "adapter_config.json").read_text()) == {"r": 1}
    assert load_file(path / "adapter_model.safetensors")["base_model.model.q.lora_A.weight"].tolist() == [[1.0]]


def test_dump_batch_writes_readable_rows(tmp_path: Path) -> None:
    row = training_row([1, 2], [3], [float("nan")], -0.5)
    folder = LocalRunFolder(tmp_path / "run", tmp_path, KEY)
    folder.begin("{}", 0)
    path = folder.dump_batch("not-finite-step-3.jsonl", [row, row])
    assert path == tmp_path / "run/not-finite-step-3.jsonl"
    dumped = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(dumped) == 2
    assert str(dumped[0]["logprobs"]) == "[nan]"
    del dumped[0]["logprobs"]
    assert dumped[0] == {"prompt": [1, 2], "completion": [3], "loss_mask": [], "proximal": [], "advantage": -0.5}


def test_dump_batch_writes_advantages_by_token_with_a_critic(tmp_path: Path) -> None:
    advantages, values, returns = (pack(column, F32) for column in ([-0.5, 2.0], [0.25, 0.5], [1.0, 1.0]))
    row = TrainingRow.of(SequenceRow(pack([1], I32), pack([2, 3], I32)), advantages, values=values, returns=returns)
    folder = LocalRunFolder(tmp_path / "run", tmp_path, KEY)
    folder.begin("{}", 0)
    (dumped,) = map(json.loads, folder.dump_batch("not-finite-step-3.jsonl", [row]).read_text().splitlines())
    expected = {"advantage": 0.0, "advantages": [-0.5, 2.0], "values": [0.25, 0.5], "returns": [1.0, 1.0]}
    assert {name: dumped[name] for name in expected} == expected
