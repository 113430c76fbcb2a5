"""Starts a pool of environments in real processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rlboost.services.trainer.adapters.environment_pool import EnvironmentPool
from rlboost.services.trainer.adapters.user_code import UserCodeLog
from rlboost.services.trainer.ports.samples import EnvironmentFault
from rlboost.shared.job.reward import EnvironmentSpec
from rlboost.shared.process.waiting import Waits


@asynccontextmanager
async def environment_pool(
    function: str, timeout_s: float = 20.0, log: UserCodeLog | None = None, **more: Any
) -> AsyncIterator[EnvironmentPool]:
    """Start the environment, a class of `tests.support.concurrent_environments`."""
    path = f"tests.support.concurrent_environments:{function}"
    pool = EnvironmentPool(EnvironmentSpec(function=path, timeout_s=timeout_s, **more), Waits(), log)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


async def fault_of(call: Awaitable[Any]) -> EnvironmentFault:
    with pytest.raises(EnvironmentFault) as caught:
        await call
    return caught.value
