"""SwanLab: one line of JSON for each call."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Self


class Table:
    """A table, by its columns and rows."""

    def __init__(self) -> None:
        self.content: list[Any] = []

    def add(self, headers: list[str], rows: list[Any]) -> Self:
        self.content = [headers, rows]
        return self


class echarts:  # noqa: N801 - a module of SwanLab
    """SwanLab's charts."""

    Table = Table


class Settings:
    """Settings that the process gives."""

    def __init__(self, *, interactive: bool) -> None:
        assert not interactive


class Run:
    """A run."""

    def log(self, data: dict[str, Any], step: int) -> None:
        _record(
            "log", step, {name: value.content if isinstance(value, Table) else value for name, value in data.items()}
        )

    def finish(self, state: str = "success", error: str | None = None) -> None:
        _record("finish", state, error)


def init(
    *,
    project: str,
    workspace: str | None,
    group: str | None,
    tags: list[str] | None,
    name: str,
    id: str,  # noqa: A002 - its name there
    config: dict[str, Any],
    log_dir: str,
    resume: str,
    settings: Settings,
) -> Run:
    assert isinstance(settings, Settings)
    _record("init", [project, workspace, group, tags, name, id, Path(log_dir).name, resume], config["steps"])
    return Run()


def _record(*call: Any) -> None:
    with Path(os.environ["RECORD"]).open("a") as file:
        file.write(json.dumps(call) + "\n")
