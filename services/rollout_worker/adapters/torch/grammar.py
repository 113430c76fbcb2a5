"""Structured outputs of the torch engine: compiles grammars with xgrammar, and follows them token by token."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt
import xgrammar
from transformers import PreTrainedTokenizerFast

from rlboost.services.rollout_worker.adapters.engine_thread import EngineThread
from rlboost.services.rollout_worker.adapters.tokenizer import loaded
from rlboost.shared.errors import Rejected
from rlboost.shared.messages import Sampling

_CACHE_BYTES = 64 << 20
"""Compiled grammars of earlier requests; those of clients repeat."""


class GrammarCompiler:
    """Compiles the grammars of requests in a thread of its own, one after the other: some take seconds.

    Args:
        tokenizer_json: a `tokenizer_for_grammars`.
        vocabulary: the model's number of token ids; the last ones may have no token.

    """

    def __init__(self, tokenizer_json: str, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        info = _tokenizer_info(loaded(tokenizer_json), vocabulary)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=_CACHE_BYTES)
        self._thread = EngineThread("grammar-compiler")

    def compile(self, sampling: Sampling) -> Future[GrammarMatcher]:
        """Return what follows the grammar of a request; raises `Rejected` if the grammar is invalid."""
        return self._thread.call(lambda: self._compile(sampling))

    def _compile(self, sampling: Sampling) -> GrammarMatcher:
        stop_token_ids = [token for token in sampling.stop_token_ids if token < self._vocabulary]
        try:
            compiled = self._compiler.compile_structural_tag(sampling.grammar)
            matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=stop_token_ids)
        except Exception as error:  # the library raises a bare RuntimeError, among others
            raise Rejected(f"the structured output cannot be compiled: {_cause(error)}") from error
        return GrammarMatcher(matcher, self._vocabulary)

    async def close(self) -> None:
        """Stop after the grammar that is being compiled."""
        await self._thread.close()


class GrammarMatcher:
    """`request_table.Matcher` of one request."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary
        self._bitmask = xgrammar.allocate_token_bitmask(1, vocabulary)
        self._n_accepted = 0

    def accept(self, tokens: Sequence[int]) -> bool:
        """See `Matcher`."""
        for token in tokens[self._n_accepted :]:
            if not self._matcher.accept_token(token):
                return False
            self._n_accepted += 1
        return True

    def allowed(self) -> npt.NDArray[np.bool_]:
        """See `Matcher`."""
        self._matcher.fill_next_token_bitmask(self._bitmask)
        bits = np.unpackbits(self._bitmask[0].numpy().view(np.uint8), bitorder="little")
        return bits[: self._vocabulary].astype(np.bool_)


def _tokenizer_info(tokenizer: PreTrainedTokenizerFast, vocabulary: int) -> xgrammar.TokenizerInfo:
    """Return the texts of tokens, without stop tokens: each request has its own."""
    kind = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary, stop_token_ids=[0])
    texts = [""] * vocabulary
    for text, token in tokenizer.get_vocab().items():
        if token < vocabulary:
            texts[token] = text
    return xgrammar.TokenizerInfo(texts, kind.vocab_type, vocab_size=vocabulary, add_prefix_space=kind.add_prefix_space)


def _cause(error: Exception) -> str:
    """Return an error's text without the place in the library's source that it begins with."""
    text = str(error).strip()
    return text.split(": ", 1)[-1] if text.startswith("[") else text
