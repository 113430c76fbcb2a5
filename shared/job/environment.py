"""The interface of a user's environment, with which the model has multi-turn conversations.

Users import it from `rlboost.environments`.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from rlboost.shared.user_code.errors import place_of
from rlboost.shared.user_code.reward_call import InvalidUserFunction, load

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


class Environment(Protocol):
    """The environment of one conversation. Both methods may be async.

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


def environment_factory(path: str, arguments: Mapping[str, Any]) -> Callable[[], Any]:
    """Return the factory of a job file's environments, after calling it once; this runs the user's code.

    Raises:
        InvalidUserFunction: it does not return an environment.
        Exception: whatever the user's code raises.

    """
    make = partial(load(path), **arguments)
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
    finally:
        close(environment, asyncio.run)
    return make


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
