"""`benchmarks/external`: each path gets all samples."""

from __future__ import annotations

import json

import pytest

from benchmarks import external


def test_each_path_is_measured(capfd: pytest.CaptureFixture[str]) -> None:
    external.main(["--groups", "8", "--size", "4", "--tokens", "4096", "--rounds", "1"])
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    assert [row["path"] for row in rows] == ["redis", "msgpack", "json"]
    assert all(row["tokens_per_s"] > 0 for row in rows)
