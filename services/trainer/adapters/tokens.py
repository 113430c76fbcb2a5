"""From texts and chat messages to token ids, as the model's own tokenizer has them."""

from __future__ import annotations

from typing import Any

from shared.errors import ConfigError
from shared.rows import is_messages


class Tokens:
    """A tokenizer whose every refusal names the row."""

    def __init__(self, tokenizer: Any, config: Any, end_ids: tuple[int, ...]) -> None:
        """Use a model's tokenizer and `config.json`; `end_ids` are the tokens that end a completion."""
        self._tokenizer = tokenizer
        self._vocab_size = int(config.vocab_size)
        self._end_ids = end_ids
        self._end_id = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else end_ids[0]
        self.max_length: int | None = getattr(config, "max_position_embeddings", None)
        """How many positions the model has, None where it does not say."""

    def prompt(self, given: object, key: str, place: str) -> list[int]:
        """Return the token ids of a prompt.

        Args:
            given: text, or chat messages, which get the template's generation prompt behind them.
            key: the column that it comes from, for errors.
            place: the row, for errors.

        Raises:
            ConfigError: it is neither, or cannot be read, or has no token, or one that the model does not have.

        """
        if isinstance(given, str):
            ids = self._read(given, place, special=True)
        elif is_messages(given):
            ids = list(self._templated(given, place, prompted=True, tokenize=True)["input_ids"])
        else:
            raise ConfigError(f"{place}: {key!r} is neither text nor a list of chat messages with a role")
        if not ids:
            raise ConfigError(f"{place}: the prompt has no tokens")
        return self._known(ids, place)

    def fit(self, n: int) -> bool:
        """Tell whether the model has positions for so many tokens."""
        return self.max_length is None or n <= self.max_length

    def completion(self, text: str, place: str) -> list[int]:
        """Return the token ids of a text behind a prompt, the end token last.

        Raises:
            ConfigError: it cannot be read, or has a token that the model does not have.

        """
        ids = self._read(text, place, special=False)
        return self._known(ids if ids and ids[-1] in self._end_ids else [*ids, self._end_id], place)

    def answer(self, prompt: list[dict[str, Any]], answer: list[dict[str, Any]], place: str) -> list[int]:
        """Return the token ids of chat messages behind a prompt of chat messages, up to the template's end token.

        They are cut where the generation prompt ends, so that the model is trained on what it will be asked for.

        Raises:
            ConfigError: the template refuses them, or writes the prompt in another way when an answer follows.

        """
        before = self._templated(prompt, place, prompted=True, tokenize=False)
        whole = self._templated([*prompt, *answer], place, prompted=False, tokenize=False)
        if not whole.startswith(before):
            raise ConfigError(
                f"{place}: the chat template writes the messages in another way when the answer follows: give prompt "
                "and completion as text"
            )
        ids = self._read(whole[len(before) :], place, special=False)
        # What a template writes behind the end of a turn belongs to the next one.
        end = max((i for i, token in enumerate(ids) if token in self._end_ids), default=None)
        return self._known([*ids, self._end_id] if end is None else ids[: end + 1], place)

    def _read(self, text: str, place: str, *, special: bool) -> list[int]:
        try:
            return list(self._tokenizer(text, add_special_tokens=special)["input_ids"])
        except Exception as error:  # what the library tokenizers raises has no class of its own
            raise ConfigError(
                f"{place}: the model's tokenizer cannot read the text ({error}): mend the row, or use a model whose "
                "tokenizer can"
            ) from error

    def _templated(self, messages: list[Any], place: str, *, prompted: bool, tokenize: bool) -> Any:
        if self._tokenizer.chat_template is None:
            raise ConfigError(f"{place}: chat messages need a chat template, and the model's tokenizer has none")
        try:
            return self._tokenizer.apply_chat_template(
                messages, tokenize=tokenize, add_generation_prompt=prompted, return_dict=tokenize
            )
        except Exception as error:  # a template is a program of its own, which raises anything
            raise ConfigError(f"{place}: the chat template refuses the messages: {error}") from error

    def _known(self, ids: list[int], place: str) -> list[int]:
        if max(ids) >= self._vocab_size:
            raise ConfigError(
                f"{place}: token id {max(ids)} is outside the model's vocabulary of {self._vocab_size}: the "
                "tokenizer and the model in this directory do not belong together"
            )
        return ids
