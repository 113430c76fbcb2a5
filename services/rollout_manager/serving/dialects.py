"""What the translations of chat completions into other APIs share."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from typing import Any, Protocol

from rlboost.services.rollout_manager.serving.completion import KEEP_ALIVE, Completion
from rlboost.services.rollout_manager.serving.schemas import error_object, openai_problem
from rlboost.shared.http.problem import Problem

Event = dict[str, Any]
"""An event of a stream, with its `type`."""


class Writer(Protocol):
    """Writes the response to one request: whole, or as the events of a stream."""

    def whole(self, chat: Mapping[str, Any]) -> dict[str, Any]:
        """Return the response of a chat completion."""

    def add(self, chunk: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the events of a chunk of the chat completion."""

    def end(self) -> Iterator[Event]:
        """Yield the last events."""

    def failed(self, error: Mapping[str, Any]) -> Event:
        """Return the event of an error of OpenAI's format, after which none follows."""


@contextlib.contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    """Name the fields of chats in errors as another API names them.

    Args:
        names: field of a chat -> name of the field that the client has sent.

    """
    try:
        yield
    except Problem as problem:
        param = error_object(problem)["param"]
        if param not in names:
            raise
        own = names[param]
        detail = own + problem.detail.removeprefix(param) if problem.detail.startswith(param) else problem.detail
        raise openai_problem(problem.status, problem.title, detail, param=own, headers=problem.headers) from problem


async def translated_stream(completion: Completion, writer: Writer) -> AsyncGenerator[str]:
    """Yield a response as server-sent events; an error is the last event."""
    try:
        async with contextlib.aclosing(completion.chunks()) as chunks:
            async for chunk in chunks:
                yield KEEP_ALIVE if chunk is None else _texts(writer.add(chunk))
    except Problem as problem:
        yield _texts([writer.failed(error_object(problem))])
        return
    yield _texts(writer.end())


def _texts(events: Iterable[Event]) -> str:
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
