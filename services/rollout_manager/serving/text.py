"""Text of served models: to tokens, from tokens, and conversations whose turns keep the tokens of earlier ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from rlboost.services.rollout_manager.loop import Manager
from rlboost.services.rollout_manager.ports import (
    NO_OPTIONS,
    ModelFiles,
    TemplateOptions,
    TextProcessor,
    TokenizationError,
    Tokenizer,
)
from rlboost.services.rollout_manager.serving.tools import overlap
from rlboost.shared.model.chat_template import ANSWER_PLACEHOLDER, text_after_answer, without_end
from rlboost.shared.model.tool_calls import CallStyle, end_of_call
from rlboost.shared.process.stalls import let_others_run
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import Bus, Delete, Expire, HashSet, Op
from rlboost.shared.wire import I32, ints

# --- served model -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model. Without a tokenizer it takes and returns token ids only."""

    files: ModelFiles
    text: TextProcessor
    _styles: list[CallStyle] = field(default_factory=list)
    """The `call_style`, once it is known."""

    @property
    def has_tokenizer(self) -> bool:
        """Return True if the model takes and returns text."""
        return self.files.tokenizer is not None

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[bytes]:
        """Return the tokens of each text, as columns.

        Raises:
            TokenizationError: there is no tokenizer, or it has no tokens for a text.
            TextProcessesBusy: try again.

        """
        self._tokenizer()
        return await self.text.encode(self.files.name, texts, add_special_tokens=add_special_tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens without special tokens; empty without a tokenizer."""
        if self.files.tokenizer is None:
            return ""
        return self.files.tokenizer.decode(tokens, skip_special_tokens=True)

    def decode_raw(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens with special tokens; empty without a tokenizer."""
        if self.files.tokenizer is None:
            return ""
        return self.files.tokenizer.decode(tokens, skip_special_tokens=False)

    def special_texts(self, tokens: Sequence[int]) -> set[str]:
        """Return the texts of the special tokens among these."""
        if self.decode(tokens) == self.decode_raw(tokens):
            return set()
        return {self.decode_raw([token]) for token in tokens if not self.decode([token])}

    def token_text(self, token: int) -> str:
        """Return the text of a single token, special or not; its id without a tokenizer."""
        if self.files.tokenizer is None:
            return f"token_id:{token}"
        return self.files.tokenizer.decode([token], skip_special_tokens=False)

    async def call_style(self) -> CallStyle:
        """Return how the chat template writes tool calls, as the trainer finds it.

        Raises:
            TokenizationError: there is no chat template.
            TextProcessesBusy: try again.

        """
        self._require_template()
        if not self._styles:
            self._styles.append(await self.text.call_style(self.files.name))
        return self._styles[0]

    async def encode_chat(self, messages: Sequence[Mapping[str, Any]], options: TemplateOptions = NO_OPTIONS) -> bytes:
        """Return the tokens of a conversation as a column, up to where the assistant's next answer begins.

        Raises:
            TokenizationError: there is no chat template, or it rejects the messages; see also `encode`.

        """
        self._require_template()
        return await self.text.encode_chat(self.files.name, messages, options)

    async def extend_chat(
        self,
        tokens: bytes,
        messages: Sequence[Mapping[str, Any]],
        answer: int,
        options: TemplateOptions = NO_OPTIONS,
    ) -> bytes:
        """Return the tokens of a conversation that continues after an answer, without tokenizing the answer again.

        Args:
            tokens: the prompt and the answer, as they were given and generated: a column, as what is returned.
            messages: the whole conversation.
            answer: the index of the answer in `messages`; the template sees neither its text nor the arguments of its
                tool calls.
            options: of the chat template.

        Raises:
            TokenizationError: the template rejects the messages, or does not render each answer exactly once; see also
                `encode`.

        """
        before, after = messages[:answer], messages[answer + 1 :]
        (last,) = ints(tokens[-I32.itemsize :])
        end_token = self.token_text(last) if last in self.files.stop_token_ids else ""
        if calls := messages[answer].get("tool_calls"):
            rendered = await self._render([*before, _with_placeholders(calls), *after], options)
            at = rendered.rfind(ANSWER_PLACEHOLDER)
            stop = end_of_call(rendered, at, await self.call_style()) if at >= 0 else None
            suffix = None if stop is None else without_end(rendered[stop:], end_token)
        else:
            placeholder = {"role": "assistant", "content": ANSWER_PLACEHOLDER}
            suffix = text_after_answer(await self._render([*before, placeholder, *after], options), end_token)
        if suffix is None:
            raise TokenizationError("the chat template does not render each answer once: leave out X-Session-ID")
        # An added space, or white space that a special token takes, depends on what is before: see PromptTokenizer.
        start = end_token or "\n"
        alone, first, both = await self.encode([suffix, start, start + suffix], add_special_tokens=False)
        return tokens + (both.removeprefix(first) if both.startswith(first) else alone)

    async def _render(self, messages: Sequence[Mapping[str, Any]], options: TemplateOptions) -> str:
        self._require_template()
        return await self.text.render(self.files.name, messages, options)

    def _require_template(self) -> None:
        self._tokenizer()
        if self.files.chat_template is None:
            raise TokenizationError(
                f"model {self.files.name} has no chat template: use /v1/completions, or add chat_template.jinja to its "
                "folder"
            )

    def _tokenizer(self) -> Tokenizer:
        if self.files.tokenizer is None:
            missing = (
                f"the manager finds no tokenizer.json in {self.files.name}: send the prompt as token ids, or put the "
                "model's folder where the manager can read it"
            )
            raise TokenizationError(self.files.problem or missing)
        return self.files.tokenizer


def _with_placeholders(calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return an answer with the same calls, with other arguments."""
    named = [{**call, "function": {**call["function"], "arguments": {"of": ANSWER_PLACEHOLDER}}} for call in calls]
    return {"role": "assistant", "content": "", "tool_calls": named}


# --- detokenizer ------------------------------------------------------------------------------------------------------
#
# Whole characters only, and no text from a stop string on.


REPLACEMENT_CHARACTER = "\ufffd"
"""A decoder's output for bytes that are no character, or an incomplete one."""
MAX_PENDING_TOKENS = 8
"""Tokens held back until a character is complete. It has four bytes at most, so more tokens do not complete it."""
CONTEXT_TOKENS = 4
"""Tokens at the end of the prompt that are decoded with the first ones: some decoders strip a leading space."""


class Detokenizer:
    """The text of one completion."""

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int], stops: Sequence[str]) -> None:
        """Start after the prompt.

        Args:
            decode: token ids to text without special tokens.
            prompt: the prompt's token ids.
            stops: the text ends before the first of these strings.

        """
        self._decode = decode
        self._window = list(prompt[-CONTEXT_TOKENS:])
        self._n_decoded = len(self._window)
        """How many tokens of the window have been returned as text; the others wait for a complete character."""
        self._stops = stops
        self._held = ""
        """The end of the text so far, which may be the beginning of a stop string."""
        self.stop = ""
        """The stop string that ended the text, empty as long as none has."""

    @property
    def stopped(self) -> bool:
        """Return True if a stop string has ended the text."""
        return bool(self.stop)

    def add(self, tokens: Sequence[int]) -> str:
        """Add the next tokens and return the text that is now certain."""
        self._window += tokens
        n_tokens = len(self._window)
        for end in range(n_tokens, max(self._n_decoded, n_tokens - MAX_PENDING_TOKENS), -1):
            text = self._decode(self._window[:end])
            if not text.endswith(REPLACEMENT_CHARACTER):
                return self._until_stop(self._advance(text, end))
        if n_tokens - self._n_decoded < MAX_PENDING_TOKENS:
            return ""
        return self._until_stop(self._advance(self._decode(self._window), n_tokens))

    def flush(self) -> str:
        """Return the text that is held back, after the last token."""
        if self.stopped:
            return ""
        text = self._until_stop(self._advance(self._decode(self._window), len(self._window)))
        held, self._held = self._held, ""
        return text + held

    def _advance(self, text: str, end: int) -> str:
        """Return what is new in the text of the first `end` tokens of the window."""
        new = text[len(self._decode(self._window[: self._n_decoded])) :]
        if new:
            self._window = self._window[self._n_decoded :]
            end -= self._n_decoded
        self._n_decoded = end
        return new

    def _until_stop(self, new: str) -> str:
        text = self._held + new
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            (end, self.stop), self._held = min(found), ""
            return text[:end]
        n_held = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - n_held :]
        return text[: len(text) - n_held]


# --- conversations ----------------------------------------------------------------------------------------------------
#
# The tokens of earlier turns are reused as they were generated.
#
# Text that is tokenized again may become other tokens than the model generated, which would invalidate
# log-probabilities and prefix caches. So only the new messages of a turn are tokenized, and appended to the tokens of
# the turns before.


CONVERSATION_TTL_S = 3600.0
"""How long a conversation is retained after its last turn."""
MAX_CONVERSATIONS = 4096
"""Maximum number of conversations that one manager retains; beyond it, the least recently used ones are deleted."""
MAX_BYTES = 256 << 20
"""Maximum size of the conversations that one manager retains, with the same rule."""
MAX_READS = 4
"""Reads of Redis at once. However many clients wait, few connections are opened: a busy loop opens many too slowly."""
MESSAGES_AT_ONCE = 64
"""How many messages are digested, or converted, before the manager's loop continues."""
LONG_CHARACTERS = 1 << 20
"""A longer text is hashed in a thread."""
_FIELD = "last"
_NO_TURN: dict[str, Any] = {"n_messages": 0, "before": "", "whole": "", "prompt": "", "completion": "", "worker": ""}

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """One requested turn of a conversation."""

    key: str
    n_messages: int
    messages: str
    """A digest of its messages and of the options of the chat template."""
    prompt: bytes
    """A column of token ids."""
    preferred_worker: str
    """The worker that generated the previous turn; empty without one."""


class Conversations:
    """The conversations of all jobs, stored in Redis so that they survive the manager."""

    def __init__(self, manager: Manager, bus: Bus) -> None:
        self._manager, self._bus = manager, bus
        self._reads = asyncio.Semaphore(MAX_READS)
        self._written: OrderedDict[str, int] = OrderedDict()
        """Key -> size in bytes, least recently used first."""

    async def next_turn(
        self,
        job_id: str,
        session: str,
        model: ServedModel,
        messages: list[Message],
        options: TemplateOptions = NO_OPTIONS,
    ) -> Turn:
        """Return the next turn, or the last one again if it is requested again.

        A conversation that does not continue the last turn, or whose options differ, starts over: all its text is
        tokenized.

        Raises:
            TokenizationError: see `ServedModel`.
            BusUnavailable: try again.

        """
        digest = blake2b(f"{job_id}/{session}".encode(), digest_size=16).hexdigest()
        key = names.serving_session(digest)
        async with self._reads:
            stored = await self._bus.hash_get(key, _FIELD)
        last: dict[str, Any] = json.loads(stored) if stored else _NO_TURN
        found = await digests(messages, options)
        n = last["n_messages"]
        prompt = bytes.fromhex(last["prompt"])
        if len(messages) == n and found[n] == last["before"]:
            tokens = prompt
        elif len(messages) > n + 1 and found[n + 1] == last["whole"]:
            tokens = await model.extend_chat(prompt + bytes.fromhex(last["completion"]), messages, n, options)
        else:
            tokens = await model.encode_chat(messages, options)
        return Turn(key, len(messages), found[-1], tokens, last["worker"])

    async def save(self, turn: Turn, answer: Message, completion: bytes, worker: str) -> None:
        """Store a turn with its answer.

        Args:
            turn: the turn.
            answer: the message that the client receives.
            completion: the answer's tokens, a column.
            worker: the worker that generated the last of them.

        Raises:
            Fenced: another manager leads.
            BusUnavailable: it is unknown whether the turn is stored.

        """
        last = {
            "n_messages": turn.n_messages,
            "before": turn.messages,
            "whole": await digest_with(turn.messages, answer),
            "prompt": turn.prompt.hex(),
            "completion": completion.hex(),
            "worker": worker,
        }
        stored = json.dumps(last)
        ops: list[Op] = [HashSet(turn.key, {_FIELD: stored}), Expire(turn.key, CONVERSATION_TTL_S)]
        self._written[turn.key] = len(stored)
        self._written.move_to_end(turn.key)
        while len(self._written) > MAX_CONVERSATIONS or (len(self._written) > 1 and self._n_bytes > MAX_BYTES):
            ops.append(Delete(self._written.popitem(last=False)[0]))
        await self._manager.write(ops)

    @property
    def _n_bytes(self) -> int:
        return sum(self._written.values())


async def digests(messages: Sequence[Message], options: TemplateOptions) -> list[str]:
    """Return a digest of the options and the first n messages, for each n from 0 to all."""
    found = [_hashed(json.dumps([list(options.tools), {**options.hints, **options.kwargs}], sort_keys=True).encode())]
    for n_hashed, message in enumerate(messages, 1):
        found.append(await digest_with(found[-1], message))
        if n_hashed % MESSAGES_AT_ONCE == 0:
            await let_others_run()
    return found


async def digest_with(before: str, message: Message) -> str:
    """Return the digest of some messages, whose own digest is `before`, and one more."""
    one = identity(message)
    content = one.get("content")
    text = content if isinstance(content, str) else json.dumps(content, sort_keys=True)
    others = json.dumps([before, {name: value for name, value in one.items() if name != "content"}], sort_keys=True)
    hashed = [others.encode(), b"\0", text.encode(errors="surrogatepass")]
    if len(text) > LONG_CHARACTERS:
        return await asyncio.to_thread(_hashed, *hashed)
    return _hashed(*hashed)


def _hashed(*parts: bytes) -> str:
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def identity(message: Message) -> Message:
    """Return what identifies a message.

    Client libraries add fields to an answer, write the arguments of its calls anew, and may change ids.
    """
    if message["role"] != "assistant":
        return message
    content, calls = message["content"] or "", message.get("tool_calls") or []
    if not calls:
        return {"role": "assistant", "content": content}
    return {"role": "assistant", "content": content.strip(), "tool_calls": list(map(_identity_of_call, calls))}


def _identity_of_call(call: Any) -> object:
    """Return name and arguments of a call; the call itself where it has another form than OpenAI's."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments or "{}")
    # As text, since True == 1 == 1.0 in Python.
    return [function.get("name"), json.dumps(arguments, sort_keys=True)]
