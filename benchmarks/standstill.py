"""How long an engine stands still for a new version: loaded whole, and as changed words only.

    OMP_NUM_THREADS=1 python -m benchmarks.standstill [--engine torch vllm] [--tensor-parallel 2] [--rounds 5]

The model is a Qwen3 of random bfloat16 parameters. Versions differ from the first one in a fraction of the words of
every tensor, or in one tensor. Each is loaded alternately as changed words and whole, over the first one. The table
has medians of the rounds in seconds, on a CPU of processor time of this process and its children, since neighbors on
the machine disturb little then:

- `read`, `verify`: the parts of a whole load that read all bytes of the cache, and compute their digests;
- `whole`: a suspended engine loads all tensors and verifies them;
- `changed`: it writes the changed words and verifies them; the ratio is the median of the rounds' ratios;
- `parity`: the parity check, which follows both;
- `compare`: what happens before, while the engine generates: the digests of its memory (torch), and the comparison.

`bytes` is what a rank reads of the changed words while the engine stands still, of what it reads of a whole version.
Versions with too many changed words are loaded whole.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from rlboost.services.rollout_worker.adapters.torch.factory import TorchFactory
from rlboost.services.rollout_worker.adapters.vllm.factory import VllmFactory
from rlboost.services.rollout_worker.adapters.vllm.options import VllmOptions
from rlboost.services.rollout_worker.ports import Changes, Engine, EngineFactory
from rlboost.services.trainer.domain.canary_prompts import build_canary_prompts
from rlboost.shared.weights.cache import CachedVersion
from tests.support.changed_versions import nudged, staged

T = TypeVar("T")
ONE = "model.layers.0.self_attn.k_proj.weight"
FRACTIONS = {"1 %": 0.01, "10 %": 0.1, "all": 1.0}


def config_of(layers: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=16_384,
        hidden_size=768,
        intermediate_size=2304,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )


def factory_of(engine: str, device: str, tensor_parallel: int) -> EngineFactory:
    if engine == "torch":
        return TorchFactory(slots=8, device=device, dtype="bfloat16", kv_cache_bytes=0)
    options = VllmOptions(
        slots=8, device=device, dtype="bfloat16", tensor_parallel=tensor_parallel, pack_weights=engine == "vllm-packed"
    )
    return VllmFactory(options)


def processor_s() -> float:
    """Return the processor time of this process and of the threads of its living descendants."""
    pids, total_ns = _children(os.getpid()), 0
    while pids:
        with suppress(OSError):  # it has ended
            pid = pids.pop()
            total_ns += sum(int(file.read_text().split()[0]) for file in Path("/proc", pid).glob("task/*/schedstat"))
            pids += _children(pid)
    return time.process_time() + total_ns / 1e9


def _children(pid: int | str) -> list[str]:
    return [child for file in Path("/proc", str(pid)).glob("task/*/children") for child in file.read_text().split()]


class Bench:
    """Measures on one clock."""

    def __init__(self, device: str) -> None:
        self._clock = processor_s if device == "cpu" else time.perf_counter

    async def timed(self, work: Callable[[], Awaitable[T]]) -> tuple[float, T]:
        began = self._clock()
        result = await work()
        return self._clock() - began, result


async def load(bench: Bench, engine: Engine, number: int, weights: CachedVersion, changes: Changes | None) -> float:
    seconds, wrong = await bench.timed(lambda: engine.load_weights(number, weights, changes))
    if wrong:
        raise SystemExit(f"{wrong[0]} is not what was published")
    return seconds


async def compare(bench: Bench, engine: Engine, old: CachedVersion, new: CachedVersion) -> tuple[float, Changes]:
    """Return what a worker does before it stops the engine, and how long that takes."""

    async def work() -> Changes:
        if await engine.differing(old):
            raise SystemExit("the engine's memory is not what was loaded")
        names = {name for name, content in new.contents.items() if old.contents[name] != content}
        return Changes(names, await asyncio.to_thread(new.changed_words, old, names))

    return await bench.timed(work)


def line(*cells: object) -> None:
    print(
        "| " + " | ".join(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells) + " |", flush=True
    )


async def measure(
    bench: Bench, name: str, engine: Engine, versions: dict[str, CachedVersion], rounds: int, vocabulary: int
) -> None:
    """Print a line for each version but the first."""
    base = versions["base"]
    n_bytes = sum(entry.n_bytes for shards in base.published.values() for entry in shards)
    rows = build_canary_prompts(vocabulary, temperature=1.0, dtype="bfloat16").rows
    await engine.load_weights(0, base)
    await engine.suspend()
    for label, version in versions.items():
        if label == "base":
            continue
        whole, changed, compared, share = [], [], [], 1.0
        for _ in range(rounds):
            await load(bench, engine, 1, base, None)
            seconds, changes = await compare(bench, engine, base, version)
            compared.append(seconds)
            if changes.words is not None:
                share = changes.words.path.stat().st_size / n_bytes
            changed.append(await load(bench, engine, 2, version, changes))
            if changes.words is not None:
                changes.words.remove()
            whole.append(await load(bench, engine, 3, version, None))
        parity, _ = await bench.timed(lambda: engine.score(rows, 1.0))
        ratio = median(few / many for few, many in zip(changed, whole, strict=True))
        line(name, label, median(whole), median(changed), ratio, share, parity, median(compared))


def parts(version: CachedVersion, rounds: int) -> tuple[float, float]:
    """Return the seconds to read a version from the cache, and to compute its digests."""
    reads, digests = [], []
    for _ in range(rounds):
        began = time.process_time()
        tensors = list(version.tensors())
        read = time.process_time()
        version.differing(tensors)
        reads.append(read - began)
        digests.append(time.process_time() - read)
    return median(reads), median(digests)


async def run(args: argparse.Namespace, directory: Path) -> None:
    config = config_of(args.layers)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tensors: list[tuple[str, Any]] = list(model.named_parameters())
    versions = {"base": staged(tensors, directory)}
    for number, (label, fraction) in enumerate(FRACTIONS.items(), 1):
        versions[label] = staged(nudged(tensors, fraction), directory, number)
    versions[f"1 of {len(tensors)} tensors"] = staged(nudged(tensors, 1.0, {ONE}), directory, 9)
    size = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
    del model, tensors
    read, digest = parts(versions["base"], args.rounds)
    print(f"{size / 1e6:.0f} MB, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}")
    print(f"read {read:.3f} s, verify {digest:.3f} s")
    print(
        "| engine | words changed | whole, s | changed, s | ratio | bytes | parity, s | compare, s |\n"
        "|---|---|---|---|---|---|---|---|",
    )
    for name in args.engine:
        factory = factory_of(name, args.device, args.tensor_parallel)
        factory.prepare()
        engine = await asyncio.to_thread(factory.build, config.to_json_string())
        label = name if args.tensor_parallel == 1 or name == "torch" else f"{name}, {args.tensor_parallel} ranks"
        await measure(Bench(args.device), label, engine, versions, args.rounds, config.vocab_size)
        await engine.close()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", nargs="+", choices=["torch", "vllm", "vllm-packed"], default=["torch", "vllm"])
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(argv)
    with TemporaryDirectory() as directory:
        asyncio.run(run(args, Path(directory)))


if __name__ == "__main__":
    main()
