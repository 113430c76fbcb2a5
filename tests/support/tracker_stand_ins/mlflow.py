"""MLflow: runs in a JSON file, which the next process reads."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_FILE = Path(os.environ["RECORD"])
_RUNS: dict[str, Any] = json.loads(_FILE.read_text()) if _FILE.exists() else {}
_active: list[str] = []


def set_experiment(name: str) -> SimpleNamespace:
    return SimpleNamespace(experiment_id=f"id of {name}")


class MlflowClient:
    """Finds runs by one tag."""

    def search_runs(self, experiments: list[str], query: str, max_results: int) -> list[SimpleNamespace]:
        found = re.fullmatch(r"tags\.`([\w.]+)` = '([\w.-]+)'", query)
        assert found is not None
        runs = [run for run, of in _RUNS.items() if of["tags"].get(found[1]) == found[2]]
        assert len(experiments) == 1
        return [SimpleNamespace(info=SimpleNamespace(run_id=run)) for run in runs[:max_results]]


def start_run(run_id: str = "", run_name: str = "", tags: dict[str, str] | None = None) -> None:
    if not run_id:
        run_id = f"run-{len(_RUNS)}"
        _RUNS[run_id] = {"name": run_name, "tags": tags, "params": {}, "metrics": [], "tables": {}}
    _active.append(run_id)
    _RUNS[run_id]["status"] = "RUNNING"
    _save()


def log_params(params: dict[str, str]) -> None:
    _RUNS[_active[0]]["params"] |= params
    _save()


def log_metrics(metrics: dict[str, float], step: int) -> None:
    if (wrong := os.environ.get("MLFLOW_TRACKING_URI", "")).startswith("http"):
        raise RuntimeError(f"API request to {wrong}/log failed with {os.environ.get('MLFLOW_TRACKING_TOKEN')}")
    assert all(re.fullmatch(r"[/\w.\- :]*", name) for name in metrics), "as MLflow checks them"
    _RUNS[_active[0]]["metrics"].append([step, metrics])
    _save()


def log_table(data: dict[str, list[Any]], artifact_file: str) -> None:
    table = _RUNS[_active[0]]["tables"].setdefault(artifact_file, {name: [] for name in data})
    for name, values in data.items():
        table[name] += values
    _save()


def end_run(status: str) -> None:
    _RUNS[_active.pop()]["status"] = status
    _save()


def _save() -> None:
    _FILE.write_text(json.dumps(_RUNS))
