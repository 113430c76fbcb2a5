"""The model of a job as the OpenAI endpoint uses it: text and conversations to tokens, and tokens to text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlboost.services.rollout_manager.ports import ModelFiles, TokenizationError, Tokenizer
from rlboost.shared.model.chat_template import ANSWER_PLACEHOLDER, text_after_answer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model. Without a tokenizer it takes and returns token ids only."""

    files: ModelFiles

    @property
    def has_tokenizer(self) -> bool:
        """Return True if the model takes and returns text."""
        return self.files.tokenizer is not None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the tokens of a text.

        Raises:
            TokenizationError: there is no tokenizer.

        """
        return self._tokenizer().encode(text, add_special_tokens=add_special_tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens without special tokens; empty without a tokenizer."""
        if self.files.tokenizer is None:
            return ""
        return self.files.tokenizer.decode(tokens, skip_special_tokens=True)

    def token_text(self, token: int) -> str:
        """Return the text of a single token, special or not; its id without a tokenizer."""
        if self.files.tokenizer is None:
            return f"token_id:{token}"
        return self.files.tokenizer.decode([token], skip_special_tokens=False)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens of a conversation, up to where the assistant's next answer begins.

        Raises:
            TokenizationError: there is no chat template, or it rejects the messages.

        """
        return self.encode(self._render(messages), add_special_tokens=False)

    def extend_chat(self, tokens: Sequence[int], messages: Sequence[Mapping[str, Any]], answer: int) -> list[int]:
        """Return the tokens of a conversation that continues after an answer, without tokenizing the answer again.

        Args:
            tokens: the prompt and the answer, as they were given and generated.
            messages: the whole conversation.
            answer: the index of the answer in `messages`; the template never sees its text.

        Raises:
            TokenizationError: the template rejects the messages, or does not render each answer exactly once.

        """
        placeholder = {"role": "assistant", "content": ANSWER_PLACEHOLDER}
        rendered = self._render([*messages[:answer], placeholder, *messages[answer + 1 :]])
        end_token = self.token_text(tokens[-1]) if tokens[-1] in self.files.stop_token_ids else ""
        suffix = text_after_answer(rendered, end_token)
        if suffix is None:
            raise TokenizationError("the chat template does not render each answer once: leave out X-Session-ID")
        return [*tokens, *self.encode(suffix, add_special_tokens=False)]

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        self._tokenizer()
        if self.files.chat_template is None:
            raise TokenizationError(
                f"model {self.files.name} has no chat template: use /v1/completions, or add chat_template.jinja to its "
                "folder"
            )
        return self.files.chat_template.render(messages)

    def _tokenizer(self) -> Tokenizer:
        if self.files.tokenizer is None:
            raise TokenizationError(
                f"the manager finds no tokenizer.json in {self.files.name}: send the prompt as token ids, or put the "
                "model's folder where the manager can read it"
            )
        return self.files.tokenizer
