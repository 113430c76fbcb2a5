"""Checkpoints as directories `step-000010`: written aside, flushed to disk, then renamed, so that each is whole."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import structlog

from services.trainer.adapters.checkpoints.files import (
    BROKEN,
    KEPT,
    PREFIX,
    Document,
    is_left_over,
    name_of,
    none_is_whole,
    own_name,
    step_of,
)
from services.trainer.ports import Snapshot, TrainState
from shared.errors import Fatal

log = structlog.get_logger(__name__)

DOCUMENT = "state.json"
_UNFINISHED = "unfinished-"


class CheckpointFolder:
    """`CheckpointStore` in one local folder."""

    def __init__(self, folder: Path) -> None:
        """Use `folder`, which need not be there yet."""
        self._folder = folder

    def save(self, state: TrainState, write: Snapshot) -> None:
        """See `CheckpointStore.save`."""
        aside, final = self._aside(state.step), self._folder / name_of(state.step)
        try:
            self._clear(state.step)
            aside.mkdir(parents=True)
            write(aside)
            document = Document.of(aside, state).encode()
            (aside / DOCUMENT).write_text(document, encoding="utf-8")
            for path in (*aside.iterdir(), aside):
                _flush(path)
            # After a fall-back a step comes again: what is there of it did not verify.
            self._remove(final)
            aside.rename(final)
            _flush(self._folder)
            for old in self._directories()[KEPT:]:
                self._remove(old)
        except OSError as error:
            raise Fatal(
                f"checkpoint {final} cannot be written: {error.strerror or error}; make room or mend the folder. "
                "The checkpoints before it are whole"
            ) from error

    def newest(self) -> tuple[TrainState, Path] | None:
        """See `CheckpointStore.newest`."""
        directories = self._directories()
        for directory in directories:
            try:
                return read(directory), directory
            except BROKEN as error:
                log.warning("checkpoint_broken", directory=str(directory), reason=str(error) or repr(error))
        if directories:
            raise none_is_whole(str(self._folder), [directory.name for directory in directories])
        return None

    def fallback(self) -> TrainState | None:
        """See `CheckpointStore.fallback`."""
        directories = self._directories()
        if len(directories) < KEPT:
            return None
        try:
            return _document(directories[-1]).state
        except BROKEN:
            return None

    def _directories(self) -> list[Path]:
        """Return the finished checkpoints, newest first."""
        return sorted(self._folder.glob(f"{PREFIX}*"), key=lambda path: step_of(path.name), reverse=True)

    def _remove(self, directory: Path) -> None:
        if directory.exists():
            # Renamed first: what is half removed must not look like a checkpoint.
            shutil.rmtree(directory.rename(self._aside(step_of(directory.name))))

    def _aside(self, step: int) -> Path:
        return self._folder / f"{_UNFINISHED}{own_name(step)}"

    def _clear(self, step: int) -> None:
        for left in self._folder.glob(f"{_UNFINISHED}*"):
            if is_left_over(left.name.removeprefix(_UNFINISHED), step):
                shutil.rmtree(left, ignore_errors=True)


def read(directory: Path) -> TrainState:
    """Verify one checkpoint and return its state, raising one of `files.BROKEN`."""
    document = _document(directory)
    document.verify(directory)
    return document.state


def _document(directory: Path) -> Document:
    return Document.decode((directory / DOCUMENT).read_text(encoding="utf-8"))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
