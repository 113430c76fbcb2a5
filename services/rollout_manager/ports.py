"""Protocols of what only the manager needs, and the values that they exchange."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from rlboost.services.rollout_manager.domain.offers import Failure
from rlboost.shared.errors import Retryable, RLBoostError
from rlboost.shared.model.tool_calls import CallStyle


class WorkerUsers(Protocol):
    """The Redis users of workers. Every method raises `BusUnavailable` while Redis is unavailable."""

    async def put(self, worker: str, secret_sha256: str) -> None:
        """Create or replace a worker's user.

        Args:
            worker: the worker's id.
            secret_sha256: the SHA-256 of the user's password, in hexadecimal.

        """

    async def remove(self, workers: Collection[str]) -> None:
        """Remove the users of workers and close their connections; users that do not exist are ignored."""

    async def present(self) -> set[str]:
        """Return the workers that have a user."""


class ProviderFailed(RLBoostError):
    """The provider did not do all that it was asked for; the text says why and what to do.

    Args:
        text: for people.
        failure: what it means for the offer.

    """

    def __init__(self, text: str, failure: Failure | None = None) -> None:
        super().__init__(text)
        self.failure = failure or Failure()


class FleetProvider(Protocol):
    """Starts and stops machines with spot workers."""

    async def scale(self, kind: str, workers: int, hosts: Collection[str] = (), /) -> None:
        """Have this many workers of a kind, started or starting. Repeating a request changes nothing.

        Args:
            kind: the kind.
            workers: how many.
            hosts: host names of the workers of the kind that are there. Of too many machines, others are ended first.

        Raises:
            ProviderFailed: the request was not accepted or only in part, or it is unknown whether it was.

        """

    async def price(self, kind: str, /) -> float | None:
        """Return the present dollars per hour of one worker of a kind; None: the provider has no prices.

        Raises:
            ProviderFailed: the price is unknown.

        """

    async def close(self) -> None:
        """Release connections."""


class LeaderWatch(Protocol):
    """Notices the death of another manager's process sooner than its lease expires."""

    async def has_died(self, url: str, limit_s: float) -> bool:
        """Return True as soon as the process that listened at the URL is known to be dead; False after the limit."""


# --- the model of a job, for the OpenAI endpoint ----------------------------------------------------------------------


class TokenizationError(RLBoostError):
    """A text or a conversation cannot be tokenized; the text says why and what to do."""


class InvalidJson(RLBoostError):
    """A text is no JSON, or has what no request needs; the text says where."""


class TextProcessesBusy(Retryable):
    """Other requests are tokenized: try again later."""


class Tokenizer(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text.

        Raises:
            TokenizationError: the tokenizer has no tokens for it.

        """

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids."""


class TemplateOptions(NamedTuple):
    """What a chat template takes besides the messages."""

    tools: Sequence[dict[str, Any]] = ()
    """JSON schemas of tools."""
    kwargs: Mapping[str, Any] = {}
    """Further arguments of the template, which rejects those that it does not read."""
    hints: Mapping[str, Any] = {}
    """Arguments for a template that reads them; `kwargs` have precedence."""


NO_OPTIONS = TemplateOptions()


class ChatTemplate(Protocol):
    """Renders conversations as the model's text."""

    def render(self, messages: Sequence[Mapping[str, Any]], options: TemplateOptions = NO_OPTIONS) -> str:
        """Return the text of a conversation, up to where the assistant's next answer begins.

        Raises:
            TokenizationError: the template rejects the messages or the options.

        """

    def render_unchecked(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], is_prompt: bool) -> str:
        """Return what the template makes of messages, to find out how it writes tool calls; may raise anything."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The contents of a job's model folder without the weights; all fields but `name` are empty without a folder."""

    name: str
    """The folder."""
    tokenizer: Tokenizer | None = None
    chat_template: ChatTemplate | None = None
    stop_token_ids: tuple[int, ...] = ()
    max_len: int | None = None
    """The most tokens of a prompt and its completion together."""
    vocab_size: int | None = None
    problem: str = ""
    """Why there is no folder, and what to do."""


class TextProcessor(Protocol):
    """Parses and tokenizes texts and renders conversations of models where this cannot stop the manager's loop."""

    async def parse(self, body: Sequence[bytes]) -> Any:
        """Return the value of a JSON text in parts, in which a `prompt` of token ids is a column (`shared.wire.I32`).

        Raises:
            InvalidJson: it is none, or not one of a request.
            TextProcessesBusy: too many requests wait.

        """

    async def encode(self, model: str, texts: Sequence[str], *, add_special_tokens: bool) -> list[bytes]:
        """Return the token ids of each text as a column, by the tokenizer in the model's folder.

        Raises:
            TokenizationError: the tokenizer has no tokens for a text, which may have half of a character, or takes too
                much time or memory.
            TextProcessesBusy: too many requests wait.

        """

    async def render(
        self, model: str, messages: Sequence[Mapping[str, Any]], options: TemplateOptions = NO_OPTIONS
    ) -> str:
        """Return the text of a conversation; see `ChatTemplate.render`, and `encode` for errors."""

    async def encode_chat(
        self, model: str, messages: Sequence[Mapping[str, Any]], options: TemplateOptions = NO_OPTIONS
    ) -> bytes:
        """Return the tokens of a conversation's text as a column; see `render` and `encode`."""

    async def call_style(self, model: str) -> CallStyle:
        """Return how a model's chat template writes tool calls; see `encode` for errors."""


FindModelFolder = Callable[[str, str], Awaitable[str]]
"""Returns the folder with the tokenizer of a job's model, by the job's id and its `model`, which may be one of the Hub.

A path is returned as it is. Raises `TokenizationError` if no model can be downloaded, `TextProcessesBusy` while one is.
"""


LoadModelFiles = Callable[[str], ModelFiles]
"""Reads the model folder of this name; raises `TokenizationError` if one of its files is invalid."""
