"""Tokens per second of the torch engine, of vLLM as a worker and as `AsyncLLM` alone, and of a plain transformers loop.

    OMP_NUM_THREADS=1 python -m benchmarks.engines [--requests 8 16 32 64] [--rounds 3]
    python -m benchmarks.engines --device cuda --dtype bfloat16 --requests 8 64 256 --tokens 512

Each contender gets the same weights and the same requests: groups of eight samples of one prompt, all of one length,
drawn at temperature 1 with the log-probability of each token. `demo` is the model of examples/countdown, `10m` a Qwen3
of 10.8 million random parameters; on a GPU it is `0.6b`, of the sizes of Qwen3-0.6B. The engines are what a worker has;
`AsyncLLM` is the same vLLM with the worker's sampling parameters but without seeds; the plain loop is the model's own
forward pass with transformers' cache, in one batch.

They take turns; a figure is the median over the rounds, a ratio the median of the rounds' ratios. On a CPU a second is
one of processor time, with vLLM of all processes of this session, so that neighbors on the machine disturb little.
Where vLLM is not installed its columns stay empty.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from rlboost.local.layout import session_cpu_s
from rlboost.services.rollout_worker.adapters.torch.factory import TorchFactory
from rlboost.services.rollout_worker.adapters.vllm.factory import VllmFactory
from rlboost.services.rollout_worker.adapters.vllm.options import VllmOptions
from rlboost.services.rollout_worker.domain.requests import Request
from rlboost.services.rollout_worker.ports import Engine, EngineFactory
from rlboost.shared.errors import ConfigError
from rlboost.shared.messages import Sampling
from tests.support.staged_weights import Staged

GROUP = 8
POLL_S = 0.02
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MODELS = {
    "demo": AutoConfig.from_pretrained(Path(__file__).parent.parent / "examples" / "countdown" / "base"),
    "10m": Qwen3Config(
        vocab_size=4096,
        hidden_size=320,
        intermediate_size=896,
        num_hidden_layers=7,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    ),
    "0.6b": Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
}
GPU_KV_CACHE_BYTES = 16 << 30
"""Of each engine: they are there at the same time."""
CONTENDERS = ("torch", "vllm", "AsyncLLM", "plain")
RATIOS = (("vllm", "torch"), ("AsyncLLM", "vllm"), ("plain", "torch"))
"""Seconds of the first over those of the second: tokens per second of the second over those of the first."""


def requests_of(n: int, prompt: int, tokens: int, vocabulary: int) -> list[Request]:
    """Return n requests; each group has a prompt of its own."""
    return [
        Request(i, 1, [(7 * (i // GROUP) + j) % vocabulary for j in range(prompt)], [], Sampling(max_tokens=tokens), i)
        for i in range(n)
    ]


async def run_engine(engine: Engine, requests: list[Request]) -> None:
    """Return when every request has ended."""
    engine.submit(requests)
    left = len(requests)
    while left:
        await asyncio.sleep(POLL_S)
        left -= sum(emission.finish != 0 for emission in engine.take_emissions())


async def run_async_llm(llm: Any, requests: list[Request]) -> None:
    """Return when every request has ended."""
    from vllm import SamplingParams  # noqa: PLC0415 - may not be installed
    from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415 - as above

    async def run(request: Request) -> None:
        params = SamplingParams(
            max_tokens=request.sampling.max_tokens,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": request.prompt}
        async for _ in llm.generate(prompt, params, request_id=f"plain-{request.sample}"):
            pass

    async with asyncio.TaskGroup() as group:
        for request in requests:
            group.create_task(run(request), name=f"plain-{request.sample}")


async def run_plain(model: Any, requests: list[Request]) -> None:
    """Make the samples with the model's own forward pass and cache."""
    with torch.inference_mode():
        ids = torch.tensor([request.prompt for request in requests], device=model.device)
        cache, made = None, []
        for _ in range(requests[0].sampling.max_tokens):
            output = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            logprobs = torch.log_softmax(output.logits[:, -1].float(), -1)
            ids = torch.multinomial(logprobs.exp(), 1)
            made.append((ids, logprobs.gather(1, ids)))
        for part in zip(*made, strict=True):
            torch.cat(part, 1).tolist()


def factories(slots: int, device: str, dtype: Any) -> dict[str, EngineFactory]:
    """Return what makes the engines that are installed."""
    options: dict[str, Any] = {"slots": slots, "device": device, "dtype": dtype}
    options["kv_cache_bytes"] = 0 if device == "cpu" else GPU_KV_CACHE_BYTES
    found: dict[str, EngineFactory] = {"torch": TorchFactory(**options)}
    try:
        found["vllm"] = VllmFactory(VllmOptions(**options))
    except ConfigError as error:
        print(f"vLLM is left out: {error}")
    for factory in found.values():
        factory.prepare()
    return found


def clock_of(device: str, engines: Mapping[str, EngineFactory]) -> Callable[[], float]:
    """Return the clock; on a CPU it counts the other processes of the session only where vLLM has some."""
    if device != "cpu":
        return time.perf_counter
    # The kernel counts those in hundredths of a second, too coarsely for short runs.
    return partial(session_cpu_s, os.getsid(0)) if "vllm" in engines else time.process_time


async def take_turns(
    runs: Mapping[str, Callable[[], Awaitable[None]]], rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Return the seconds of each contender in each round; a round before the first one warms them up."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            began = clock()
            await run()
            seconds[name].append(clock() - began)
    return {name: of[1:] for name, of in seconds.items()}


def line(model: str, n: int, tokens: int, seconds: Mapping[str, Sequence[float]]) -> str:
    """Return a line of the table."""
    made = [f"{tokens / median(seconds[name]):.0f}" if name in seconds else "-" for name in CONTENDERS]
    ratios = []
    for slower, faster in RATIOS:
        pairs = list(zip(seconds.get(slower, ()), seconds.get(faster, ()), strict=False))
        ratios.append(f"{median(one / other for one, other in pairs):.2f}" if pairs else "-")
    return "| " + " | ".join([model, str(n), *made, *ratios]) + " |"


async def measure(name: str, args: argparse.Namespace, engines: Mapping[str, EngineFactory]) -> None:
    """Print a line for each number of requests to one model."""
    config = MODELS[name]
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, dtype=DTYPES[args.dtype], attn_implementation="sdpa")
    plain = plain.eval().to(args.device)
    weights = {name: tensor for name, tensor in plain.state_dict().items() if name != "lm_head.weight"}
    clock = clock_of(args.device, engines)
    async with AsyncExitStack() as stack:
        running: dict[str, Engine] = {}
        for contender, factory in engines.items():
            running[contender] = factory.build(config.to_json_string())
            stack.push_async_callback(running[contender].close)
            await running[contender].load_weights(0, Staged(weights.items()))
        for n in args.requests:
            asked = requests_of(n, args.prompt, args.tokens, config.vocab_size)
            runs: dict[str, Callable[[], Awaitable[None]]] = {
                contender: partial(run_engine, engine, asked) for contender, engine in running.items()
            }
            if (vllm := running.get("vllm")) is not None:
                runs["AsyncLLM"] = partial(run_async_llm, cast("Any", vllm).llm, asked)
            runs["plain"] = partial(run_plain, plain, asked)
            print(line(name, n, n * args.tokens, await take_turns(runs, args.rounds, clock)), flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a completion")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", choices=sorted(MODELS), nargs="+", help="demo and 10m; demo and 0.6b on a GPU")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    args = parser.parse_args(argv)

    engines = factories(max(args.requests), args.device, args.dtype)
    print(f"{torch.get_num_threads()} threads, {args.device}, {args.dtype}, load {os.getloadavg()[0]:.1f}")
    print(
        "| model | requests | torch, tokens/s | vLLM | AsyncLLM | plain loop | torch : vLLM | vLLM : AsyncLLM |", end=""
    )
    print(" torch : plain |\n|---|---|---|---|---|---|---|---|---|", flush=True)
    for name in args.model or ["demo", "10m" if args.device == "cpu" else "0.6b"]:
        asyncio.run(measure(name, args, engines))


if __name__ == "__main__":
    main()
