"""What a user writes to let the model act in turns: an environment, which answers what the model says.

`rlboost.environments` is where users import this from.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from shared.reward_call import Unfit, load

Said = str | list[dict[str, Any]]
"""Text behind a text prompt; behind a prompt of chat messages, messages, or text for one message of the user."""


@dataclass(frozen=True, slots=True)
class Step:
    """What an environment answers."""

    observation: Said = ""
    """What the model gets to read before it speaks again; nothing reads it once the conversation is over."""
    reward: float = 0.0
    """Added to the conversation's reward."""
    done: bool = False
    """True ends the conversation."""


class Environment(Protocol):
    """The other side of one conversation. Both methods may be async.

    What it does is to depend on its row, its seed and the texts that it hears, and on nothing else: after a crash of
    its process or of the trainer another one is made and hears the same texts again. It may have an attribute `tools`:
    JSON schemas that the chat template shows the model; and a method `close`, called when it is no longer needed, be it
    that it was never reset.
    """

    def reset(self, row: dict[str, Any], seed: int) -> Said | Awaitable[Said | None] | None:
        """Begin.

        Args:
            row: the row of the data: `prompt`, and its other columns by name.
            seed: the same for all samples of a group, which are to begin alike.

        Returns:
            What the model gets as its prompt in place of the row's; None for the row's.

        """

    def step(self, text: str) -> Step | Awaitable[Step]:
        """Answer one turn of the model, given without special tokens. A turn that was cut off is heard, too."""


def maker(path: str, arguments: Mapping[str, Any]) -> Callable[[], Any]:
    """Return what makes the environments of a job file, tried once: it runs the user's code.

    Raises:
        Unfit: it makes none.
        Exception: whatever the user's code does.

    """
    make = partial(load(path), **arguments)
    try:
        one = make()
    except Exception as error:
        raise Unfit(f"making one raised {type(error).__name__}: {error}") from error
    try:
        if missing := [name for name in ("reset", "step") if not callable(getattr(one, name, None))]:
            raise Unfit(f"it makes a {type(one).__name__}, which has no method {missing[0]}")
    finally:
        end(one, asyncio.run)
    return make


def end(environment: Any, run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    """Close an environment that can be closed; what it raises is printed, for nothing depends on it any more.

    Args:
        environment: no longer needed.
        run: what runs a coroutine, as `asyncio.run` does; called where `close` is async.

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
