"""The state folder: where a running system is found by the command line, and what is left of one that has died.

    config.json      {url, token, redis_url, state_dir, pid}
    processes.json   what runs, replaced atomically at each change
    lock             held by the supervisor for as long as it lives; its process id
    logs/            one file a process
    drained/         one empty file a worker that was drained and stays away

Files that hold secrets are readable by their owner only.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shared.errors import ConfigError

_LOCK_PATIENCE_S = 1.0
"""Another command that only looks whether a system runs holds the lock for microseconds."""


@dataclass(frozen=True)
class Config:
    """Where a system is and how to get in."""

    url: str
    token: str
    redis_url: str
    state_dir: str
    pid: int
    """Of the supervisor."""

    def public(self) -> dict[str, str]:
        """Return what `rlboost up --json` prints."""
        return {"url": self.url, "token": self.token, "redis_url": self.redis_url, "state_dir": self.state_dir}


@dataclass(frozen=True)
class ProcessRecord:
    """What is known of one process; `started_at` is RFC 3339."""

    name: str
    role: str
    pid: int
    started_at: str
    restarts: int
    alive: bool
    note: str = ""
    """Why it is not alive."""


class StateDir:
    """One state folder."""

    def __init__(self, path: Path) -> None:
        """Name the folder; nothing is created yet."""
        self.path = path.absolute()

    def log_of(self, name: str) -> Path:
        """Return a process's log file."""
        return self.path / "logs" / f"{name}.log"

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Own the folder, as the one supervisor.

        Raises:
            ConfigError: another supervisor runs on it, or the folder cannot be made.

        """
        try:
            for folder in (self.path, self.path / "logs", self.path / "drained"):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"state folder {self.path}: {error.strerror}; name another with --state") from error
        try:
            self._lock(descriptor)
            os.truncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
            self._forget()
            yield
        finally:
            os.close(descriptor)

    def _lock(self, descriptor: int) -> None:
        limit = time.monotonic() + _LOCK_PATIENCE_S
        while not _try_lock(descriptor):
            if time.monotonic() > limit:
                raise self._in_use()
            time.sleep(0.02)

    def require_free(self) -> None:
        """Find out at once what `owned` would find out.

        Raises:
            ConfigError: another supervisor runs on the folder.

        """
        if self.running():
            raise self._in_use()

    def _in_use(self) -> ConfigError:
        config = self.config()
        where = f"at {config.url}" if config else "and is starting"
        return ConfigError(
            f"a system already runs in {self.path} {where} (supervisor {self.supervisor()}): "
            "use it, stop it with 'rlboost down', or name another folder with --state"
        )

    def _forget(self) -> None:
        """Remove what a supervisor before us has said; the data of its processes stays."""
        for said in (self.path / "config.json", self.path / "processes.json", *(self.path / "drained").iterdir()):
            said.unlink(missing_ok=True)

    def running(self) -> bool:
        """Tell whether a supervisor lives; a lock ends with its process, however that dies."""
        try:
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return not _try_lock(descriptor)
        finally:
            os.close(descriptor)

    def supervisor(self) -> int:
        """Return the process id of the supervisor that owns the folder, or did; 0 if there was none."""
        try:
            return int((self.path / "lock").read_text(encoding="ascii") or 0)
        except FileNotFoundError:
            return 0

    def started_in(self) -> Path | None:
        """Return the folder in which the supervisor was started: its processes look for files and modules from there.

        None where that cannot be told.
        """
        try:
            return Path(f"/proc/{self.supervisor()}/cwd").readlink()
        except OSError:
            return None

    def write_config(self, config: Config) -> None:
        """Publish where the system is."""
        self.write("config.json", json.dumps(asdict(config), indent=2) + "\n")

    def config(self) -> Config | None:
        """Return where the system is, or was; None when the folder has none."""
        raw = self._read("config.json")
        return None if raw is None else Config(**raw)

    def write_processes(self, records: Sequence[ProcessRecord]) -> None:
        """Publish what runs."""
        self.write("processes.json", json.dumps([asdict(record) for record in records], indent=2) + "\n")

    def processes(self) -> list[ProcessRecord]:
        """Return what runs. Without a living supervisor nothing does: its processes die with it."""
        records = [ProcessRecord(**raw) for raw in self._read("processes.json") or []]
        if self.running():
            return records
        return [replace(record, alive=False, note=record.note or "the supervisor is gone") for record in records]

    def set_drained(self, name: str, drained: bool) -> None:
        """Say whether a worker was asked to leave for good, before it leaves."""
        marker = self.path / "drained" / name
        if drained:
            marker.touch(mode=0o600)
        else:
            marker.unlink(missing_ok=True)

    def drained(self, name: str) -> bool:
        """Tell whether a worker was asked to leave for good."""
        return (self.path / "drained" / name).exists()

    def write(self, name: str, text: str) -> None:
        """Replace a file atomically; only its owner may read it."""
        target = self.path / name
        draft = target.with_name(f".{name}.{secrets.token_hex(4)}")
        draft.touch(mode=0o600)
        draft.write_text(text, encoding="utf-8")
        draft.replace(target)

    def _read(self, name: str) -> Any:
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.path / name} cannot be read ({error}): remove it") from error


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
