"""A process that runs the user's reward functions: `python -m services.trainer.reward_worker PARTS`.

PARTS is JSON, a list of the fields of `RewardPart`, with `timeout_s`.

It reads requests from standard input and answers on standard output, each a 4-byte big-endian length and a msgpack
map. The user's own prints go to standard error. It ends with its input, or when its parent is gone.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import threading
import time
from collections.abc import Awaitable, Sequence
from typing import Any, BinaryIO

import msgpack

from services.trainer.remote_reward import remote
from services.trainer.reward_styles import Caller, caller
from shared.reward_call import Unfit, load

_LENGTH_BYTES = 4
_PARENT_CHECK_S = 1.0


def main() -> int:
    """Answer requests until the input ends."""
    threading.Thread(target=_leave_with_parent, args=(os.getppid(),), daemon=True).start()
    requests, answers = _take_standard_streams()
    callers = []
    for part in json.loads(sys.argv[1]):
        try:
            callers.append(remote(part) if part["url"] else caller(load(part["function"]), part))
        except Unfit as error:
            _write(answers, {"unfit": str(error), "function": part["function"]})
            return 1
        except BaseException as error:  # noqa: BLE001 - importing runs the user's code, which may raise or exit
            _write(answers, {"failed": f"{type(error).__name__}: {error}", "function": part["function"]})
            return 1
    _write(answers, {"ready": True})
    with asyncio.Runner() as runner:
        while (request := _read(requests)) is not None:
            _write(answers, _answer(runner, callers, request))
    return 0


def _answer(runner: asyncio.Runner, callers: Sequence[Caller], request: dict[str, Any]) -> dict[str, Any]:
    """Return `rewards`, a list for each function; or what one of them `raised`."""
    rewards = []
    for name, call, number in callers:
        try:
            # Called outside the event loop: a function may run one of its own.
            result = call(request)
            if inspect.isawaitable(result):
                result = runner.run(_wait_for(result))
            rewards.append([None if value is None else number(value) for value in result])
        except Exception as error:  # noqa: BLE001 - the user's function may raise anything
            return {"raised": (f"{name}: " if name else "") + f"{type(error).__name__}: {error}"}
    return {"rewards": rewards}


async def _wait_for(result: Awaitable[Any]) -> Any:
    return await result


def _take_standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """Return input and output for this module alone; whoever else reads gets nothing, whoever prints, prints errors."""
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - a device, not a path
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return requests, answers


def _read(stream: BinaryIO) -> dict[str, Any] | None:
    head = stream.read(_LENGTH_BYTES)
    if len(head) < _LENGTH_BYTES:
        return None
    body: dict[str, Any] = msgpack.unpackb(stream.read(int.from_bytes(head, "big")))
    return body


def _write(stream: BinaryIO, body: dict[str, Any]) -> None:
    packed = msgpack.packb(body)
    stream.write(len(packed).to_bytes(_LENGTH_BYTES, "big") + packed)
    stream.flush()


def _leave_with_parent(parent: int) -> None:
    # A function that hangs would not notice that the input has ended.
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
