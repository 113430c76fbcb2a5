"""Fakes of environments and of their chat formatter, without processes and tokenizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from rlboost.services.trainer.ports.environments import EnvironmentFault, ResetResult, StepResult
from rlboost.shared.job.environment import Environment, Message


class FakeEnvironments:
    """Environments in this process."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        """Create an environment with `make` for each conversation."""
        self._make = make
        self._held: dict[int, tuple[Environment, int]] = {}
        self.n_made = 0
        self.closed = False

    async def start(self) -> None:
        """See `Environments.start`."""

    async def reset(self, row: dict[str, Any], seed: int) -> ResetResult:
        """See `Environments.reset`."""
        environment = self._make()
        prompt = await self._call(environment.reset, row, seed)
        return ResetResult(prompt, list(getattr(environment, "tools", ())))

    async def step(
        self,
        conversation: int,
        row: dict[str, Any],
        seed: int,
        texts: Sequence[str],
        texts_raw: Sequence[str] | None = None,
    ) -> list[StepResult]:
        """See `Environments.step`; environments get no raw texts."""
        del texts_raw
        if conversation not in self._held:
            environment = self._make()
            self.n_made += 1
            await self._call(environment.reset, row, seed)
            self._held[conversation] = environment, 0
        environment, n_heard = self._held[conversation]
        steps = [await self._call(environment.step, text) for text in texts[n_heard:]]
        self._held[conversation] = environment, len(texts)
        return [StepResult(step.observation, step.reward, step.done, step.warning) for step in steps]

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            result = function(*arguments)
            return await result if inspect.isawaitable(result) else result
        except Exception as error:
            raise EnvironmentFault("raised", f"{type(error).__name__}: {error}") from error

    def release(self, conversation: int) -> None:
        """See `Environments.release`."""
        self._held.pop(conversation, None)

    @property
    def held(self) -> int:
        """Return how many environments are held."""
        return len(self._held)

    async def close(self) -> None:
        """See `Environments.close`."""
        self.closed = True


class FakeChatFormatter:
    """`ChatFormatter` whose words are token ids."""

    max_length: int | None = None

    def format_prompt(self, prompt: Message, tools: Sequence[dict[str, Any]]) -> list[int]:
        """See `ChatFormatter.format_prompt`."""
        del tools
        return _ids(prompt)

    def format_observation(
        self, prompt: Message, last: int, observation: Message, tools: Sequence[dict[str, Any]]
    ) -> list[int]:
        """See `ChatFormatter.format_observation`."""
        del prompt, last, tools
        return _ids(observation)


def _ids(text: Message) -> list[int]:
    if not isinstance(text, str) or not all(word.isdigit() for word in text.split()):
        raise EnvironmentFault("unformattable", f"{text!r} has words that are not token ids")
    return [int(word) for word in text.split()]
