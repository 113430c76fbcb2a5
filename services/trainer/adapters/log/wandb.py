"""Weights & Biases as a logger.

Its library runs in a process of its own: at the end of one it waits for the network, for minutes, and a trainer that is
told to stop has seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

from services.trainer.adapters.log.run_log import LoggerFailed
from services.trainer.adapters.log.wandb_child import BEGUN
from shared.jobspec import BaseJob
from shared.runlog import WandbSpec


class Wandb:
    """`Logger` that goes on with the W&B run whose id is the job's.

    Of a step that is trained again W&B keeps the row that it got first: its steps only rise.
    """

    def __init__(self, wandb: WandbSpec, spec: BaseJob, job_id: str, folder: Path) -> None:
        """Begin the run, or go on with it; its files are in `folder`.

        Raises:
            LoggerFailed: with W&B's own words.

        """
        folder.mkdir(parents=True, exist_ok=True)
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        self._process = Popen(
            [sys.executable, "-m", "services.trainer.adapters.log.wandb_child"],
            stdin=PIPE,
            stdout=PIPE,
            stderr=self._complaints,
            env={name: value for name, value in os.environ.items() if not name.startswith("RLBOOST_")},
            text=True,
            start_new_session=True,  # what stops the trainer must not stop it before it has sent what it has
        )
        self._send(
            {
                "project": wandb.project,
                "entity": wandb.entity,
                "group": wandb.group,
                "tags": list(wandb.tags) or None,
                "name": spec.name,
                "id": job_id,
                "dir": str(folder),
                "config": spec.model_dump(mode="json"),
            }
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != BEGUN:
            raise self._failure()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Logger.log`."""
        self._send({"step": step, "metrics": dict(metrics)})

    def close(self) -> None:
        """See `Logger.close`."""
        self._send(None)
        if self._process.wait():
            raise self._failure()
        self._release()

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failure() from error

    def _failure(self) -> LoggerFailed:
        self._process.kill()
        self._process.wait()
        self._complaints.seek(0)
        lines = self._complaints.read().decode(errors="replace").strip().splitlines()
        self._release()
        return LoggerFailed(lines[-1] if lines else "its process ended without a word")

    def _release(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()
        self._complaints.close()
