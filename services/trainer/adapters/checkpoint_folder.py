"""Checkpoints as directories `step-000010` in a local folder, and their format, which any kind of store shares."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import structlog
from blake3 import blake3

from rlboost.services.trainer.ports.engine import Snapshot
from rlboost.services.trainer.ports.storage import TrainState
from rlboost.shared.errors import Corrupt
from rlboost.shared.files import sync_path, write_error
from rlboost.shared.ids import new_token

log = structlog.get_logger(__name__)

# --- Format of a checkpoint, in any kind of store: the engine's files, and a manifest with the training state ---------
# The manifest lists each file with its length and digest. It is written last: without it there is no checkpoint.


N_RETAINED = 2
"""Checkpoints that a job retains: if the newest does not verify, there is the one before."""
PREFIX = "step-"
CRITIC_PREFIX = "critic-"
"""Prefix of the names of a critic's files."""
CORRUPT_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError)
"""Errors that reading an invalid checkpoint raises."""
_FORMAT = 1


def name_of(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"{PREFIX}{step:06d}"


def step_of(name: str) -> int:
    """Return the step of a checkpoint by its name, -1 if it is not a checkpoint's name."""
    digits = name.removeprefix(PREFIX)
    return int(digits) if digits.isdigit() else -1


def unique_name(step: int) -> str:
    """Return a unique name for the temporary files of a step's checkpoint."""
    return f"{name_of(step)}-{new_token()}"


def is_stale(name: str, step: int) -> bool:
    """Return True if files of this unique name may be removed when `step` is saved: those of earlier steps.

    Files of the same or a later step may be in use, by a trainer that was presumed dead or by its successor.
    """
    return step_of(name.rpartition("-")[0]) < step


def no_valid_checkpoint(place: str, names: Sequence[str]) -> Corrupt:
    """Return the error for a store that has checkpoints, but none that verifies."""
    return Corrupt(
        f"no checkpoint in {place} verifies ({', '.join(names)}; see the trainer's log), and samples of earlier steps "
        "may have been removed: restore one from a backup, or start a new job, which may name any other checkpoint in "
        "trainer.resume"
    )


class FileDigest(NamedTuple):
    """A file's expected content."""

    digest: str
    """blake3, as hexadecimal digits."""
    n_bytes: int

    @classmethod
    def of(cls, file: Path) -> Self:
        """Compute the digest of a file."""
        return cls(blake3(max_threads=1).update_mmap(file).hexdigest(), file.stat().st_size)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Training state, and the files that belong to it."""

    state: TrainState
    files: Mapping[str, FileDigest]
    """Name -> digest of the file; there are no subdirectories."""
    folder: str = ""
    """Folder of the files, if the store has them apart from the manifest."""

    @classmethod
    def of(cls, directory: Path, state: TrainState, folder: str = "") -> Self:
        """Describe the files of a directory."""
        return cls(state, {file.name: FileDigest.of(file) for file in sorted(directory.iterdir())}, folder)

    def encode(self) -> str:
        """Return it as JSON."""
        body: dict[str, Any] = {"format": _FORMAT, "state": asdict(self.state), "folder": self.folder}
        return json.dumps({**body, "files": self.files}, indent=1)

    @classmethod
    def decode(cls, text: str | bytes) -> Self:
        """Parse a manifest, raising one of `CORRUPT_ERRORS`."""
        body = json.loads(text)
        if body["format"] != _FORMAT:
            raise ValueError(f"format {body['format']} is not {_FORMAT}")
        files = {name: FileDigest(*entry) for name, entry in body["files"].items()}
        return cls(TrainState(**body["state"]), files, body["folder"])

    def verify(self, directory: Path) -> None:
        """Check the files in a directory against their digests, raising one of `CORRUPT_ERRORS`."""
        for name, expected in self.files.items():
            if FileDigest.of(directory / name).digest != expected.digest:
                raise ValueError(f"{name} has another digest than when it was written")


# --- Checkpoints as directories `step-000010` in a local folder -------------------------------------------------------
# Each is written under another name, flushed to disk and then renamed, so a directory of that name is complete.


MANIFEST_FILE = "state.json"
_TEMPORARY = "unfinished-"


class CheckpointFolder:
    """`CheckpointStore` in one local folder."""

    def __init__(self, folder: Path) -> None:
        """Use `folder`, which is created by the first `save`."""
        self._folder = folder

    def save(self, state: TrainState, write: Snapshot) -> None:
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
