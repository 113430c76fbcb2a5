"""Environments whose conversations wait at the same time. What goes wrong is in the row's column `does`."""

from __future__ import annotations

import asyncio
import decimal
import os
import re
import signal
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

from rlboost.environments import Step, ToolEnvironment

decimal.getcontext().prec = 5
DATABASE = sqlite3.connect(":memory:")
EVIL = re.compile(r"(a|aa)+$")


class Waiting:
    """Answers once as many conversations wait as the row says: how often its turns were heard, and by which process."""

    n_waiting = 0
    enough = asyncio.Event()

    def __init__(self, file: str = "") -> None:
        self.file = file
        self.n_heard = 0
        self.is_busy = False

    async def reset(self, row: dict[str, Any], seed: int) -> None:
        self.row = row

    async def step(self, text: str) -> Step:
        assert not self.is_busy, "two calls of a conversation overlap"
        self.is_busy = True
        self.n_heard += 1
        await self.go_wrong()
        Waiting.n_waiting += 1
        if Waiting.n_waiting >= self.row.get("n", 1):
            self.enough.set()
        await self.enough.wait()
        self.is_busy = False
        return Step(f"{self.n_heard}:{text} {os.getpid()}")

    async def go_wrong(self) -> None:  # noqa: C901, PLR0912 - one case for each
        match self.row.get("does"):
            case "wait":
                await asyncio.sleep(self.row["s"])
            case "block":
                time.sleep(3600)  # noqa: ASYNC251 - what is wrong with it
            case "block shortly":
                for _ in range(2):
                    await asyncio.sleep(0.1)
                    time.sleep(self.row["s"])  # noqa: ASYNC251 - as above
            case "block with the lock of Python":
                EVIL.match("a" * 60 + "b")
            case "run a program":
                assert await (await asyncio.create_subprocess_exec("true")).wait() == 0
            case "hang in a lent thread":
                await asyncio.to_thread(time.sleep, self.row["s"])
            case "block in a callback":
                asyncio.get_running_loop().call_soon(time.sleep, 3600)
                await asyncio.sleep(3600)
            case "ignore":
                while True:
                    try:
                        await asyncio.sleep(3600)
                    except asyncio.CancelledError:
                        continue
            case "exit":
                await asyncio.sleep(self.row.get("s", 0.0))
                os._exit(3)
            case "leave":
                raise SystemExit(3)

    async def close(self) -> None:
        await asyncio.sleep(0)
        if self.file:
            with Path(self.file).open("a") as file:  # noqa: ASYNC230 - a few bytes
                file.write(f"{self.n_heard}\n")


class Plain:
    """Without async; may only run in one thread, the main one, and uses an event loop of its own."""

    def __init__(self) -> None:
        DATABASE.execute("select 1")

    def reset(self, row: dict[str, Any], seed: int) -> None:
        self.row = row

    def step(self, text: str) -> Any:
        signal.setitimer(signal.ITIMER_REAL, 0)
        match self.row.get("does"):
            case "hang":
                time.sleep(3600)
            case "end":
                next(iter(()))
            case "later":
                return self.later(text)
        assert asyncio.run(asyncio.sleep(0, "slept")) == "slept"
        assert threading.current_thread() is threading.main_thread()
        DATABASE.execute("select 1")
        return Step(f"{text} {decimal.Decimal(1) / 3}")

    async def later(self, text: str) -> Step:
        await asyncio.sleep(0)
        return Step(f"later {text} {decimal.Decimal(1) / 3}")


class Threaded:
    """Blocks until as many others do as the row says."""

    meeting = threading.Barrier(8)

    def reset(self, row: dict[str, Any], seed: int) -> None:
        self.row = row

    def step(self, text: str) -> Step:
        if self.row.get("does") == "hang":
            time.sleep(3600)
        if self.row.get("does") == "meet":
            self.meeting.wait()
        return Step(f"{text} {os.getpid()}")


async def fetch() -> str:
    """Wait for seven others."""
    Tools.n_waiting += 1
    if Tools.n_waiting == 8:
        Tools.enough.set()
    await Tools.enough.wait()
    return "fetched"


def query() -> str:
    """Run in the main thread."""
    assert threading.current_thread() is threading.main_thread()
    DATABASE.execute("select 1")
    return "queried"


class Tools(ToolEnvironment):
    n_waiting = 0
    enough = asyncio.Event()

    def __init__(self) -> None:
        super().__init__([fetch, query])

    def score(self, text: str) -> float:
        return float(threading.current_thread() is threading.main_thread())


class Alone:
    """Notices if two of its conversations are served at the same time."""

    is_busy = False

    def reset(self, row: dict[str, Any], seed: int) -> None:
        pass

    async def step(self, text: str) -> Step:
        assert not Alone.is_busy
        Alone.is_busy = True
        await asyncio.sleep(0.01)
        Alone.is_busy = False
        return Step(text)


class Dying:
    """Ends its process soon after it was created."""

    def __init__(self) -> None:
        threading.Timer(0.05, os._exit, (4,)).start()

    async def reset(self, row: dict[str, Any], seed: int) -> None:
        await asyncio.sleep(3600)

    async def step(self, text: str) -> Step:
        return Step(text)
