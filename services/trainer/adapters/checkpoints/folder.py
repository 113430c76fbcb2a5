"""Checkpoints as directories `step-000010` in a local folder.

Each is written under another name, flushed to disk and then renamed, so a directory of that name is complete.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import structlog

from rlboost.services.trainer.adapters.checkpoints.files import (
    CORRUPT_ERRORS,
    N_RETAINED,
    PREFIX,
    Manifest,
    is_stale,
    name_of,
    no_valid_checkpoint,
    step_of,
    unique_name,
)
from rlboost.services.trainer.ports.engine import Snapshot
from rlboost.services.trainer.ports.storage import TrainState
from rlboost.shared.atomic_file import sync_path
from rlboost.shared.disk_space import write_error

log = structlog.get_logger(__name__)

MANIFEST_FILE = "state.json"
_TEMPORARY = "unfinished-"


class CheckpointFolder:
    """`CheckpointStore` in one local folder."""

    def __init__(self, folder: Path) -> None:
        """Use `folder`, which is created by the first `save`."""
        self._folder = folder

    def save(self, state: TrainState, write: Snapshot) -> None:
        """See `CheckpointStore.save`."""
        temporary, final = self._temporary(state.step), self._folder / name_of(state.step)
        try:
            self._remove_stale(state.step)
            temporary.mkdir(parents=True)
            write(temporary)
            manifest = Manifest.of(temporary, state).encode()
            (temporary / MANIFEST_FILE).write_text(manifest, encoding="utf-8")
            for path in (*temporary.iterdir(), temporary):
                sync_path(path)
            # After a fallback the same step comes again; its old checkpoint did not verify.
            self._remove(final)
            temporary.rename(final)
            sync_path(self._folder)
            for old in self._directories()[N_RETAINED:]:
                self._remove(old)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise write_error(
                error,
                f"checkpoint {final} cannot be written: {error.strerror or error}; free space or repair the folder. "
                "Earlier checkpoints are complete",
            ) from error

    def newest(self) -> tuple[TrainState, Path] | None:
        """See `CheckpointStore.newest`."""
        directories = self._directories()
        for directory in directories:
            try:
                return read(directory), directory
            except CORRUPT_ERRORS as error:
                log.warning("checkpoint_corrupt", directory=str(directory), reason=str(error) or repr(error))
        if directories:
            raise no_valid_checkpoint(str(self._folder), [directory.name for directory in directories])
        return None

    def fallback(self) -> TrainState | None:
        """See `CheckpointStore.fallback`."""
        directories = self._directories()
        if len(directories) < N_RETAINED:
            return None
        try:
            return _read_manifest(directories[-1]).state
        except CORRUPT_ERRORS:
            return None

    def progress(self) -> str:
        """See `CheckpointStore.progress`. Nothing is transferred."""
        return ""

    def _directories(self) -> list[Path]:
        """Return the finished checkpoints, newest first."""
        return sorted(self._folder.glob(f"{PREFIX}*"), key=lambda path: step_of(path.name), reverse=True)

    def _remove(self, directory: Path) -> None:
        if directory.exists():
            # Renamed first: a partly removed directory must not look like a checkpoint.
            shutil.rmtree(directory.rename(self._temporary(step_of(directory.name))))

    def _temporary(self, step: int) -> Path:
        return self._folder / f"{_TEMPORARY}{unique_name(step)}"

    def _remove_stale(self, step: int) -> None:
        for directory in self._folder.glob(f"{_TEMPORARY}*"):
            if is_stale(directory.name.removeprefix(_TEMPORARY), step):
                shutil.rmtree(directory, ignore_errors=True)


def read(directory: Path) -> TrainState:
    """Verify one checkpoint and return its state.

    Raises:
        files.CORRUPT_ERRORS: it is not a checkpoint, or does not verify.

    """
    manifest = _read_manifest(directory)
    manifest.verify(directory)
    return manifest.state


def _read_manifest(directory: Path) -> Manifest:
    return Manifest.decode((directory / MANIFEST_FILE).read_text(encoding="utf-8"))
