"""Versions of a tiny model in a weight store. Imports torch."""

from __future__ import annotations

import torch
from transformers import Qwen3Config

from rlboost.shared.process.waiting import Waits
from rlboost.shared.weights.client import StoreClient
from rlboost.shared.weights.manifest import Part, Shard
from rlboost.shared.weights.publisher import Publisher
from rlboost.shared.weights.rest_models import CommitRequest
from tests.support import tiny_models

MAX_LEN = 8192


def config(layers: int, vocabulary: int = tiny_models.VOCABULARY) -> Qwen3Config:
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=MAX_LEN,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def policy(seed: int) -> torch.nn.Module:
    """Return a random model with two layers."""
    made: torch.nn.Module = tiny_models.make(config(2), seed).eval()
    return made


def shards(layers: int, seed: int, vocabulary: int = tiny_models.VOCABULARY) -> list[Shard]:
    """Return the whole tensors of a random model, as one rank publishes them."""
    found = []
    for name, tensor in tiny_models.weights(tiny_models.make(config(layers, vocabulary), seed)):
        shape, data = tuple(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().data
        found.append(Shard(name, str(tensor.dtype).removeprefix("torch."), shape, (0,) * len(shape), shape, data))
    return found


async def publish(
    client: StoreClient,
    job_id: str,
    version: int,
    *,
    seed: int,
    layers: int = 2,
    vocabulary: int = tiny_models.VOCABULARY,
) -> None:
    """Commit a version, the next after `version - 1`."""
    publisher = Publisher(client, Waits())
    part = await publisher.publish(job_id, version, 0, shards(layers, seed, vocabulary))
    await _commit(client, job_id, version, part, config(layers, vocabulary))


async def publish_mislabelled(client: StoreClient, job_id: str) -> None:
    """Commit a version 0 whose chunks are right, but one tensor is not the one that its digest says."""
    publisher = Publisher(client, Waits())
    part = await publisher.publish(job_id, 0, 0, shards(2, seed=0))
    first, *others = part.tensors
    wrong = part.model_copy(update={"tensors": (first.model_copy(update={"digest": "0" * 64}), *others)})
    await client.put_part(job_id, 0, wrong)
    await _commit(client, job_id, 0, wrong, config(2))


async def _commit(client: StoreClient, job_id: str, version: int, part: Part, model: Qwen3Config) -> None:
    text = model.to_json_string(use_diff=False)
    request = CommitRequest(expect=version - 1, parts=(part.digest,), config_json=text)
    await client.commit(job_id, version, request)
