"""A model folder as a version that need not be pulled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from rlboost.services.rollout_worker.adapters.model_folder import ModelFolderSeeder
from rlboost.shared.weights.cache import Cache
from rlboost.shared.weights.manifest import ChunkRef, Manifest, Part, TensorEntry, digest_of

CHUNK = 4096


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    path = tmp_path / "model"
    path.mkdir()
    for number in range(2):
        tensors = {
            f"layer.{number}.weight": torch.randn(64, 48, generator=generator),
            f"layer.{number}.bias": torch.randn(48, generator=generator),
        }
        save_file(tensors, path / f"model-{number}.safetensors")
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    cache = Cache(tmp_path / "cache")
    yield cache
    cache.close()


def manifest(folder: Path, *, dtype: torch.dtype = torch.float32, ranks: int = 1) -> Manifest:
    """Return what a trainer publishes of the folder: every rank an equal part of the rows."""
    tensors = {name: t.to(dtype) for file in sorted(folder.glob("*")) for name, t in load_file(file).items()}
    parts = []
    for rank in range(ranks):
        entries, stream = [], b""
        for name, tensor in tensors.items():
            rows = len(tensor) // ranks
            box = tensor[rank * rows : (rank + 1) * rows].contiguous()
            data = box.view(torch.uint8).numpy().tobytes()
            entry = TensorEntry(
                name=name,
                dtype=str(dtype).removeprefix("torch."),
                global_shape=tuple(tensor.shape),
                offset=(rank * rows, *(0,) * (tensor.ndim - 1)),
                local_shape=tuple(box.shape),
                start=len(stream),
                n_bytes=len(data),
                digest=digest_of(data),
            )
            entries.append(entry)
            stream += data
        pieces = [stream[at : at + CHUNK] for at in range(0, len(stream), CHUNK)]
        chunks = tuple(ChunkRef(digest_of(piece), len(piece)) for piece in pieces)
        parts.append(Part(rank=rank, chunks=chunks, tensors=tuple(entries)))
    return Manifest(job_id="job", version=0, config_json="{}", parts=tuple(parts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_chunk_comes_out_of_the_folder(folder: Path, cache: Cache, dtype: torch.dtype, ranks: int) -> None:
    wanted = manifest(folder, dtype=dtype, ranks=ranks)
    assert ModelFolderSeeder(folder)(wanted, cache) == len(list(wanted.chunks()))
    assert all(cache.holds(chunk) for chunk in wanted.chunks())


def test_seeder_takes_only_the_chunks_of_the_requested_version(folder: Path, cache: Cache) -> None:
    wanted = manifest(folder)
    (folder / "model-1.safetensors").unlink()
    found = ModelFolderSeeder(folder)(wanted, cache)
    assert 0 < found < len(list(wanted.chunks()))
    assert cache.digests() <= {chunk.digest for chunk in wanted.chunks()}


@pytest.mark.parametrize("damage", ["no folder", "truncated", "no model"])
def test_folder_that_cannot_be_read_is_reported(cache: Cache, folder: Path, tmp_path: Path, damage: str) -> None:
    wanted, other = manifest(folder), tmp_path / "other"
    if damage != "no folder":
        other.mkdir()
        name = "model.safetensors" if damage == "truncated" else "readme.md"
        (other / name).write_bytes((folder / "model-0.safetensors").read_bytes()[:1000])
    with capture_logs() as logs:
        assert ModelFolderSeeder(other)(wanted, cache) == 0
    assert [line["event"] for line in logs] == ["cache_seeding_failed"]
