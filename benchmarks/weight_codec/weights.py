"""Weights before and after a step: drawn at random under Adam, and of models that are trained here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.weight_codec.contenders import Weights
from rlboost.shared.weights.manifest import CHUNK_BYTES

SYNTHETIC = (1e-6, 6.3e-6, 6.4e-5)
"""Learning rates: about 1, 5 and 28 % change."""
VALUES = CHUNK_BYTES // 2
COUNTDOWN = Path(__file__).parents[2] / "examples" / "countdown"


def pairs(chunks: int, with_models: bool) -> Iterator[tuple[str, Weights, Weights]]:
    for rate in SYNTHETIC:
        yield f"synthetic at {rate:g}", *synthetic(rate, chunks * VALUES)
    if with_models:
        yield from models()


def rounded(values: NDArray[np.float32]) -> Weights:
    """Return bfloat16 patterns, rounded to the nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def synthetic(rate: float, n: int) -> tuple[Weights, Weights]:
    """Return weights before and after the last of 20 steps of Adam."""
    rng = np.random.default_rng(0)
    weights = rng.normal(0, 0.02, n).astype(np.float32)
    mean, square = np.zeros(n, dtype=np.float32), np.zeros(n, dtype=np.float32)
    before = weights
    for step in range(1, 21):
        gradient = rng.standard_normal(n, dtype=np.float32)
        mean += np.float32(0.1) * (gradient - mean)
        square += np.float32(0.001) * (gradient * gradient - square)
        update = (mean / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.999**step)) + 1e-8)
        before, weights = weights, (weights - rate * update).astype(np.float32)
    return rounded(before), rounded(weights)


def trained(config: dict[str, Any], start: Path | None, tokens: list[list[int]], steps: int) -> list[Weights]:
    """Return the weights, end to end, before step 1 and after each step; `tokens` has a batch of rows for each."""
    import torch  # noqa: PLC0415 - only the models need it
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415 - likewise

    torch.manual_seed(0)
    if start is None:
        model = Qwen3ForCausalLM(Qwen3Config(**config))
    else:
        model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def snapshot() -> Weights:
        flat = torch.cat([p.detach().to(torch.bfloat16).flatten() for p in model.parameters()])
        return flat.view(torch.int16).numpy().view(np.uint16)

    versions = [snapshot()]
    per_step = len(tokens) // steps
    for step in range(steps):
        batch = torch.tensor(tokens[step * per_step : (step + 1) * per_step])
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        versions.append(snapshot())
    return versions


def models() -> Iterator[tuple[str, Weights, Weights]]:
    from tokenizers import Tokenizer  # noqa: PLC0415 - comes with transformers

    tokenizer = Tokenizer.from_file(str(COUNTDOWN / "base" / "tokenizer.json"))
    lines = (COUNTDOWN / "train.jsonl").read_text().splitlines()[: 12 * 32]
    ids = [tokenizer.encode(json.loads(line)["prompt"]).ids for line in lines]
    shortest = min(map(len, ids))
    versions = trained({}, COUNTDOWN / "base", [row[:shortest] for row in ids], 12)
    yield "countdown", versions[11], versions[12]

    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
    shape |= {"num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32_000, "tie_word_embeddings": True}
    rows = np.random.default_rng(0).integers(0, 32_000, (5 * 2, 128)).tolist()
    versions = trained(shape, None, rows, 5)
    yield "qwen3-43M", versions[3], versions[4]
    yield "qwen3-43M, 3 steps apart", versions[2], versions[5]
