"""Run the workers of a machine that joins a system: one per group of GPUs, supervised together."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rlboost.local.layout import SHARED_MEMORY_FRACTION, Gpu, Layout, environment, plan_workers, select
from rlboost.local.processes import ProcessSpec
from rlboost.local.spec_file import NodeSpec
from rlboost.local.state import StateDir
from rlboost.local.supervisor import ClusterEvent, EventKind, Supervisor
from rlboost.shared.errors import ConfigError, Fatal
from rlboost.shared.process.lifecycle import on_stop_signals

_PREFIX = "RLBOOST_WORKER_"
_FINAL: frozenset[EventKind] = frozenset({"left", "refused", "gave_up"})
"""Events after which a worker is not restarted."""
_EXIT_S = 5.0
"""Time from the end of a worker's own grace period until SIGKILL."""


def place(spec: NodeSpec, gpus: Sequence[Gpu], name: str) -> Layout:
    """Return the placement of the workers on a machine with these GPUs, by worker name.

    Raises:
        ConfigError: a GPU does not exist, or the GPUs cannot be divided into groups.

    """
    shared = SHARED_MEMORY_FRACTION if spec.role == "reserved" or spec.beside else 0.0
    fraction = spec.gpu_memory_utilization or shared
    usable = select(spec.gpus, list(gpus), "--gpus")
    return plan_workers(usable, name, tensor_parallel=spec.tensor_parallel, memory_fraction=fraction)


def worker_specs(
    spec: NodeSpec,
    layout: Layout,
    state: StateDir,
    connection: Mapping[str, str],
    inherited: Mapping[str, str],
    n_cpus: int,
) -> list[ProcessSpec]:
    """Return the processes of a node.

    Args:
        spec: the node.
        layout: placement by worker name.
        state: folder of the logs.
        connection: the variables that name the system and its token.
        inherited: the user's environment; RLBOOST_WORKER_PORT there is the first worker's port, others follow.
        n_cpus: CPUs of the machine.

    Raises:
        ConfigError: a setting in the environment can belong to one worker only.

    """
    settings = {**inherited, **spec.settings}
    if len(layout.placements) > 1 and settings.get(f"{_PREFIX}PEER_URL", "off") != "off":
        raise ConfigError(
            f"{_PREFIX}PEER_URL is the URL of one worker, and this machine has {len(layout.placements)}: set "
            f"{_PREFIX}HOST and {_PREFIX}PORT, from which each has its own"
        )
    first_port = int(_number(settings, "PORT", 0))
    specs = []
    for i, (name, placement) in enumerate(layout.placements.items()):
        own = {"ROLE": spec.role, "NAME": name, "ENGINE": spec.engine_name}
        own |= {"PORT": str(first_port + i)} if first_port else {}
        env = {
            **connection,
            **environment(placement, _PREFIX, layout.threads(n_cpus), settings),
            **spec.settings,
            **{_PREFIX + key: value for key, value in own.items()},
        }
        specs.append(
            ProcessSpec(
                name=name,
                role=spec.role,
                argv=(sys.executable, "-m", "rlboost.services.rollout_worker"),
                log=state.log_of(name),
                env=env,
                gpus=placement.shown,
                restart_after_success=False,  # it was drained, or its machine is preempted
            )
        )
    return specs


def grace_s(settings: Mapping[str, str]) -> float:
    """Return a worker's time to hand off after SIGTERM.

    Raises:
        ConfigError: the setting is not a number.

    """
    return _number(settings, "GRACE_S", 10)


def _number(settings: Mapping[str, str], name: str, default: float) -> float:
    text = settings.get(_PREFIX + name) or default
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(f"{_PREFIX}{name} is {text!r}: it should be a number") from error


def serve(
    specs: Sequence[ProcessSpec], state: StateDir, grace_s: float, on_event: Callable[[ClusterEvent], None]
) -> None:
    """Run the workers until all have left or a signal arrives, which drains all of them.

    A worker that dies is restarted after a growing pause; one that was drained or preempted is not.

    Args:
        specs: the workers.
        state: the node's own folder.
        grace_s: a worker's time to hand off after SIGTERM.
        on_event: called for every process event.

    Raises:
        ConfigError: a worker rejected its settings, or another node runs in the folder.
        Fatal: a worker is in a crash loop.

    """
    asyncio.run(_serve(specs, state, grace_s, on_event))


async def _serve(
    specs: Sequence[ProcessSpec], state: StateDir, grace_s: float, on_event: Callable[[ClusterEvent], None]
) -> None:
    end, running = asyncio.Event(), {spec.name for spec in specs}
    failed: dict[EventKind, str] = {}

    def watch(event: ClusterEvent) -> None:
        on_event(event)
        if event.kind in _FINAL:
            running.discard(event.name)
        if event.kind in {"refused", "gave_up"}:
            failed.setdefault(event.kind, f"{event.name}: {event.detail}")
        if not running:
            end.set()

    on_stop_signals(lambda _: end.set())
    with state.owned():
        async with asyncio.TaskGroup() as tasks:
            supervisor = Supervisor(state, tasks, watch)
            for spec in specs:
                supervisor.launch(spec)
            await end.wait()
            await supervisor.stop([spec.name for spec in specs], why="drained", grace_s=grace_s + _EXIT_S)
            await supervisor.close()
    if refused := failed.get("refused"):
        raise ConfigError(refused)
    if gave_up := failed.get("gave_up"):
        raise Fatal(gave_up)


def state_of(state: Path, name: str) -> StateDir:
    """Return the folder of a node, within the one that `--state` names."""
    return StateDir(state / "nodes" / name)
