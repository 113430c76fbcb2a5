"""A process that runs the user's reward function: `python -m services.trainer.reward_worker module:function`.

It reads requests from standard input and answers on standard output, each a 4-byte big-endian length and a msgpack
map. The user's own prints go to standard error. It ends with its input, or when its parent is gone.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, BinaryIO

import msgpack

_LENGTH_BYTES = 4
_PARENT_CHECK_S = 1.0


def main() -> int:
    """Answer requests until the input ends."""
    threading.Thread(target=_leave_with_parent, args=(os.getppid(),), daemon=True).start()
    requests, answers = _take_standard_streams()
    try:
        function = _load(sys.argv[1])
    except BaseException as error:  # noqa: BLE001 - importing runs the user's code, which may raise or exit
        _write(answers, {"failed": f"{type(error).__name__}: {error}"})
        return 1
    _write(answers, {"ready": True})
    with asyncio.Runner() as runner:
        while (request := _read(requests)) is not None:
            _write(answers, _answer(runner, function, request))
    return 0


def _answer(runner: asyncio.Runner, function: Callable[..., Any], request: dict[str, Any]) -> dict[str, Any]:
    try:
        result = function(
            prompts=request["prompts"],
            completions=request["completions"],
            completion_ids=request["completion_ids"],
            **request["columns"],
        )
        if inspect.isawaitable(result):
            result = runner.run(_wait_for(result))
        return {"rewards": [None if value is None else float(value) for value in result]}
    except Exception as error:  # noqa: BLE001 - the user's function may raise anything
        return {"raised": f"{type(error).__name__}: {error}"}


async def _wait_for(result: Any) -> Any:
    return await result


def _load(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    function = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    if not callable(function):
        raise TypeError(f"{path} is not a function")
    return function


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
