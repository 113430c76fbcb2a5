"""Another release of this tree, for tests of upgrades: its messages have one field more, and maybe another protocol."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgpack

from rlboost.shared.messages import Message, codec
from rlboost.shared.messages.codec import PROTOCOL

ROOT = Path(__file__).parents[2]
ADDED = "added_by_the_next_release"
_LAST_OF_BASE = '    tag: ClassVar[str] = ""\n'


def environment(root: Path = ROOT) -> Mapping[str, str]:
    """Return the variables with which a process runs the release in a folder."""
    return {"PYTHONPATH": str(root), "PYTHONSAFEPATH": "1"}


def next_release(root: Path, *, protocol: int = PROTOCOL) -> Mapping[str, str]:
    """Make a copy of this release in a new folder, and return the variables that run it."""
    for package in ("services", "shared", "rlboost", "examples", "recipes"):
        shutil.copytree(ROOT / package, root / package, symlinks=True)
    _replace(root / "shared/messages/codec.py", _LAST_OF_BASE, f"{_LAST_OF_BASE}    {ADDED}: int = 7\n")
    _replace(root / "shared/messages/codec.py", f"\nPROTOCOL = {PROTOCOL}\n", f"\nPROTOCOL = {protocol}\n")
    return environment(root)


def encode_as_next_release(message: Message) -> bytes:
    """Return a message's bytes as the next release encodes it."""
    fields: dict[str, Any] = {**codec.fields_of(codec.encode(message)), ADDED: 7}
    packed: bytes = msgpack.packb(fields, use_bin_type=True)
    return packed


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{path}: {old!r}"
    path.write_text(text.replace(old, new))
