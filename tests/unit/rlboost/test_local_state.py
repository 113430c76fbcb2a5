from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from rlboost.local.state import Config, ProcessRecord, StateDir
from rlboost.local.supervisor import Backoff
from rlboost.shared.errors import ConfigError

RECORD = ProcessRecord("redis", "redis", 123, "2026-01-01T00:00:00.000+00:00", 0, alive=True)


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path / "deep" / "state")


def config(state: StateDir) -> Config:
    return Config("http://127.0.0.1:1", "token", "redis://x", str(state.path), 1)


def test_state_is_readable_while_the_supervisor_lives(state: StateDir) -> None:
    with state.owned():
        state.write_config(config(state))
        state.write_processes([RECORD])
        other = StateDir(state.path)
        assert other.running()
        assert other.config() == config(state)
        assert other.processes() == [RECORD]


def test_the_state_of_a_dead_supervisor_is_recognised(state: StateDir) -> None:
    with state.owned():
        state.write_config(config(state))
        state.write_processes([RECORD])
    assert not state.running()
    assert [(record.alive, record.note) for record in state.processes()] == [(False, "the supervisor is gone")]


def test_a_new_supervisor_removes_the_records_of_the_last(state: StateDir) -> None:
    with state.owned():
        state.write_config(config(state))
        state.set_drained("worker-1", True)
    with state.owned():
        assert state.config() is None
        assert state.processes() == []
        assert not state.drained("worker-1")


def test_the_end_of_a_system_overwrites_blocks_that_are_allocated(state: StateDir) -> None:
    """So that it can be recorded on a full disk."""
    with state.owned():
        before = (state.path / "end").stat()
        assert before.st_blocks * 512 >= before.st_size > 0
        state.write_end("x" * 100_000)
        assert (state.path / "end").stat().st_size == before.st_size
        assert state.end() is None
    end = state.end()
    assert end is not None
    assert set(end.reason) == {"x"}


def test_a_second_supervisor_is_refused_naming_the_first(state: StateDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlboost.local.state._LOCK_PATIENCE_S", 0.05)
    with state.owned():
        state.write_config(config(state))
        with pytest.raises(ConfigError, match=r"already runs in .* at http://127.0.0.1:1 .*rlboost down"):
            StateDir(state.path).owned().__enter__()
        assert state.running()


def test_a_folder_that_never_was_has_no_system(state: StateDir) -> None:
    assert not state.running()
    assert state.config() is None
    assert state.processes() == []


def test_only_the_owner_can_read_secrets(state: StateDir) -> None:
    with state.owned():
        state.write_config(config(state))
        assert stat.S_IMODE((state.path / "config.json").stat().st_mode) == 0o600
        assert stat.S_IMODE(state.path.stat().st_mode) == 0o700
        assert not list(state.path.glob(".config.json*"))


def test_next_system_of_a_folder_has_the_same_token(state: StateDir) -> None:
    with state.owned():
        first = state.system_token(None)
    with state.owned():
        assert state.system_token(None) == first
        assert not state.warnings
        assert state.system_token("given") == "given"
        assert "whose unfinished jobs do not continue" in state.warnings.pop()
    with state.owned():
        assert state.system_token(None) == "given"
    assert len(first) >= 24
    assert state.join_token() == state.join_token() != first
    assert stat.S_IMODE((state.path / "join-token").stat().st_mode) == 0o600
    assert stat.S_IMODE((state.path / "token").stat().st_mode) == 0o600


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/state.*--state"):
        StateDir(tmp_path / "file" / "state").owned().__enter__()


def test_a_garbled_file_is_named(state: StateDir) -> None:
    with state.owned():
        state.write("config.json", "{")
        with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
            state.config()


def test_the_wait_doubles_to_its_limit() -> None:
    backoff = Backoff()
    assert [backoff.after(0.1) for _ in range(7)] == [0.5, 1, 2, 4, 8, 10, 10]


def test_a_long_life_resets_the_wait() -> None:
    backoff = Backoff()
    for _ in range(50):
        backoff.after(29.9)
    assert backoff.is_loop
    assert (backoff.after(30.0), backoff.is_loop) == (0.5, False)
    assert backoff.after(1.0) == 1.0


def test_many_short_lives_in_a_row_are_a_crash_loop() -> None:
    backoff = Backoff(most=3)
    loops = []
    for alive_s in (1.0, 1.0, 60.0, 1.0, 1.0):
        backoff.after(alive_s)
        loops.append(backoff.is_loop)
    assert loops == [False, False, False, False, True]


def test_older_state_folder_becomes_private(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o755)
    with StateDir(folder).owned():
        assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("content", ["", "\0" * 32, "\n", " \n"])
def test_empty_secret_is_taken_from_the_last_system_or_made_anew(content: str, state: StateDir) -> None:
    with state.owned():
        first = state.system_token(None)
        state.write_config(replace(config(state), token=first))
    (state.path / "token").write_text(content)
    (state.path / "join-token").write_text(content)
    with state.owned():
        assert state.system_token(None) == first
        assert len(state.join_token()) > 20
        assert state.warnings == []
    (state.path / "token").write_text(content)
    with state.owned():
        assert len(state.system_token(None)) > 20
        assert "the system has a new token" in state.warnings[0]


@pytest.mark.parametrize("content", ["", "\0\0", "{", "[1]", '{"redis": "x"}'])
def test_damaged_ports_are_ignored(content: str, state: StateDir) -> None:
    with state.owned():
        (state.path / "ports.json").write_text(content)
        assert state.ports() == {}
        for name in ("config.json", "devices.json", "processes.json"):
            (state.path / name).write_text("\0" * 9)
        assert (state.config(), state.devices(), state.processes()) == (None, None, [])


def test_secret_files_are_on_disk_before_their_name(state: StateDir, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bool] = []
    monkeypatch.setattr("rlboost.local.state.replace_file", lambda *_, sync, **_options: synced.append(sync))
    with state.owned():
        state.system_token(None)
        state.write_config(config(state))
        state.write_ports({})
    assert synced == [True, True, True]


def test_orderly_stop_is_known_to_the_next_owner(state: StateDir) -> None:
    with state.owned():
        state.write_end("")
    with state.owned():
        assert state.was_stopped
    with StateDir(state.path).owned():
        pass
    with (after_a_crash := StateDir(state.path)).owned():
        assert not after_a_crash.was_stopped
