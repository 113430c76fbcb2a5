"""What the translations of chat completions into other APIs share."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol

from rlboost.services.rollout_manager.serving import anthropic_messages
from rlboost.services.rollout_manager.serving.completion import Completion
from rlboost.services.rollout_manager.serving.schemas import error_object, openai_error_format, openai_problem
from rlboost.shared.http.problem import Problem
from rlboost.shared.http.server import ErrorFormat

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

    def failed(self, problem: Problem) -> Event:
        """Return the event of an error, after which none follows."""

    @property
    def keep_alive(self) -> str:
        """Return a server-sent event for a connection on which there is nothing new."""


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
                yield writer.keep_alive if chunk is None else _texts(writer.add(chunk))
    except Problem as problem:
        yield _texts([writer.failed(problem)])
        return
    yield _texts(writer.end())


def _texts(events: Iterable[Event]) -> str:
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)


def error_format(own_paths: Collection[str]) -> ErrorFormat:
    """Return a function that gives the errors of each API's routes its format; see `openai_error_format`."""
    openai_format = openai_error_format(own_paths)

    def format_error(method: str, path: str, document: Mapping[str, Any]) -> tuple[int, dict[str, Any]] | None:
        found = openai_format(method, path, document)
        if found is None or not anthropic_messages.is_messages_path(path):
            return found
        status, body = found
        return status, anthropic_messages.error_body(status, body["error"])

    return format_error
