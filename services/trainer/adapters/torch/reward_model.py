"""A frozen reward model that scores completions. It is in a reward process of its own, not in the trainer's.

There it scores groups while the trainer computes and reserved engines hold the trainer's memory, has the time limit of
other rewards, and takes nothing with it if it fails. It is whole on one device, as no rank shares it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from rlboost.services.trainer.adapters.data import RewardTokenizer
from rlboost.services.trainer.adapters.torch.attention import PACKED, one_row_each
from rlboost.services.trainer.adapters.torch.layers import attention_of
from rlboost.services.trainer.adapters.torch.models import whole_model
from rlboost.services.trainer.adapters.torch.passes import ScorePass, with_scores
from rlboost.services.trainer.domain.plan import SequenceRow, pack
from rlboost.shared.model.folder import require_scores
from rlboost.shared.wire import I32
from rlboost.shared.wire import pack as pack_column


class RewardModel:
    """A reward model with its own tokenizer and chat template, which may be other than the policy's."""

    def __init__(
        self,
        folder: str,
        *,
        device: str,
        dtype: str,
        micro_batch_tokens: int,
        created: str,
        chat_template_kwargs: Mapping[str, Any],
        has_chats: bool,
    ) -> None:
        """Load the model in a directory.

        Args:
            folder: the directory.
            device: torch's name.
            dtype: of the weights and of matrix multiplications.
            micro_batch_tokens: tokens of one forward pass, unless a conversation has more.
            created: the date that chat templates print, in ISO format: a resumed job has the same scores.
            chat_template_kwargs: arguments of the chat template.
            has_chats: whether prompts are chat messages.

        Raises:
            ConfigError: it holds no reward model, or none with the tokenizer that is needed.

        """
        transformers_logging.disable_progress_bar()
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)
        source, torch_dtype, place = Path(folder), getattr(torch, dtype), torch.device(device)
        require_scores(source)
        when = datetime.fromisoformat(created)
        self._tokenizer = RewardTokenizer(source, when, chat_template_kwargs, has_chats=has_chats)
        attention = attention_of(self._tokenizer.loaded.config)
        module = whole_model(source, attention, torch_dtype, scores=True).to(place).requires_grad_(False)
        with_scores(module)
        self._passes = ScorePass(module, dtype=torch_dtype, device=place)
        self._packs_rows = attention == PACKED
        self._micro_batch_tokens = micro_batch_tokens

    @torch.inference_mode()
    def score(self, request: Mapping[str, Any]) -> list[float]:
        """Return the score of each completion of a group, whose fields are those of `RewardBatch`.

        Raises:
            ConfigError: the tokenizer or the chat template refuses a conversation, or it is too long.

        """
        columns = {name: values[0] for name, values in request["columns"].items()}
        pairs = zip(request["prompts"], request["completions"], strict=True)
        rows = [_row(self._tokenizer.tokens(*pair, columns)) for pair in pairs]
        batches, scores = pack(rows, self._micro_batch_tokens), [0.0] * len(rows)
        for batch in batches if self._packs_rows else one_row_each(batches):
            for i, score in zip(batch, self._passes([rows[i] for i in batch]).tolist(), strict=True):
                scores[i] = score
        return scores


def _row(ids: list[int]) -> SequenceRow:
    return SequenceRow(pack_column(ids[:-1], I32), pack_column(ids[-1:], I32))
