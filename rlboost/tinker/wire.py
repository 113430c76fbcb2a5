"""The wire format of Tinker's client, pinned: JSON bodies, and protobuf for what has tensors.

Protobuf is read and written here by field numbers, since few messages need it: a request of `forward_backward`, its
answer, and the answer of a sample.
"""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from rlboost.shared.errors import ConfigError
from rlboost.shared.ids import MAX_GROUP_SIZE

VERSION = "0.38"
"""Of the client that this is written for and tested with."""
PROTOBUF = "application/x-protobuf"
_F32, _I64 = 1, 2
_DTYPES: Mapping[int, np.dtype[Any]] = {_F32: np.dtype("<f4"), _I64: np.dtype("<i8"), 3: np.dtype("<i4")}
_STOP, _LENGTH = 0, 1
_MAX_VALUES = 1 << 28
"""Of one tensor: a sparse one may declare any shape."""


# --- bodies -----------------------------------------------------------------------------------------------------------


class _Body(BaseModel):
    """A request's JSON. What the client of another version adds is rejected, not ignored."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    type: str = ""


class CreateSession(_Body):
    """Begins a session. `sdk_version` is compared with the pinned one."""

    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class Heartbeat(_Body):
    """Keeps a session, and the models of it."""

    session_id: str


class LoraOptions(BaseModel):
    """What of the model is trained, by an adapter of which rank."""

    model_config = ConfigDict(extra="forbid")
    rank: int = Field(32, ge=1, le=512)
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class _Optimizer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["adamw"] = "adamw"


class CreateModel(_Body):
    """Begins a model: an adapter on the base model."""

    session_id: str
    model_seq_id: int = Field(ge=0)
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraOptions = LoraOptions()
    optimizer_config: _Optimizer = _Optimizer()


class OfModel(_Body):
    """Asks about a model."""

    model_id: str


class _InOrder(OfModel):
    """A request of a model, which is executed after those with smaller numbers."""

    seq_id: int = Field(ge=1)


class Adam(BaseModel):
    """Parameters of one step of Adam, with decoupled weight decay. `grad_clip_norm` 0 clips nothing."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    learning_rate: float = Field(1e-4, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip_norm: float = Field(0.0, ge=0)


class OptimStep(_InOrder):
    """A step of the optimizer with the gradients that were accumulated."""

    adam_params: Adam


class _Save(_InOrder):
    path: str | None = None
    ttl_seconds: int | None = Field(None, ge=1, lt=1 << 31)
    user_metadata: dict[str, str] | None = None


class SaveState(_Save):
    """Saves weights and optimizer."""

    overwrite: bool = False


class SaveForSampler(_Save):
    """Saves weights to sample with: under a name, or for one sampling session."""

    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"


class LoadState(_Body):
    """Loads weights into a model, or into a new one of a session."""

    model_id: str | None = None
    seq_id: int | None = Field(None, ge=1)
    session_id: str | None = None
    model_seq_id: int | None = Field(None, ge=0)
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool
    optimizer_config: _Optimizer | None = None
    weights_access_token: None = None


class CreateSampler(_Body):
    """Begins a sampling session, with saved weights or the base model."""

    session_id: str
    sampling_session_seq_id: int = Field(ge=0)
    base_model: str | None = None
    model_path: str | None = None


class Retrieve(_Body):
    """Asks for the result of a request."""

    request_id: str
    allow_metadata_only: bool = False


class Chunk(BaseModel):
    """A part of a prompt: token ids alone."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[int]


class _Input(BaseModel):
    model_config = ConfigDict(extra="forbid")
    chunks: list[Chunk]


class SamplingParams(BaseModel):
    """How tokens are drawn. `stop`: none of them adds the model's end tokens, `[]` has none at all."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    max_tokens: int | None = Field(None, ge=1)
    seed: None = None
    stop: str | list[int] | list[str] | None = None
    temperature: float = Field(1.0, ge=0)
    top_k: int = -1
    top_p: float = Field(1.0, gt=0, le=1)


class Sample(_Body):
    """Asks for samples of one prompt, and for log-probabilities of the prompt."""

    sampling_session_id: str
    seq_id: int = Field(ge=0)
    num_samples: int = Field(1, ge=1, le=MAX_GROUP_SIZE)
    prompt: _Input
    sampling_params: SamplingParams
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = Field(None, ge=1)
    topk_prompt_logprobs: Literal[0] = 0
    topk_sample_logprobs: Literal[0] = 0
    target_prompt_logprobs: None = None
    prompt_alt_tokens_k: Literal[0] = 0
    record_stability_info: Literal[False] | None = None

    @property
    def tokens(self) -> list[int]:
        """Return the prompt."""
        return [token for chunk in self.prompt.chunks for token in chunk.tokens]


# --- protobuf ---------------------------------------------------------------------------------------------------------


def _fields(data: bytes) -> dict[int, list[Any]]:
    """Return the values of a message by field number: integers, or bytes."""
    found: defaultdict[int, list[Any]] = defaultdict(list)
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(data, at)
            found[number].append(value)
            continue
        n = {1: 8, 5: 4}.get(kind)
        if n is None:
            if kind != 2:  # a group, which no message here has
                raise ConfigError(f"the body is no protobuf of tinker {VERSION}: a field has the wire type {kind}")
            n, at = _varint(data, at)
        if at + n > len(data):
            raise ConfigError("the body is no protobuf: a field is longer than its message")
        found[number].append(data[at : at + n])
        at += n
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for i in range(10):
        if at + i >= len(data):
            break
        byte = data[at + i]
        value |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            return value, at + i + 1
    raise ConfigError("the body is no protobuf: a number is cut off")


def _encoded(number: int, value: bytes | int | str | float) -> bytes:
    if isinstance(value, float):
        return _written(number << 3 | 1) + struct.pack("<d", value)
    if isinstance(value, int):
        return _written(number << 3) + _written(value)
    content = value.encode() if isinstance(value, str) else value
    return _written(number << 3 | 2) + _written(len(content)) + content


def _written(value: int) -> bytes:
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _map(entries: Sequence[bytes]) -> dict[str, Any]:
    """Return a map's values, each as what `_fields` has of it."""
    pairs = [_fields(entry) for entry in entries]
    return {_text(pair[1]): (pair[2] or [b""])[-1] for pair in pairs}


def _text(values: Sequence[bytes]) -> str:
    try:
        return values[-1].decode() if values else ""
    except (UnicodeDecodeError, AttributeError) as error:
        raise ConfigError(f"the body is no protobuf of tinker {VERSION}: a text is none") from error


@dataclass(frozen=True, slots=True)
class Datum:
    """A sequence to train on."""

    tokens: NDArray[np.int64]
    """[n]."""
    inputs: dict[str, NDArray[Any]]
    """By name: [n], or [n, k] for several targets of each position."""


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """A request for a loss, and for its gradients unless `forward_only`."""

    model_id: str
    seq_id: int
    loss_fn: str
    forward_only: bool
    data: list[bytes] = field(repr=False)
    """Decoded by `datum_of` when it is due, so that a wrong one fails the request, not the order of requests."""
    config: dict[str, float | str]


@contextmanager
def _as_protobuf() -> Iterator[None]:
    """Translate what a field of another type than the client's raises."""
    try:
        yield
    except (TypeError, ValueError, struct.error) as error:
        raise ConfigError(f"the body is no protobuf of tinker {VERSION}: {error}") from error


@_as_protobuf()
def forward_backward_of(body: bytes) -> ForwardBackward:
    """Return the request that a body has.

    Raises:
        ConfigError: it is no protobuf of the client.

    """
    found = _fields(body)
    config = dict[str, float | str]()
    for name, value in _map(found[7]).items():
        either = _fields(value)
        config[name] = _text(either[2]) if either[2] else struct.unpack("<d", either[1][-1])[0] if either[1] else 0.0
    return ForwardBackward(
        _text(found[1]),
        int((found[2] or [0])[-1]),
        _text(found[4]),
        bool((found[6] or [0])[-1]),
        found[3],
        config,
    )


@_as_protobuf()
def datum_of(data: bytes) -> Datum:
    """Return a sequence to train on.

    Raises:
        ConfigError: it has an image or sound, or a tensor that cannot be read.

    """
    found = _fields(data)
    tokens = []
    for chunk in map(_fields, found[1]):
        if not chunk[1]:
            raise ConfigError("model_input has an image or sound: this server trains on text (EncodedTextChunk)")
        tokens.append(_array((_fields(chunk[1][-1])[1] or [b""])[-1], np.dtype("<i4")))
    inputs = {name: _tensor(name, value) for name, value in _map(found[2]).items()}
    return Datum(np.concatenate([np.empty(0, np.int64), *tokens]).astype(np.int64), inputs)


def _array(data: bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
    if len(data) % dtype.itemsize:
        raise ConfigError(f"a tensor of {dtype} has {len(data)} bytes: no multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype)


def _tensor(name: str, data: bytes) -> NDArray[Any]:
    found = _fields(data)
    dtype = _DTYPES.get((found[3] or [0])[-1])
    if dtype is None:
        raise ConfigError(f"loss_fn_inputs: {name} has the dtype {found[3]}: use float32 or int64")
    shape = list[int]()
    for packed in found[4]:
        at = 0
        while isinstance(packed, bytes) and at < len(packed):
            value, at = _varint(packed, at)
            shape.append(value)
        if isinstance(packed, int):
            shape.append(packed)
    if math.prod(shape) > _MAX_VALUES:
        raise ConfigError(f"loss_fn_inputs: {name} has the shape {shape}: at most {_MAX_VALUES} values are possible")
    if not found[2]:
        dense = _array((found[1] or [b""])[-1], dtype)
        if shape and dense.size != math.prod(shape):
            raise ConfigError(f"loss_fn_inputs: {name} of shape {shape} has {dense.size} values")
        return dense.reshape(shape) if shape else dense
    csr = _fields(found[2][-1])
    values = _array((csr[1] or [b""])[-1], dtype)
    starts, columns = (_array((csr[i] or [b""])[-1], np.dtype("<i8")) for i in (2, 3))
    fits = len(shape) == 2 and len(starts) == shape[0] + 1 and len(values) == len(columns) == starts[-1]
    if not fits or starts[0] or (np.diff(starts) < 0).any():
        raise ConfigError(f"loss_fn_inputs: {name} is no sparse CSR tensor of shape {shape}")
    whole = np.zeros(shape, dtype)
    rows = np.repeat(np.arange(shape[0]), np.diff(starts))
    if len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]:
        raise ConfigError(f"loss_fn_inputs: {name} has columns outside of its shape {shape}")
    whole[rows, columns] = values
    return whole


def forward_backward_output(logprobs: Sequence[NDArray[np.float32]], metrics: Mapping[str, float]) -> bytes:
    """Return the answer of a loss: log-probabilities of each sequence's targets, and metrics."""
    records = b"".join(_encoded(2, _record(one)) for one in logprobs)
    named = [_encoded(3, _encoded(1, name) + _encoded(2, float(value))) for name, value in metrics.items()]
    return _encoded(1, "TensorRecord") + records + b"".join(named)


def _record(logprobs: NDArray[np.float32]) -> bytes:
    """Return the outputs of one sequence; a record of its own, since the number of targets may differ."""
    data = logprobs.astype("<f4").tobytes()
    trailing = b"".join(map(_written, logprobs.shape[1:]))
    batched = _encoded(1, data) + _encoded(2, struct.pack("<2q", 0, len(data))) + _encoded(3, _F32)
    batched += _encoded(4, trailing) if trailing else b""
    return _encoded(2, _encoded(1, "logprobs") + _encoded(2, batched)) + _encoded(3, 1)


def sample_response(
    sequences: Sequence[tuple[Sequence[int], Sequence[float], bool]], prompt_logprobs: NDArray[np.float32] | None
) -> bytes:
    """Return the answer of a sample.

    Args:
        sequences: of each its tokens, their log-probabilities, and whether it has ended by a stop.
        prompt_logprobs: of each token of the prompt, NaN where there is none.

    """
    found = b""
    for tokens, logprobs, stopped in sequences:
        columns = np.asarray(tokens, "<i4").tobytes(), np.asarray(logprobs, "<f4").tobytes()
        reason = _encoded(1, _STOP if stopped else _LENGTH)
        found += _encoded(1, reason + _encoded(2, columns[0]) + _encoded(3, columns[1]))
    return found if prompt_logprobs is None else found + _encoded(2, prompt_logprobs.astype("<f4").tobytes())
