"""A reward model as workers serve it: a causal language model whose output layer has the head as one row.

So every engine that generates can score. The other V - 1 rows of the output layer are zeros: after a conversation of
score s the log-probability of the head's token is log p = s / `SCALE` - log(V - 1 + exp(s / `SCALE`)), which gives
s = `SCALE` (log p - log(1 - p) + log(V - 1)).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlboost.services.trainer.adapters.data import RewardTokenizer
from rlboost.services.trainer.adapters.tokens import UNLOADABLE
from rlboost.shared.errors import ConfigError
from rlboost.shared.model.file_names import by_file_name, names_in_files
from rlboost.shared.model.folder import HEAD, digest_of_weights, read_config, read_tensor_shapes
from rlboost.shared.weights.manifest import Shard
from rlboost.shared.weights.torch_tensors import named_shards
from rlboost.shared.wire import I32, pack, unpack

SCALE = 16.0
"""A power of two, so that it rounds no weight. Measured with log-probabilities of torch in float32 on a CPU:
scores up to 200 are within 0.02 for 151,936 token ids and within 0.005 for 64, those up to 60 within 0.003."""
_LEAST_OTHERS = 1e-4
"""The least probability of all other tokens, which is known up to about 1e-6, from which a score is told."""
TOKEN = 0
"""Whose row of the output layer is the head."""
_LAYER = "lm_head.weight"
_PLAIN_LOGITS = {"final_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0, "lm_head_multiplier": 1.0}
"""What some families do to logits and not to scores: the setting, and the value with which they do not."""
_OF_CLASSIFIERS = ("id2label", "label2id", "num_labels", "problem_type")


class ServedScores:
    """`ports.storage.ScoreTokenizer` of a reward model's directory, and its weights for workers."""

    forced = pack([TOKEN], I32)

    def __init__(self, folder: Path, created: datetime, template_kwargs: Mapping[str, Any], *, has_chats: bool) -> None:
        """Read its files, the weights for their digest only; see `RewardTokenizer` for the arguments.

        Raises:
            ConfigError: it has no chat template, or transformers has no causal language model of these tensors.

        """
        self._folder = folder
        self._tokenizer = RewardTokenizer(folder, created, template_kwargs, has_chats=has_chats)
        self.config_json, self.vocab_size = _as_language_model(folder)
        self.digest = digest_of_weights(folder)

    def conversation(self, prompt: Any, completion: Any, columns: Mapping[str, Any]) -> bytes:
        """See `ScoreTokenizer.conversation`."""
        return pack(self._tokenizer.tokens(prompt, completion, columns, n_more=1), I32)

    def score(self, logprobs: bytes) -> float | None:
        """See `ScoreTokenizer.score`."""
        logprob = float(unpack(logprobs, np.dtype("<f4")).item())
        p_others = -math.expm1(logprob)
        if not _LEAST_OTHERS < p_others < 1:
            return None
        return SCALE * (logprob - math.log(p_others) + math.log(self.vocab_size - 1))

    def shards(self) -> Iterator[Shard]:
        """Read the tensors of the causal language model."""
        for shard in named_shards(self._folder):
            if shard.name != HEAD:
                yield shard
                continue
            head = torch.frombuffer(bytearray(shard.data), dtype=getattr(torch, shard.dtype))
            layer = torch.zeros(self.vocab_size, head.numel(), dtype=head.dtype)
            layer[TOKEN] = head / SCALE
            yield from named_shards({_LAYER: layer})


def _as_language_model(folder: Path) -> tuple[str, int]:
    """Return `config.json` of the causal language model that a reward model becomes, and its number of token ids."""
    config = read_config(folder)
    try:
        loaded: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
        plain = {key: value for key, value in _PLAIN_LOGITS.items() if hasattr(loaded, key)} | {
            "tie_word_embeddings": False
        }
        for key, value in plain.items():
            setattr(loaded, key, value)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(loaded)
        given = read_tensor_shapes(folder).keys() - {HEAD}
        names = by_file_name(model.state_dict(), names_in_files(model, given)).keys()
    except UNLOADABLE as error:
        raise ConfigError(f"workers can serve no reward model of this kind ({error}): {_INSTEAD}") from error
    layer = model.get_output_embeddings()
    if names - {_LAYER} != given or getattr(layer, "bias", None) is not None or _LAYER not in names:
        other = min((names - {_LAYER}) ^ given, default="a bias of the output layer")
        raise ConfigError(
            f"workers serve reward models as {type(model).__name__}, which differs in {other}: {_INSTEAD}"
        )
    kept = {key: value for key, value in config.items() if key not in _OF_CLASSIFIERS}
    return json.dumps({**kept, **plain, "architectures": [type(model).__name__]}, indent=2), len(layer.weight)


_INSTEAD = "name its folder in reward.model, so that the trainer's reward processes hold it, and remove it from models"
