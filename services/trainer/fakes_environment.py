"""Fakes of `ports_environment.py`. No processes, no tokenizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from services.trainer.ports_environment import Misbehaved, Opening, Reply
from shared.environment import Environment, Said


class FakeEnvironments:
    """Environments in this process."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        """Make an environment for each conversation."""
        self._make = make
        self._held: dict[int, tuple[Environment, int]] = {}
        self.n_made = 0
        self.closed = False

    async def start(self) -> None:
        """See `Environments.start`."""

    async def open(self, row: dict[str, Any], seed: int) -> Opening:
        """See `Environments.open`."""
        environment = self._make()
        prompt = await self._call(environment.reset, row, seed)
        return Opening(prompt, list(getattr(environment, "tools", ())))

    async def hear(self, talk: int, row: dict[str, Any], seed: int, texts: Sequence[str]) -> list[Reply]:
        """See `Environments.hear`."""
        if talk not in self._held:
            environment = self._make()
            self.n_made += 1
            await self._call(environment.reset, row, seed)
            self._held[talk] = environment, 0
        environment, n_heard = self._held[talk]
        steps = [await self._call(environment.step, text) for text in texts[n_heard:]]
        self._held[talk] = environment, len(texts)
        return [Reply(step.observation, step.reward, step.done) for step in steps]

    async def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            result = function(*arguments)
            return await result if inspect.isawaitable(result) else result
        except Exception as error:
            raise Misbehaved("raised", f"{type(error).__name__}: {error}") from error

    def forget(self, talk: int) -> None:
        """See `Environments.forget`."""
        self._held.pop(talk, None)

    @property
    def held(self) -> int:
        """Return how many environments are held."""
        return len(self._held)

    async def close(self) -> None:
        """See `Environments.close`."""
        self.closed = True


class FakeSpeech:
    """`Speech` whose words are token ids."""

    max_length: int | None = None

    def opening(self, prompt: Said, tools: Sequence[dict[str, Any]]) -> list[int]:
        """See `Speech.opening`."""
        del tools
        return _ids(prompt)

    def behind(self, prompt: Said, last: int, observation: Said, tools: Sequence[dict[str, Any]]) -> list[int]:
        """See `Speech.behind`."""
        del prompt, last, tools
        return _ids(observation)


def _ids(text: Said) -> list[int]:
    if not isinstance(text, str) or not all(word.isdigit() for word in text.split()):
        raise Misbehaved("untellable", f"{text!r} has words that are no token ids")
    return [int(word) for word in text.split()]
