"""Files that are replaced whole, so that a reader sees the old content or the new one; locked folders; full disks."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from rlboost.shared.errors import ConfigError, DiskFull, Fatal

# --- Full disks, told apart from other errors of writing files --------------------------------------------------------


_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
_IN_TEXT = tuple(f"os error {number}" for number in _ERRNOS)
"""How errors of safetensors, which have no number, name the operating system's error."""


def is_full(error: BaseException) -> bool:
    """Return True if the error says that a disk, or a user's share of it, has no space left."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _ERRNOS
    return any(text in str(error) for text in _IN_TEXT)


def write_error(cause: BaseException, text: str) -> DiskFull | Fatal:
    """Return the error for a write that failed: whether the caller may wait for space, or must give up."""
    return (DiskFull if is_full(cause) else Fatal)(text)


# --- Atomic file replacement: a reader sees the old content or the new one, never a part of either --------------------
# The data goes to a temporary file on the same file system, which is then renamed over the target. With `sync` the data
# is on disk before the name is, so the file also survives a power failure. Errors of the file system are raised as
# `OSError`; the temporary file is removed in every case but a killed process.


_WRITE_BYTES = 64 << 10
"""Size of one write. Larger writes make the kernel allocate large pages, which it has to get back from the host of a
virtual machine with free page reporting: 2 to 3 processor seconds per GB instead of 0.4."""


def replace_file(
    path: Path, data: str | bytes | bytearray | memoryview, *, sync: bool = False, mode: int = 0o666
) -> None:
    """Replace the content of a file, or create it, in one step.

    Args:
        path: the file; its directory exists.
        data: the whole content; text is encoded as UTF-8.
        sync: flush the file before the rename and the directory after it.
        mode: permissions of the file, reduced by the umask.

    """
    content = data.encode() if isinstance(data, str) else data
    with temporary_file(path.parent, [content], prefix=f".{path.name}.", sync=sync, mode=mode) as temporary:
        temporary.replace(path)
    if sync:
        sync_path(path.parent)


@contextmanager
def temporary_file(
    directory: Path,
    blocks: Sequence[bytes | bytearray | memoryview],
    *,
    prefix: str = "",
    sync: bool = False,
    mode: int = 0o666,
    mtime_ns: int | None = None,
) -> Iterator[Path]:
    """Write a temporary file for the body to rename; if it is still there after the body, it is removed.

    Args:
        directory: where to put it; on the file system of the target.
        blocks: the content, one block after the other.
        prefix: what the file's name begins with; a random suffix makes the name unique.
        sync: flush the content to disk before the body runs.
        mode: permissions of the file, reduced by the umask.
        mtime_ns: the file's modification time; None for now.

    """
    temporary = directory / f"{prefix}{secrets.token_hex(8)}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            for block in blocks:
                data = memoryview(block)
                for start in range(0, len(data), _WRITE_BYTES):
                    file.write(data[start : start + _WRITE_BYTES])
            file.flush()
            if mtime_ns is not None:
                os.utime(file.fileno(), ns=(mtime_ns, mtime_ns))
            if sync:
                os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def append_line(file: FileIO, line: bytes) -> None:
    """Append a line whole or not at all."""
    before = file.seek(0, os.SEEK_END)
    try:
        written = file.write(line)
        if written < len(line):  # the disk is full: the rest says so
            file.write(line[written:])
    except OSError:
        file.truncate(before)
        raise


def sync_path(path: Path) -> None:
    """Flush a file's content, or a directory's entries where the file system can, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # of file systems that flush no directories
            raise
    finally:
        os.close(descriptor)


# --- An exclusive lock on a directory ---------------------------------------------------------------------------------


class DirectoryInUse(ConfigError):
    """Another process holds the lock."""


def lock_directory(directory: Path) -> FileIO:
    """Create a directory if needed and lock it until the returned file is closed or the process ends.

    Raises:
        ConfigError: it is not writable.
        DirectoryInUse: another process holds the lock.

    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = FileIO(directory / "lock", "w")
    except OSError as error:
        raise ConfigError(f"directory {directory}: {error.strerror}; set a directory that is writable") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise DirectoryInUse(
            f"directory {directory} is in use by another process: give each process its own directory"
        ) from error
    return lock
