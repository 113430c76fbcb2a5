"""A disk that a test can fill: a file system in memory, which only root can mount."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


class SmallDisk:
    """A mounted disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self) -> None:
        """Leave no space."""
        with suppress(OSError), (self.path / "filler").open("ab", buffering=0) as file:
            for n_block in (1 << 16, 1):
                with suppress(OSError):
                    while file.write(bytes(n_block)) == n_block:
                        pass

    def free(self) -> None:
        """Remove what `fill` wrote."""
        (self.path / "filler").unlink()


@contextmanager
def small_disk(path: Path, n_bytes: int) -> Iterator[SmallDisk]:
    """Mount a disk of this size at `path`, which is created; skip the test without root."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={n_bytes}", "rlboost-test", str(path)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("only root can mount a disk")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
