"""From a system's specification to the options of a local system, GPUs included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlboost.local import layout
from rlboost.local.gpus import Gpu, list_gpus, select
from rlboost.local.processes import LOOPBACK, LocalOptions, reserved_names, spot_names, trainer_names, trainer_of
from rlboost.local.spec_file import SystemSpec
from rlboost.shared.errors import ConfigError

_DEFAULT_WORKERS = 3
_PORT, _WEIGHT_STORE_PORT, _REDIS_PORT = 8700, 8701, 6379
"""Where other machines find a system; deploy/README.md names them for firewalls."""


def local_options(spec: SystemSpec, state: Path) -> LocalOptions:
    """Return the options of a local system; lists this machine's GPUs only if the specification names some.

    Raises:
        ConfigError: the engine is not installed, there are no GPUs, or the processes do not fit on them.

    """
    spec.require_engine()
    if not spec.gpus and spec.trainer_gpus:
        raise ConfigError(f"--trainer-gpus {spec.trainer_gpus} needs --gpus: name all GPUs of the system with it")
    return placed(spec, state, list_gpus() if spec.gpus else [])


def initial_workers(workers: int | None, autoscale: int) -> int:
    """Return the number of spot workers to start with.

    Args:
        workers: the number that was requested, if any.
        autoscale: the most that autoscaling may run; 0: there is no autoscaling.

    Raises:
        ConfigError: more were requested than autoscaling may run.

    """
    if workers is None:
        return min(_DEFAULT_WORKERS, autoscale or _DEFAULT_WORKERS)
    if autoscale and workers > autoscale:
        raise ConfigError(f"--workers {workers} is more than --autoscale {autoscale}, the most: change one of them")
    return workers


def placed(spec: SystemSpec, state: Path, gpus: Sequence[Gpu]) -> LocalOptions:
    """Return the options of a local system on a machine with these GPUs.

    Raises:
        ConfigError: a GPU does not exist, the processes do not fit on the GPUs, or options exclude each other.

    """
    options = LocalOptions(
        state_dir=state,
        reserved=1 if spec.reserved is None else spec.reserved,
        workers=initial_workers(spec.workers, spec.autoscale),
        engine=spec.engine_name,
        host=spec.host or LOOPBACK,
        port=spec.port or (_PORT if spec.host else 0),
        weight_store_port=spec.weight_store_port or (_WEIGHT_STORE_PORT if spec.host else 0),
        redis_port=spec.redis_port or (_REDIS_PORT if spec.host else 0),
        env=spec.settings,
        standby=spec.standby,
        trainers=spec.trainers,
        autoscale=spec.autoscale,
    )
    if spec.autoscale and "RLBOOST_MANAGER_POOLS" in spec.env:
        raise ConfigError(
            "--autoscale sets RLBOOST_MANAGER_POOLS to the workers of this machine: remove it from env, or do without "
            "--autoscale"
        )
    if not spec.gpus:
        return options
    usable = select(spec.gpus, list(gpus), "--gpus")
    workers = spec.workers or 0
    if spec.trainer_gpus:
        trainer_gpus = select(spec.trainer_gpus, usable, "--trainer-gpus")
    else:
        trainer_gpus = usable[: max(len(usable) - max(workers, spec.autoscale) * spec.tensor_parallel, 0)]
    n_groups = len(trainer_gpus) // spec.trainers // spec.tensor_parallel * spec.trainers
    options = replace(options, workers=workers, reserved=n_groups if spec.reserved is None else spec.reserved)
    planned = layout.plan(
        usable,
        trainer_gpus,
        trainer_names(options),
        {name: trainer_of(options, name) for name in reserved_names(options)},
        spot_names(options),
        tensor_parallel=spec.tensor_parallel,
        memory_fraction=spec.gpu_memory_utilization or layout.SHARED_MEMORY_FRACTION,
    )
    if spec.autoscale > len(planned.worker_groups):
        raise ConfigError(
            f"--autoscale {spec.autoscale} does not fit on the GPUs that the trainer does not use, which have room for "
            f"{len(planned.worker_groups)} workers: lower it, or give fewer --trainer-gpus"
        )
    return replace(options, layout=planned)
