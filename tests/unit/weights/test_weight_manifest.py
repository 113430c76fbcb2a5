"""Shards, parts, manifests: none can be built that is not whole."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rlboost.shared.errors import Undecodable
from rlboost.shared.weights.manifest import (
    CHUNK_BYTES,
    ITEM_BYTES,
    ChunkRef,
    Manifest,
    Part,
    TensorEntry,
    check_coverage,
    digest_of,
)

DIGEST = digest_of(b"")


def entry(
    name: str,
    shape: tuple[int, ...],
    offset: tuple[int, ...] | None = None,
    local: tuple[int, ...] | None = None,
    *,
    dtype: str = "bfloat16",
    start: int = 0,
) -> TensorEntry:
    extent = shape if local is None else local
    return TensorEntry(
        name=name,
        dtype=dtype,
        global_shape=shape,
        offset=offset if offset is not None else (0,) * len(shape),
        local_shape=extent,
        start=start,
        n_bytes=math.prod(extent) * ITEM_BYTES[dtype],
        digest=DIGEST,
    )


def part(rank: int, tensors: list[TensorEntry]) -> Part:
    laid, start = [], 0
    for tensor in tensors:
        laid.append(tensor.model_copy(update={"start": start}))
        start += tensor.n_bytes
    chunks = [ChunkRef(DIGEST, min(CHUNK_BYTES, start - at)) for at in range(0, start, CHUNK_BYTES)]
    return Part(rank=rank, chunks=tuple(chunks), tensors=tuple(laid))


@dataclass(frozen=True)
class Sharding:
    """A tensor split into slices by a grid, each slice once."""

    shape: tuple[int, ...]
    slices: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    def entries(self) -> list[TensorEntry]:
        return [entry("w", self.shape, offset, local) for offset, local in self.slices]


@st.composite
def shardings(draw: st.DrawFn) -> Sharding:
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    slices: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for size in shape:
        # Cuts may coincide: then a rank's shard is empty, as with FSDP when a dimension is smaller than the ranks.
        cuts = sorted([0, size, *draw(st.lists(st.integers(0, size), max_size=3))])
        intervals = [(low, high - low) for low, high in itertools.pairwise(cuts)]
        slices = [((*offset, low), (*local, n)) for offset, local in slices for low, n in intervals]
    return Sharding(shape, tuple(draw(st.permutations(slices))))


@given(shardings())
def test_shards_of_any_grid_cover_the_tensor(sharding: Sharding) -> None:
    check_coverage(sharding.entries())


@given(shardings(), st.randoms(use_true_random=False))
def test_a_lost_shard_is_a_gap(sharding: Sharding, rng: random.Random) -> None:
    entries = sharding.entries()
    lost = rng.choice([shard for shard in entries if shard.n_bytes])
    others = [shard for shard in entries if shard is not lost]
    if others:
        with pytest.raises(ValueError, match=r"tensor w: its shards cover \d+ of \d+ elements"):
            check_coverage(others)


@given(shardings(), st.randoms(use_true_random=False))
def test_a_shard_published_twice_is_an_overlap(sharding: Sharding, rng: random.Random) -> None:
    entries = sharding.entries()
    again = rng.choice([shard for shard in entries if shard.n_bytes])
    with pytest.raises(ValueError, match="tensor w: its shards overlap"):
        check_coverage([*entries, again])


@pytest.mark.parametrize("shape", [(1 << 63, 0), (1,) * 17], ids=["extent", "dimensions"])
def test_shape_that_no_array_has_is_rejected(shape: tuple[int, ...]) -> None:
    """Shards are compared as arrays of 64-bit numbers."""
    with pytest.raises(ValidationError, match="global_shape"):
        entry("w", shape)


@given(shardings(), st.data())
def test_coverage_is_complete_iff_every_element_is_in_one_shard(sharding: Sharding, data: st.DataObject) -> None:
    moved = []
    for offset, local in sharding.slices:
        limits = [size - extent for size, extent in zip(sharding.shape, local, strict=True)]
        shift = data.draw(st.booleans())
        moved.append((tuple(data.draw(st.integers(0, n)) for n in limits) if shift else offset, local))
    entries = [entry("w", sharding.shape, offset, local) for offset, local in moved]
    counts: dict[tuple[int, ...], int] = {}
    for offset, local in moved:
        cells: list[tuple[int, ...]] = [()]
        for low, n in zip(offset, local, strict=True):
            cells = [(*cell, at) for cell in cells for at in range(low, low + n)]
        for cell in cells:
            counts[cell] = counts.get(cell, 0) + 1
    once = len(counts) == math.prod(sharding.shape) and set(counts.values()) <= {1}
    if once:
        check_coverage(entries)
    else:
        with pytest.raises(ValueError, match="tensor w"):
            check_coverage(entries)


def test_many_ranks_are_checked_quickly() -> None:
    check_coverage(entry("w", (4096, 8), (row, 0), (8, 8)) for row in range(0, 4096, 8))


def test_shards_that_disagree_on_the_dtype_are_refused() -> None:
    shards = [entry("w", (4,), (0,), (2,)), entry("w", (4,), (2,), (2,), dtype="float32")]
    with pytest.raises(ValueError, match="disagree on dtype"):
        check_coverage(shards)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dtype": "bfloat61"}, "unknown dtype 'bfloat61'"),
        ({"offset": (1, 0)}, "exceeds"),
        ({"offset": (0,)}, "differ in length"),
        ({"n_bytes": 7}, "7 bytes, but its shape and dtype take 12"),
        ({"digest": "abc"}, "pattern"),
        ({"start": -1}, "greater than or equal to 0"),
    ],
)
def test_an_entry_that_contradicts_itself_is_refused(change: dict[str, object], text: str) -> None:
    raw = entry("w", (2, 3)).model_dump() | change
    with pytest.raises(ValidationError, match=text):
        TensorEntry.model_validate(raw)


def test_a_part_whose_tensors_leave_a_hole_is_refused() -> None:
    with pytest.raises(ValidationError, match="tensor b starts at 10, but the one before it ends at 8"):
        Part(rank=0, chunks=(ChunkRef(DIGEST, 12),), tensors=(entry("a", (4,)), entry("b", (1,), start=10)))


def test_a_part_whose_chunks_are_longer_than_its_tensors_is_refused() -> None:
    with pytest.raises(ValidationError, match="the tensors are 8 bytes, the chunks 9"):
        Part(rank=0, chunks=(ChunkRef(DIGEST, 9),), tensors=(entry("a", (4,)),))


def test_a_manifest_without_a_rank_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"ranks \[0, 2\], expected 0\.\.1"):
        Manifest(job_id="j", version=0, config_json="{}", parts=(part(0, [entry("a", (4,))]), part(2, [])))


def test_shards_of_different_global_shapes_are_refused() -> None:
    """Together they have as many elements as the first says, and they do not overlap."""
    shards = [entry("a", (4, 1), local=(2, 1)), entry("a", (4, 2), offset=(2, 0), local=(2, 1))]
    with pytest.raises(ValueError, match="tensor a: its shards disagree"):
        check_coverage(shards)


def test_a_manifest_with_parts_out_of_order_is_refused() -> None:
    parts = tuple(part(rank, [entry(f"t{rank}", (4,))]) for rank in (1, 0))
    with pytest.raises(ValidationError, match=r"ranks \[1, 0\], expected 0\.\.1"):
        Manifest(job_id="j", version=0, config_json="{}", parts=parts)


@pytest.mark.parametrize("job_id", ["..", "../x", "a/b", "", ".hidden", "a\n", "a\x00", "x" * 129])
def test_unsafe_job_id_is_refused(job_id: str) -> None:
    with pytest.raises(ValidationError):
        Manifest(job_id=job_id, version=0, config_json="{}", parts=(part(0, []),))


def test_documents_survive_the_wire_byte_for_byte() -> None:
    left = part(0, [entry("a", (4, 2), (0, 0), (2, 2)), entry("b", ()), entry("empty", (0, 3))])
    right = part(1, [entry("a", (4, 2), (2, 0), (2, 2))])
    manifest = Manifest(job_id="job-1", version=7, config_json='{"model_type": "llama"}', parts=(left, right))
    again = Manifest.decode(manifest.encode())
    assert again == manifest
    assert again.encode() == manifest.encode()
    assert Part.decode(left.encode()).digest == left.digest
    assert manifest.n_bytes == 16 + 2


def test_manifest_without_an_adapter_keeps_its_encoding() -> None:
    manifest = Manifest(job_id="job-1", version=7, config_json="{}", parts=(part(0, [entry("a", (1,))]),))
    expected = (
        '{"job_id":"job-1","version":7,"config_json":"{}","parts":[{"rank":0,"chunks":[["%s",2]],"tensors":[{"name":"a",'
        '"dtype":"bfloat16","global_shape":[1],"offset":[0],"local_shape":[1],"start":0,"n_bytes":2,"digest":"%s"}],'
        '"edges":[]}]}'
    )
    assert manifest.encode() == (expected % (DIGEST, DIGEST)).encode()
    assert not manifest.is_adapter


def test_parity_reference_is_part_of_the_manifest_digest() -> None:
    plain = Manifest(job_id="j", version=3, config_json="{}", parts=(part(0, [entry("a", (4,))]),))
    manifest = plain.model_copy(update={"parity_json": '{"rows":[]}'})
    assert manifest.encode() == plain.encode()[:-1] + b',"parity_json":"{\\"rows\\":[]}"}'
    assert Manifest.decode(manifest.encode()) == manifest
    assert manifest.digest != plain.digest


def test_an_adapter_version_names_its_base() -> None:
    adapter = {"base_version": 0, "adapter_json": '{"r": 8}'}
    manifest = Manifest(job_id="j", version=3, config_json="{}", parts=(part(0, [entry("a", (4,))]),), **adapter)
    again = Manifest.decode(manifest.encode())
    assert again == manifest
    assert again.is_adapter
    assert (again.base_version, again.adapter_json) == (0, '{"r": 8}')


@pytest.mark.parametrize(
    ("adapter", "text"),
    [
        ({"base_version": 0}, "adapter_json"),
        ({"adapter_json": "{}"}, "adapter_json"),
        ({"base_version": 3, "adapter_json": "{}"}, "not older"),
        ({"base_version": -1, "adapter_json": "{}"}, "greater than or equal to 0"),
    ],
)
def test_an_adapter_version_without_an_older_base_is_refused(adapter: dict[str, object], text: str) -> None:
    manifest = Manifest(job_id="j", version=3, config_json="{}", parts=(part(0, [entry("a", (4,))]),))
    with pytest.raises(Undecodable, match=text):
        Manifest.decode(json.dumps(json.loads(manifest.encode()) | adapter).encode())


def test_invalid_manifest_is_undecodable() -> None:
    with pytest.raises(Undecodable, match="Manifest"):
        Manifest.decode(b"{")
    with pytest.raises(Undecodable, match=r"Manifest: parts: Field required"):
        Manifest.decode(b'{"job_id": "j", "version": 0, "config_json": ""}')


def test_every_chunk_is_listed_once() -> None:
    chunks = (ChunkRef(DIGEST, 8), ChunkRef(DIGEST, 8))
    twice = Part(rank=0, chunks=chunks, tensors=(entry("a", (8,)),))
    manifest = Manifest(job_id="j", version=0, config_json="{}", parts=(twice,))
    assert list(manifest.chunks()) == [ChunkRef(DIGEST, 8)]
