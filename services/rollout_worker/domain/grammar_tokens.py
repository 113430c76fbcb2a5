"""The tokenizer with which an engine follows grammars: only its tokens' texts count."""

from __future__ import annotations

import json
from typing import Any

_NEVER_MATCHES = "\n\x01"
"""No string of JSON has the first character, and nothing else the second."""


def without_special_tokens(tokenizer_json: str) -> str:
    """Return a tokenizer whose special tokens match nothing in a grammar.

    Clients get no text of special tokens. An engine that took one for its text, such as `<s>` within a string, would
    leave them an answer that is shorter than its schema says.

    Args:
        tokenizer_json: a tokenizer in the format of the library tokenizers.

    """
    tokenizer: dict[str, Any] = json.loads(tokenizer_json)
    special = [token for token in tokenizer.get("added_tokens") or () if token["special"]]
    renamed = {token["content"]: f"{_NEVER_MATCHES}{token['id']}" for token in special}
    for token in special:
        token["content"] = renamed[token["content"]]
    vocabulary = tokenizer["model"].get("vocab")
    if isinstance(vocabulary, dict):
        tokenizer["model"]["vocab"] = {renamed.get(text, text): token for text, token in vocabulary.items()}
    elif vocabulary is not None:
        tokenizer["model"]["vocab"] = [[renamed.get(text, text), *rest] for text, *rest in vocabulary]
    return json.dumps({**tokenizer, "post_processor": None}, ensure_ascii=False)  # it adds special tokens to texts
