"""The loggers that a job file can ask for: TensorBoard's event files, and Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from services.trainer.adapters.log.run_log import Opener
from services.trainer.adapters.log.wandb import Wandb
from shared.errors import ConfigError
from shared.jobspec import BaseJob
from shared.runlog import lacking


def openers(spec: BaseJob, job_id: str, folder: Path) -> dict[str, Opener]:
    """Return what makes the loggers of a job whose run is in `folder`; by name.

    Raises:
        ConfigError: a library is not installed.

    """
    if missing := lacking(spec.log):
        raise ConfigError("; ".join(missing))
    found: dict[str, Opener] = {}
    if spec.log.tensorboard:
        found["tensorboard"] = lambda step: TensorBoard(folder / "tensorboard", step)
    if (wandb := spec.log.wandb) is not None:
        found["wandb"] = lambda _step: Wandb(wandb, spec, job_id, folder)
    return found


class TensorBoard:
    """`Logger` that writes event files."""

    def __init__(self, folder: Path, step: int) -> None:
        """Write into `folder`; readers forget what an earlier process wrote there of `step` and later."""
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra

        self._writer = SummaryWriter(str(folder), purge_step=step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Logger.log`."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        # A process that is killed leaves every row that it was given.
        self._writer.flush()

    def close(self) -> None:
        """See `Logger.close`."""
        self._writer.close()
