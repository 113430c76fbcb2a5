"""Finds checkpoints by the settings of a job file: in local folders or object stores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from rlboost.services.trainer.adapters.checkpoints.bucket import CheckpointBucket
from rlboost.services.trainer.adapters.checkpoints.files import CORRUPT_ERRORS, step_of
from rlboost.services.trainer.adapters.checkpoints.folder import MANIFEST_FILE, CheckpointFolder, read
from rlboost.services.trainer.ports.storage import CheckpointStore, TrainState
from rlboost.shared.bucket import SCHEMES
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.training import RESUME_WORDS


@dataclass(frozen=True, slots=True)
class CheckpointLocations:
    """Builds the checkpoint store of a job, and finds checkpoints of other jobs."""

    folder: Path
    """The job's folder."""
    limit_s: float
    """How long an object store may be unavailable."""

    def store(self, where: str, job_id: str) -> CheckpointStore:
        """Return the store of a job's checkpoints.

        Args:
            where: a folder or URL, under which each job has a folder of its own; empty for the job's folder.
            job_id: the job.

        Raises:
            ConfigError: `where` is neither.

        """
        if not where:
            return CheckpointFolder(self.folder / "checkpoints")
        if _is_url(where, "trainer.checkpoints"):
            return CheckpointBucket(f"{where.rstrip('/')}/{job_id}", self.folder / "checkpoint", self.limit_s)
        return CheckpointFolder(Path(where) / job_id)

    def predecessor(self, resume: str) -> Callable[[], tuple[TrainState, Path]] | None:
        """Return a function that fetches the checkpoint that `trainer.resume` names; None if it names none.

        Raises:
            ConfigError: `trainer.resume` is not a path, a supported URL, or one of its words.

        """
        if resume in RESUME_WORDS:
            return None
        if _is_url(resume, "trainer.resume"):
            return lambda: self._from_bucket(resume.rstrip("/"))
        return lambda: _from_folder(Path(resume))

    def _from_bucket(self, url: str) -> tuple[TrainState, Path]:
        parent, _, name = url.rpartition("/")
        if step_of(name) < 0:
            parent, name = url, ""
        found = CheckpointBucket(parent, self.folder / "checkpoint", self.limit_s).download(name)
        if found is None:
            raise _no_checkpoint_at(url)
        return found


def _from_folder(given: Path) -> tuple[TrainState, Path]:
    """Return the given checkpoint, or the newest in a folder of checkpoints or in a job's folder."""
    if (given / MANIFEST_FILE).is_file():
        try:
            return read(given), given
        except CORRUPT_ERRORS as error:
            raise ConfigError(f"trainer.resume: checkpoint {given} is corrupt: {error}; name another") from error
    subfolder = given / "checkpoints"
    found = CheckpointFolder(subfolder if subfolder.is_dir() else given).newest()
    if found is None:
        raise _no_checkpoint_at(str(given))
    return found


def _no_checkpoint_at(place: str) -> ConfigError:
    return ConfigError(
        f"trainer.resume: no checkpoint at {place}: give auto, never, or a checkpoint of another job (its "
        "folder .rlboost/runs/JOB, its checkpoints, or one of them, as a path on the trainer's machine or a URL)"
    )


def _is_url(where: str, field: str) -> bool:
    if "://" not in where:
        return False
    if (scheme := urlsplit(where).scheme) not in SCHEMES:
        known = ", ".join(f"{name}://" for name in sorted(SCHEMES - {"memory"}))
        raise ConfigError(f"{field}: {scheme}:// is not supported: give a folder, or a URL that starts with {known}")
    return True
