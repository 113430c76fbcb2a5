"""What the trainer needs from environments, and from a tokenizer for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shared.environment import Said


class Misbehaved(Exception):
    """A conversation cannot go on for what its environment did: data, not a failure. Its group is dropped."""

    def __init__(self, reason: str, detail: str) -> None:
        """Say why.

        Args:
            reason: `raised`, `timeout`, `crashed`, `unsendable`, `untellable`, `too_long` or `not_the_same`; or
                `forgotten`: nobody wants the answer any more.
            detail: in words.

        """
        super().__init__(detail)
        self.reason = f"environment_{reason}"
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Opening:
    """What a conversation begins with."""

    prompt: Said | None
    """None: the row's own."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """JSON schemas, for the chat template."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What an environment answers to one text."""

    observation: Said
    reward: float
    done: bool


class Environments(Protocol):
    """The user's environments. Whatever they do, each call returns or raises `Misbehaved`."""

    async def start(self) -> None:
        """Make ready.

        Raises:
            ConfigError: the function cannot be imported, or makes no environment.

        """

    async def open(self, row: dict[str, Any], seed: int) -> Opening:
        """Return what the conversations of a group begin with.

        Raises:
            Misbehaved: why they cannot.

        """

    async def hear(self, talk: int, row: dict[str, Any], seed: int, texts: Sequence[str]) -> list[Reply]:
        """Let a conversation's environment hear what it has not heard yet, at least the last text.

        One that is not there any more, for its process has died or the trainer was restarted, is made anew and hears
        all of them. A conversation is asked for one answer at a time.

        Args:
            talk: the conversation.
            row: of the data.
            seed: of its group.
            texts: what the model said in all its turns.

        Returns:
            The replies to as many of the last texts as it had not heard.

        Raises:
            Misbehaved: why there is no answer.

        """

    def forget(self, talk: int) -> None:
        """Let a conversation's environment go, if there is one. What waits to be heard by it is `Misbehaved`."""

    async def close(self) -> None:
        """Stop what runs."""


class Speech(Protocol):
    """The tokenizer's part in conversations. What the model has said is never tokenized."""

    max_length: int | None
    """How many positions the model has, None where it does not say."""

    def opening(self, prompt: Said, tools: Sequence[dict[str, Any]]) -> list[int]:
        """Return the token ids of a prompt, chat messages through the template, with the tools.

        Raises:
            Misbehaved: it has none.

        """

    def behind(self, prompt: Said, last: int, observation: Said, tools: Sequence[dict[str, Any]]) -> list[int]:
        """Return the token ids that stand between one turn of the model and its next.

        Args:
            prompt: what the conversation began with: text or chat messages.
            last: the turn's last token, which the template may write, too.
            observation: what was answered.
            tools: as in the opening.

        Raises:
            Misbehaved: it has none.

        """
