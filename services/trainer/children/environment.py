"""A process that runs environments: `python -m rlboost.services.trainer.children.environment SPEC`.

SPEC is JSON: the fields of `EnvironmentSpec`, and `call_style` with those of `CallStyle`. `child` describes the
transport. A request is a map:

- `release`: ids of conversations whose environments to discard first.
- `conversation`: None asks for the start of a conversation, with `row` and `seed`. Otherwise the id of one, with
  `turns`, those that its environment has not processed: each its text without special tokens, with them, and whether
  it begins inside of a thought.
  Without an environment for it here, `turns` has all of them, and `row` and `seed` are given, too.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Callable
from typing import Any

import msgpack

from rlboost.services.trainer.children.child import Pipe
from rlboost.services.trainer.children.reward import reward_number
from rlboost.shared.job.environment import Step, close, environment_factory
from rlboost.shared.model.tool_calls import CallStyle
from rlboost.shared.user_code.errors import MAX_CHARS, describe_error
from rlboost.shared.user_code.functions import MAX_REWARD, describe_import_error, has_parameter


def main() -> int:
    """Answer requests until the input ends."""
    pipe = Pipe()
    spec = json.loads(sys.argv[1])
    function = spec["function"]
    try:
        make = environment_factory(function, spec["arguments"], CallStyle(**spec["call_style"]))
    except BaseException as error:  # noqa: BLE001 - importing runs the user's code, which may raise or exit
        pipe.write({"failed": describe_import_error(function, "environment", error)})
        return 1
    pipe.write({"ready": True})
    with asyncio.Runner() as runner:
        host = Host(runner, make)
        try:
            while (request := pipe.read()) is not None:
                pipe.write(host.answer(request))
        finally:
            host.close()
    return 0


class Host:
    """The environments of this process's conversations."""

    def __init__(self, runner: asyncio.Runner, make: Callable[[], Any]) -> None:
        self._runner = runner
        self._make = make
        self._environments: dict[int, Any] = {}
        self._rows: dict[int, dict[str, Any]] = {}
        """Conversation -> its data row."""

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the serializable answer to a request."""
        for conversation in request["release"]:
            self.release(conversation)
        try:
            answer = self.reset(request) if request["conversation"] is None else self.step(request)
            _check_sendable(answer)
        except Exception as error:  # noqa: BLE001 - the user's environment may raise anything
            row = request.get("row") or self._rows.get(request["conversation"], {})
            last = {"text": request["turns"][-1][0]} if request["turns"] else {}
            self.release(request["conversation"])
            return {"raised": describe_error(error, {**row, **last})}
        return answer

    def reset(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the start of a conversation. Its own environment is created with its first turn."""
        environment = self._make()
        try:
            prompt = self._call(environment.reset, request["row"], request["seed"])
            tools = list(getattr(environment, "tools", None) or ())
        finally:
            close(environment, self._runner.run)
        return {"prompt": None if prompt is None else _checked_message(prompt, "reset"), "tools": tools}

    def step(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the environment's result for each text."""
        if "row" in request:
            environment = self._environments[request["conversation"]] = self._make()
            self._rows[request["conversation"]] = request["row"]
            self._call(environment.reset, request["row"], request["seed"])
        environment = self._environments[request["conversation"]]
        pass_raw = has_parameter(environment.step, "text_raw")
        results = []
        for text, raw, in_thought in request["turns"]:
            if hasattr(environment, "in_thought"):
                environment.in_thought = in_thought
            results.append(_step_result(self._call(environment.step, text, **({"text_raw": raw} if pass_raw else {}))))
        return {"results": results}

    def release(self, conversation: int | None) -> None:
        """Close the environment of a conversation, if it is here."""
        self._rows.pop(-1 if conversation is None else conversation, None)
        if conversation is not None and (environment := self._environments.pop(conversation, None)) is not None:
            close(environment, self._runner.run)

    def close(self) -> None:
        """Close all environments."""
        for conversation in list(self._environments):
            self.release(conversation)

    def _call(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        # Called outside the event loop: the environment may run one of its own.
        result = function(*arguments, **named)
        if inspect.isawaitable(result):

            async def wait() -> Any:
                return await result

            return self._runner.run(wait())
        return result


def _step_result(step: object) -> list[Any]:
    if not isinstance(step, Step):
        raise TypeError(f"step returned {type(step).__name__}, not rlboost.environments.Step")
    reward = reward_number(step.reward)
    if reward is None or not abs(reward) <= MAX_REWARD:
        raise ValueError(
            f"step returned the reward {step.reward}: return a finite number, at most {MAX_REWARD:g}; 0 for none"
        )
    done: object = step.done
    if isinstance(done, str):
        raise TypeError(f"step returned done={done!r}, which is text: return True or False")
    return [_checked_message(step.observation, "step"), reward, bool(step.done), str(step.warning)[:MAX_CHARS]]


def _check_sendable(answer: dict[str, Any]) -> None:
    try:
        msgpack.unpackb(msgpack.packb(answer))  # unpacking rejects some values that can be packed
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"the environment returned a value that cannot be sent, use text and JSON values: {error}"
        ) from error


def _checked_message(value: object, who: str) -> Any:
    if isinstance(value, str) or (isinstance(value, list) and all(_is_message(one) for one in value)):
        return value
    raise TypeError(f"{who} returned {type(value).__name__}: return text or a list of chat messages with a role")


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and "role" in value


if __name__ == "__main__":
    sys.exit(main())
