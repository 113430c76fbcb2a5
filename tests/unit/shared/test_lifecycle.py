"""How a service's loops live and end, and what is told of waits (invariant 8)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from rlboost.shared.errors import ConfigError, Retryable, WaitTimedOut
from rlboost.shared.process import logs
from rlboost.shared.process.lifecycle import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_OK,
    LoopEnded,
    on_stop_signals,
    run_service,
    supervise,
)
from rlboost.shared.process.waiting import Waits
from rlboost.shared.settings import ServiceSettings
from tests.support.eventually import LIMIT_S, eventually


async def until_told(stop: asyncio.Event) -> None:
    await stop.wait()


async def at_once(_: asyncio.Event) -> None:
    pass


async def test_supervise_fails_if_a_loop_ends_before_the_stop() -> None:
    with pytest.raises(ExceptionGroup) as group:
        await supervise({"short": at_once, "long": until_told}, asyncio.Event())
    (error,) = group.value.exceptions
    assert isinstance(error, LoopEnded)
    assert "'short'" in str(error)


async def test_supervise_raises_the_error_of_a_loop() -> None:
    async def fail(_: asyncio.Event) -> None:
        raise Retryable("Redis is away")

    with pytest.raises(ExceptionGroup) as group:
        await supervise({"fail": fail, "long": until_told}, asyncio.Event())
    assert [str(error) for error in group.value.exceptions] == ["Redis is away"]


async def test_supervise_lets_loops_finish_after_the_stop() -> None:
    done = []

    async def finish(stop: asyncio.Event) -> None:
        await stop.wait()
        await asyncio.sleep(0)
        done.append("flushed")

    stop = asyncio.Event()
    stop.set()
    await supervise({"finish": finish}, stop)
    assert done == ["flushed"]


async def test_supervise_cancels_loops_after_the_grace_period() -> None:
    async def stubborn(_: asyncio.Event) -> None:
        await asyncio.Event().wait()

    stop = asyncio.Event()
    stop.set()
    async with asyncio.timeout(5):
        await supervise({"stubborn": stubborn}, stop, grace_s=0.01)


@pytest.mark.parametrize(
    ("error", "code"),
    [(None, EXIT_OK), (Retryable("it is away"), EXIT_FAILED), (ConfigError("PORT: mend it"), EXIT_CONFIG)],
)
def test_run_service_reports_expected_errors_in_one_line(
    error: Exception | None, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["a_service"])
    # It would bind every later test's log to this one's captured stderr.
    monkeypatch.setattr(logs, "configure", lambda *_, **__: None)

    async def main(_: ServiceSettings, stop: asyncio.Event) -> None:
        if error is not None:
            raise error

    assert run_service("a_service", ServiceSettings, main) == code
    assert capsys.readouterr().err == (f"a_service: {error}\n" if error else "")


@pytest.mark.parametrize("by_nohup", [False, True])
async def test_closed_terminal_stops_a_process_unless_nohup_started_it(*, by_nohup: bool) -> None:
    seen: list[signal.Signals] = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if by_nohup else signal.SIG_DFL)
    try:
        on_stop_signals(seen.append)
        for number in (signal.SIGHUP, signal.SIGTERM):
            os.kill(os.getpid(), number)
        await eventually(lambda: signal.SIGTERM in seen)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(signal.SIGHUP, before)
    assert (signal.SIGHUP in seen) is not by_nohup


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_second_stop_signal_while_the_process_ends_leaves_its_exit_code(number: signal.Signals) -> None:
    script = """
import atexit, signal, sys
from rlboost.shared.process import lifecycle
from rlboost.shared.settings import ServiceSettings

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup may have started the tests
lifecycle.loop_factory = lambda: None  # uvloop leaves its handlers until the interpreter removes them, after atexit

async def main(_, stop):
    print("runs", flush=True)
    await stop.wait()

def end():
    print("ends", flush=True)
    sys.stdin.readline()

atexit.register(end)
sys.argv = ["a_service"]
sys.exit(lifecycle.run_service("a_service", ServiceSettings, main))
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in ("runs\n", "ends\n"):
            assert process.stdout.readline() == line
            process.send_signal(number)
        process.stdin.write("\n")
        process.stdin.close()
        assert process.wait(LIMIT_S) == EXIT_OK


async def test_waits_lists_a_wait_and_ends_it_at_its_limit() -> None:
    waits = Waits()
    seen = []

    async def wait_for_ever() -> None:
        async with waits.on("Redis", because="a flush", limit_s=0.01):
            seen.extend(waits.current())
            await asyncio.Event().wait()

    with pytest.raises(WaitTimedOut, match=r"for Redis \(a flush\)"):
        await wait_for_ever()
    assert [wait.public().keys() for wait in seen] == [{"for", "because", "since", "limit_s", "kind"}]
    assert not waits.current()


async def test_waits_passes_on_other_timeouts() -> None:
    with pytest.raises(TimeoutError):
        async with Waits().on("Redis", because="a flush", limit_s=5):
            raise TimeoutError
