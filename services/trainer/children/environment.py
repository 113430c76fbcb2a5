"""A process that runs environments: `python -m services.trainer.children.environment SPEC`.

SPEC is JSON, the fields of `EnvironmentSpec`. `child` has how it is asked. A request has `forget`: ids
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

import msgpack

from services.trainer.children.child import Pipe
from shared.environment import Step, end, maker
from shared.reward_call import why_not


def main() -> int:
    """Answer requests until the input ends."""
    pipe = Pipe()
    spec = json.loads(sys.argv[1])
    function = spec["function"]
    try:
        make = maker(function, spec["arguments"])
    except BaseException as error:  # noqa: BLE001 - importing runs the user's code, which may raise or exit
        pipe.write({"failed": why_not(function, "environment", error)})
        return 1
    pipe.write({"ready": True})
    with asyncio.Runner() as runner:
        host = _Host(runner, make)
        try:
            while (request := pipe.read()) is not None:
                pipe.write(host.answer(request))
        finally:
            host.close()
    return 0


class _Host:
    """The environments of the conversations that are led here."""

    def __init__(self, runner: asyncio.Runner, make: Callable[[], Any]) -> None:
        self._runner = runner
        self._make = make
        self._held: dict[int, Any] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return what a request is answered with, which can be sent."""
        for talk in request["forget"]:
            self.forget(talk)
        try:
            answer = self.open(request) if request["talk"] is None else self.hear(request)
            _check_sendable(answer)
        except Exception as error:  # noqa: BLE001 - the user's environment may raise anything
            self.forget(request["talk"])
            text = f"{type(error).__name__}: {error}"
            return {"raised": text.encode(errors="backslashreplace").decode()}
        return answer

    def open(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return what a conversation begins with; its environment is made when the model has spoken."""
        environment = self._make()
        try:
            prompt = self._call(environment.reset, request["row"], request["seed"])
            tools = list(getattr(environment, "tools", None) or ())
        finally:
            end(environment, self._runner.run)
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
            end(environment, self._runner.run)

    def close(self) -> None:
        """End all that are here."""
        for talk in list(self._held):
            self.forget(talk)

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


def _check_sendable(answer: dict[str, Any]) -> None:
    try:
        msgpack.unpackb(msgpack.packb(answer))  # the other side refuses some of what can be packed
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"what it gave cannot be sent, give text and what JSON has: {error}") from error


def _said(value: object, who: str) -> Any:
    if isinstance(value, str) or (isinstance(value, list) and all(_is_message(one) for one in value)):
        return value
    raise TypeError(f"{who} gave {type(value).__name__}, neither text nor a list of chat messages with a role")


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and "role" in value


if __name__ == "__main__":
    sys.exit(main())
