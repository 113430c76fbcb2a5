"""`python -m rlboost.services.trainer.adapters.tracker_child`: one run of a tracker, in its own process.

Standard input has lines of JSON: how the run starts (see `TrackerProcess`), then one row per line, then how the run
ends (`RunEnd`). `STARTED` on standard output means that the run has started. If the input ends without an end, the
trainer has died; the child still sends all rows. The run has the job's id, so that the next trainer of the job
continues it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TextIO, cast

STARTED = "started"
SAMPLE_COLUMNS = ("step", "prompt", "completion", "reward")
_FINISH_LIMIT_S = 60.0
"""Limit for sending the remaining rows. No process waits for this one, so it must not stay forever."""


End = Literal["completed", "failed", "cancelled", "stopped", "died"]
"""`RunEnd`, or that the trainer has died."""


class Run(Protocol):
    """A run of a tracker."""

    def __init__(self, start: Mapping[str, Any]) -> None:
        """Create the job's run, or continue it."""

    def log(self, step: int, metrics: dict[str, float], samples: Sequence[Sequence[Any]]) -> None:
        """Log a step, and its samples as a table with `SAMPLE_COLUMNS`, if there are any."""

    def finish(self, end: End) -> None:
        """Send what is left, and how the run ends; each but `completed` may be continued."""


class Wandb:
    """A run of Weights & Biases, which keeps the first row of a step."""

    def __init__(self, start: Mapping[str, Any]) -> None:
        import wandb  # noqa: PLC0415 - an extra

        self._table = wandb.Table
        section = start["section"]
        self._run: Any = wandb.init(
            **{**section, "tags": section["tags"] or None},
            **{name: start[name] for name in ("name", "id", "dir", "config")},
            resume="allow",
            settings=wandb.Settings(console="off", silent=True, finish_timeout=_FINISH_LIMIT_S),
        )

    def log(self, step: int, metrics: dict[str, float], samples: Sequence[Sequence[Any]]) -> None:
        table = {"samples": self._table(columns=list(SAMPLE_COLUMNS), data=samples)} if samples else {}
        self._run.log(metrics | table, step=step)

    def finish(self, end: End) -> None:
        # 255 is that of a program that Ctrl-C ends.
        self._run.finish(exit_code={"completed": 0, "cancelled": 255, "stopped": 255}.get(end, 1))


class Mlflow:
    """A run of MLflow, which has the job's id as a tag: MLflow chooses the ids of runs."""

    _TAG = "rlboost.job"
    _PARAMETER_CHARS = 500
    """Longest value of a parameter that all versions of the server store."""
    _STEPS_PER_TABLE = 100
    """A table is sent anew with each step that is added to it, and the names of all tables are one tag of the run."""

    def __init__(self, start: Mapping[str, Any]) -> None:
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            sys.exit(
                "MLFLOW_TRACKING_URI is not set in the trainer's environment: give the URL of the MLflow server, or "
                "sqlite:////FOLDER/mlflow.db"
            )
        import mlflow  # noqa: PLC0415 - an extra

        self._mlflow: Any = mlflow
        section, job_id = start["section"], start["id"]
        experiment = mlflow.set_experiment(section["experiment"]).experiment_id
        found = mlflow.MlflowClient().search_runs([experiment], f"tags.`{self._TAG}` = '{job_id}'", max_results=1)
        if found:
            mlflow.start_run(run_id=found[0].info.run_id)
            return
        mlflow.start_run(run_name=start["name"], tags={**section["tags"], self._TAG: job_id})
        mlflow.log_params({name: str(value)[: self._PARAMETER_CHARS] for name, value in _leaves("", start["config"])})

    def log(self, step: int, metrics: dict[str, float], samples: Sequence[Sequence[Any]]) -> None:
        # Names of MLflow's metrics have no @.
        self._mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step=step)
        if samples:
            columns = dict(zip(SAMPLE_COLUMNS, map(list, zip(*samples, strict=True)), strict=True))
            self._mlflow.log_table(columns, f"samples-{step - step % self._STEPS_PER_TABLE}.json")

    def finish(self, end: End) -> None:
        statuses = {"completed": "FINISHED", "cancelled": "KILLED", "stopped": "KILLED"}
        self._mlflow.end_run(statuses.get(end, "FAILED"))


class Swanlab:
    """A run of SwanLab, which keeps the first row of a step."""

    def __init__(self, start: Mapping[str, Any]) -> None:
        import swanlab  # noqa: PLC0415 - an extra

        self._swanlab: Any = swanlab
        section = start["section"]
        self._run: Any = swanlab.init(
            **{**section, "tags": section["tags"] or None},
            **{name: start[name] for name in ("name", "id", "config")},
            log_dir=f"{start['dir']}/swanlog",
            resume="allow",
            settings=swanlab.Settings(interactive=False),
        )

    def log(self, step: int, metrics: dict[str, float], samples: Sequence[Sequence[Any]]) -> None:
        table = {"samples": self._swanlab.echarts.Table().add(list(SAMPLE_COLUMNS), samples)} if samples else {}
        self._run.log(metrics | table, step=step)

    def finish(self, end: End) -> None:
        if end in ("cancelled", "stopped"):
            self._run.finish(state="aborted")
        elif end == "completed":
            self._run.finish()
        else:
            self._run.finish(state="crashed", error="the job failed" if end == "failed" else "the trainer died")


TRACKERS: Mapping[str, type[Run]] = {"wandb": Wandb, "mlflow": Mlflow, "swanlab": Swanlab}


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each setting of a job file with its dotted key."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _leaves(f"{prefix}.{name}" if prefix else name, part)
    else:
        yield prefix, value


def main(lines: TextIO, answers: TextIO) -> int:
    """Run the child; return its exit code."""
    start = json.loads(lines.readline())
    run = TRACKERS[start["tracker"]](start)
    print(STARTED, file=answers, flush=True)
    end: End = "died"
    for line in lines:
        if isinstance(row := json.loads(line), str):
            end = cast("End", row)
            break
        run.log(row["step"], row["metrics"], row["samples"])
    run.finish(end)
    return 0


if __name__ == "__main__":
    # Other output of the library must not be read as `STARTED`.
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.exit(main(sys.stdin, channel))
