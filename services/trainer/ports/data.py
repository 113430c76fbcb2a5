"""The job's prompts, tokenized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlboost.services.trainer.domain.groups.messages import Decode
from rlboost.services.trainer.ports.environments import ChatFormatter


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of the data."""

    given: str | list[dict[str, Any]]
    """As given in the file: text or chat messages."""
    tokens: bytes
    """int32 column of token ids: the model's input."""
    columns: dict[str, Any]
    """The line's other keys."""
    completion: bytes = b""
    """int32 column of token ids including the end token: the target of supervised fine-tuning, empty otherwise."""


@dataclass(frozen=True, slots=True)
class Data:
    """The job's prompts, and the tokenizer's decoder."""

    train: Sequence[Prompt]
    evaluation: Sequence[Prompt]
    stop_token_ids: tuple[int, ...]
    decode: Decode
    n_too_long: int = 0
    """Training prompts left out because of their length."""
    n_too_long_eval: int = 0
    """Evaluation prompts left out because of their length."""
    chat_formatter: ChatFormatter | None = None
    """Set if the job has an environment."""
    vocab_size: int = 0
    """Number of token ids of the model; 0 if unknown."""
