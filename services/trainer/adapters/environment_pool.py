"""Runs the user's environments in a pool of processes.

A conversation stays in one process, which holds its environment; each process serves one call at a time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rlboost.services.trainer.adapters.tokens import PromptTokenizer
from rlboost.services.trainer.adapters.user_code import (
    UserCodeFault,
    UserCodeLog,
    UserCodeProcess,
    UserProgram,
    start_all,
)
from rlboost.services.trainer.ports.samples import EnvironmentFault, ResetResult, StepResult
from rlboost.shared.data.messages import TEMPLATE_KWARGS, TOOLS, Tools, template_kwargs_of, tools_of
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.environment import Message
from rlboost.shared.job.reward import EnvironmentSpec
from rlboost.shared.model.tool_calls import HERMES, CallStyle
from rlboost.shared.process.waiting import Waits

# --- Formats prompts and observations of environments as token ids. The model's own tokens stay as they are -----------


class TokenizerChatFormatter:
    """`ChatFormatter` with a tokenizer of transformers."""

    def __init__(self, tokens: PromptTokenizer) -> None:
        """Use the tokenizer of the job's prompts."""
        self._tokens = tokens
        self.max_length = tokens.max_length

    def format_prompt(
        self, prompt: Message, tools: Sequence[dict[str, Any]], columns: Mapping[str, Any] | None = None
    ) -> list[int]:
        """See `ChatFormatter.format_prompt`."""
        with _faults():
            return self._tokens.prompt(prompt, *_options(tools, columns or {}))

    def format_observation(
        self,
        prompt: Message,
        last: int,
        observation: Message,
        tools: Sequence[dict[str, Any]],
        columns: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """See `ChatFormatter.format_observation`."""
        with _faults():
            if not isinstance(prompt, str):
                messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
                return self._tokens.observation(prompt, last, messages, *_options(tools, columns or {}))
            if not isinstance(observation, str):
                raise ConfigError("step returned messages, but the prompt is text: return text")
            return self._tokens.text_observation(last, observation)


@contextmanager
def _faults() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise EnvironmentFault("unformattable", str(error)) from error


def _options(tools: Tools, columns: Mapping[str, Any]) -> tuple[Tools, dict[str, Any]]:
    """Return the tools and the arguments of the chat template for a row.

    Raises:
        ConfigError: row and environment have different tools.

    """
    of_row = tools_of(columns.get(TOOLS))
    if tools and of_row and list(tools) != list(of_row):
        raise ConfigError("the row's column 'tools' differs from the environment's tools: remove the column")
    return tools or of_row, template_kwargs_of(columns.get(TEMPLATE_KWARGS))


# --- The pool of processes --------------------------------------------------------------------------------------------


_Turn = tuple[str, str, bool]
"""The text of a turn without special tokens, with them, and whether it begins inside of a thought."""

_CLOSE_LIMIT_S = 5.0
"""How long a process may take to close its environments."""


class EnvironmentPool:
    """`Environments` over `environment.workers` processes."""

    def __init__(
        self, spec: EnvironmentSpec, waits: Waits, log: UserCodeLog | None = None, style: CallStyle = HERMES
    ) -> None:
        """Start no process yet: see `start`. Their output goes to `log`; the model writes tool calls in `style`."""
        self._waits = waits
        self._log = log
        self._hosts = [_Host(spec, log, style) for _ in range(spec.workers)]
        self._host_of: dict[int, _Host] = {}
        """Conversation -> its process."""

    async def start(self) -> None:
        """See `Environments.start`."""
        await start_all((host.process for host in self._hosts), self._waits, "the environment")

    async def reset(self, row: dict[str, Any], seed: int) -> ResetResult:
        """See `Environments.reset`."""
        host = min(self._hosts, key=lambda host: host.n_calls)
        answer = await host.call(None, row, seed, ())
        return ResetResult(answer["prompt"], answer["tools"])

    async def step(
        self,
        conversation: int,
        row: dict[str, Any],
        seed: int,
        texts: Sequence[str],
        texts_raw: Sequence[str] | None = None,
        in_thought: Sequence[bool] | None = None,
    ) -> list[StepResult]:
        """See `Environments.step`. The time limit starts when the conversation's process takes the call."""
        host = self._host_of.get(conversation)
        if host is None:
            host = self._host_of[conversation] = min(self._hosts, key=lambda host: len(host.conversations))
            host.conversations.add(conversation)
        raw, thoughts = texts_raw or texts, in_thought or [False] * len(texts)
        turns = list(zip(texts, raw, thoughts, strict=True))
        answer = await host.call(conversation, row, seed, turns)
        return [StepResult(*result) for result in answer["results"]]

    def release(self, conversation: int) -> None:
        """See `Environments.release`."""
        if (host := self._host_of.pop(conversation, None)) is not None:
            host.conversations.discard(conversation)
            host.released.append(conversation)

    async def close(self) -> None:
        """See `Environments.close`."""
        async with self._waits.on("the environment", because="open environments close", limit_s=_CLOSE_LIMIT_S + 5):
            await asyncio.gather(*(host.process.kill(_CLOSE_LIMIT_S) for host in self._hosts))
        if self._log is not None:
            self._log.close()


class _Host:
    """One process and its conversations."""

    def __init__(self, spec: EnvironmentSpec, log: UserCodeLog | None, style: CallStyle) -> None:
        program = UserProgram(
            "rlboost.services.trainer.children.environment",
            json.dumps({**spec.model_dump(mode="json"), "call_style": asdict(style)}),
            "environment.function",
            spec.function,
        )
        self.process = UserCodeProcess(program, log)
        self.conversations: set[int] = set()
        """Conversations assigned to this process."""
        self.n_calls = 0
        """Calls that wait or run."""
        self.released: list[int] = []
        """Finished conversations, which the next call passes to the process."""
        self._limit_s = spec.timeout_s
        self._n_processed: dict[int, int] = {}
        """Conversation whose environment is in the process -> turns that the environment has processed."""
        self._lock = asyncio.Lock()

    async def call(
        self, conversation: int | None, row: dict[str, Any], seed: int, turns: Sequence[_Turn]
    ) -> dict[str, Any]:
        """Call the process: `reset` without a conversation, else `step`.

        Raises:
            EnvironmentFault: the environment failed, or the conversation was released before the call started.

        """
        self.n_calls += 1
        try:
            async with self._lock:
                if conversation is not None and conversation not in self.conversations:
                    raise EnvironmentFault("released", "its conversation was released before the call started")
                return await self._call(conversation, row, seed, turns)
        except UserCodeFault as fault:
            raise EnvironmentFault(fault.reason, fault.detail) from fault
        finally:
            self.n_calls -= 1

    async def _call(
        self, conversation: int | None, row: dict[str, Any], seed: int, turns: Sequence[_Turn]
    ) -> dict[str, Any]:
        if await self.process.restart_if_ended():
            self._n_processed.clear()
        released, self.released = self.released, []
        for finished in released:
            self._n_processed.pop(finished, None)
        # Removed until the call succeeds: after a fault the environment is created again.
        n_processed = None if conversation is None else self._n_processed.pop(conversation, None)
        unprocessed = list(turns[n_processed or 0 :])
        request: dict[str, Any] = {"conversation": conversation, "release": released, "turns": unprocessed}
        if n_processed is None:
            request |= {"row": row, "seed": seed}
        try:
            answer = await self.process.call(request, self._limit_s * max(1, len(unprocessed)))
        except UserCodeFault as fault:
            if fault.reason == "unserializable":  # nothing was sent, and the process lives
                self.released = [*released, *self.released]
                if conversation is not None and n_processed is not None:
                    self._n_processed[conversation] = n_processed
            raise
        if conversation is not None:
            self._n_processed[conversation] = len(turns)
        return answer
