"""What a checkpoint is, wherever it lies: the engine's files, and a document that says where the job stands.

The document names each file with its length and digest, and is written last: without it there is no checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from blake3 import blake3

from services.trainer.ports import TrainState
from shared.errors import Corrupt
from shared.ids import new_token

KEPT = 2
"""How many checkpoints a job has: should the newest turn out broken, there is the one before."""
PREFIX = "step-"
BROKEN = (OSError, ValueError, KeyError, TypeError, AttributeError)
"""What reading a checkpoint that is none may raise."""
_FORMAT = 1


def name_of(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"{PREFIX}{step:06d}"


def step_of(name: str) -> int:
    """Return the step of a checkpoint by its name, -1 where that is none."""
    digits = name.removeprefix(PREFIX)
    return int(digits) if digits.isdigit() else -1


def own_name(step: int) -> str:
    """Return a name for files of a step's checkpoint that are on their way; nobody else has it."""
    return f"{name_of(step)}-{new_token()}"


def is_left_over(name: str, step: int) -> bool:
    """Tell whether what `own_name` has named may be removed when a step's checkpoint is kept.

    That of an earlier step may. What is of this step or a later one, a trainer may be writing at this moment: one that
    was thought dead, or its successor.
    """
    return step_of(name.rpartition("-")[0]) < step


def none_is_whole(place: str, names: Sequence[str]) -> Corrupt:
    """Return the error for a place with checkpoints none of which verifies."""
    return Corrupt(
        f"no checkpoint in {place} is whole ({', '.join(names)}; the trainer's log says what is wrong), and samples of "
        "the steps before them may be gone: put one back from a copy, or start a new job, which may name any other "
        "checkpoint in trainer.resume"
    )


class FileDigest(NamedTuple):
    """What a file must be."""

    digest: str
    """blake3, as hexadecimal digits."""
    n_bytes: int

    @classmethod
    def of(cls, file: Path) -> Self:
        """Return that of a file as it is."""
        return cls(blake3(max_threads=1).update_mmap(file).hexdigest(), file.stat().st_size)


@dataclass(frozen=True, slots=True)
class Document:
    """What makes files a checkpoint."""

    state: TrainState
    files: Mapping[str, FileDigest]
    """By name; there are no folders."""
    folder: str = ""
    """Where the files are, for a store that has them elsewhere."""

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
        """Read it, raising one of `BROKEN`. Before there were lengths, a file's digest stood alone."""
        body = json.loads(text)
        if body["format"] != _FORMAT:
            raise ValueError(f"format {body['format']} is not {_FORMAT}")
        files = {
            name: FileDigest(entry, -1) if isinstance(entry, str) else FileDigest(*entry)
            for name, entry in body["files"].items()
        }
        return cls(TrainState(**body["state"]), files, body.get("folder", ""))

    def verify(self, directory: Path) -> None:
        """Make sure that the files of a directory are these, raising one of `BROKEN`."""
        for name, expected in self.files.items():
            if FileDigest.of(directory / name).digest != expected.digest:
                raise ValueError(f"{name} is not what was written")
