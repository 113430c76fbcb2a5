"""The loggers of a job file's `log` section: TensorBoard and Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlboost.services.trainer.adapters.log.run_log import Opener
from rlboost.services.trainer.adapters.log.wandb import Wandb
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.run_log import missing_log_libraries
from rlboost.shared.job.spec import BaseJob


def openers(spec: BaseJob, job_id: str, folder: Path) -> dict[str, Opener]:
    """Return the functions that create a job's loggers, by name; `folder` is the run's folder.

    Raises:
        ConfigError: a library is not installed.

    """
    if missing := missing_log_libraries(spec.log):
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
        """Write into `folder`; readers discard rows of `step` and later that an earlier process wrote."""
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra

        self._writer = SummaryWriter(str(folder), purge_step=step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Logger.log`."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        # Flush per row: a killed process must not lose rows.
        self._writer.flush()

    def close(self) -> None:
        """See `Logger.close`."""
        self._writer.close()
