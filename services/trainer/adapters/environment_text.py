"""Formats prompts and observations of environments as token ids. The model's own tokens stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlboost.services.trainer.ports.environments import EnvironmentFault
from rlboost.shared.job.environment import Message
from rlboost.shared.model.chat_template import ANSWER_PLACEHOLDER, text_after_answer


class TokenizerChatFormatter:
    """`ChatFormatter` with a tokenizer of transformers."""

    def __init__(self, tokenizer: Any, config: Any, end_ids: Sequence[int]) -> None:
        """Use a model's tokenizer and `config.json`; `end_ids` are the tokens that end a turn."""
        self._tokenizer = tokenizer
        self._vocab_size = int(config.vocab_size)
        self._end_ids = frozenset(end_ids)
        self.max_length: int | None = getattr(config, "max_position_embeddings", None)

    def format_prompt(self, prompt: Message, tools: Sequence[dict[str, Any]]) -> list[int]:
        """See `ChatFormatter.format_prompt`."""
        if not isinstance(prompt, str):
            return self._ids(self._rendered(prompt, tools), special=False)
        if tools:
            raise EnvironmentFault("unformattable", "tools need a chat template: give the prompt as chat messages")
        return self._ids(prompt, special=True)

    def format_observation(
        self, prompt: Message, last: int, observation: Message, tools: Sequence[dict[str, Any]]
    ) -> list[int]:
        """See `ChatFormatter.format_observation`."""
        if isinstance(prompt, str):
            if not isinstance(observation, str):
                raise EnvironmentFault("unformattable", "step returned messages, but the prompt is text: return text")
            return self._ids(observation, special=False) if observation else []
        messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        turn = {"role": "assistant", "content": ANSWER_PLACEHOLDER}
        end = str(self._tokenizer.decode([last], skip_special_tokens=False)) if last in self._end_ids else ""
        text = text_after_answer(self._rendered([*prompt, turn, *messages], tools), end)
        if text is None:
            raise EnvironmentFault(
                "unformattable", "the chat template does not render the model's answer exactly once, unchanged"
            )
        return self._ids(text, special=False)

    def _rendered(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
        if self._tokenizer.chat_template is None:
            raise EnvironmentFault(
                "unformattable", "chat messages need a chat template, and the model's tokenizer has none"
            )
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=True
                )
            )
        except Exception as error:  # a template is a program, which may raise anything
            raise EnvironmentFault("unformattable", f"the chat template cannot render the messages: {error}") from error

    def _ids(self, text: str, *, special: bool) -> list[int]:
        try:
            ids = list(self._tokenizer(text, add_special_tokens=special)["input_ids"])
        except Exception as error:  # a tokenizer without an unknown token raises a bare Exception
            raise EnvironmentFault("unformattable", f"the tokenizer cannot tokenize {text[:80]!r}: {error}") from error
        if special and not ids:
            raise EnvironmentFault("unformattable", "the prompt has no tokens")
        if ids and max(ids) >= self._vocab_size:
            raise EnvironmentFault("unformattable", f"token id {max(ids)} is outside the model's vocabulary")
        return ids
