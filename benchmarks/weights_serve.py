"""From the commit of a version to its first token from an engine on the weight store's machine, as JSON lines.

    python -m benchmarks.weights_serve [--layers 18] [--rounds 3] [--dir DIR]

A Llama of 18 layers has 2 GB in bfloat16. The store is the real process; this one publishes, and runs the torch engine
on the CPU. Every version changes every chunk. `seconds` is the time from the commit to the first token: `pull_s` links
and verifies the chunks, `load_s` copies them into the engine and verifies its memory. `cpu_s` are the processor seconds
of this process for all of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import transformers

from benchmarks.support.weight_store import running_store
from rlboost.services.rollout_worker.adapters.torch.factory import TorchFactory
from rlboost.services.rollout_worker.domain.requests import Request
from rlboost.services.rollout_worker.ports import Engine
from rlboost.shared.messages import Sampling
from rlboost.shared.process.lifecycle import loop_factory
from rlboost.shared.process.waiting import Waits
from rlboost.shared.weights.cache import Cache, cached_version
from rlboost.shared.weights.client import StoreClient
from rlboost.shared.weights.manifest import Shard
from rlboost.shared.weights.publisher import Publisher
from rlboost.shared.weights.puller import DirectorySource, Puller, StoreSource
from tests.support.eventually import eventually
from tests.support.service_process import TOKEN

JOB = "benchmark"


def model(layers: int) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=16,
        vocab_size=32_000,
        tie_word_embeddings=True,
        max_position_embeddings=256,
    )


def weights(config: transformers.LlamaConfig) -> list[Shard]:
    """Return the model's tensors, with random values between 2^-7 and 2^-5."""
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in empty.items() if name != "lm_head.weight"}
    random = np.random.default_rng(0)
    arrays = {
        name: random.integers(0x3C00, 0x3D00, math.prod(shape), dtype=np.uint16) for name, shape in shapes.items()
    }
    return [
        Shard(name, "bfloat16", shape, (0,) * len(shape), shape, arrays[name].view(np.uint8).data)
        for name, shape in shapes.items()
    ]


async def first_token(engine: Engine, version: int) -> None:
    engine.submit([Request(version, 1, [1, 2, 3], [], Sampling(max_tokens=1), version)])
    await eventually(lambda: any(emission.finish for emission in engine.take_emissions()), within_s=600)


async def measure(url: str, directory: Path, layers: int, rounds: int) -> None:
    config = model(layers)
    shards, config_json = weights(config), config.to_json_string()
    gb = sum(len(shard.data) for shard in shards) / 1e9
    engine = TorchFactory(slots=4, device="cpu", dtype="bfloat16", kv_cache_bytes=64 << 20).build(config_json)
    async with StoreClient(url, TOKEN) as client:
        cache = Cache(directory / "cache")
        source = DirectorySource(client, cache, StoreSource(client, cache, concurrency=8))
        puller, publisher = Puller(client, cache, Waits(), source=source), Publisher(client, Waits())
        for version in range(rounds):
            for shard in shards:
                np.frombuffer(shard.data, dtype=np.uint16)[::512] += 1
            part = await publisher.publish(JOB, version, 0, shards)
            await publisher.commit(
                JOB, version, expect=version - 1, part_digests=[part.digest], config_json=config_json
            )
            times, cpu = [time.perf_counter()], time.process_time()
            pulled = cached_version(await puller.pull(JOB, version))
            times.append(time.perf_counter())
            assert not await engine.load_weights(version, pulled)
            times.append(time.perf_counter())
            await first_token(engine, version)
            times.append(time.perf_counter())
            row = {"gb": gb, "seconds": times[3] - times[0], "pull_s": times[1] - times[0]}
            row |= {"load_s": times[2] - times[1], "cpu_s": time.process_time() - cpu}
            print(
                json.dumps({"version": version, **{name: round(value, 2) for name, value in row.items()}}), flush=True
            )
        puller.close()
    await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=18)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, default=None, help="where store and cache are; a temporary directory")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=options.dir) as name,
        running_store(Path(name), KEEP_VERSIONS="2") as (store, _),
        asyncio.Runner(loop_factory=loop_factory()) as loop,
    ):
        loop.run(measure(store.url, Path(name), options.layers, options.rounds))


if __name__ == "__main__":
    main()
