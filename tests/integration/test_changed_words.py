"""New versions are written into engines in place, bit for bit as if they had been loaded whole."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pytest
import pytest_asyncio

torch = pytest.importorskip("torch")

from structlog.testing import capture_logs  # noqa: E402 - only where torch is

from rlboost.services.rollout_worker.adapters.torch.engine import TorchEngine  # noqa: E402
from rlboost.services.rollout_worker.ports import Changes, EngineFailed  # noqa: E402
from rlboost.shared.errors import Corrupt  # noqa: E402
from rlboost.shared.weights.changed_words import bits  # noqa: E402
from tests.support import tiny_models, vllm_engines  # noqa: E402
from tests.support.changed_versions import changes, nudged, staged  # noqa: E402
from tests.support.engines import request, run  # noqa: E402
from tests.support.eventually import eventually  # noqa: E402

pytestmark = vllm_engines.MARKS


class InTorch:
    """The torch engine, and how its memory is read."""

    def __init__(self, directory: Path, dtype: Literal["float32", "bfloat16"]) -> None:
        self.config = tiny_models.CONFIGS["qwen3-tied"]
        folder = tiny_models.save_config(self.config, directory)
        self.engine: Any = TorchEngine(folder, slots=2, dtype=dtype)

    async def memory(self) -> dict[str, Any]:
        return {name: tensor.clone() for name, tensor in self.engine.loaded_tensors()}


def parameters(worker: Any) -> dict[str, bytes]:
    """Return the bytes of each parameter of a rank of vLLM."""
    model = worker.model_runner.get_model()
    return {
        name: parameter.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, parameter in model.named_parameters()
    }


class InVllm:
    """vLLM with one or two ranks; on a CPU it must not pack weights."""

    def __init__(self, *, dtype: str = "bfloat16", tied: bool = True, **options: Any) -> None:
        self.config = vllm_engines.config(tied=tied)
        self.engine: Any = vllm_engines.build(self.config, slots=2, dtype=dtype, **options)

    async def memory(self) -> list[dict[str, bytes]]:
        ranks: list[dict[str, bytes]] = await self.engine.llm.collective_rpc(parameters)
        assert all(len(data) > 0 for rank in ranks for data in rank.values())
        return ranks


Kind = InTorch | InVllm


@pytest_asyncio.fixture(
    loop_scope="module",
    params=[
        "torch",
        "torch-wider",
        "vllm",
        pytest.param("vllm-untied", marks=pytest.mark.long),
        pytest.param("vllm-tp2", marks=pytest.mark.long),
    ],
)
async def kind(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Kind]:
    if "vllm" in request.param:
        vllm_engines.require()
        vllm_engines.end_shared()
        monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # to read a rank's memory
        n_ranks = 2 if request.param == "vllm-tp2" else 1
        made: Kind = InVllm(tied=request.param != "vllm-untied", tensor_parallel=n_ranks, pack_weights=False)
    else:
        made = InTorch(tmp_path, "float32" if request.param == "torch-wider" else "bfloat16")
    yield made
    await made.engine.close()


def tensors(kind: Kind, seed: int) -> Any:
    model = tiny_models.make(kind.config, seed)
    return [(name, tensor.bfloat16()) for name, tensor in tiny_models.weights(model)]


async def memory_after_a_whole_load(kind: Kind, version: int, weights: Any) -> Any:
    assert await kind.engine.load_weights(version, weights) == []
    return await kind.memory()


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return bool(one == other)
    return one.keys() == other.keys() and all(bits(one[name]).equal(bits(other[name])) for name in one)


async def test_changed_words_give_the_memory_of_a_whole_load(kind: Kind, tmp_path: Path) -> None:
    base = tensors(kind, 1)
    some = nudged(base, 0.01)
    one = nudged(some, 1.0, {"model.norm.weight", "model.layers.1.self_attn.k_proj.weight"})
    versions = [staged(weights, tmp_path, n) for n, weights in enumerate((base, some, one, some))]
    whole = [await memory_after_a_whole_load(kind, n, weights) for n, weights in enumerate(versions)]
    assert not equal(whole[0], whole[1])
    (expected,) = await run(kind.engine, [request(1, max_tokens=20, temperature=0.0)])
    await kind.engine.load_weights(0, versions[0])
    loaded = versions[0]
    for version in (1, 2, 3, 3, 2, 3):  # the same one twice, and back
        found = changes(loaded, versions[version])
        assert found.words is not None
        with capture_logs() as logs:
            assert await kind.engine.load_weights(10 + version, versions[version], found) == []
        assert logs == []
        assert equal(await kind.memory(), whole[version])
        loaded = versions[version]
    (made,) = await run(kind.engine, [request(1, max_tokens=20, temperature=0.0)])
    assert (made.tokens, set(made.versions)) == (expected.tokens, {13})
    assert made.logprobs == expected.logprobs


async def test_other_base_is_found_out_and_everything_is_loaded(kind: Kind, tmp_path: Path) -> None:
    base = tensors(kind, 1)
    versions = [staged(weights, tmp_path, n) for n, weights in enumerate((base, nudged(base, 0.01), tensors(kind, 2)))]
    expected = await memory_after_a_whole_load(kind, 1, versions[1])
    await kind.engine.load_weights(2, versions[2])
    with capture_logs() as logs:
        assert await kind.engine.load_weights(3, versions[1], changes(versions[0], versions[1])) == []
    assert {entry["event"] for entry in logs} == {"weights_loaded_whole"}
    assert all("is not the tensor that was loaded" in entry["reason"] for entry in logs)
    assert equal(await kind.memory(), expected)


async def test_damaged_changed_words_serve_nothing_until_a_whole_load(kind: Kind, tmp_path: Path) -> None:
    base = tensors(kind, 1)
    versions = [staged(weights, tmp_path, n) for n, weights in enumerate((base, nudged(base, 0.01)))]
    expected = await memory_after_a_whole_load(kind, 1, versions[1])
    await kind.engine.load_weights(0, versions[0])
    found = changes(*versions)
    assert found.words is not None
    data = bytearray(found.words.path.read_bytes())
    data[-1] ^= 1
    found.words.path.write_bytes(data)
    with pytest.raises(Corrupt, match="not the bytes that were written"):
        await kind.engine.load_weights(1, versions[1], found)
    assert kind.engine.stats().version == -1
    assert equal(await memory_after_a_whole_load(kind, 1, versions[1]), expected)


async def test_unknown_tensor_is_loaded_as_a_whole_version(kind: Kind, tmp_path: Path) -> None:
    base = tensors(kind, 1)
    versions = [staged(weights, tmp_path, n) for n, weights in enumerate((base, nudged(base, 0.01)))]
    expected = await memory_after_a_whole_load(kind, 1, versions[1])
    await kind.engine.load_weights(0, versions[0])
    more = [("another.weight", torch.zeros(8).bfloat16()), *base]
    renamed = changes(staged(more, tmp_path), staged([("another.weight", torch.ones(8).bfloat16()), *base], tmp_path))
    assert renamed.words is not None
    with capture_logs() as logs:
        await kind.engine.load_weights(1, versions[1], Changes(renamed.names, renamed.words))
    assert {entry["reason"] for entry in logs} == {"another.weight has no known place in the engine's memory"}
    assert equal(await kind.memory(), expected)


def readers(file: Path) -> list[int]:
    """Return the processes below this one that have the file open."""
    below, found = [os.getpid()], []
    while below:
        pid = below.pop()
        with suppress(OSError):  # it has ended
            for task in Path("/proc", str(pid), "task").iterdir():
                below += map(int, (task / "children").read_text().split())
            if pid != os.getpid():
                opened = {str(link.readlink()) for link in Path("/proc", str(pid), "fd").iterdir()}
                found += [pid] if str(file) in opened else []
    return found


def excuses(directory: Path) -> list[Path]:
    """Return the files in which ranks say why they loaded everything."""
    return [file for file in directory.iterdir() if file.suffix]


async def test_rank_that_dies_in_the_middle_ends_the_engine(tmp_path: Path) -> None:
    vllm_engines.require()
    vllm_engines.end_shared()
    kind = InVllm(pack_weights=False)
    base = tensors(kind, 1)
    versions = [staged(weights, tmp_path, n) for n, weights in enumerate((base, nudged(base, 0.01)))]
    await kind.engine.load_weights(0, versions[0])
    found = changes(*versions)
    assert found.words is not None
    file = found.words.path
    file.unlink()
    os.mkfifo(file)
    writer = os.open(file, os.O_RDWR)  # so that ranks open it and then wait for its bytes
    load = asyncio.create_task(kind.engine.load_weights(1, versions[1], found), name="load")
    await eventually(lambda: readers(file))
    os.kill(readers(file)[0], signal.SIGKILL)
    with pytest.raises(EngineFailed, match="died"):
        await load
    os.close(writer)
    with pytest.raises(EngineFailed, match="died"):
        kind.engine.stats()
    await kind.engine.close()


@pytest.mark.parametrize(
    "options",
    [{}, {"pack_weights": False, "vllm_args": {"quantization": "fp8_per_channel"}}],
    ids=["packed", "quantized"],
)
async def test_vllm_that_changes_weights_says_so_once_and_loads_everything(
    options: dict[str, Any], tmp_path: Path
) -> None:
    vllm_engines.require()
    vllm_engines.end_shared()
    kind = InVllm(**options)
    base = tensors(kind, 1)
    versions = [staged(weights, tmp_path, n) for n, weights in enumerate((base, nudged(base, 0.01)))]
    await kind.engine.load_weights(0, versions[0])
    probe = [([3, 1, 4], [1, 5, 9])]
    scores: list[list[list[float]]] = []
    for before, after in ((0, 1), (1, 0), (0, 1)):
        with capture_logs() as logs:
            assert (
                await kind.engine.load_weights(after, versions[after], changes(versions[before], versions[after])) == []
            )
        reasons = [entry["reason"] for entry in logs]
        assert reasons == ([] if scores else ["vllm packs weights for this CPU (RLBOOST_WORKER_PACK_WEIGHTS)"])
        await kind.engine.suspend()
        scores.append(await kind.engine.score(probe, 1.0))
        await kind.engine.resume()
    assert scores[0] == scores[2] != scores[1]
    assert not excuses(tmp_path)
    await kind.engine.close()
