"""The interface of a user's environment, with which the model has multi-turn conversations.

Users import it from `rlboost.environments`.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, get_type_hints

from rlboost.shared.user_code import InvalidUserFunction, load, place_of

Message = str | list[dict[str, Any]]
"""Text after a text prompt; after a prompt of chat messages, a list of them, or text for one user message."""


@dataclass(frozen=True, slots=True)
class Step:
    """An environment's reply to one turn of the model."""

    observation: Message = ""
    """Shown to the model before its next turn; ignored when the conversation is over."""
    reward: float = 0.0
    """Added to the conversation's reward."""
    done: bool = False
    """True ends the conversation."""
    warning: str = ""
    """For the user: a warning among the job's events, once for each first line, five at most."""
    cost: float = 0.0
    """Added to the conversation's cost, such as the dollars for a call of another model; not part of the reward."""


class ToolUnavailable(Exception):
    """A tool cannot be called, whatever the model writes: its conversation is lost, and another one begins."""


class Environment(Protocol):
    """The environment of one conversation. Both methods may be async.

    Async methods of different conversations run concurrently on one event loop; other ones in `environment.threads`
    threads. The calls of one conversation never overlap.

    Its behavior must depend only on its row, its seed and the texts it gets: after a crash of its process or of the
    trainer, a new environment gets the same texts again. It may have an attribute `tools`, JSON schemas that the chat
    template shows to the model, and a method `close`, which is called when it is no longer needed, even if it was never
    reset.
    """

    def reset(self, row: dict[str, Any], seed: int) -> Message | Awaitable[Message | None] | None:
        """Start the conversation.

        Args:
            row: the row of the data: `prompt`, and the other columns by name.
            seed: the same for all samples of a group, which must start alike.

        Returns:
            The prompt to use instead of the row's; None to use the row's.

        """

    def step(self, text: str) -> Step | Awaitable[Step]:
        """Reply to one turn of the model, given without special tokens; also called for a truncated turn.

        With a parameter `text_raw` it gets the same text with special tokens in addition.
        """


Plain = Callable[[], Any]
"""A call of code without `async`."""
PLAIN_RUNNER: ContextVar[Callable[[Plain], Awaitable[Any]] | None] = ContextVar("plain_runner", default=None)
"""Set in a process that serves many conversations: runs code that would block them, in a thread for such code."""


async def run_plain(call: Plain) -> Any:
    """Return the result of code without `async`, called from async code."""
    run = PLAIN_RUNNER.get()
    return call() if run is None else await run(call)


def environment_factory(path: str, arguments: Mapping[str, Any], style: Any = None) -> Callable[[], Any]:
    """Return the factory of a job file's environments, after calling it once; this runs the user's code.

    Args:
        path: `package.module:function`.
        arguments: keyword arguments of the function.
        style: how the model writes tool calls (a `CallStyle`), for environments that have an attribute `call_style`;
            None: they keep their own.

    Raises:
        ForbiddenFunction: a job file may not name it; nothing was imported.
        InvalidUserFunction: it is no class of environments, or no function that returns one, or it cannot read the
            model's tool calls.
        Exception: whatever the user's code raises.

    """
    function = load(path, "environment")
    _check_before_call(function, arguments)
    make = partial(_styled, partial(function, **arguments), style)
    try:
        environment = make()
    except Exception as error:
        place = place_of(error)
        raise InvalidUserFunction(
            f"creating an environment raised {type(error).__name__}: {error}" + (f" ({place})" if place else "")
        ) from error
    try:
        if missing := [name for name in ("reset", "step") if not callable(getattr(environment, name, None))]:
            raise InvalidUserFunction(f"it returns a {type(environment).__name__}, which has no method {missing[0]}")
        if style is not None and style.problem and hasattr(environment, "call_style"):
            raise InvalidUserFunction(f"{type(environment).__name__} cannot read tool calls: {style.problem}")
    finally:
        close(environment, asyncio.run)
    return make


def _check_before_call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Check what a call would show too late: a function that is none for environments may do anything.

    Raises:
        InvalidUserFunction: the arguments do not fit, or it makes something else.

    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise InvalidUserFunction(f"it has no signature: write a function or a class in Python ({error})") from error
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise InvalidUserFunction(f"it takes {signature}, which environment.arguments do not fit: {error}") from error
    made: Any = function
    if not isinstance(function, type):
        try:
            made = get_type_hints(function).get("return", Any)
        except Exception:  # noqa: BLE001 - evaluates the user's annotations
            return
    if made is type(None) or (isinstance(made, type) and made is not Any and not hasattr(made, "__getattr__")):
        missing = [name for name in ("reset", "step") if not callable(getattr(made, name, None))]
        if missing:
            verb = "is" if made is function else "returns"
            raise InvalidUserFunction(f"it {verb} a {made.__name__}, which has no method {missing[0]}")


def _styled(make: Callable[[], Any], style: Any) -> Any:
    environment = make()
    if style is not None and hasattr(environment, "call_style"):
        environment.call_style = style
    return environment


def close(environment: Any, run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    """Close an environment that has a method `close`; print an error of it.

    Args:
        environment: the environment, which is no longer needed.
        run: runs a coroutine, as `asyncio.run` does; used if `close` is async.

    """
    if not hasattr(environment, "close"):
        return
    try:
        if inspect.isawaitable(closing := environment.close()):

            async def wait() -> None:
                await closing

            run(wait())
    except Exception as error:  # noqa: BLE001 - the user's environment may raise anything
        print(f"environment.close: {type(error).__name__}: {error}", file=sys.stderr)
