"""Logits processors for vLLM, as a package might install them. Imports vLLM."""

from __future__ import annotations

from typing import Any

from vllm.v1.sample.logits_processor import LogitsProcessor


class FewTokens(LogitsProcessor):  # type: ignore[misc]  # vLLM may not be installed
    """Leaves the ten most likely tokens."""

    def __init__(self, *_: Any) -> None:
        """Take vLLM's configuration, which is not used."""

    def is_argmax_invariant(self) -> bool:
        """Return True: the most likely token stays."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """Ignore requests: all are treated alike."""

    def apply(self, logits: Any) -> Any:
        """Mask all other tokens."""
        return logits.masked_fill(logits < logits.topk(10).values[:, -1:], -float("inf"))
