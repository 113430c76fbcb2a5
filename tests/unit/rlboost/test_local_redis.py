"""The local system's Redis: which program, its configuration, and the repair of its file after a power failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlboost.local import redis_server
from rlboost.local.redis_server import Program, configure, find, repair
from rlboost.local.state import StateDir
from rlboost.shared.errors import ConfigError


def command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


SELECT = command(b"SELECT", b"0")
COMMANDS = SELECT + command(b"SET", b"a", b"\0\r\n*3\r\n") + command(b"XADD", b"s", b"*", b"m", b"\0" * 5000)
SNAPSHOT = b"REDIS0009" + b"\xfa data" + b"\xff" + b"checksu\0"


@pytest.mark.parametrize("layout", ["6.2", "7"])
@pytest.mark.parametrize("start", [b"", SNAPSHOT])
@pytest.mark.parametrize(
    "tail",
    [
        b"",
        b"\0" * 4096,
        b"\0",
        b"\0" * (3 << 20),
        command(b"SET", b"b", b"x" * 99)[:-7],
        command(b"SET", b"b", b"x" * 99)[:60] + b"\0" * 4096,
        b"*3\r\n$3\r\nSET\r\n$1\r\nb\r\n$50\r\n" + b"\0" * 4096,
        b"*",
        b"*3\r",
        b"*3\r\n",
        b"*3\r\n$",
        b"*3\r\n" + b"\0" * 7,
    ],
)
def test_repair_cuts_after_the_last_whole_command(tail: bytes, start: bytes, layout: str, tmp_path: Path) -> None:
    file = aof(tmp_path, layout)
    file.write_bytes(start + COMMANDS + tail)
    text = repair(tmp_path)
    assert file.read_bytes() == start + COMMANDS
    copies = list(tmp_path.glob("*.damaged-*"))
    assert [copy.read_bytes() for copy in copies] == ([start + COMMANDS + tail] if tail else [])
    assert (f"the last {len(tail)} bytes" in text) is bool(tail)
    assert repair(tmp_path) == ""


@pytest.mark.parametrize("zeros", [0, 1, 4096])
def test_repair_keeps_a_whole_snapshot_whose_checksum_ends_with_zeros(zeros: int, tmp_path: Path) -> None:
    file = aof(tmp_path, "6.2")
    file.write_bytes(SNAPSHOT + b"\0" * zeros)
    repair(tmp_path)
    assert file.read_bytes() == SNAPSHOT


@pytest.mark.parametrize("damage", [b"\0" * 512, b"garbage\r\n", b"*x\r\n", b"*1\r\n$3\r\nPINGPONG\r\n", b"\r\n"])
def test_repair_refuses_damage_before_other_commands(damage: bytes, tmp_path: Path) -> None:
    file = aof(tmp_path, "6.2")
    content = COMMANDS + damage + COMMANDS
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"is damaged at byte {len(COMMANDS)} of {len(content)}.*truncate --size"):
        repair(tmp_path)
    assert file.read_bytes() == content


def test_repair_leaves_missing_and_empty_files(tmp_path: Path) -> None:
    assert repair(tmp_path) == ""
    aof(tmp_path, "6.2").touch()
    assert repair(tmp_path) == ""


def test_repair_names_an_empty_manifest(tmp_path: Path) -> None:
    aof(tmp_path, "7")
    (tmp_path / "appendonlydir" / "appendonly.aof.manifest").write_text("")
    with pytest.raises(ConfigError, match="manifest is empty, as a power failure leaves it"):
        repair(tmp_path)


def aof(folder: Path, layout: str) -> Path:
    if layout == "6.2":
        return folder / "appendonly.aof"
    parts = folder / "appendonlydir"
    parts.mkdir()
    (parts / "appendonly.aof.manifest").write_text(
        "file appendonly.aof.1.base.rdb seq 1 type b\n"
        "file appendonly.aof.1.incr.aof seq 1 type h\nfile appendonly.aof.2.incr.aof seq 2 type i\n"
    )
    return parts / "appendonly.aof.2.incr.aof"


def program(folder: Path, version: str) -> Path:
    folder.mkdir()
    path = folder / "redis-server"
    path.write_text(f"#!/bin/sh\necho 'Redis server v={version} sha=0 bits=64'\n")
    path.chmod(0o755)
    return path


def test_newest_redis_is_taken_wherever_it_is_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "venv", "6.2.14")
    system = program(tmp_path / "usr", "7.0.15")
    program(tmp_path / "old", "2.8.4")
    monkeypatch.setenv(
        "PATH", ":".join(str(tmp_path / name) for name in ("venv", "none", "usr", "old")) + ":/bin:/usr/bin"
    )
    assert find() == Program(system, (7, 0))
    program(tmp_path / "new", "10.1.0")
    monkeypatch.setenv("PATH", f"{tmp_path / 'usr'}:{tmp_path / 'new'}:/bin:/usr/bin")
    assert find().version == (10, 1)


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.5", "fd00::5"])
def test_old_redis_is_warned_of_where_other_machines_join(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_server, "find", lambda: Program(Path("/venv/redis-server"), (6, 2)))
    state = StateDir(tmp_path / 'a"b\\c\nd é')
    state.path.mkdir()
    _, url = configure(state, 6379, host)
    assert [text for text in state.warnings if "before Redis 7" in text] == state.warnings
    assert bool(state.warnings) is (host != "127.0.0.1")
    assert url.endswith("@[fd00::5]:6379/0" if ":" in host else f"@{host}:6379/0")
    text = (state.path / "redis.conf").read_text()
    assert r'a\x22b\x5cc\x0ad \xc3\xa9/redis"' in text
    assert "maxmemory-policy noeviction\n" in text


def test_data_of_redis_7_is_not_started_with_an_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server, "find", lambda: Program(Path("/venv/redis-server"), (6, 2)))
    (tmp_path / "redis" / "appendonlydir").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"written by Redis 7 or newer, which /venv/redis-server \(Redis 6.2\)"):
        configure(StateDir(tmp_path), 6379)
