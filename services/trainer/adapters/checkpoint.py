"""Checkpoints as directories `step-000010`: written aside, flushed to disk, then renamed, so that each is whole."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import structlog
from blake3 import blake3

from services.trainer.ports import TrainState
from shared.errors import Fatal

log = structlog.get_logger(__name__)

KEPT = 2
_STATE = "state.json"
_PREFIX, _UNFINISHED = "step-", "unfinished-"
_FORMAT = 1


class CheckpointFolder:
    """`CheckpointStore` in one local folder."""

    def __init__(self, folder: Path) -> None:
        """Use `folder`, which need not be there yet."""
        self._folder = folder

    def save(self, state: TrainState, write: Callable[[Path], None]) -> None:
        """See `CheckpointStore.save`."""
        name = f"{_PREFIX}{state.step:06d}"
        aside, final = self._folder / f"{_UNFINISHED}{name}", self._folder / name
        try:
            self._clear()
            aside.mkdir(parents=True)
            write(aside)
            files = {file.name: _digest(file) for file in sorted(aside.iterdir())}
            body = {"format": _FORMAT, "state": asdict(state), "files": files}
            (aside / _STATE).write_text(json.dumps(body, indent=1), encoding="utf-8")
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
                return _read(directory, verify=True), directory
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.warning("checkpoint_broken", directory=str(directory), reason=str(error) or repr(error))
        return None

    def fallback(self) -> TrainState | None:
        """See `CheckpointStore.fallback`."""
        directories = self._directories()
        if len(directories) < KEPT:
            return None
        try:
            return _read(directories[-1], verify=False)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _directories(self) -> list[Path]:
        """Return the finished checkpoints, newest first."""
        return sorted(self._folder.glob(f"{_PREFIX}*"), key=_step_of, reverse=True)

    def _remove(self, directory: Path) -> None:
        if directory.exists():
            # Renamed first: what is half removed must not look like a checkpoint.
            going = directory.rename(self._folder / f"{_UNFINISHED}{directory.name}-old")
            shutil.rmtree(going)

    def _clear(self) -> None:
        for left in self._folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(left)


def _read(directory: Path, *, verify: bool) -> TrainState:
    body: dict[str, Any] = json.loads((directory / _STATE).read_text(encoding="utf-8"))
    if body["format"] != _FORMAT:
        raise ValueError(f"format {body['format']} is not {_FORMAT}")
    if verify:
        for name, digest in body["files"].items():
            if _digest(directory / name) != digest:
                raise ValueError(f"{name} is not what was written")
    return TrainState(**body["state"])


def _digest(file: Path) -> str:
    hasher = blake3(max_threads=1)
    return hasher.update_mmap(file).hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _step_of(directory: Path) -> int:
    digits = directory.name.removeprefix(_PREFIX)
    return int(digits) if digits.isdigit() else -1
