"""Runs a service: named loops in one task group, stopped by a signal, with an exit code.

A loop that ends before the stop is a failure, and a failure is a non-zero exit. When `stop` is set, each loop accepts
no new work, finishes what it has and returns; loops that still run after the grace period are cancelled.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import structlog

from rlboost.shared.errors import ConfigError, Fatal, RLBoostError, leaves
from rlboost.shared.process import logs
from rlboost.shared.process.logs import BUFFER
from rlboost.shared.process.system import protect_process_memory, raise_open_files_limit
from rlboost.shared.proxies import PROXY_VARIABLE, exclude_metadata
from rlboost.shared.secrets import clean_environment, secrets_of_environment
from rlboost.shared.settings import ServiceSettings, read
from rlboost.shared.tls import CA_VARIABLE
from rlboost.shared.variables import ignored

log = structlog.get_logger(__name__)

S = TypeVar("S", bound=ServiceSettings)

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
"""A setting is invalid: a restart without a change would fail again."""


class LoopEnded(Fatal):
    """A loop returned before the stop."""


class _Stop(asyncio.Event):
    """The stop event of a process, with its cause."""

    supervised = False
    """True once loops wait for the stop."""
    cause = ""

    def set_by(self, number: signal.Signals) -> None:
        """Stop because of a signal; the first one is the cause."""
        self.cause = self.cause or number.name.lower()
        self.set()


def on_stop_signals(handle: Callable[[signal.Signals], object]) -> None:
    """Have the running loop call `handle` at SIGTERM, SIGINT and SIGHUP.

    A terminal that closes sends SIGHUP; a process that was started by `nohup` ignores it.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, handle, number)


def _ignore_more_stops() -> None:
    """Ignore SIGTERM and SIGHUP from now on: once the loop is closed, a second one would be the exit code."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)


def stop_cause(stop: asyncio.Event) -> str:
    """Return the signal that stopped the process, such as `sigterm`; `stopped` if it was none."""
    return (stop.cause if isinstance(stop, _Stop) else "") or "stopped"


Loop = Callable[[asyncio.Event], Coroutine[Any, Any, None]]
"""A loop gets the stop event and returns only after it is set."""


async def supervise(loops: Mapping[str, Loop], stop: asyncio.Event, *, grace_s: float = 10.0) -> None:
    """Run the loops until `stop` is set, then let them finish within `grace_s`; a failure cancels all others.

    Args:
        loops: name -> loop; the names appear in logs and tracebacks.
        stop: set by a signal, or by a loop when the service's work is done.
        grace_s: seconds from the stop until remaining loops are cancelled.

    Raises:
        LoopEnded: a loop returned before the stop.
        ExceptionGroup: the errors of the failed loops.

    """

    async def guarded(name: str, loop: Loop) -> None:
        try:
            await loop(stop)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            is_expected = all(isinstance(leaf, RLBoostError) for leaf in leaves(error))  # the text says what to do
            log.exception("loop_failed", loop=name, error=str(error) or repr(error), exc_info=not is_expected)
            raise
        if not stop.is_set():
            raise LoopEnded(f"the loop {name!r} ended before the stop")

    async def cancel_after_grace() -> None:
        await stop.wait()
        await asyncio.sleep(grace_s)
        for name, task in tasks.items():
            if not task.done():
                log.warning("loop_cancelled_after_grace", loop=name, grace_s=grace_s)
                task.cancel()

    if isinstance(stop, _Stop):
        stop.supervised = True
    async with asyncio.TaskGroup() as group:
        tasks = {name: group.create_task(guarded(name, loop), name=name) for name, loop in loops.items()}
        reaper = asyncio.create_task(cancel_after_grace(), name="grace")
        try:
            await asyncio.wait(tasks.values())
        finally:
            reaper.cancel()


def run_service(name: str, settings: type[S], main: Callable[[S, asyncio.Event], Awaitable[None]]) -> int:
    """Read the settings and run `main(settings, stop)`, a stop signal setting `stop`; return the exit code.

    Expected errors (`RLBoostError`) become one line; unexpected ones keep their traceback.
    """
    protect_process_memory()  # the environment has the token
    raise_open_files_limit()
    try:
        clean_environment()
        config = read(settings)
    except ConfigError as error:
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        return EXIT_CONFIG
    secrets = [*config.secrets, *secrets_of_environment()]
    logs.configure(name, level=config.log_level, form=config.log_format, secrets=secrets)
    for problem in ignored(os.environ):
        log.warning("variable_ignored", problem=problem)
    # For child processes, too.
    os.environ.update({CA_VARIABLE: config.tls_ca} if config.tls_ca else {})
    os.environ.update({PROXY_VARIABLE: config.proxy} if config.proxy else {})
    exclude_metadata()

    async def body() -> None:
        stop = _Stop()
        on_stop_signals(stop.set_by)
        running = asyncio.ensure_future(main(config, stop))
        stopping = asyncio.create_task(stop.wait(), name="stop")
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not stop.supervised and not running.done():
            # Still starting: no loop waits for the stop yet.
            running.cancel()
        try:
            await running
        except asyncio.CancelledError:
            if not running.cancelled():
                raise
        finally:
            if stop.is_set():
                _ignore_more_stops()

    code = EXIT_OK
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(body())
    except* ConfigError as group:
        code = _report(name, group, EXIT_CONFIG)
    except* RLBoostError as group:
        reported = _report(name, group, EXIT_FAILED)
        code = code or reported
    return code


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's factory if it is installed: bulk transfers take two thirds of the CPU time."""
    try:
        import uvloop  # noqa: PLC0415 - it may be missing
    except ImportError:
        return None
    return uvloop.new_event_loop


def _report(name: str, group: BaseExceptionGroup[RLBoostError], code: int) -> int:
    for error in leaves(group):
        print(f"{name}: {BUFFER.without_secrets(str(error))}", file=sys.stderr, flush=True)
    return code


async def until_stop(stop: asyncio.Event, timeout_s: float) -> bool:
    """Sleep for `timeout_s` or until the event is set; return True if it is."""
    try:
        async with asyncio.timeout(timeout_s):
            await stop.wait()
    except TimeoutError:
        return False
    return True
