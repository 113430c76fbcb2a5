"""Where checkpoints are: folders or object stores, and what a job file may say of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from services.trainer.adapters.checkpoints.bucket import CheckpointBucket
from services.trainer.adapters.checkpoints.files import BROKEN, step_of
from services.trainer.adapters.checkpoints.folder import DOCUMENT, CheckpointFolder, read
from services.trainer.ports import CheckpointStore, TrainState
from shared.bucket import SCHEMES
from shared.errors import ConfigError
from shared.training import RESUME_WORDS


@dataclass(frozen=True, slots=True)
class Places:
    """What all jobs of a trainer have in common."""

    folder: Path
    """The job's own."""
    limit_s: float
    """How long an object store may be away."""

    def store(self, where: str, job_id: str) -> CheckpointStore:
        """Return the store of a job's checkpoints.

        Args:
            where: a folder or URL under which each job has a place of its own; empty for the job's folder.
            job_id: the job.

        Raises:
            ConfigError: it is neither.

        """
        if not where:
            return CheckpointFolder(self.folder / "checkpoints")
        if _is_url(where, "trainer.checkpoints"):
            return CheckpointBucket(f"{where.rstrip('/')}/{job_id}", self.folder / "checkpoint", self.limit_s)
        return CheckpointFolder(Path(where) / job_id)

    def predecessor(self, resume: str) -> Callable[[], tuple[TrainState, Path]] | None:
        """Return what finds the checkpoint of another job that `trainer.resume` names, None where it names none.

        Raises:
            ConfigError: it is no place where one could be.

        """
        if resume in RESUME_WORDS:
            return None
        if _is_url(resume, "trainer.resume"):
            return lambda: self._from_bucket(resume.rstrip("/"))
        return lambda: _from_folder(Path(resume))

    def _from_bucket(self, url: str) -> tuple[TrainState, Path]:
        above, _, name = url.rpartition("/")
        if step_of(name) < 0:
            above, name = url, ""
        found = CheckpointBucket(above, self.folder / "checkpoint", self.limit_s).brought(name)
        if found is None:
            raise _none_at(url)
        return found


def _from_folder(given: Path) -> tuple[TrainState, Path]:
    """Return a checkpoint, or the newest of a folder of them, or the newest of a job's folder."""
    if (given / DOCUMENT).is_file():
        try:
            return read(given), given
        except BROKEN as error:
            raise ConfigError(f"trainer.resume: checkpoint {given} is broken: {error}; name another") from error
    below = given / "checkpoints"
    found = CheckpointFolder(below if below.is_dir() else given).newest()
    if found is None:
        raise _none_at(str(given))
    return found


def _none_at(place: str) -> ConfigError:
    return ConfigError(
        f"trainer.resume: there is no checkpoint at {place}: give auto, never, or a checkpoint of another job (its "
        "folder .rlboost/runs/JOB, its checkpoints, or one of them, as a path on the trainer's machine or a URL)"
    )


def _is_url(where: str, field: str) -> bool:
    if "://" not in where:
        return False
    if (scheme := urlsplit(where).scheme) not in SCHEMES:
        known = ", ".join(f"{name}://" for name in sorted(SCHEMES - {"memory"}))
        raise ConfigError(f"{field}: {scheme}:// is not known: give a folder, or one of {known}")
    return True
