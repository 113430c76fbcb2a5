"""Checkpoints as directories `step-000010`: written aside, flushed to disk, then renamed, so that each is whole."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import structlog

from services.trainer.adapters.checkpoint_files import BROKEN, KEPT, PREFIX, Document, name_of, step_of
from services.trainer.ports import Snapshot, TrainState
from shared.errors import Fatal
from shared.ids import new_token

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
        name = name_of(state.step)
        # A name of its own: a trainer that was thought dead may still be writing.
        aside, final = self._folder / f"{_UNFINISHED}{name}-{new_token()}", self._folder / name
        try:
            self._clear()
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
        for directory in self._directories():
            try:
                return read(directory), directory
            except BROKEN as error:
                log.warning("checkpoint_broken", directory=str(directory), reason=str(error) or repr(error))
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
            going = directory.rename(self._folder / f"{_UNFINISHED}{directory.name}-{new_token()}")
            shutil.rmtree(going)

    def _clear(self) -> None:
        for left in self._folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(left, ignore_errors=True)


def read(directory: Path) -> TrainState:
    """Verify one checkpoint and return its state, raising one of `checkpoint_files.BROKEN`."""
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
