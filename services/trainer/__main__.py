"""`python -m rlboost.services.trainer`: settings -> adapters -> app -> supervise."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from datetime import datetime

import structlog
from fastapi import FastAPI

from rlboost.services.trainer.adapters.machines.registry import TrainerMachines
from rlboost.services.trainer.app import Limits, Trainer
from rlboost.services.trainer.job.job import DeviceThread
from rlboost.services.trainer.ports.storage import JobResources
from rlboost.services.trainer.settings import Settings
from rlboost.shared.http import server as http
from rlboost.shared.http.guard import Guard
from rlboost.shared.job.spec import JobSpec
from rlboost.shared.process.lifecycle import run_service, supervise
from rlboost.shared.process.system import bind_to_cpus, gc_paused
from rlboost.shared.process.waiting import Waits
from rlboost.shared.redis.bus import connect
from rlboost.shared.streams.job_logs import log_sender
from rlboost.shared.streams.state_protocol import check_leader, leader_check
from rlboost.shared.variables import LAST_EXIT

log = structlog.get_logger(__name__)


async def main(config: Settings, stop: asyncio.Event) -> None:
    """Run the trainer until the stop."""
    bind_to_cpus(config.cpus)
    sock = http.bind(config.host, config.port)
    bus = await connect(config.redis_url, "trainer")
    await check_leader(bus)
    waits, device, token = Waits(), DeviceThread(), config.token.get_secret_value()
    machines = None
    if config.machines_port:
        machines = TrainerMachines(http.bind(config.host, config.machines_port), token, config.certificate)

    def build(spec: JobSpec, job_id: str, created: datetime) -> JobResources:
        from rlboost.services.trainer import build  # noqa: PLC0415 - imports torch

        return build.build_resources(config, waits, machines, spec, job_id, created)

    trainer = Trainer(
        bus,
        build,
        device,
        waits,
        name=config.trainer_name,
        token=token,
        limits=Limits(outage_s=config.outage_limit_s, samples_s=config.samples_limit_s),
        price_per_hour=config.price_per_hour,
        last_exit=os.environ.get(LAST_EXIT, ""),
        shared_device=config.shared_device,
        device_call_limit_s=config.device_call_limit_s,
    )
    # The first job finds it imported.
    device.post(_import_build)
    log.info("listening", host=config.host, port=sock.getsockname()[1])
    loops = {
        "commands": trainer.follow_commands,
        "jobs": trainer.run_jobs,
        "lease": trainer.renew_lease,
        "protocol": leader_check(bus),
        "logs": log_sender(bus, config.trainer_name, trainer.active_jobs),
        "http": http.server_loop(create_app(trainer, token, waits), sock, config.certificate),
    }
    if machines is not None:
        loops["machines"] = machines.serve
    try:
        await supervise(loops, stop)
    finally:
        device.close()
        await bus.close()


def create_app(trainer: Trainer, token: str, waits: Waits) -> FastAPI:
    """Return the HTTP interface, which has only the routes of every service."""
    guard = Guard.of_token(token)
    return http.create_app("RLBoost trainer", guard=guard, not_ready_reason=trainer.not_ready_reason, waits=waits)


def _import_build() -> None:
    with gc_paused():
        importlib.import_module("rlboost.services.trainer.build")


if __name__ == "__main__":
    code = run_service("trainer", Settings, main)
    sys.stdout.flush()
    os._exit(code)  # the interpreter would wait for a call on the device, and free all memory first
