"""Run a whole system on this machine during a `with` block: Redis, weight store, manager, trainers and workers.

async with LocalCluster(LocalOptions(workers=3)) as cluster:
    cluster.on_event(print)
    client = Client(cluster.url, cluster.token)
    cluster.kill("worker-2")         # preempt a worker without notice
    name = cluster.join_worker()     # add a worker
"""

from __future__ import annotations

import asyncio
import importlib
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import rlboost
from rlboost.client import Client, ClientError
from rlboost.local import redis_server
from rlboost.local.layout import n_cpus
from rlboost.local.processes import (
    LEAST_OPEN_FILES,
    LOOPBACK,
    STARTING_ORDER,
    LaunchContext,
    LocalOptions,
    ProcessSpec,
    SpecOf,
    cache_dir,
    initial_processes,
    spec_of,
    spot_names,
)
from rlboost.local.state import Config, ProcessRecord, StateDir
from rlboost.local.supervisor import ClusterEvent, Supervisor
from rlboost.shared.errors import ConfigError, DiskFull, Fatal, RLBoostError, leaves
from rlboost.shared.files import is_full
from rlboost.shared.http.server import bind
from rlboost.shared.process.system import raise_open_files_limit
from rlboost.shared.settings import check

# --- Ports of its processes -------------------------------------------------------------------------------------------


class Ports:
    """Ports of one address by process name, reserved until closed.

    A bound socket that does not listen reserves the port. On Linux the kernel then does not hand out the port as a free
    one, while the process itself, which sets SO_REUSEADDR, can listen on it. On other systems the second bind would
    fail, so the port is chosen but not reserved.
    """

    def __init__(self, preferred: Mapping[str, int] | None = None, host: str = LOOPBACK) -> None:
        """Start with none; `preferred` are ports by name to take again if they are free."""
        self._preferred = dict(preferred or {})
        self._host = host
        self._ports: dict[str, int] = {}
        self._sockets: dict[str, socket.socket] = {}

    def of(self, name: str, requested: int = 0, given_by: str = "") -> int:
        """Return the port of `name`: its reserved one, else `requested`, else the preferred or another free one.

        Raises:
            ConfigError: the requested port is in use; `given_by` chooses another.

        """
        if name not in self._ports:
            sock = bind(self._host, requested, given_by) if requested else self._free(name)
            self._ports[name] = sock.getsockname()[1]
            if sys.platform == "linux":
                self._sockets[name] = sock
            else:
                sock.close()
        return self._ports[name]

    def _free(self, name: str) -> socket.socket:
        try:
            return bind(self._host, self._preferred.get(name, 0))
        except ConfigError:
            return bind(self._host, 0)

    def by_name(self) -> dict[str, int]:
        """Return all reserved ports."""
        return dict(self._ports)

    def release(self, name: str) -> None:
        """Release the port of `name`, if it has one."""
        self._ports.pop(name, None)
        if sock := self._sockets.pop(name, None):
            sock.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Release all ports."""
        for name in list(self._ports):
            self.release(name)


# --- The system -------------------------------------------------------------------------------------------------------

_GRACE_S = 12.0
"""A worker may take 10 s to hand off after a stop (invariant 7)."""

_FOLLOW_EVERY_S = 1.0
_READ_TIMEOUT_S = 5.0
"""Longest wait for the manager's target."""


class LocalCluster:
    """On entry everything is ready; on exit everything has stopped, in order.

    A process that dies is restarted on its own port. A spot worker that was preempted (`kill`, `notice`) or
    drained is not restarted, as its machine is gone; `join_worker` adds a new one.

    Args:
        options: what to start.
        spec_of: returns each process's command; tests substitute small programs.

    Raises:
        ConfigError: on entering: a system already runs in the folder, a port is in use, Redis is not installed, a
            service's setting is invalid.
        StartFailed: on entering: a process did not become ready.
        Fatal: on entering or leaving: the disk is full, or a limit of this machine is reached.

    """

    def __init__(self, options: LocalOptions, *, spec_of: SpecOf = spec_of) -> None:
        """Plan the processes; entering the context starts them."""
        self.options = options
        self.state = StateDir(options.state_dir)
        self._spec_of = spec_of
        self._listeners: list[Callable[[ClusterEvent], None]] = []
        self._stack = AsyncExitStack()
        self._ports: Ports
        self._spot_workers = options.workers
        self._present_spot = set(spot_names(options))
        self._placements = dict(options.layout.placements)
        self._context: LaunchContext
        self._supervisor: Supervisor

    # --- life ---------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Start everything and wait until it is ready."""
        _check_folder(Path.cwd())
        _require_open_files()
        try:
            async with AsyncExitStack() as stack:
                stack.enter_context(self.state.owned())
                stack.push(self._record_end)
                self._ports = stack.enter_context(Ports(self.state.ports(), self.options.host))
                self._context = self._launch_context()
                for text in self.state.warnings:
                    self._on_event(ClusterEvent("warning", "state", time.time(), text))
                specs = [self._spec_of(self._context, name, role) for name, role in initial_processes(self.options)]
                _check_settings(specs)
                tasks = await stack.enter_async_context(asyncio.TaskGroup())
                self._supervisor = Supervisor(self.state, tasks, self._on_event)
                stack.push_async_callback(self._supervisor.close)
                stack.push_async_callback(self._stop)
                await self._start(specs)
                self.state.write_ports(self._ports.by_name())
                self.state.write_devices(self.options.layout.summary())
                self.state.write_config(self.config)
                if self.options.autoscale:
                    following = tasks.create_task(self._follow_autoscaling(), name="autoscale")
                    stack.callback(following.cancel)
                self._stack = stack.pop_all()
        except BaseExceptionGroup as group:
            raise self._translated(leaves(group)[0]) from group
        except OSError as error:
            raise self._translated(error) from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> bool:
        """Stop everything in reverse order of starting."""
        try:
            await self._stack.__aexit__(kind, error, at)
        except BaseExceptionGroup as group:
            if isinstance(leaves(group)[0], OSError):
                raise self._translated(leaves(group)[0]) from group
            if group.exceptions != (error,):
                raise
        return False  # the body's own error reaches the caller unwrapped, not in a group

    def _record_end(self, _kind: object, error: BaseException | None, _at: object) -> None:
        self.state.write_end(_reason(error))

    def _translated(self, error: BaseException) -> BaseException:
        """Return a failure of the disk or of a limit of this machine as a `Fatal`, other errors as they are."""
        if not isinstance(error, OSError):
            return error
        advice = ": free some space" if is_full(error) else ""
        return Fatal(f"the system in {self.options.state_dir} ended: {_reason(error)}{advice}")

    def _launch_context(self) -> LaunchContext:
        redis_port = self._ports.of("redis", self.options.redis_port, "redis_port in the FILE of 'rlboost up FILE'")
        self._ports.of("manager", self.options.port, "--port")
        store = "weight_store_port in the FILE of 'rlboost up FILE'"
        self._ports.of("weight-store", self.options.weight_store_port, store)
        redis_argv, redis_url = redis_server.configure(self.state, redis_port, self.options.host)
        return LaunchContext(
            options=self.options,
            state_dir=self.state.path,
            cwd=Path.cwd(),
            inherited=dict(os.environ),
            token=self.state.system_token(os.environ.get("RLBOOST_TOKEN")),
            join_token=self.state.join_token(),
            redis_url=redis_url,
            redis_argv=redis_argv,
            port_of=self._ports.of,
            placements=self._placements,
            n_cpus=n_cpus(),
        )

    async def _start(self, specs: Sequence[ProcessSpec]) -> None:
        for stage in STARTING_ORDER:
            members = [spec for spec in specs if spec.role in stage]
            for spec in members:
                self._supervisor.launch(spec)
            async with asyncio.TaskGroup() as waits:
                for spec in members:
                    waits.create_task(self._supervisor.until_ready(spec.name), name=f"ready {spec.name}")

    async def _stop(self) -> None:
        for stage in reversed(STARTING_ORDER):
            names = [spec.name for spec in self._supervisor.specs() if spec.role in stage]
            await self._supervisor.stop(names, why="the system stopped", grace_s=_GRACE_S)

    # --- state ----------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """The REST API."""
        return self._context.url_of("manager")

    @property
    def token(self) -> str:
        """The REST API's bearer token."""
        return self._context.token

    @property
    def config(self) -> Config:
        """The connection data that the command line reads."""
        return Config(self.url, self.token, self._context.redis_url, str(self.state.path), os.getpid())

    def processes(self) -> list[ProcessRecord]:
        """Return all running and past processes."""
        return self._supervisor.records()

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU seconds so far by process name, over all restarts, with descendants."""
        return self._supervisor.cpu_seconds()

    def on_event(self, listener: Callable[[ClusterEvent], None]) -> None:
        """Call the listener, in the event loop, for every process event from now on."""
        self._listeners.append(listener)

    def _on_event(self, event: ClusterEvent) -> None:
        if event.kind == "left":  # the machine is gone, with its port and its disk
            self._forget_worker(event.name)
            shutil.rmtree(cache_dir(self.state.path) / event.name, ignore_errors=True)
        for listener in self._listeners:
            with suppress(OSError):  # it prints into a file on a full disk, or into a closed pipe
                listener(event)

    def _forget_worker(self, name: str) -> None:
        self._present_spot.discard(name)
        self._ports.release(name)
        self._placements.pop(name, None)

    # --- operations -----------------------------------------------------------------------------------------------

    def join_worker(self) -> str:
        """Start one more spot worker; return its name immediately, before it is ready.

        Raises:
            Conflict: the system uses GPUs, and none is free.
            DiskFull: there is no space for its log.

        """
        group = self.options.layout.free_group(self._placements.values()) if self._placements else None
        self._spot_workers += 1
        name = f"worker-{self._spot_workers}"
        self._present_spot.add(name)
        if group is not None:
            self._placements[name] = group
        try:
            self._supervisor.launch(self._spec_of(self._context, name, "preemptible"))
        except OSError as error:
            self._forget_worker(name)
            if is_full(error):
                raise DiskFull(f"{name} cannot be started: {error}; free space") from error
            raise
        self._on_event(ClusterEvent("joined", name, time.time()))
        return name

    async def _follow_autoscaling(self) -> None:
        """Start spot workers that are missing from the manager's target; the manager drains those beyond it."""
        with Client(self.url, self.token, retry_for_s=0.0, read_timeout_s=_READ_TIMEOUT_S) as client:
            while True:
                # The manager restarts, or there is no space for a log: its next target counts.
                with suppress(ClientError, DiskFull):
                    pools = (await asyncio.to_thread(client.fleet))["autoscaling"]["pools"]
                    for _ in range((pools[0]["target"] or 0) - len(self._present_spot)):
                        self.join_worker()
                await asyncio.sleep(_FOLLOW_EVERY_S)

    async def until_ready(self, name: str) -> None:
        """Wait until a process is ready; see `Supervisor.until_ready`."""
        await self._supervisor.until_ready(name)

    def kill(self, name: str) -> None:
        """Send SIGKILL. A spot worker is not restarted; any other process is."""
        self._supervisor.kill(name)

    def notice(self, name: str) -> None:
        """Send a preemption notice (SIGTERM) to a spot worker; SIGKILL follows after 30 s."""
        self._supervisor.notice(name)


def _check_settings(specs: Sequence[ProcessSpec]) -> None:
    """Check the settings of all services before the first one starts, which takes seconds.

    Raises:
        ConfigError: a variable is unknown or has an invalid value.

    """
    for spec in specs:
        if (module := spec.argv[-1]).startswith("rlboost.services."):
            settings = importlib.import_module(f"{module}.settings").Settings
            check(settings, {**os.environ, **spec.env})


def _require_open_files() -> None:
    """Raise the limit of open files, which all processes inherit.

    Raises:
        ConfigError: it is too low.

    """
    limit = raise_open_files_limit()
    if limit < LEAST_OPEN_FILES:
        raise ConfigError(
            f"the limit of open files (ulimit -n) is {limit}, and at least {LEAST_OPEN_FILES} are needed: raise it"
        )


def _check_folder(cwd: Path) -> None:
    """Refuse a folder with a different package `rlboost`: it comes first on every process's path.

    Raises:
        ConfigError: it has one.

    """
    theirs = cwd / "rlboost" / "__init__.py"
    if theirs.exists() and not theirs.samefile(str(rlboost.__file__)):
        raise ConfigError(
            f"the package {theirs.parent} would shadow the installed rlboost: rename it, or start from another folder"
        )


def _reason(error: BaseException | None) -> str:
    """Return why a system ended, in one line; empty for a normal stop."""
    if isinstance(error, BaseExceptionGroup):
        return _reason(leaves(error)[0])
    if error is None or isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
        return ""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" ({error.filename})" if error.filename else "")
    text = str(error) if isinstance(error, RLBoostError) else f"{type(error).__name__}: {error}"
    return text.partition("\n")[0]
