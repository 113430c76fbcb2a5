"""The weight codec beside a memory copy and beside what other systems send, on one core, as JSON lines and a table.

    OMP_NUM_THREADS=1 python -m benchmarks.weight_codec [--chunks 4] [--rounds 9] [--no-models]

Two versions of bfloat16 weights are cut into chunks of 4 MiB. Every codec encodes each chunk, differences included, and
applies the result in place, in turn with the others. Of each chunk the best round counts, in seconds of processor time,
and the chunks' are added up: what else the machine does disturbs short measurements least. The memory copy is numpy's,
of the same chunks, in the same rounds. Every result is compared bit for bit. `again` is a second application at once,
to what the first has left in the caches.

Weights:

- `synthetic`: 32-bit weights drawn from N(0, 0.02) under Adam (betas 0.9 and 0.999) whose gradients are drawn from
  N(0, 1) anew in each of 20 steps, at the learning rates that `SYNTHETIC` names. The versions are the weights before
  and after the last step, rounded to bfloat16. At 1e-6 about 1 % change.
- `countdown`: the example's base model under AdamW at 1e-6 on its own training prompts, before and after step 12.
- `qwen3-43M`: a Qwen3 of 43 M parameters, initialized at random, under AdamW at 1e-6 on random tokens, before and
  after step 4 (a second pair: step 2 and step 5).

Codecs of others are written down here from the description of their formats, in numpy, and without what surrounds them:
`u32 + value` (AstraFlow), `i32 + value` (verl), `xor + zlib` (slime and SkyRL use zstd; level 1 of zlib stands in).
"""

from __future__ import annotations

import argparse
import json
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from shared.weights import codec
from shared.weights.codec import Kind, kernels
from shared.weights.manifest import CHUNK_BYTES

Weights = NDArray[np.uint16]
SYNTHETIC = (1e-6, 6.3e-6, 6.4e-5)
"""Learning rates: about 1, 5 and 28 % change."""
VALUES = CHUNK_BYTES // 2
COUNTDOWN = Path(__file__).parents[1] / "examples" / "countdown"


@dataclass
class Codec:
    """One way to say what changed; `apply` works in place."""

    name: str
    encode: Callable[[Weights, Weights], Any]
    apply: Callable[[Weights, Any], None]
    size: Callable[[Any], int]
    kernels: str | None = None
    rounds: int | None = None
    """Fewer for what is slow."""
    encode_s: dict[int, float] = field(default_factory=dict)
    """Best, by chunk."""
    apply_s: dict[int, float] = field(default_factory=dict)
    apply_again_s: dict[int, float] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)

    def using(self) -> AbstractContextManager[object]:
        return kernels.using(self.kernels or kernels.active().name)


def ours(name: str, kind: Kind | None, kernel: str, rounds: int | None = None) -> Codec:
    def encode(base: Weights, new: Weights) -> bytes:
        return codec.encode(base.data.cast("B"), new.data.cast("B"), "bfloat16", kind)

    def apply(target: Weights, delta: bytes) -> None:
        codec.apply_into(target.data.cast("B"), delta)

    return Codec(f"{name} ({kernel})", encode, apply, len, kernel, rounds)


def listed(name: str, index: type[np.integer[Any]]) -> Codec:
    def encode(base: Weights, new: Weights) -> tuple[NDArray[Any], Weights]:
        places = np.flatnonzero(base != new)
        return places.astype(index), new[places]

    def apply(target: Weights, delta: tuple[NDArray[Any], Weights]) -> None:
        target[delta[0]] = delta[1]

    return Codec(name, encode, apply, lambda delta: delta[0].nbytes + delta[1].nbytes)


def xored() -> Codec:
    def apply(target: Weights, delta: bytes) -> None:
        np.bitwise_xor(target, np.frombuffer(zlib.decompress(delta), dtype=np.uint16), out=target)

    return Codec(
        "xor + zlib-1 (slime, SkyRL)", lambda base, new: zlib.compress((base ^ new).data, 1), apply, len, None, 2
    )


def contenders() -> list[Codec]:
    best = kernels.active().name
    made = [ours("ours", None, name) for name in reversed(kernels.available()) if name != "numpy"]
    made += [ours("ours", None, "numpy", 2), ours("ours, bitmap", Kind.BITMAP, best)]
    made += [ours("ours, overwrite", Kind.OVERWRITE, best)]
    return [*made, listed("u32 + value (AstraFlow)", np.uint32), listed("i32 + value (verl)", np.int32), xored()]


def measure(label: str, base: Weights, new: Weights, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each codec."""
    codecs, copy_s = contenders(), dict[int, float]()
    for round_no in range(rounds):
        for chunk, at in enumerate(range(0, len(base), VALUES)):
            before, after = base[at : at + VALUES], new[at : at + VALUES]
            target = before.copy()
            np.copyto(target, after)
            _keep_best(copy_s, chunk, _seconds(partial(np.copyto, target, before)))
            for one in codecs:
                if one.rounds is None or round_no < one.rounds:
                    _turn(one, chunk, before, after, target)
    changed = int((base != new).sum())
    return [_row(label, one, len(base), changed, sum(copy_s.values())) for one in codecs]


def _turn(one: Codec, chunk: int, base: Weights, new: Weights, target: Weights) -> None:
    """Let one codec have its turn at one chunk."""
    deltas: list[Any] = []
    # Every codec finds the caches alike: whoever came before it, both versions were just read.
    np.copyto(target, base)
    np.copyto(target, new)
    with one.using():
        _keep_best(one.encode_s, chunk, _seconds(lambda: deltas.append(one.encode(base, new))))
        np.copyto(target, base)
        _keep_best(one.apply_s, chunk, _seconds(lambda: one.apply(target, deltas[0])))
    if not np.array_equal(target, new):
        raise SystemExit(f"{one.name} is not exact")
    with one.using():
        _keep_best(one.apply_again_s, chunk, _seconds(lambda: one.apply(target, deltas[0])))
    one.sizes[chunk] = one.size(deltas[0])


def _keep_best(best: dict[int, float], chunk: int, seconds: float) -> None:
    best[chunk] = min(seconds, best.get(chunk, seconds))


def _row(label: str, one: Codec, n: int, changed: int, copy_s: float) -> dict[str, Any]:
    gb, encode_s = n * 2 / 1e9, sum(one.encode_s.values())
    return {
        "weights": label,
        "codec": one.name,
        "values": n,
        "changed": round(changed / n, 4),
        "bytes_per_changed": round(sum(one.sizes.values()) / changed, 3),
        "copy_gb_per_s": round(gb / copy_s, 2),
        "encode_gb_per_s": round(gb / encode_s, 2),
        "encode_of_copy": round(copy_s / encode_s, 3),
        "apply_m_values_per_s": round(changed / sum(one.apply_s.values()) / 1e6, 1),
        "apply_again_m_values_per_s": round(changed / sum(one.apply_again_s.values()) / 1e6, 1),
    }


def _seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


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
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415

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


def pairs(chunks: int, with_models: bool) -> Iterator[tuple[str, Weights, Weights]]:
    for rate in SYNTHETIC:
        yield f"synthetic at {rate:g}", *synthetic(rate, chunks * VALUES)
    if with_models:
        yield from models()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=4, help="of 4 MiB, of synthetic weights")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-models", action="store_true", help="do not train models")
    args = parser.parse_args()
    table = Table(
        "weights", "changed", "codec", "bytes a change", "encode GB/s", "of a copy", "apply M values/s", "again"
    )
    for label, base, new in pairs(args.chunks, not args.no_models):
        for row in measure(label, base, new, args.rounds):
            print(json.dumps(row), flush=True)
            table.add_row(
                label,
                f"{row['changed']:.2%}",
                row["codec"],
                f"{row['bytes_per_changed']:.3f}",
                f"{row['encode_gb_per_s']:.2f}",
                f"{row['encode_of_copy']:.2f}",
                f"{row['apply_m_values_per_s']:.1f}",
                f"{row['apply_again_m_values_per_s']:.1f}",
            )
        table.add_section()
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
