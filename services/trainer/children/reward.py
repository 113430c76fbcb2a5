"""A process that runs the user's reward functions: `python -m rlboost.services.trainer.children.reward PARTS`.

PARTS is JSON, a list of the fields of `RewardPart`, with `timeout_s`. `child` describes the transport.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Awaitable, Sequence
from typing import Any

from rlboost.services.trainer.children.child import Pipe
from rlboost.services.trainer.children.remote_reward import remote
from rlboost.services.trainer.children.reward_styles import Caller, caller
from rlboost.shared.user_code.errors import describe_error
from rlboost.shared.user_code.reward_call import describe_import_error, load


def main() -> int:
    """Answer requests until the input ends."""
    pipe = Pipe()
    callers = []
    for part in json.loads(sys.argv[1]):
        try:
            function = None if part["url"] else load(part["function"])
            callers.append(remote(part) if function is None else caller(function, part))
        except BaseException as error:  # noqa: BLE001 - importing runs the user's code, which may raise or exit
            pipe.write({"failed": describe_import_error(part["function"], "reward function", error)})
            return 1
        try:
            if (prepare := getattr(function, "prepare", None)) is not None:
                prepare(**part["arguments"])
        except BaseException as error:  # noqa: BLE001 - as above
            pipe.write({"failed": f"{part['function']}: {error}"})
            return 1
    pipe.write({"ready": True})
    with asyncio.Runner() as runner:
        while (request := pipe.read()) is not None:
            pipe.write(_answer(runner, callers, request))
    return 0


def _answer(runner: asyncio.Runner, callers: Sequence[Caller], request: dict[str, Any]) -> dict[str, Any]:
    """Return `rewards`, a list per function; or `raised`, the error of the first that failed."""
    rewards = []
    for name, call, number in callers:
        try:
            # Called outside the event loop: a function may run its own.
            result = call(request)
            if inspect.isawaitable(result):
                result = runner.run(_wait_for(result))
            rewards.append([None if value is None else number(value) for value in result])
        except Exception as error:  # noqa: BLE001 - the user's function may raise anything
            return {"raised": (f"{name}: " if name else "") + describe_error(error, _row(request))}
    return {"rewards": rewards}


def _row(request: dict[str, Any]) -> dict[str, Any]:
    """Return the data row of a group's request, and its completions."""
    columns = {name: values[0] for name, values in request["columns"].items()}
    return {"prompt": request["prompts"][0], **columns, "completions": request["solutions"] or request["completions"]}


async def _wait_for(result: Awaitable[Any]) -> Any:
    return await result


if __name__ == "__main__":
    sys.exit(main())
