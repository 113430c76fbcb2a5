"""From what an environment says to token ids, put behind the model's own, which stay what they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.trainer.ports_environment import Misbehaved
from shared.chat import STAND_IN, behind_answer
from shared.environment import Said


class TokenizerSpeech:
    """`Speech` with a tokenizer of transformers."""

    def __init__(self, tokenizer: Any, config: Any, end_ids: Sequence[int]) -> None:
        """Use a model's tokenizer and `config.json`; `end_ids` are the tokens that end a turn."""
        self._tokenizer = tokenizer
        self._vocab_size = int(config.vocab_size)
        self._end_ids = frozenset(end_ids)
        self.max_length: int | None = getattr(config, "max_position_embeddings", None)

    def opening(self, prompt: Said, tools: Sequence[dict[str, Any]]) -> list[int]:
        """See `Speech.opening`."""
        if not isinstance(prompt, str):
            return self._ids(self._rendered(prompt, tools), special=False)
        if tools:
            raise Misbehaved("untellable", "tools are told by a chat template: give the prompt as chat messages")
        return self._ids(prompt, special=True)

    def behind(self, prompt: Said, last: int, observation: Said, tools: Sequence[dict[str, Any]]) -> list[int]:
        """See `Speech.behind`."""
        if isinstance(prompt, str):
            if not isinstance(observation, str):
                raise Misbehaved("untellable", "step gave chat messages, but the prompt is text: give text")
            return self._ids(observation, special=False) if observation else []
        said = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        turn = {"role": "assistant", "content": STAND_IN}
        end = str(self._tokenizer.decode([last], skip_special_tokens=False)) if last in self._end_ids else ""
        rest = behind_answer(self._rendered([*prompt, turn, *said], tools), end)
        if rest is None:
            raise Misbehaved("untellable", "the chat template does not show what the model said once, as it is")
        return self._ids(rest, special=False)

    def _rendered(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
        if self._tokenizer.chat_template is None:
            raise Misbehaved("untellable", "chat messages need a chat template, and the model's tokenizer has none")
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=True
                )
            )
        except Exception as error:  # a template is a program of its own, which raises anything
            raise Misbehaved("untellable", f"the chat template refuses the messages: {error}") from error

    def _ids(self, text: str, *, special: bool) -> list[int]:
        try:
            ids = list(self._tokenizer(text, add_special_tokens=special)["input_ids"])
        except Exception as error:  # a tokenizer without an unknown token raises a bare one
            raise Misbehaved("untellable", f"the tokenizer cannot spell {text[:80]!r}: {error}") from error
        if special and not ids:
            raise Misbehaved("untellable", "the prompt has no tokens")
        if ids and max(ids) >= self._vocab_size:
            raise Misbehaved("untellable", f"token id {max(ids)} is outside the model's vocabulary")
        return ids
