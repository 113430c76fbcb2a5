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

from rlboost.services.trainer.adapters.data import load_tokenizer
from rlboost.services.trainer.adapters.torch.attention import PACKED, one_row_each
from rlboost.services.trainer.adapters.torch.layers import attention_of
from rlboost.services.trainer.adapters.torch.models import whole_model
from rlboost.services.trainer.adapters.torch.passes import ScorePass, with_scores
from rlboost.services.trainer.domain.plan import SequenceRow, pack
from rlboost.shared.data.messages import ASSISTANT, TEMPLATE_KWARGS, TOOLS, template_kwargs_of, tools_of
from rlboost.shared.errors import ConfigError
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
        loaded = load_tokenizer(source, datetime.fromisoformat(created), chat_template_kwargs)
        if has_chats and loaded.tokenizer.chat_template is None:
            raise ConfigError(
                "prompts are chat messages, and its tokenizer has no chat template: add chat_template.jinja"
            )
        attention = attention_of(loaded.config)
        module = whole_model(source, attention, torch_dtype, scores=True).to(place).requires_grad_(False)
        with_scores(module)
        self._passes = ScorePass(module, dtype=torch_dtype, device=place)
        self._tokens = loaded.prompts
        self._packs_rows = attention == PACKED
        self._micro_batch_tokens = micro_batch_tokens

    @torch.inference_mode()
    def score(self, request: Mapping[str, Any]) -> list[float]:
        """Return the score of each completion of a group, whose fields are those of `RewardBatch`.

        Raises:
            ConfigError: the tokenizer or the chat template refuses a conversation, or it is too long.

        """
        columns = {name: values[0] for name, values in request["columns"].items()}
        rows = [self._row(*one, columns) for one in zip(request["prompts"], request["completions"], strict=True)]
        batches, scores = pack(rows, self._micro_batch_tokens), [0.0] * len(rows)
        for batch in batches if self._packs_rows else one_row_each(batches):
            for i, score in zip(batch, self._passes([rows[i] for i in batch]).tolist(), strict=True):
                scores[i] = score
        return scores

    def _row(self, prompt: Any, completion: Any, columns: Mapping[str, Any]) -> SequenceRow:
        if isinstance(prompt, str):
            ids = self._tokens.scored(prompt, completion)
        else:
            if prompt[-1]["role"] == ASSISTANT:  # which the completion continues
                start, (answer,) = prompt[-1], completion
                prompt, completion = prompt[:-1], [{**answer, "content": start["content"] + answer["content"]}]
            tools, kwargs = tools_of(columns.get(TOOLS)), template_kwargs_of(columns.get(TEMPLATE_KWARGS))
            ids = self._tokens.scored(prompt, completion, tools, kwargs)
        if not self._tokens.fit(len(ids)):
            raise ConfigError(
                f"a conversation has {len(ids)} tokens of the reward model, which has {self._tokens.max_length} "
                "positions: lower sampling.max_tokens or data.max_prompt_tokens"
            )
        return SequenceRow(pack_column(ids[:-1], I32), pack_column(ids[-1:], I32))
