"""Converts texts and chat messages to token ids with the model's tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from itertools import takewhile
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from rlboost.shared.data.messages import ASSISTANT, Messages, Tools, clean_messages
from rlboost.shared.data.rows import is_messages
from rlboost.shared.errors import ConfigError
from rlboost.shared.model.chat_template import (
    ANSWER_PLACEHOLDER,
    THINKING_TAG,
    ChatTemplate,
    Rendered,
    text_after_answer,
    without_end,
)
from rlboost.shared.model.tool_calls import CallStyle, call_id, called, end_of_call, style_of_turns

UNLOADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError)
"""What transformers raises for a model or tokenizer that it cannot load; the last one for values of a `config.json`."""
_SENTINELS = ("\n", "=", "0", "a")
"""Texts that a tokenizer does not join to what follows; see `PromptTokenizer.encode_after`."""


def _texts_in(value: Any) -> Iterator[str]:
    """Yield the texts in a message, with those of its tool calls and their names."""
    if isinstance(value, str):
        yield value
    for inner in [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts_in(inner)


def pad_id_of(tokenizer: Any) -> int | None:
    """Return the token that pads batches of a reward model: the tokenizer's own, or else its end token, as with TRL."""
    found: int | None = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return found


_QUESTION = "qzm9999mzq"
"""A text that no chat template has."""
_NO_NAME = "unknown"
"""The name of a call that could not be read."""


class PromptTokenizer:
    """A model's tokenizer and chat template, which refuse what the model would not see as it was given."""

    def __init__(
        self,
        tokenizer: Any,
        config: Any,
        end_ids: Sequence[int],
        now: datetime | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Use a model's tokenizer and `config.json`.

        Args:
            tokenizer: of transformers.
            config: the model's.
            end_ids: the tokens that end a completion.
            now: the date that chat templates print; None: today's.
            template_kwargs: arguments of the chat template of all messages; those of a call come first.

        """
        self._tokenizer = tokenizer
        self._vocab_size = int(config.vocab_size)
        self._end_ids = frozenset(end_ids)
        self._end_id = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else end_ids[0]
        self.pad_id = pad_id_of(tokenizer)
        """The token that pads batches of a reward model."""
        self._template: ChatTemplate | None = None
        self._source: Any = None
        self._now = now or datetime.now(UTC)
        self.template_kwargs = template_kwargs or {}
        self.max_length: int | None = getattr(config, "max_position_embeddings", None)
        """Number of positions of the model, None if its config does not name it."""

    def fit(self, n: int) -> bool:
        """Return True if the model has positions for `n` tokens."""
        return self.max_length is None or n <= self.max_length

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, with special tokens."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))

    @property
    def has_rendered(self) -> bool:
        """Return True if chat messages have been given."""
        return self._template is not None

    @property
    def ignored_keys(self) -> frozenset[str]:
        """Return the keys of messages that the chat template has not shown, such as an id."""
        return frozenset(self._template.ignored_keys if self._template else ())

    # --- prompts ---

    def prompt(
        self, given: object, tools: Tools = (), kwargs: Mapping[str, Any] | None = None, *, is_open: bool = True
    ) -> list[int]:
        """Return the token ids of a prompt.

        They begin with one begin token if the tokenizer adds one, and never end with an end token.

        Args:
            given: text; or chat messages, after which the template's generation prompt is added, or whose last one is
                the beginning of the assistant's turn.
            tools: JSON schemas of tools, for the chat template.
            kwargs: arguments of the chat template.
            is_open: False if messages that end with the assistant's are complete, and another turn follows.

        Raises:
            ConfigError: `given` is neither, cannot be tokenized, is empty, is not shown to the model as it is, or has a
                token outside the vocabulary.

        """
        if isinstance(given, str):
            if tools or kwargs:
                raise ConfigError(
                    "tools and chat_template_kwargs need a chat template: give the prompt as chat messages"
                )
            ids = self._with_begin(self._encode(given))
            what = "the prompt's text"
        elif is_messages(given):
            ids = self._encode(self.rendered_prompt(given, tools, kwargs, is_open=is_open).text)
            what = "the rendered chat"
        else:
            raise ConfigError("it is neither text nor a list of chat messages with a role")
        if not ids:
            raise ConfigError("the prompt has no tokens")
        begin = self._tokenizer.bos_token_id
        head = list(takewhile(lambda token: token == begin or not self.decode([token]).strip(), ids))
        if head.count(begin) > 1 and begin not in self._end_ids:
            raise ConfigError(f"{what} begins with two begin tokens ({self.decode(head)}): remove one")
        self._require_open(ids, what)
        return self._require_in_vocabulary(ids)

    def rendered_prompt(
        self,
        messages: Sequence[Any],
        tools: Tools = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        is_open: bool = True,
    ) -> Rendered:
        """Return chat messages as the text of a prompt.

        Raises:
            ConfigError: see `prompt`.

        """
        cleaned = self._cleaned(messages)
        template = self._checked_template()
        render = template.render_prefill if is_open and cleaned[-1]["role"] == ASSISTANT else template.render
        return render(cleaned, tools=tools, kwargs=self._with_defaults(kwargs))

    def _with_defaults(self, kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
        return {**self.template_kwargs, **(kwargs or {})}

    # --- what follows a prompt ---

    def completion(self, prompt: str, text: str) -> list[int]:
        """Return the token ids of a completion of a text, with the end token last.

        Raises:
            ConfigError: it cannot be tokenized, has a token outside the vocabulary, or a begin or end token within it.

        """
        ids = self.encode_after(prompt, text)
        for token in ids[:-1] if ids and ids[-1] in self._end_ids else ids:
            if token in self._end_ids or token == self._tokenizer.bos_token_id:
                raise ConfigError(
                    f"the completion has the special token {self.decode([token])!r} before its end, where the model "
                    "would stop: remove it, or give a conversation as chat messages"
                )
        return self._require_in_vocabulary(ids if ids and ids[-1] in self._end_ids else [*ids, self._end_id])

    def answer(
        self, prompt: Messages, answer: Messages, tools: Tools = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Return the token ids of the chat message that follows a prompt of chat messages, up to the end token.

        They start after the generation prompt, as the model's completions do.

        Raises:
            ConfigError: the template raises, does not show a message as it is, or renders the prompt differently when
                an answer follows.

        """
        kwargs = self._with_defaults(kwargs)
        before = self.rendered_prompt(prompt, tools, kwargs, is_open=False).text
        messages = self._cleaned([*prompt, *answer])
        whole = self._checked_template().render(messages, tools=tools, kwargs=kwargs, is_prompt=False)
        if not whole.text.startswith(before):
            if prompt[-1]["role"] == ASSISTANT:
                raise ConfigError(
                    "the chat template renders a message of the assistant differently after another one of its own: "
                    "join the two"
                )
            raise ConfigError(
                "the chat template renders the prompt differently when an answer follows, as those of thinking models "
                "do: give the answer's reasoning_content, set data.chat_template_kwargs to {enable_thinking: false}, "
                "or give prompt and completion as text"
            )
        ids = self.encode_after(before, whole.text[len(before) :])
        # What the template adds after the end of the last turn belongs to the next turn.
        n_inner = sum(token in self._end_ids for token in self._encode(whole.text[len(before) : whole.end]))
        ends = [i for i, token in enumerate(ids) if token in self._end_ids][n_inner:]
        return self._require_in_vocabulary(ids[: ends[0] + 1] if ends else [*ids, self._end_id])

    def scored(
        self,
        prompt: str | Messages,
        completion: str | Messages,
        tools: Tools = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a prompt and its completion as a reward model sees them, as TRL's `RewardTrainer`.

        Text is tokenized as a whole, with an end token; the chat template renders messages up to its end of the last
        turn. Padding at the end is left out: the score is that of the last token that is none, as in transformers.

        Raises:
            ConfigError: see `prompt`.

        """
        if isinstance(prompt, str):
            end = self.decode([self._end_id])
            ids = self._with_begin(self._encode(f"{prompt}{str(completion).removesuffix(end)}{end}"))
        else:
            messages = self._cleaned([*prompt, *completion])
            whole = self._checked_template().render(
                messages, tools=tools, kwargs=self._with_defaults(kwargs), is_prompt=False
            )
            ids = self._encode(whole.text)
        while ids and ids[-1] == self.pad_id:
            ids.pop()
        if len(ids) < 2:
            raise ConfigError("it has fewer than two tokens: leave it out")
        return self._require_in_vocabulary(ids)

    def observation(
        self,
        prompt: Sequence[Any],
        last: int,
        observation: Sequence[Any],
        tools: Tools = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids between the model's turn after a prompt of messages and its next turn.

        Args:
            prompt: chat messages.
            last: the last token of the turn; an end token is not repeated.
            observation: chat messages.
            tools: as in `prompt`.
            kwargs: as in `prompt`.

        Raises:
            ConfigError: see `prompt`; or the template changes the model's answer.

        """
        kwargs = self._with_defaults(kwargs)
        given = [*prompt, {"role": ASSISTANT, "content": ANSWER_PLACEHOLDER}, *observation]
        messages = self._cleaned(given, self._end_tokens)  # a page that a tool has read may name other tokens
        if messages[len(prompt) - 1]["role"] == ASSISTANT:  # which the model has continued
            start, answer = messages[len(prompt) - 1 : len(prompt) + 1]
            content = start["content"] + answer["content"]
            messages[len(prompt) - 1 : len(prompt) + 1] = [{"role": ASSISTANT, "content": content}]
        end = self.decode([last]) if last in self._end_ids else ""
        results = messages[len(messages) - len(observation) :]
        if results and results[0]["role"] == "tool" and self.call_style.format:
            after = self._text_after_calls(messages[: -len(results) - 1], results, end, tools, kwargs)
            return self._require_in_vocabulary(self.encode_after(end, after))
        rendered = self._checked_template().render(messages, tools=tools, kwargs=kwargs)
        text = text_after_answer(rendered.text, end)
        if text is None:
            raise ConfigError("the chat template does not render the model's answer exactly once, unchanged")
        ids = self.encode_after(end, text)
        self._require_open(ids, "the rendered chat")
        return self._require_in_vocabulary(ids)

    @cached_property
    def call_style(self) -> CallStyle:
        """How the chat template writes tool calls, which a turn has to be able to end with."""
        if self._tokenizer.chat_template is None:
            why = "the model's tokenizer has no chat template: use a model that has one, or add its chat_template.jinja"
            return CallStyle("", problem=why)

        def render(messages: Messages, tools: list[dict[str, Any]], prompted: bool) -> str:
            return self._render(messages, tools=tools, add_generation_prompt=prompted)

        return style_of_turns(render, self._end_ids, self._encode, self.decode)

    def _text_after_calls(
        self, before: Messages, results: Messages, end: str, tools: Tools, kwargs: Mapping[str, Any] | None
    ) -> str:
        """Return what the template writes after a turn with calls that ended with `end`, up to the next turn.

        Many templates write the results of calls only after calls, and under their names.
        """
        answers = [
            {"tool_call_id": call_id(i), **one}
            for i, one in enumerate(takewhile(lambda one: one["role"] == "tool", results))
        ]
        calls = [(str(answer.get("name") or _NO_NAME), {"of": ANSWER_PLACEHOLDER}) for answer in answers]
        turn = called(calls, as_text=False)
        for call, answer in zip(turn["tool_calls"], answers, strict=True):
            call["id"] = answer["tool_call_id"]
        after, template = [*answers, *results[len(answers) :]], self._checked_template()
        try:
            text = template.render([*before, turn, *after], tools=tools, kwargs=kwargs).text
        except ConfigError:
            if len(calls) == 1:
                raise
            one = {**turn, "tool_calls": turn["tool_calls"][:1]}  # some templates write one call per turn only
            text = template.render([*before, one, *after], tools=tools, kwargs=kwargs).text
        at = text.rfind(ANSWER_PLACEHOLDER)
        stop = end_of_call(text, at, self.call_style) if at >= 0 else None
        if stop is None:
            raise ConfigError("the chat template does not render the model's tool call as that of another conversation")
        return without_end(text[stop:], end)

    def text_observation(self, last: int, text: str) -> list[int]:
        """Return the token ids of a text between two turns of the model, the first of which ends with a token.

        Raises:
            ConfigError: it cannot be tokenized, or has a token outside the vocabulary.

        """
        return self._require_in_vocabulary(
            self.encode_after(self.decode([last]) if last in self._end_ids else "", text)
        )

    def encode_after(self, before: str, text: str) -> list[int]:
        """Return the token ids of a text that follows another.

        They lack the space that some tokenizers add to a start, and white space that a special token before it takes.

        Raises:
            ConfigError: it cannot be tokenized.

        """
        if not text:
            return []
        alone = self._encode(text)
        if not self._needs_context:
            return alone
        for context in (before, *_SENTINELS):
            ids = self._encode(context) if context else []
            whole = self._encode(context + text) if context else []
            if ids and whole[: len(ids)] == ids:
                return whole[len(ids) :]
        return alone

    # --- tokens ---

    @cached_property
    def _needs_context(self) -> bool:
        """True if a text may get other tokens after another text than alone.

        Tokenizers add a space to a start, or special tokens take the white space next to them, as Phi-3's do.
        """
        special = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        if any(one.rstrip or one.lstrip for one in special):
            return True
        try:
            before, whole, alone = self._encode("\n"), self._encode("\na"), self._encode("a")
        except ConfigError:
            return False
        return bool(alone) and whole[len(before) :] != alone

    @cached_property
    def _begin(self) -> list[int]:
        """The tokens that the tokenizer adds before a text; those that it adds after a text are never used."""
        try:
            alone, framed = self._encode("a"), self._encode("a", special=True)
        except ConfigError:  # it has no token for this text
            alone, framed = [], self._encode("", special=True)
        if not alone:
            return [token for token in framed if token == self._tokenizer.bos_token_id]
        start = next((i for i in range(len(framed)) if framed[i : i + len(alone)] == alone), 0)
        return framed[:start]

    def _with_begin(self, ids: list[int]) -> list[int]:
        """Add the tokens before a text, unless the text begins with them itself."""
        return ids if ids[: len(self._begin)] == self._begin else [*self._begin, *ids]

    def _require_open(self, ids: Sequence[int], what: str) -> None:
        """Refuse a prompt that ends with an end token, perhaps before white space."""
        for token in reversed(ids[-4:]):
            if token in self._end_ids:
                raise ConfigError(
                    f"{what} ends with the end token {self.decode([token])!r}, after which the model writes nothing: "
                    "remove it, or use a chat template with a generation prompt"
                )
            if self.decode([token]).strip():
                return

    def _encode(self, text: str, *, special: bool = False) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start]
            raise ConfigError(f"the text {text[:80]!r} has {half!r}, half of a character: correct the row") from error
        try:
            ids = list(self._tokenizer(text, add_special_tokens=special)["input_ids"])
        except Exception as error:  # the tokenizers library raises a bare Exception
            raise ConfigError(
                f"the model's tokenizer cannot tokenize the text ({error}; {text[:80]!r}): correct the row, or use "
                "another model"
            ) from error
        unknown = self._tokenizer.unk_token_id
        if unknown is not None and unknown in ids and unknown not in self._end_ids:
            self._require_known(text, ids, unknown)
        return ids

    def _require_known(self, text: str, ids: Sequence[int], unknown: int) -> None:
        if text.count(self._tokenizer.unk_token) < ids.count(unknown):
            raise ConfigError(
                f"the model's tokenizer has no token for a part of the text {text[:80]!r}, so the model would not see "
                "it: correct the row, or use another model"
            )

    def _require_in_vocabulary(self, ids: list[int]) -> list[int]:
        if ids and max(ids) >= self._vocab_size:
            raise ConfigError(
                f"token id {max(ids)} is outside the model's vocabulary of {self._vocab_size}: the tokenizer and the "
                "model in this directory do not match"
            )
        return ids

    # --- messages ---

    def _cleaned(self, messages: Sequence[Any], refused: re.Pattern[str] | None = None) -> Messages:
        cleaned = clean_messages(messages)
        refused = refused or self._turn_tokens
        for number, message in enumerate(cleaned, 1):
            if found := refused.search("\n".join(_texts_in(message))):
                raise ConfigError(
                    f"message {number} ({message['role']}) has the special token {found[0]!r} in its text, where it "
                    "would end or begin a turn: remove it; the chat template adds its own"
                )
        return cleaned

    @cached_property
    def _turn_tokens(self) -> re.Pattern[str]:
        """The special tokens that end or begin a turn: end tokens, the begin token, and those of a plain rendering."""
        special = {str(one) for one in getattr(self._tokenizer, "added_tokens_decoder", {}).values() if one.special}
        written = {one for one in special if one in self._plain_chat and not THINKING_TAG.search(one)}
        return re.compile("|".join([self._end_tokens.pattern, *map(re.escape, sorted(written))]))

    @cached_property
    def _end_tokens(self) -> re.Pattern[str]:
        """End tokens and the begin token."""
        ends = {self.decode([token]) for token in {*self._end_ids, self._tokenizer.bos_token_id} - {None}}
        return re.compile("|".join(map(re.escape, sorted(ends - {""}))) or "(?!)")

    @cached_property
    def unended_turn(self) -> str:
        """The special token with which the chat template ends a turn, if no completion ends at it; else empty."""
        question, turn = {"role": "user", "content": _QUESTION}, {"role": ASSISTANT, "content": ANSWER_PLACEHOLDER}
        try:
            asked, answered = self._render([question]), self._render([question, turn])
        except Exception:  # noqa: BLE001 - a template is a program, which may raise anything
            return ""
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        ids = {str(one): token for token, one in added.items() if one.special}
        special = re.compile("|".join(map(re.escape, sorted(ids, key=len, reverse=True))) or "(?!)")
        found = special.match((text_after_answer(answered, "") or "").lstrip())
        begins = special.findall(asked.partition(_QUESTION)[0])[-1:]
        return "" if found is None or ids[found[0]] in self._end_ids or found[0] in begins else found[0]

    @cached_property
    def split_tokens(self) -> Sequence[str]:
        """What the used chat template writes like a special token, and the tokenizer splits into several tokens."""
        if self._template is None:
            return ()
        found = sorted(set(re.findall(r"<\|\w+\|>|<(?:start|end)_of_turn>", self._plain_chat)))
        return [one for one in found if len(self.encode_after("\n", one)) > 1]

    @cached_property
    def _plain_chat(self) -> str:
        """A conversation as the chat template renders it, empty if there is none or it cannot."""
        user, answer = {"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}
        for messages in ([{"role": "system", "content": "c"}, user, answer, user], [user, answer, user]):
            try:
                return self._render(messages, add_generation_prompt=True)
            except Exception:  # noqa: BLE001, S112 - a template is a program, which may raise anything
                continue
        return ""

    def _checked_template(self) -> ChatTemplate:
        source = self._tokenizer.chat_template
        if source is None:
            raise ConfigError("chat messages need a chat template, and the model's tokenizer has none")
        if self._template is None or source is not self._source:
            text = "\n".join(source.values()) if isinstance(source, dict) else source
            self._template, self._source = ChatTemplate(text, self._render), source
        return self._template

    def _render(self, messages: Messages, **options: Any) -> str:
        if "strftime_now" in str(self._tokenizer.chat_template):  # else each call would print the date of its day
            options["strftime_now"] = self._now.strftime
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **options))
