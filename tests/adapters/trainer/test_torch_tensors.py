"""From a pulled version's bytes to tensors, and from loaded tensors back to the digests that were published."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlboost.shared.errors import ConfigError
from rlboost.shared.weights import torch_tensors
from rlboost.shared.weights.cache import CachedVersion, PulledVersion
from rlboost.shared.weights.manifest import ChunkRef, Manifest, Part, TensorEntry, digest_of


def entry(name: str, whole: torch.Tensor, low: tuple[int, ...], shard: torch.Tensor, start: int) -> TensorEntry:
    data = raw(shard)
    return TensorEntry(
        name=name,
        dtype=str(whole.dtype).removeprefix("torch."),
        global_shape=tuple(whole.shape),
        offset=low,
        local_shape=tuple(shard.shape),
        start=start,
        n_bytes=len(data),
        digest=digest_of(data),
    )


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def pulled(tensors: dict[str, torch.Tensor], directory: Path) -> PulledVersion:
    """Publish as two ranks would: each has half of the columns of a matrix, the first has all else."""
    parts = []
    for rank in range(2):
        entries: list[TensorEntry] = []
        data = b""
        low: tuple[int, ...]
        for name, whole in tensors.items():
            if whole.ndim == 2:
                half = whole.shape[1] // 2
                low, shard = (0, rank * half), whole[:, rank * half : (rank + 1) * half]
            elif rank == 0:
                low, shard = (0,) * whole.ndim, whole
            else:
                continue
            entries.append(entry(name, whole, low, shard, len(data)))
            data += raw(shard)
        chunk = ChunkRef(digest_of(data), len(data))
        (directory / chunk.digest).write_bytes(data)
        parts.append(Part(rank=rank, chunks=(chunk,), tensors=tuple(entries)))
    return PulledVersion(Manifest(job_id="j", version=0, config_json="{}", parts=tuple(parts)), directory)


TENSORS = {
    "matrix": torch.randn(6, 8, generator=torch.Generator().manual_seed(0)),
    "half": torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).bfloat16(),
    "vector": torch.arange(5),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, dtype=torch.float32),
}


def test_tensors_published_in_shards_are_reassembled(tmp_path: Path) -> None:
    found = dict(torch_tensors.tensors(pulled(TENSORS, tmp_path)))
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_tensors_loaded_bit_for_bit_do_not_differ(tmp_path: Path) -> None:
    published = CachedVersion(pulled(TENSORS, tmp_path))
    transposed_in_memory = TENSORS["matrix"].T.contiguous().T
    loaded = {**TENSORS, "matrix": transposed_in_memory, "half": TENSORS["half"].float(), "another": torch.ones(1)}
    assert published.differing(loaded.items()) == []


def test_differing_returns_every_changed_or_missing_tensor(tmp_path: Path) -> None:
    published = CachedVersion(pulled(TENSORS, tmp_path))
    flipped = TENSORS["matrix"].clone()
    flipped.view(torch.int32)[5, 7] ^= 1
    loaded = {"matrix": flipped, "half": TENSORS["half"].T, "scalar": torch.tensor([2.5]), "empty": TENSORS["empty"]}
    assert published.differing(loaded.items()) == ["half", "matrix", "scalar", "vector"]


def test_minus_zero_is_not_zero(tmp_path: Path) -> None:
    published = CachedVersion(pulled({"matrix": torch.zeros(2, 2)}, tmp_path))
    assert published.differing([("matrix", -torch.zeros(2, 2))]) == ["matrix"]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_weights_are_not_published(dtype: torch.dtype) -> None:
    """Their scales are other tensors: a worker would load the numbers as weights."""
    tensors = {"a.position_ids": torch.ones(1, dtype=torch.int64), "a.weight": torch.ones(1).to(dtype)}
    shards = torch_tensors.named_shards(tensors)
    assert next(shards).name == "a.position_ids"
    with pytest.raises(ConfigError, match=r"a\.weight is quantized \(\w+\): load the model without quantization"):
        next(shards)
