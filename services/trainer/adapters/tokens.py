"""Converts texts and chat messages to token ids with the model's tokenizer."""

from __future__ import annotations

from typing import Any

from rlboost.shared.data.examples import Messages, Tools
from rlboost.shared.data.rows import is_messages
from rlboost.shared.errors import ConfigError


class RowTokenizer:
    """A tokenizer whose errors name the data row."""

    def __init__(self, tokenizer: Any, config: Any, end_ids: tuple[int, ...]) -> None:
        """Use a model's tokenizer and `config.json`; `end_ids` are the tokens that end a completion."""
        self._tokenizer = tokenizer
        self._vocab_size = int(config.vocab_size)
        self._end_ids = end_ids
        self._end_id = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else end_ids[0]
        self.max_length: int | None = getattr(config, "max_position_embeddings", None)
        """Number of positions of the model, None if its config does not name it."""

    def prompt(self, given: object, key: str, location: str, tools: Tools = ()) -> list[int]:
        """Return the token ids of a prompt.

        Args:
            given: text, or chat messages, after which the template's generation prompt is added.
            key: the text's column, for errors.
            location: the row, for errors.
            tools: JSON schemas of tools, for the chat template.

        Raises:
            ConfigError: `given` is neither, cannot be tokenized, is empty, or has a token outside the vocabulary.

        """
        if isinstance(given, str):
            ids = self._encode(given, location, special=True)
        elif is_messages(given):
            ids = list(self._render(given, location, tools, prompted=True, tokenize=True)["input_ids"])
        else:
            raise ConfigError(f"{location}: {key!r} is neither text nor a list of chat messages with a role")
        if not ids:
            raise ConfigError(f"{location}: the prompt has no tokens")
        return self._require_in_vocabulary(ids, location)

    def fit(self, n: int) -> bool:
        """Return True if the model has positions for `n` tokens."""
        return self.max_length is None or n <= self.max_length

    def completion(self, text: str, location: str) -> list[int]:
        """Return the token ids of a completion text, with the end token last.

        Raises:
            ConfigError: it cannot be tokenized, or has a token outside the vocabulary.

        """
        ids = self._encode(text, location, special=False)
        return self._require_in_vocabulary(ids if ids and ids[-1] in self._end_ids else [*ids, self._end_id], location)

    def answer(self, prompt: Messages, answer: Messages, location: str, tools: Tools = ()) -> list[int]:
        """Return the token ids of chat messages that follow a prompt of chat messages, up to the end token.

        They start after the generation prompt, as the model's completions do.

        Raises:
            ConfigError: the template raises, or renders the prompt differently when an answer follows.

        """
        before = self._render(prompt, location, tools, prompted=True, tokenize=False)
        whole = self._render([*prompt, *answer], location, tools, prompted=False, tokenize=False)
        if not whole.startswith(before):
            raise ConfigError(
                f"{location}: the chat template renders the prompt differently when an answer follows: give prompt "
                "and completion as text"
            )
        ids = self._encode(whole[len(before) :], location, special=False)
        # What the template adds after the end of a turn belongs to the next turn.
        end = max((i for i, token in enumerate(ids) if token in self._end_ids), default=None)
        return self._require_in_vocabulary([*ids, self._end_id] if end is None else ids[: end + 1], location)

    def _encode(self, text: str, location: str, *, special: bool) -> list[int]:
        try:
            return list(self._tokenizer(text, add_special_tokens=special)["input_ids"])
        except Exception as error:  # the tokenizers library raises a bare Exception
            raise ConfigError(
                f"{location}: the model's tokenizer cannot tokenize the text ({error}): correct the row, or use "
                "another model"
            ) from error

    def _render(self, messages: list[Any], location: str, tools: Tools, *, prompted: bool, tokenize: bool) -> Any:
        if self._tokenizer.chat_template is None:
            raise ConfigError(f"{location}: chat messages need a chat template, and the model's tokenizer has none")
        try:
            return self._tokenizer.apply_chat_template(
                messages,
                tools=list(tools) or None,
                tokenize=tokenize,
                add_generation_prompt=prompted,
                return_dict=tokenize,
            )
        except Exception as error:  # a template is a program, which may raise anything
            raise ConfigError(f"{location}: the chat template cannot render the messages: {error}") from error

    def _require_in_vocabulary(self, ids: list[int], location: str) -> list[int]:
        if max(ids) >= self._vocab_size:
            raise ConfigError(
                f"{location}: token id {max(ids)} is outside the model's vocabulary of {self._vocab_size}: the "
                "tokenizer and the model in this directory do not match"
            )
        return ids
