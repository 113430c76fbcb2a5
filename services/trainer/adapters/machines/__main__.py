"""`python -m rlboost.services.trainer.adapters.machines`: settings -> agent -> supervise."""

from __future__ import annotations

import asyncio
import sys

from rlboost.services.trainer.adapters.machines.agent import Agent
from rlboost.services.trainer.adapters.machines.settings import MachineSettings
from rlboost.shared.process.lifecycle import run_service, supervise


async def main(config: MachineSettings, stop: asyncio.Event) -> None:
    """Run ranks until the stop."""
    await supervise({"assignments": Agent(config).run}, stop, grace_s=20.0)


if __name__ == "__main__":
    sys.exit(run_service("machine", MachineSettings, main))
