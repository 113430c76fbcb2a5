"""An agent as users write them, good and bad: the column `fault` says what goes wrong."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient, OpenAIError

from rlboost.agents import Session

HTTP = DefaultAsyncHttpxClient()


Ask = Callable[..., Awaitable[str]]


async def raises(*_: Any) -> None:
    raise RuntimeError("the tool server is down")


async def returns_nothing(*_: Any) -> None:
    return None


async def returns_no_number(*_: Any) -> float:
    return float("nan")


async def hangs(*_: Any) -> None:
    await asyncio.sleep(3600)


async def dies(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def calls_for_ever(ask: Ask, question: dict[str, str]) -> float:
    while True:
        await ask(question)


async def calls_for_ever_and_looks(ask: Ask, question: dict[str, str]) -> float:
    try:
        return await calls_for_ever(ask, question)
    except OpenAIError:
        return 0.75


async def edits_its_history(ask: Ask, question: dict[str, str]) -> float:
    await ask({"role": "user", "content": "1,2,3>9"}, {"role": "assistant", "content": "5"}, question)
    return 0.5


async def ends_long_after_its_call(*_: Any) -> float:
    await asyncio.sleep(3)
    return 1.0


FAULTS: dict[str, Callable[..., Awaitable[Any]]] = {
    "raises": raises,
    "nothing": returns_nothing,
    "not a number": returns_no_number,
    "hangs": hangs,
    "dies": dies,
    "calls for ever": calls_for_ever,
    "calls for ever, and looks": calls_for_ever_and_looks,
    "edits its history": edits_its_history,
    "ends late": ends_long_after_its_call,
}


def fail_once(failed: Path) -> None:
    if not failed.exists():
        failed.touch()
        raise RuntimeError("the first time")


class Dies:
    """An agent whose process dies while it returns its rows."""

    def __init__(self, values: Sequence[Any] = ({},)) -> None:
        self._values = values

    def rows(self, split: str) -> Iterator[Any]:
        yield from [*self._values] * 256
        os.kill(os.getpid(), signal.SIGKILL)

    async def __call__(self, session: Session, row: dict[str, Any]) -> float:
        return 1.0


async def run(session: Session, row: dict[str, Any], fault: str | None = None) -> Any:
    """Ask once; then return a reward that depends on the answer, unless something goes wrong."""
    named = row["fault"] if fault is None else fault
    if named == "fails at once":
        raise KeyError(named)
    if named.startswith("fails once"):
        fail_once(Path(named.removeprefix("fails once "), f"{row['prompt'].replace('>', '-')}.failed"))
    if named == "no call":
        return 1.0
    client = AsyncOpenAI(base_url=session.base_url, api_key=session.key, http_client=HTTP, max_retries=10)

    async def ask(*messages: Any) -> str:
        made = await client.chat.completions.create(model="policy", messages=list(messages))
        return made.choices[0].message.content or ""

    question = {"role": "user", "content": row["prompt"]}
    text = await ask(question)
    go_on = FAULTS.get(named)
    return (len(text) % 5) / 4 if go_on is None else await go_on(ask, question)
