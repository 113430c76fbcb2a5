"""Weights & Biases as a logger.

Its library runs in a child process, because it waits for the network for minutes at exit, and a stopping trainer has
only seconds.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

from rlboost.services.trainer.adapters.log.run_log import LoggerFailed
from rlboost.services.trainer.adapters.log.wandb_child import STARTED
from rlboost.shared.job.run_log import WandbSpec
from rlboost.shared.job.spec import BaseJob
from rlboost.shared.settings import environment_without_settings


class Wandb:
    """`Logger` that creates or resumes the W&B run whose id is the job's.

    If a step is trained again, W&B keeps the first row: its steps only increase.
    """

    def __init__(self, wandb: WandbSpec, spec: BaseJob, job_id: str, folder: Path) -> None:
        """Start or resume the run; its files are in `folder`.

        Raises:
            LoggerFailed: the run cannot be started; with W&B's own message.

        """
        folder.mkdir(parents=True, exist_ok=True)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = Popen(
            [sys.executable, "-m", "rlboost.services.trainer.adapters.log.wandb_child"],
            stdin=PIPE,
            stdout=PIPE,
            stderr=self._stderr,
            env=environment_without_settings(),
            text=True,
            start_new_session=True,  # signals to the trainer must not stop it before it has sent its rows
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
        if self._process.stdout.readline().strip() != STARTED:
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
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        self._release()
        return LoggerFailed(lines[-1] if lines else "its process ended without an error message")

    def _release(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()
        self._stderr.close()
