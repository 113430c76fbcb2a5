"""`rlboost trace`: send a trace of each sample to an OpenTelemetry collector."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import typer

from rlboost.commands.common import DEFAULT_STATE, StateOption
from rlboost.commands.up import require_packages
from rlboost.shared.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

_REDIS_VARIABLE = "RLBOOST_REDIS_URL"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(trace)


def trace(state: StateOption = DEFAULT_STATE) -> None:
    """Send a trace of each sample to an OpenTelemetry collector, over OTLP/HTTP, until Ctrl-C.

    A trace has the sample's request, its attempts on workers with migrations and losses, its reward, and the step that
    trained on it. It is read from the Redis of the local system, or of RLBOOST_REDIS_URL; nothing else changes.
    OTEL_EXPORTER_OTLP_ENDPOINT names the collector, by default http://localhost:4318; OTEL_TRACES_SAMPLER selects
    samples. Needs the extra otel.
    """
    import asyncio  # noqa: PLC0415 - keeps --help quick

    require_packages("opentelemetry.exporter.otlp.proto.http", extra="otel")
    from rlboost.shared.redis.bus import connect  # noqa: PLC0415 - likewise
    from rlboost.tracing.follow import follow  # noqa: PLC0415 - likewise
    from rlboost.tracing.otlp import OtlpTraces  # noqa: PLC0415 - likewise

    redis_url = _redis_url(state)

    async def run() -> None:
        stop = asyncio.Event()
        bus = await connect(redis_url, "trace")
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        typer.echo("rlboost: sending traces; stop with Ctrl-C", err=True)
        try:
            await follow(bus, OtlpTraces(stop).send, stop)
        finally:
            await bus.close()

    asyncio.run(run())


def _redis_url(state: Path) -> str:
    from rlboost.local.state import StateDir  # noqa: PLC0415 - keeps --help quick

    config = StateDir(state).config() if StateDir(state).running() else None
    url = os.environ.get(_REDIS_VARIABLE) or (config and config.redis_url)
    if not url:
        raise ConfigError(f"no system runs in {state}: start one with 'rlboost up', or set {_REDIS_VARIABLE}")
    return url
