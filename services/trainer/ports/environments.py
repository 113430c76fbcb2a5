"""The user's environments, and the chat formatting of their messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlboost.shared.job.environment import Message


class EnvironmentFault(Exception):
    """An environment failed, so its conversation cannot continue. Its group is dropped; the job continues."""

    def __init__(self, reason: str, detail: str) -> None:
        """Describe the fault.

        Args:
            reason: `raised`, `timeout`, `crashed`, `unserializable`, `unformattable`, `too_long` or `nondeterministic`;
                or `released`: the conversation was released before the call started.
            detail: for people.

        """
        super().__init__(detail)
        self.reason = f"environment_{reason}"
        self.detail = detail


@dataclass(frozen=True, slots=True)
class ResetResult:
    """What an environment's `reset` returned: the start of a conversation."""

    prompt: Message | None
    """None: use the prompt of the data row."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """JSON schemas of the tools, for the chat template."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an environment's `step` returned for one turn."""

    observation: Message
    reward: float
    done: bool
    warning: str = ""
    """Shown to the user; empty if there is none."""


class Environments(Protocol):
    """The user's environments, one per conversation. Calls return or raise `EnvironmentFault`, and always end."""

    async def start(self) -> None:
        """Import the environment function.

        Raises:
            ConfigError: it cannot be imported, or creates no environment.

        """

    async def reset(self, row: dict[str, Any], seed: int) -> ResetResult:
        """Return the start of a group's conversations.

        Raises:
            EnvironmentFault: the environment failed.

        """

    async def step(
        self,
        conversation: int,
        row: dict[str, Any],
        seed: int,
        texts: Sequence[str],
        texts_raw: Sequence[str] | None = None,
    ) -> list[StepResult]:
        """Pass to a conversation's environment the turns that it has not processed yet, at least the last one.

        An environment that is gone, because its process died or the trainer restarted, is created again and replays all
        turns. Make one call per conversation at a time.

        Args:
            conversation: id of the conversation.
            row: columns of the data row.
            seed: seed of the conversation's group.
            texts: all turns of the model, decoded without special tokens.
            texts_raw: the same with special tokens; None if they have none.

        Returns:
            The results of the last turns, one for each that the environment processed in this call.

        Raises:
            EnvironmentFault: the environment failed, or the conversation was released.

        """

    def release(self, conversation: int) -> None:
        """Discard a conversation's environment, if there is one. A queued `step` raises `EnvironmentFault`."""

    async def close(self) -> None:
        """Stop the processes that run environments."""


class ChatFormatter(Protocol):
    """Tokenizes prompts and observations. The model's own turns are never tokenized again."""

    max_length: int | None
    """Number of positions of the model, None if its config does not name it."""

    def format_prompt(self, prompt: Message, tools: Sequence[dict[str, Any]]) -> list[int]:
        """Return the token ids of a prompt; chat messages and tools go through the chat template.

        Raises:
            EnvironmentFault: it cannot be formatted.

        """

    def format_observation(
        self, prompt: Message, last: int, observation: Message, tools: Sequence[dict[str, Any]]
    ) -> list[int]:
        """Return the token ids between one turn of the model and its next.

        Args:
            prompt: what the conversation started with: text or chat messages.
            last: last token id of the turn, which the chat template may write, too.
            observation: what the environment answered.
            tools: as in `format_prompt`.

        Raises:
            EnvironmentFault: it cannot be formatted.

        """
