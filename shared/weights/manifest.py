"""The manifest of a version of a model's weights: its shards, chunks and digests.

A *part* is published by one trainer rank: the bytes of its shards (row major, little endian) concatenated to one
stream, which is split into chunks. A *manifest* has all parts of one version. Both are validated: the shards of a part
fill its chunks exactly, and the shards of a manifest cover every tensor exactly once.

An *adapter version* has the tensors of a LoRA adapter only, under PEFT's names, and refers to the version of the model
that the adapter belongs to.

`Shard` and `split`: the slices of tensors that a rank publishes, and how they are split into chunks.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Annotated, Literal, NamedTuple, Self

import numpy as np
from blake3 import blake3
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeInt,
    StringConstraints,
    ValidationError,
    model_validator,
)

from rlboost.shared.errors import Undecodable
from rlboost.shared.ids import JOB_ID_PATTERN

CHUNK_BYTES = 4 << 20
"""Size of a chunk; only the last one of a part is smaller."""

MAX_SHARDS = 4096
"""Maximum shards of one tensor: they are compared pairwise."""
ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element, by torch's name of the dtype."""

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""BLAKE3 in hexadecimal."""
JobId = Annotated[str, StringConstraints(pattern=JOB_ID_PATTERN)]
Shape = Annotated[tuple[Annotated[int, Field(ge=0, lt=1 << 63)], ...], Field(max_length=16)]


def digest_of(data: bytes | bytearray | memoryview) -> str:
    """Return the BLAKE3 digest of contiguous bytes, on all cores. Releases the GIL."""
    return blake3(data, max_threads=blake3.AUTO).hexdigest()


class ChunkRef(NamedTuple):
    """One chunk, by content."""

    digest: Digest
    n_bytes: Annotated[int, Field(ge=1, le=CHUNK_BYTES)]


class Document(BaseModel):
    """A document that is stored and sent as canonical JSON."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    def encode(self) -> bytes:
        """Return canonical JSON: equal documents have equal bytes."""
        return self.model_dump_json().encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Invert `encode`.

        Raises:
            Undecodable: the bytes are not a valid document of this type.

        """
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise Undecodable(f"{cls.__name__}: {place}: {first['msg']}") from error

    @property
    def digest(self) -> str:
        """Return the digest of the canonical JSON."""
        return digest_of(self.encode())


class TensorEntry(BaseModel):
    """One rank's shard of one tensor: the slice at `offset` of shape `local_shape` within `global_shape`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    dtype: str
    global_shape: Shape
    offset: Shape
    local_shape: Shape
    start: NonNegativeInt
    """Position of the shard's first byte in its part's stream."""
    n_bytes: NonNegativeInt
    digest: Digest
    """Digest of the shard's bytes."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"tensor {self.name}: unknown dtype {self.dtype!r}; known: {', '.join(ITEM_BYTES)}")
        if not len(self.global_shape) == len(self.offset) == len(self.local_shape):
            raise ValueError(f"tensor {self.name}: global_shape, offset and local_shape differ in length")
        extents = zip(self.offset, self.local_shape, self.global_shape, strict=True)
        if any(low + extent > size for low, extent, size in extents):
            raise ValueError(f"tensor {self.name}: the shard at {self.offset} exceeds {self.global_shape}")
        expected = math.prod(self.local_shape) * ITEM_BYTES[self.dtype]
        if self.n_bytes != expected:
            raise ValueError(f"tensor {self.name}: {self.n_bytes} bytes, but its shape and dtype take {expected}")
        return self


class Part(Document):
    """The part of a version that one rank publishes."""

    rank: NonNegativeInt
    chunks: tuple[ChunkRef, ...]
    tensors: tuple[TensorEntry, ...]
    edges: tuple[ChunkRef, ...] = ()
    """References to blobs that each contain an `EdgeList`: deltas from older chunks."""

    @model_validator(mode="after")
    def _tensors_fill_chunks(self) -> Self:
        end = 0
        for entry in self.tensors:
            if entry.start != end:
                raise ValueError(f"tensor {entry.name} starts at {entry.start}, but the one before it ends at {end}")
            end += entry.n_bytes
        if end != self.n_bytes:
            raise ValueError(f"the tensors are {end} bytes, the chunks {self.n_bytes}")
        return self

    @property
    def n_bytes(self) -> int:
        """Return the length of the stream."""
        return sum(chunk.n_bytes for chunk in self.chunks)


class Manifest(Document):
    """One complete version; part i belongs to rank i."""

    job_id: JobId
    version: NonNegativeInt
    config_json: str
    """The model's Hugging Face `config.json`: a worker needs no model directory."""
    parts: tuple[Part, ...] = Field(min_length=1)
    base_version: NonNegativeInt | None = None
    """The older version of the model that the adapter belongs to; None for a whole model."""
    adapter_json: str = ""
    """PEFT's `adapter_config.json`; empty for a whole model."""
    parity_json: str = ""
    """A `ParityReference`: the trainer's log-probabilities of canary prompts under these weights."""
    signature: str = ""
    """The weight store's signature of `statement`: see `access`."""

    def statement(self) -> bytes:
        """Return what the weight store signs when it commits: everything, each part by its digest."""
        parts = [part.digest for part in self.parts]
        fields = [self.job_id, self.version, parts, self.config_json, self.base_version, self.adapter_json]
        return json.dumps(["rlboost manifest", *fields, self.parity_json]).encode()

    def encode(self) -> bytes:
        """Return canonical JSON without the fields that do not apply to the version."""
        absent = set() if self.is_adapter else {"base_version", "adapter_json"}
        absent |= {name for name in ("parity_json", "signature") if not getattr(self, name)}
        return self.model_dump_json(exclude=absent).encode()

    @property
    def identity(self) -> str:
        """Return the digest of the model's configuration and tensors, equal for equal weights of different jobs."""
        shards = sorted(entry.model_dump_json(exclude={"start"}) for part in self.parts for entry in part.tensors)
        return digest_of(json.dumps([self.config_json, *shards]).encode())

    @property
    def is_adapter(self) -> bool:
        """Return True for an adapter version."""
        return self.base_version is not None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.is_adapter != bool(self.adapter_json):
            raise ValueError("base_version and adapter_json must be set together: an adapter version has both")
        if self.base_version is not None and self.base_version >= self.version:
            raise ValueError(f"the base of version {self.version} is version {self.base_version}, which is not older")
        ranks = [part.rank for part in self.parts]
        if ranks != list(range(len(ranks))):
            raise ValueError(f"the parts are those of ranks {ranks}, expected 0..{len(ranks) - 1}")
        check_coverage(entry for part in self.parts for entry in part.tensors)
        return self

    @property
    def n_bytes(self) -> int:
        """Return the size of the weights."""
        return sum(part.n_bytes for part in self.parts)

    def chunks(self) -> Iterator[ChunkRef]:
        """Yield every distinct chunk once, in order of first use."""
        yield from dict.fromkeys(chunk for part in self.parts for chunk in part.chunks)


def check_coverage(shards: Iterable[TensorEntry]) -> None:
    """Check that the shards cover every tensor that they name exactly once.

    Raises:
        ValueError: naming the tensor whose shards disagree, overlap or leave a gap.

    """
    by_name: dict[str, list[TensorEntry]] = {}
    for entry in shards:
        by_name.setdefault(entry.name, []).append(entry)
    for name, group in by_name.items():
        if len(group) > MAX_SHARDS:
            raise ValueError(f"tensor {name}: {len(group)} shards, at most {MAX_SHARDS} are allowed")
        if len({(entry.dtype, entry.global_shape) for entry in group}) > 1:
            raise ValueError(f"tensor {name}: its shards disagree on dtype or global shape")
        if _overlap(group):
            raise ValueError(f"tensor {name}: its shards overlap")
        covered, size = sum(math.prod(entry.local_shape) for entry in group), math.prod(group[0].global_shape)
        if covered != size:
            raise ValueError(f"tensor {name}: its shards cover {covered} of {size} elements")


def _overlap(group: Sequence[TensorEntry]) -> bool:
    shards = [entry for entry in group if entry.n_bytes]
    if len(shards) < 2:
        return False
    low = np.array([entry.offset for entry in shards], dtype=np.int64)
    high = low + np.array([entry.local_shape for entry in shards], dtype=np.int64)
    reaches = (low[:, None] < high[None, :]).all(axis=-1)
    meets = reaches & reaches.T
    return int(meets.sum()) > len(shards)


ChunkCopy = tuple[ChunkRef, bytes]
"""A chunk and its bytes, which no later change of the shards affects."""


class Shard(NamedTuple):
    """One rank's slice of a tensor, C-contiguous in any buffer; the bytes must not change until `publish` returns.

    With torch: `tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data`.
    """

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    local_shape: tuple[int, ...]
    data: memoryview | bytes | bytearray


class Chunk(NamedTuple):
    """One chunk of a part's byte stream."""

    ref: ChunkRef
    data: memoryview
    dtype: str
    """Dtype of most of its bytes."""


def chunks_among(shards: Iterable[Shard], digests: AbstractSet[str]) -> list[ChunkCopy]:
    """Return copies of the chunks with these digests, as one rank's `Publisher.publish` splits its shards."""
    chunks = split(shards, CHUNK_BYTES, [])
    return [(chunk.ref, bytes(chunk.data)) for chunk in chunks if chunk.ref.digest in digests]


def split(shards: Iterable[Shard], chunk_bytes: int, entries: list[TensorEntry]) -> Iterator[Chunk]:
    """Concatenate the shards and split them into chunks; add each shard to `entries`. Copies only at shard borders."""
    blocks: list[tuple[memoryview, str]] = []
    start, free = 0, chunk_bytes
    for shard in shards:
        data = _flat(shard.data)
        entries.append(
            TensorEntry(
                name=shard.name,
                dtype=shard.dtype,
                global_shape=shard.global_shape,
                offset=shard.offset,
                local_shape=shard.local_shape,
                start=start,
                n_bytes=len(data),
                digest=digest_of(data),
            )
        )
        start += len(data)
        while data:
            block, data = data[:free], data[free:]
            blocks.append((block, shard.dtype))
            free -= len(block)
            if not free:
                yield _join(blocks)
                blocks, free = [], chunk_bytes
    if blocks:
        yield _join(blocks)


def _join(blocks: list[tuple[memoryview, str]]) -> Chunk:
    data = blocks[0][0] if len(blocks) == 1 else memoryview(b"".join(block for block, _ in blocks))
    share: Counter[str] = Counter()
    for block, dtype in blocks:
        share[dtype] += len(block)
    return Chunk(ChunkRef(digest_of(data), len(data)), data, share.most_common(1)[0][0])


def _flat(data: memoryview | bytes | bytearray) -> memoryview:
    view = memoryview(data)
    # A view with a zero in its shape cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


# --- The parity reference of a version --------------------------------------------------------------------------------
# A few token sequences with the trainer's log-probabilities, which the version's manifest has as text. A worker whose
# engine computes other log-probabilities for these tokens does not serve the version.


ParityDtype = Literal["float32", "bfloat16"]
_Tokens = Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)]


class ScoredSequence(BaseModel):
    """One sequence with the trainer's log-probabilities."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    prompt: _Tokens
    completion: _Tokens
    logprobs: tuple[FiniteFloat, ...]
    """The log-probability of each completion token given all tokens before it, in nats."""

    @model_validator(mode="after")
    def _one_each(self) -> Self:
        if len(self.logprobs) != len(self.completion):
            raise ValueError(f"{len(self.logprobs)} log-probabilities for {len(self.completion)} tokens")
        return self


class ParityReference(BaseModel):
    """The reference of one version."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    temperature: float = Field(gt=0)
    """The temperature of the log-probabilities: the job's sampling temperature, which training uses too."""
    top_p: float = Field(1.0, gt=0, le=1)
    """The top-p that training samples with. The log-probabilities are of the whole distribution."""
    dtype: ParityDtype
    """The dtype of the trainer's matrix multiplications."""
    rows: tuple[ScoredSequence, ...] = Field(min_length=1)

    def encode(self) -> str:
        """Return the reference as JSON."""
        return self.model_dump_json()

    @classmethod
    def decode(cls, text: str) -> Self:
        """Invert `encode`.

        Raises:
            Undecodable: the text is not a parity reference.

        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise Undecodable(f"parity reference: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
