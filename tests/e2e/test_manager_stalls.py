"""`benchmarks/manager_stalls`: each of its loads is answered."""

from __future__ import annotations

import json

import pytest

from benchmarks import manager_stalls


def test_benchmark_loads_the_manager_in_each_way(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--seconds", "10", "--streams", "4", "--sessions", "8", "--turns", "2", "--prompt-mb", "0.2"]
    manager_stalls.main([*small, "--places", "1"])
    lines = capsys.readouterr().out.splitlines()
    begin, streams, sessions, large, together = (json.loads(line) for line in lines if line.startswith("{"))
    assert begin["call_200"] == 8
    assert streams["stream_200"] >= 4
    assert sessions["call_200"] > 0
    for kind in ("ids", "text", "chat", "chat_of_many"):
        assert large[f"{kind}_200"] > 0
    assert together["call_200"] > 0
    assert all(row["longest_ms"] >= 0 for row in (begin, streams, sessions, large, together))
