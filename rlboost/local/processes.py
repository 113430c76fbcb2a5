"""The processes of a local system as data: command, environment, readiness."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rlboost.local.layout import Layout, Placement, environment
from rlboost.shared.http.server_url import server_url
from rlboost.shared.process.modules import EngineName

LOOPBACK = "127.0.0.1"
LEAST_OPEN_FILES = 256
"""With fewer, a process cannot open its libraries, connections and log."""

SHARED_DEVICE = "trainers"
"""Name of the device that trainers of one system use in turns."""

ProcessRole = Literal["redis", "weight_store", "manager", "standby", "trainer", "reserved", "preemptible"]

STARTING_ORDER: tuple[tuple[ProcessRole, ...], ...] = (
    ("redis",),
    ("weight_store", "manager"),
    ("standby",),  # after the manager, which leads while it lives
    ("trainer", "reserved", "preemptible"),
)
"""Each stage starts when the previous stage is ready; stopping uses the reverse order."""

_LIGHT_LIMIT_S = 60.0
_REDIS_LIMIT_S = 600.0
"""It loads its file first: a gigabyte takes seconds, and more on a slow disk."""
_KIND = "local"
"""Kind of the workers that autoscaling counts, unless the settings name one."""
_TORCH_LIMIT_S = 180.0
"""Importing torch from a cold disk in several processes at once takes minutes on a small machine."""


@dataclass(frozen=True)
class HttpReady:
    """Ready when a GET of `url` answers 200."""

    url: str


@dataclass(frozen=True)
class RedisReady:
    """Ready when Redis at `url` answers PING; it does not while loading its data."""

    url: str = field(repr=False)


@dataclass(frozen=True)
class ProcessSpec:
    """One process. `env` extends the launcher's environment; it may hold secrets, so it is not shown."""

    name: str
    role: ProcessRole
    argv: tuple[str, ...]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    ready: HttpReady | RedisReady | None = None
    """None means ready as soon as it runs."""
    ready_limit_s: float = _LIGHT_LIMIT_S
    gpus: str = ""
    """Indexes of its GPUs."""
    restart_after_success: bool = True
    """False if exit code 0 means that it is no longer needed."""


@dataclass(frozen=True)
class LocalOptions:
    """Options of a local system. Port 0 selects a free port; `env` is passed to every process."""

    state_dir: Path = Path(".rlboost")
    reserved: int = 1
    """Workers that share a trainer's device, assigned to trainers round-robin."""
    workers: int = 3
    engine: EngineName = "torch"
    port: int = 0
    redis_port: int = 0
    weight_store_port: int = 0
    host: str = LOOPBACK
    """Address that every process listens on."""
    env: Mapping[str, str] = field(default_factory=dict)
    standby: bool = False
    """Start a second manager, which takes over from the first."""
    trainers: int = 1
    """Number of jobs that can run at once."""
    time_share: bool = False
    """The trainers use one device in turns."""
    autoscale: int = 0
    """Maximum number of spot workers, which then follows the manager's autoscaling; 0: it does not."""
    layout: Layout = field(default_factory=Layout)
    """Placement on GPUs; without one, the environment's settings select devices."""


@dataclass(frozen=True)
class LaunchContext:
    """The inputs from which process settings are derived."""

    options: LocalOptions
    state_dir: Path
    """Absolute."""
    cwd: Path
    inherited: Mapping[str, str] = field(repr=False)
    """The launcher's own environment."""
    token: str = field(repr=False)
    join_token: str = field(repr=False)
    """The workers' token, with which they can only join."""
    redis_url: str = field(repr=False)
    redis_argv: tuple[str, ...]
    port_of: Callable[[str], int]
    """Process name -> port, stable across calls."""
    placements: Mapping[str, Placement] = field(default_factory=dict)
    """The present placement by process name, of those that use GPUs."""
    n_cpus: int = 1

    def url_of(self, name: str) -> str:
        """Return the base URL of a process's HTTP interface."""
        return server_url(self.options.host, self.port_of(name), tls=False)

    def log_of(self, name: str) -> Path:
        """Return the log file of a process."""
        return self.state_dir / "logs" / f"{name}.log"


SpecOf = Callable[[LaunchContext, str, ProcessRole], ProcessSpec]
"""(context, name, role) -> process; tests substitute small programs."""


def initial_processes(options: LocalOptions) -> list[tuple[str, ProcessRole]]:
    """Return name and role of every initial process, in starting order."""
    named: list[tuple[str, ProcessRole]] = [
        ("redis", "redis"),
        ("weight-store", "weight_store"),
        ("manager", "manager"),
    ]
    named += [("standby", "standby")] if options.standby else []
    named += [(name, "trainer") for name in trainer_names(options)]
    named += [(name, "reserved") for name in reserved_names(options)]
    named += [(name, "preemptible") for name in spot_names(options)]
    return named


def spot_names(options: LocalOptions) -> list[str]:
    """Return the names of the initial spot workers."""
    return [f"worker-{i + 1}" for i in range(options.workers)]


def trainer_names(options: LocalOptions) -> list[str]:
    """Return the names of the trainers, numbered if there are several."""
    return ["trainer"] if options.trainers == 1 else [f"trainer-{i + 1}" for i in range(options.trainers)]


def trainer_of(options: LocalOptions, reserved: str) -> str:
    """Return the name of the trainer whose device a reserved worker shares."""
    trainers = trainer_names(options)
    return trainers[reserved_names(options).index(reserved) % len(trainers)]


def reserved_names(options: LocalOptions) -> list[str]:
    """Return the names of the reserved workers."""
    return [f"reserved-{i + 1}" for i in range(options.reserved)]


def spec_of(context: LaunchContext, name: str, role: ProcessRole) -> ProcessSpec:
    """Return the real process: Redis, or `python -m rlboost.services.<role>`."""
    if role == "redis":
        ready = RedisReady(context.redis_url)
        return ProcessSpec(
            name, role, context.redis_argv, context.log_of(name), ready=ready, ready_limit_s=_REDIS_LIMIT_S
        )
    module = "rollout_worker" if role in ("reserved", "preemptible") else _MODULES[role]
    heavy = role not in ("weight_store", "manager", "standby")
    # A worker is ready only with a job's weights; before the first job, joining and answering is enough.
    # A standby is ready only when it leads.
    route = "healthz" if module == "rollout_worker" or role == "standby" else "readyz"
    return ProcessSpec(
        name=name,
        role=role,
        argv=(sys.executable, "-m", f"rlboost.services.{module}"),
        log=context.log_of(name),
        env={
            **_common(context),
            **_secrets(context, module),
            **_settings(context, name, role),
            **_devices(context, name, role),
            **context.options.env,
        },
        ready=HttpReady(f"{context.url_of(name)}/{route}"),
        ready_limit_s=_TORCH_LIMIT_S if heavy else _LIGHT_LIMIT_S,
        gpus=context.placements[name].shown if name in context.placements else "",
        restart_after_success=role != "preemptible",  # it was drained, or its machine is preempted
    )


_MODULES: dict[ProcessRole, str] = {
    "weight_store": "weight_store",
    "manager": "rollout_manager",
    "standby": "rollout_manager",
    "trainer": "trainer",
}


def _common(context: LaunchContext) -> dict[str, str]:
    # The user's folder is importable: job files name reward functions in it.
    path = [str(context.cwd), *filter(None, [context.inherited.get("PYTHONPATH")])]
    return {
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": ":".join(path),
        # Several engines share the cores: one thread per core in each would oversubscribe them.
        "OMP_NUM_THREADS": context.inherited.get("OMP_NUM_THREADS", "1"),
        # The launcher makes http:// addresses of all of them.
        "RLBOOST_TLS_CERT": "",
        "RLBOOST_TLS_KEY": "",
    }


def _secrets(context: LaunchContext, module: str) -> dict[str, str]:
    if module == "rollout_worker":  # the manager tells it the rest
        return {"RLBOOST_TOKEN": context.join_token}
    return {"RLBOOST_TOKEN": context.token, "RLBOOST_REDIS_URL": context.redis_url}


def _settings(context: LaunchContext, name: str, role: ProcessRole) -> dict[str, str]:
    here = {"HOST": context.options.host, "PORT": str(context.port_of(name))}
    if role == "weight_store":
        own = {**here, "DIR": str(context.state_dir / "weights")}
        return _prefixed("RLBOOST_WEIGHT_STORE_", own)
    if role in ("manager", "standby"):
        own = {**here, "WEIGHT_STORE_URL": context.url_of("weight-store"), "JOIN_TOKEN": context.join_token}
        return _prefixed("RLBOOST_MANAGER_", own | _pools(context))
    if role == "trainer":
        own = {
            **here,
            "NAME": name,
            "WEIGHT_STORE_URL": context.url_of("weight-store"),
            "DIR": str(context.state_dir / "runs"),
        }
        if context.options.time_share:
            own["SHARED_DEVICE"] = SHARED_DEVICE
        return _prefixed("RLBOOST_TRAINER_", own)
    own = {
        **here,
        "URL": context.url_of("manager"),
        "ROLE": role,
        "NAME": name,
        "ENGINE": context.options.engine,
        "CACHE_DIR": str(cache_dir(context.state_dir)),
    }
    if role == "preemptible" and context.options.autoscale:
        own["KIND"] = _setting(context, "RLBOOST_WORKER_KIND", _KIND)
    if role == "reserved":
        own["TRAINER"] = trainer_of(context.options, name)
    return _prefixed("RLBOOST_WORKER_", own)


def _pools(context: LaunchContext) -> dict[str, str]:
    """Return the manager's setting for spot workers that this launcher starts as it follows the manager."""
    if not context.options.autoscale:
        return {}
    pool = {
        "kind": _setting(context, "RLBOOST_WORKER_KIND", _KIND),
        "max_workers": context.options.autoscale,
        "price_per_hour": _setting(context, "RLBOOST_WORKER_PRICE_PER_HOUR", "0"),
    }
    return {"POOLS": json.dumps([pool])}


def _setting(context: LaunchContext, name: str, default: str) -> str:
    return {**context.inherited, **context.options.env}.get(name) or default


def _devices(context: LaunchContext, name: str, role: ProcessRole) -> dict[str, str]:
    if name not in context.placements:
        return {}
    prefix = "RLBOOST_TRAINER_" if role == "trainer" else "RLBOOST_WORKER_"
    return environment(
        context.placements[name], prefix, context.options.layout.threads(context.n_cpus), context.inherited
    )


def cache_dir(state_dir: Path) -> Path:
    """Return the folder of the workers' weight caches, one subfolder per worker name."""
    return state_dir / "cache"


def _prefixed(prefix: str, settings: Mapping[str, str]) -> dict[str, str]:
    return {prefix + key: value for key, value in settings.items()}
