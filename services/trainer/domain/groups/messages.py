"""A conversation as messages for people, with the tool calls of each turn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Protocol

from rlboost.services.trainer.domain.groups.conversation import Conversation
from rlboost.shared.wire.columns import ints

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
"""The Hermes and Qwen format, as in `rlboost.environments.tools`."""


class Decode(Protocol):
    """The tokenizer's decoder."""

    def __call__(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids."""


def messages_of(conversation: Conversation, decode: Decode) -> list[dict[str, Any]]:
    """Return the turns and answers of a conversation, alternating, texts without special tokens.

    - `{role: "assistant", content, tool_calls, spans}`: a turn of the model. `content` is its text less the calls, of
      which `tool_calls` has the JSON texts as the model wrote them; `spans` as in samples.
    - `{role: "environment", content, reward, over}`: the answer. `content` is what the model reads before its next
      turn, as its chat template formats it; `over` is `done` or `cut` if the conversation ends with it.

    Args:
        conversation: complete.
        decode: the tokenizer's decoder.

    """
    found: list[dict[str, Any]] = []
    for turn, answer in zip_longest(conversation.turns, conversation.answers):
        tokens = ints(turn.tokens)
        text, raw = (decode(tokens, skip_special_tokens=skips) for skips in (True, False))
        content, calls = _without_calls(text, raw)
        spans = [list(span) for span in turn.spans]
        found.append({"role": "assistant", "content": content, "tool_calls": calls, "spans": spans})
        if answer is not None:
            content = decode(ints(answer.tokens), skip_special_tokens=True).strip()
            found.append({"role": "environment", "content": content, "reward": answer.reward, "over": answer.over})
    return found


def _without_calls(text: str, raw: str) -> tuple[str, list[str]]:
    """Return a text less its tool calls, and these; in `raw` their tags are, too, if they are special tokens."""
    calls = _CALL.findall(raw)
    for call in calls:
        tagged = f"<tool_call>{call}</tool_call>"
        text = text.replace(tagged if tagged in text else call, "", 1)
    return text.strip() if calls else text, [call.strip() for call in calls]
