"""The user's reward functions in processes of our own: they may hang, raise, print, or kill their process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from typing import Any

import msgpack
import structlog

from services.trainer.domain.rewards import combine
from services.trainer.ports import RewardBatch, Scores
from shared.errors import ConfigError
from shared.reward import RewardPart, RewardSpec
from shared.waiting import Waits

log = structlog.get_logger(__name__)

IMPORT_LIMIT_S = 60.0
_LENGTH_BYTES = 4
"""Of the big-endian length in front of each message, as in `services.trainer.reward_worker`."""
_DETAIL_CHARS = 500
_LAST_WORDS_S = 1.0
"""A process that has closed its output gets so long to end with its own exit code."""


class RewardPool:
    """`RewardFunction` over `reward.workers` processes; one group at a time in each."""

    def __init__(self, spec: RewardSpec, waits: Waits) -> None:
        """Prepare; `start` starts the processes."""
        self._spec = spec
        self._waits = waits
        self._workers = [_Worker(spec) for _ in range(spec.workers)]
        self._idle: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()

    async def start(self) -> None:
        """See `RewardFunction.start`."""
        async with self._waits.on("the reward function", because="it is being imported", limit_s=IMPORT_LIMIT_S + 5):
            await asyncio.gather(*(worker.start() for worker in self._workers))
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def score(self, batch: RewardBatch) -> Scores:
        """See `RewardFunction.score`. The time limit counts from when a process takes the group."""
        try:
            request = msgpack.packb(
                {
                    "prompts": batch.prompts,
                    "completions": batch.completions,
                    "completion_ids": batch.completion_ids,
                    "columns": batch.columns,
                    "solutions": batch.solutions,
                }
            )
        except (OverflowError, TypeError, ValueError) as error:
            return Scores(None, "unsendable", f"a column cannot be given to the reward function: {error}")
        worker = await self._idle.get()
        try:
            return await self._call(worker, request, len(batch.completions))
        finally:
            self._idle.put_nowait(worker)

    async def _call(self, worker: _Worker, request: bytes, n: int) -> Scores:
        try:
            await worker.start()
            async with asyncio.timeout(self._spec.timeout_s):
                answer = await worker.call(request)
        except TimeoutError:
            await worker.kill()
            return Scores(None, "timeout", f"no answer within {self._spec.timeout_s:g} s; its process was killed")
        except ConfigError as error:
            return Scores(None, "crashed", str(error))
        except (EOFError, OSError, ValueError, msgpack.UnpackException) as error:
            code = await worker.kill(patience_s=_LAST_WORDS_S)
            return Scores(None, "crashed", f"its process ended with code {code} ({type(error).__name__})")
        except asyncio.CancelledError:
            # The process is in the middle of an answer that nobody will read.
            await worker.kill()
            raise
        return _judge(answer, n, self._spec.parts)

    async def close(self) -> None:
        """See `RewardFunction.close`."""
        await asyncio.gather(*(worker.kill() for worker in self._workers))


def _judge(answer: dict[str, Any], n: int, parts: Sequence[RewardPart]) -> Scores:
    if "raised" in answer:
        return Scores(None, "raised", str(answer["raised"])[:_DETAIL_CHARS])
    for part, values in zip(parts, answer["rewards"], strict=True):
        who = f"{part.name}: " if part.name else ""
        if len(values) != n:
            return Scores(None, "wrong_length", f"{who}{len(values)} rewards for {n} completions")
        if not all(value is None or math.isfinite(value) for value in values):
            return Scores(None, "not_a_number", f"{who}rewards {values}"[:_DETAIL_CHARS])
    rewards = combine(answer["rewards"], [part.weight for part in parts])
    given = {part.name: tuple(values) for part, values in zip(parts, answer["rewards"], strict=True) if part.name}
    if None in rewards:
        return Scores(None, "missing", f"no reward for completion {rewards.index(None)} of the group", given)
    return Scores(tuple(reward for reward in rewards if reward is not None), parts=given)


class _Worker:
    """One process, started again when it is gone."""

    def __init__(self, spec: RewardSpec) -> None:
        self._parts = json.dumps([{**part.model_dump(), "timeout_s": spec.timeout_s} for part in spec.parts])
        self._names = ", ".join(part.source for part in spec.parts)
        self._process: Process | None = None

    async def start(self) -> None:
        """Start the process unless it is there."""
        if self._process is not None and self._process.returncode is None:
            return
        command = (sys.executable, "-m", "services.trainer.reward_worker", self._parts)
        # Its own process group, so that what the function has started goes with it; and no secrets of ours.
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, start_new_session=True, env=_environment()
        )
        try:
            async with asyncio.timeout(IMPORT_LIMIT_S):
                answer = await self._receive()
        except (TimeoutError, EOFError) as error:
            await self.kill()
            reason = "took too long" if isinstance(error, TimeoutError) else "ended its process"
            raise ConfigError(f"reward.function: importing {self._names} {reason}") from error
        if "unfit" in answer:
            await self.kill()
            raise ConfigError(f"reward.function: {answer['function']} is no reward function: {answer['unfit']}")
        if "failed" in answer:
            await self.kill()
            function = answer["function"]
            module = function.partition(":")[0]
            raise ConfigError(
                f"reward.function: {function} cannot be imported: {answer['failed']}; start the trainer in a "
                f"folder from which 'import {module}' works, or add that folder to PYTHONPATH"
            )

    async def call(self, request: bytes) -> dict[str, Any]:
        """Send a request and return its answer."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(len(request).to_bytes(_LENGTH_BYTES, "big") + request)
        await self._process.stdin.drain()
        return await self._receive()

    async def _receive(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        head = await self._process.stdout.readexactly(_LENGTH_BYTES)
        body: dict[str, Any] = msgpack.unpackb(await self._process.stdout.readexactly(int.from_bytes(head, "big")))
        return body

    async def kill(self, patience_s: float = 0.0) -> int | None:
        """End the process and everything it started, unless it ends by itself in time; return its exit code."""
        if self._process is None:
            return None
        process, self._process = self._process, None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                return await process.wait()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return await process.wait()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("RLBOOST_")}
