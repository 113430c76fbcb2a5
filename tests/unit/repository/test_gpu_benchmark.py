"""`make gpu` as far as it goes without a GPU: parts that end, fail, take too long, and a run that continues."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.gpu import run as gpu
from tests.support import fake_gpus


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpu, "RESULTS", tmp_path / "build" / "gpu.json")
    monkeypatch.setattr(gpu, "commit", lambda: "abc")
    monkeypatch.setattr(sys, "argv", ["run"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def part(name: str, folder: Path, program: str) -> gpu.Part:
    (folder / f"{name}_part.py").write_text(program)
    return gpu.Part(name, "a part", (f"{name}_part",), 60.0)


def test_machine_without_a_gpu_gets_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(folder))
    assert gpu.main() == 1
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert shown.err.startswith("make gpu: no GPU was found: ")


def test_run_continues_with_the_parts_that_have_not_succeeded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", f"{fake_gpus.install(folder / 'bin', 1)}:/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    parts = (
        part("good", folder, "open('good', 'a').write('x'); print('42 tokens/s')"),
        part("bad", folder, "open('bad', 'a').write('x'); raise SystemExit('no memory')"),
    )
    monkeypatch.setattr(gpu, "PARTS", parts)
    monkeypatch.chdir(folder)
    assert gpu.main() == 1
    assert "| good | yes |" in capsys.readouterr().out
    (folder / "bad_part.py").write_text("print('now')")
    assert gpu.main() == 0
    assert (folder / "good").read_text() == "x", "what succeeded is not repeated"
    assert "| bad | yes |" in capsys.readouterr().out
    monkeypatch.setattr(gpu, "commit", lambda: "def")
    gpu.main()
    assert (folder / "good").read_text() == "xx", "another commit starts anew"


def test_part_that_takes_too_long_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(folder))
    slow = part("slow", folder, "import time; print('begun', flush=True); time.sleep(600)")
    found = gpu.run(slow._replace(limit_s=1.0))
    assert not found["ok"]
    assert found["output"][-1] == "it took longer than 1 s"


def test_parts_end_within_25_minutes_the_recipe_first() -> None:
    assert sum(part.limit_s for part in gpu.PARTS) <= 25 * 60
    assert gpu.PARTS[0].name == "gsm8k"
