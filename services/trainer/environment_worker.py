"""A process that runs environments: `python -m services.trainer.environment_worker SPEC`.

SPEC is JSON, the fields of `EnvironmentSpec`. `services.trainer.child` has how it is asked. A request has `forget`: ids
of conversations that are over. One without a `talk` has a `row` and a `seed`, and asks what conversations begin with.
One with a talk, its id, has `texts`: those that it has not heard yet; if it is not here, all, and `row` and `seed`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import sys
from collections.abc import Callable
from typing import Any

from services.trainer.child import Pipe
from shared.environment import Step, maker
from shared.reward_call import Unfit


def main() -> int:
    """Answer requests until the input ends."""
    pipe = Pipe()
    spec = json.loads(sys.argv[1])
    function = spec["function"]
    with asyncio.Runner() as runner:
        try:
            host = _Host(runner, maker(function, spec["arguments"]))
        except Unfit as error:
            pipe.write({"unfit": str(error), "function": function})
            return 1
        except BaseException as error:  # noqa: BLE001 - importing runs the user's code, which may raise or exit
            pipe.write({"failed": f"{type(error).__name__}: {error}", "function": function})
            return 1
        pipe.write({"ready": True})
        while (request := pipe.read()) is not None:
            for talk in request["forget"]:
                host.forget(talk)
            try:
                answer = host.open(request) if request["talk"] is None else host.hear(request)
            except Exception as error:  # noqa: BLE001 - the user's environment may raise anything
                host.forget(request["talk"])
                answer = {"raised": f"{type(error).__name__}: {error}"}
            pipe.write(answer)
    return 0


class _Host:
    """The environments of the conversations that are led here."""

    def __init__(self, runner: asyncio.Runner, make: Callable[[], Any]) -> None:
        self._runner = runner
        self._make = make
        self._held: dict[int, Any] = {}

    def open(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return what a conversation begins with; its environment is made when the model has spoken."""
        environment = self._make()
        prompt = self._call(environment.reset, request["row"], request["seed"])
        tools = list(getattr(environment, "tools", None) or ())
        self.end(environment)
        return {"prompt": None if prompt is None else _said(prompt, "reset"), "tools": tools}

    def hear(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return what each text is answered with."""
        if "row" in request:
            environment = self._held[request["talk"]] = self._make()
            self._call(environment.reset, request["row"], request["seed"])
        environment = self._held[request["talk"]]
        return {"replies": [_reply(self._call(environment.step, text)) for text in request["texts"]]}

    def forget(self, talk: int | None) -> None:
        """End the environment of a conversation, if it is here."""
        if talk is not None and (environment := self._held.pop(talk, None)) is not None:
            self.end(environment)

    def end(self, environment: Any) -> None:
        """Close an environment that can be closed."""
        if hasattr(environment, "close"):
            try:
                self._call(environment.close)
            except Exception as error:  # noqa: BLE001 - likewise, and nothing depends on it any more
                print(f"environment.close: {type(error).__name__}: {error}", file=sys.stderr)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        # Called outside the event loop: the environment may run one of its own.
        result = function(*arguments)
        if inspect.isawaitable(result):

            async def wait() -> Any:
                return await result

            return self._runner.run(wait())
        return result


def _reply(step: object) -> list[Any]:
    if not isinstance(step, Step):
        raise TypeError(f"step returned {type(step).__name__}, not rlboost.environments.Step")
    if not math.isfinite(reward := float(step.reward)):
        raise ValueError(f"step gave the reward {step.reward}")
    return [_said(step.observation, "step"), reward, bool(step.done)]


def _said(value: object, who: str) -> Any:
    if isinstance(value, str) or (isinstance(value, list) and all(_is_message(one) for one in value)):
        return value
    raise TypeError(f"{who} gave {type(value).__name__}, neither text nor a list of chat messages with a role")


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and "role" in value


if __name__ == "__main__":
    sys.exit(main())
