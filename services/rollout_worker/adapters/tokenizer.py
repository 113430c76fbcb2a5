"""A model's tokenizer: for an engine that follows grammars, and for stop strings. Only its tokens' texts count."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import structlog
from tokenizers import Tokenizer

from rlboost.services.rollout_worker.domain.stop_strings import Decode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = structlog.get_logger(__name__)

_NEVER_MATCHES = "\n\x01"
"""No string of JSON has the first character, and nothing else the second."""


def tokenizer_for_grammars(tokenizer_json: str) -> str:
    """Return a tokenizer whose special tokens match nothing in a grammar; empty if there are no grammars with it.

    Clients get no text of special tokens. An engine that took one for its text, such as `<s>` within a string, would
    leave them an answer that is shorter than its schema says.

    Args:
        tokenizer_json: a tokenizer in the format of the library tokenizers; empty for none.

    """
    if not tokenizer_json or find_spec("xgrammar") is None:
        return ""
    from xgrammar import TokenizerInfo  # noqa: PLC0415 - optional

    try:
        found = _without_special_tokens(tokenizer_json)
        # As vLLM does: what fails there ends the engine.
        TokenizerInfo.from_huggingface(loaded(found), stop_token_ids=[0])
    except Exception as error:  # noqa: BLE001 - libraries raise it bare; without grammars, the worker serves all the rest
        log.warning("tokenizer_unusable", reason=f"there will be no structured outputs: {error!r}")
        return ""
    return found


def decoder(tokenizer_json: str) -> Decode | None:
    """Return what decodes tokens to text without special tokens; None if there is no usable tokenizer.

    Args:
        tokenizer_json: a tokenizer in the format of the library tokenizers; empty for none.

    """
    if not tokenizer_json:
        return None
    try:
        tokenizer = Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # noqa: BLE001 - the library raises it bare; the worker serves all the rest
        log.warning("tokenizer_unusable", reason=f"there will be no stop strings: {error!r}")
        return None

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=True))

    return decode


def loaded(tokenizer_json: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer as transformers has it."""
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - slow, and only grammars need it

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer_json))


def _without_special_tokens(tokenizer_json: str) -> str:
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
