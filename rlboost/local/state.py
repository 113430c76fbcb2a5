"""The state folder: how the command line finds a running system, and what remains of a dead one.

    config.json      {url, token, redis_url, state_dir, pid}
    processes.json   all processes, replaced atomically at each change
    devices.json     GPUs of the trainer and of engines, which jobs are checked against; null without GPUs
    ports.json       ports by process name, which the next system takes again if they are free
    token            the system's token, which the next system uses again
    join-token       likewise the token of its workers
    lock             held by the supervisor while it lives; contains its process id
    end              when and why the last supervisor ended; its disk blocks are allocated in advance
    logs/            one file per process
    drained/         one empty file per drained worker, which is not restarted

Files with secrets are readable by their owner only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlboost.local.layout import DeviceSummary
from rlboost.shared.errors import ConfigError
from rlboost.shared.files import replace_file
from rlboost.shared.secrets import clean_secret

_LOCK_PATIENCE_S = 1.0
"""A command that checks whether a system runs holds the lock for microseconds."""
_END_BYTES = 4096


@dataclass(frozen=True)
class Config:
    """Connection data of a system."""

    url: str
    token: str
    redis_url: str
    state_dir: str
    pid: int
    """Process id of the supervisor."""

    def public(self) -> dict[str, str]:
        """Return the fields that `rlboost up --json` prints."""
        return {"url": self.url, "token": self.token, "redis_url": self.redis_url, "state_dir": self.state_dir}


@dataclass(frozen=True)
class ProcessRecord:
    """Record of one process; `started_at` is RFC 3339."""

    name: str
    role: str
    pid: int
    started_at: str
    restarts: int
    alive: bool
    note: str = ""
    """Why it is not running."""
    gpus: str = ""
    """Indexes of its GPUs, such as `0,1`; empty without GPUs."""


@dataclass(frozen=True)
class End:
    """How the last system of a state folder ended; `at` is Unix seconds, None if it recorded nothing."""

    at: float | None
    reason: str
    """Empty after a normal stop."""

    def __str__(self) -> str:
        if self.at is None:
            return "ended and left no reason: its supervisor was killed, or the machine restarted"
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.at))
        return f"ended at {at}: {self.reason}" if self.reason else f"was stopped at {at}"


class StateDir:
    """A state folder."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.last_token = ""
        """Of the last system, if it left one in addition to its file; known to the owner."""
        self.warnings: list[str] = []
        """What was lost or repaired at the start."""
        self.was_stopped = False
        """Whether the last system was stopped in order; known to the owner."""

    def log_of(self, name: str) -> Path:
        """Return a process's log file."""
        return self.path / "logs" / f"{name}.log"

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Own the folder as its only supervisor.

        Raises:
            ConfigError: another supervisor owns it, or the folder cannot be created.

        """
        try:
            for folder in (self.path, self.path / "logs", self.path / "drained"):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.chmod(0o700)  # it may be older; weights, runs and Redis's files in it are readable by all
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"state folder {self.path}: {error.strerror}; name another with --state") from error
        try:
            self._lock(descriptor)
            self._read_last()
            os.truncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
            self._forget()
            self._allocate_end()
            yield
        finally:
            os.close(descriptor)

    def _read_last(self) -> None:
        with contextlib.suppress(ConfigError):
            config = self.config()
            self.last_token = config.token if config else ""
        with contextlib.suppress(OSError, ValueError):
            end = json.loads((self.path / "end").read_bytes().rstrip(b"\0"))
            self.was_stopped = end.get("reason") == ""

    def _lock(self, descriptor: int) -> None:
        limit = time.monotonic() + _LOCK_PATIENCE_S
        while not _try_lock(descriptor):
            if time.monotonic() > limit:
                raise self._in_use()
            time.sleep(0.02)

    def require_free(self) -> None:
        """Check early that the folder can be owned.

        Raises:
            ConfigError: another supervisor owns it.

        """
        if self.running():
            raise self._in_use()

    def _in_use(self) -> ConfigError:
        config = self.config()
        where = f"at {config.url}" if config else "and is starting"
        return ConfigError(
            f"a system already runs in {self.path} {where} (supervisor {self.supervisor()}): "
            f"use it, stop it with 'rlboost down --state {self.path}', or name another folder with --state"
        )

    def _forget(self) -> None:
        """Remove the records of an earlier supervisor; the data of its processes stays."""
        for record in (
            self.path / "config.json",
            self.path / "devices.json",
            self.path / "processes.json",
            *(self.path / "drained").iterdir(),
        ):
            record.unlink(missing_ok=True)

    def _allocate_end(self) -> None:
        """Allocate the record of the end, so that it can be overwritten when the disk is full.

        Raises:
            ConfigError: the disk is full now.

        """
        try:
            self._overwrite_end(b"")
        except OSError as error:
            raise ConfigError(f"state folder {self.path}: {error.strerror}; free some space or name another") from error

    def _overwrite_end(self, content: bytes) -> None:
        descriptor = os.open(self.path / "end", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(descriptor, content.ljust(_END_BYTES, b"\0"), 0)
        finally:
            os.close(descriptor)

    def write_end(self, reason: str) -> None:
        """Record the end of the system and its reason, empty for a normal stop, as far as the disk permits."""
        content = json.dumps({"at": time.time(), "reason": reason[: _END_BYTES // 16]}).encode()
        with contextlib.suppress(OSError):  # there is no other place to report it to
            self._overwrite_end(content)

    def end(self) -> End | None:
        """Return how the last system ended; None if one runs or none ran."""
        try:
            content = (self.path / "end").read_bytes().rstrip(b"\0")
        except OSError:
            return None
        if self.running():
            return None
        try:
            return End(**json.loads(content))
        except (ValueError, TypeError):
            return End(None, "")

    def running(self) -> bool:
        """Return True if a supervisor lives; the kernel releases its lock when it dies."""
        try:
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            return not _try_lock(descriptor)
        finally:
            os.close(descriptor)

    def supervisor(self) -> int:
        """Return the process id of the current or last supervisor, 0 if there was none."""
        try:
            return int((self.path / "lock").read_text(encoding="ascii") or 0)
        except FileNotFoundError:
            return 0

    def started_in(self) -> Path | None:
        """Return the working folder of the supervisor, from which its processes resolve files and modules.

        None if unknown.
        """
        try:
            return Path(f"/proc/{self.supervisor()}/cwd").readlink()
        except OSError:
            return None

    def write_config(self, config: Config) -> None:
        """Write the connection data."""
        self.write("config.json", json.dumps(asdict(config), indent=2) + "\n")

    def config(self) -> Config | None:
        """Return the connection data of the current or last system, None if there is none."""
        raw = self._read("config.json")
        try:
            return None if raw is None else Config(**raw)
        except TypeError as error:
            raise ConfigError(f"{self.path / 'config.json'} is of another release ({error}): remove it") from error

    def system_token(self, given: str | None) -> str:
        """Return the system's token: the given one, that of the last system in this folder, or a new one.

        The folder's jobs continue only under the token that their commands are signed with.

        Raises:
            ConfigError: the folder's file is damaged, and no token is given.

        """
        return self._secret("token", given)

    def join_token(self) -> str:
        """Return the token that the local workers join with: that of the last system in this folder, or a new one."""
        return self._secret("join-token", None)

    def _secret(self, name: str, given: str | None) -> str:
        file = self.path / name
        known = self.last_token if name == "token" else ""
        stored = self._stored_secret(file) or known
        secret = clean_secret("RLBOOST_TOKEN", given or "") or stored
        if name == "token" and stored and secret != stored:
            self.warnings.append(
                "RLBOOST_TOKEN is not the token of this folder's last system, whose unfinished jobs do not continue, "
                "not even under the last token again: cancel them, and go on from a checkpoint with trainer.resume"
            )
        if not secret:
            if name == "token" and file.exists():
                self.warnings.append(
                    f"{file} was empty, as a power failure leaves it: the system has a new token, under which "
                    "unfinished jobs of this folder do not continue"
                )
            secret = secrets.token_urlsafe(24)
        self.write(name, f"{secret}\n")
        return secret

    def _stored_secret(self, file: Path) -> str:
        """Return the secret in a file; empty if there is no file, or a power failure has left it empty."""
        try:
            # A file system may restore the length of a file without its blocks.
            return clean_secret(str(file), file.read_bytes().rstrip(b"\0").decode("latin-1"))
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}; remove it, or make it readable") from error

    def write_ports(self, ports: Mapping[str, int]) -> None:
        """Write the ports by process name, for the next system in this folder."""
        self.write("ports.json", json.dumps(dict(ports), indent=2) + "\n")

    def ports(self) -> dict[str, int]:
        """Return the ports of the current or last system by process name."""
        try:
            return {str(name): int(port) for name, port in dict(self._read("ports.json") or {}).items()}
        except (ConfigError, ValueError, TypeError, AttributeError):  # other ports do as well
            return {}

    def write_devices(self, devices: DeviceSummary | None) -> None:
        """Write what a job must know of the system's GPUs; None if it uses none."""
        self.write("devices.json", json.dumps(devices and asdict(devices), indent=2) + "\n")

    def devices(self) -> DeviceSummary | None:
        """Return what a job must know of the running system's GPUs, None if none runs or it uses none."""
        raw = self._read("devices.json") if self.running() else None
        return None if raw is None else DeviceSummary(**raw)

    def write_processes(self, records: Sequence[ProcessRecord]) -> None:
        """Write the process records."""
        self.write("processes.json", json.dumps([asdict(record) for record in records], indent=2) + "\n")

    def processes(self) -> list[ProcessRecord]:
        """Return the running processes: none without a living supervisor, as they die with it."""
        records = [ProcessRecord(**raw) for raw in self._read("processes.json") or []]
        if self.running():
            return records
        return [replace(record, alive=False, note=record.note or "the supervisor is gone") for record in records]

    def set_drained(self, name: str, drained: bool) -> None:
        """Mark a worker as drained, before it exits, or clear the mark."""
        marker = self.path / "drained" / name
        if drained:
            marker.touch(mode=0o600)
        else:
            marker.unlink(missing_ok=True)

    def drained(self, name: str) -> bool:
        """Return True if a worker was drained."""
        return (self.path / "drained" / name).exists()

    def write(self, name: str, text: str) -> None:
        """Replace a file atomically, readable by its owner only; it is on disk before its name is."""
        replace_file(self.path / name, text, sync=name != "processes.json", mode=0o600)

    def _read(self, name: str) -> Any:
        try:
            # After a power failure a file may be empty, or consist of zeros.
            text = (self.path / name).read_text(encoding="utf-8").strip("\0 \n")
            return json.loads(text) if text else None
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
