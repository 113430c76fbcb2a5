"""The wire format stays what it was: golden bytes of every message, and what decoding refuses and forgives."""

from __future__ import annotations

import contextlib
import os
import types
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from rlboost.shared.errors import Undecodable
from rlboost.shared.ids import SampleId, group_of, job_of
from rlboost.shared.messages import Message, TokenFrame, codec, registered
from rlboost.shared.messages.codec import MAX_ITEMS, decode, encode
from rlboost.shared.wire import F32, I32, floats, ints, pack

GOLDEN = Path(__file__).parents[2] / "golden"
M = TypeVar("M", bound=BaseModel)


def example(annotation: Any, name: str) -> Any:  # noqa: PLR0911 - one case a kind of type
    """A fixed value of a field's type: numbers and texts derived from the field's name."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return example(args[0], name)
    if origin is Literal:
        return args[0]
    if origin in {list, tuple}:
        if origin is tuple and len(args) > 1 and args[1] is not ...:
            return tuple(example(arg, name) for arg in args)
        one = example(args[0], name)
        return [one, one] if origin is list else (one, one)
    if origin is dict:
        return {"a": 1.5}
    if origin in {Union, types.UnionType}:
        return example(args[0], name)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return build(annotation)
    simple: dict[type, Any] = {int: len(name), float: len(name) + 0.5, str: name, bytes: name.encode(), bool: True}
    return simple[annotation]


def build(cls: type[M]) -> M:
    values = {name: example(field.annotation, name) for name, field in cls.model_fields.items()}
    values |= {"last_command": "12-3"} if "last_command" in values else {}
    # Columns with constraints have whole entries.
    constrained = {name for name, field in cls.model_fields.items() if field.annotation is bytes and field.metadata}
    return cls(**{name: value * 8 if name in constrained else value for name, value in values.items()})


@pytest.mark.parametrize("tag", sorted(registered()))
def test_every_message_has_the_golden_bytes(tag: str) -> None:
    message = build(registered()[tag])
    assert isinstance(message, Message)
    file = GOLDEN / f"{tag}.msgpack"
    if os.environ.get("RLBOOST_WRITE_GOLDEN"):
        file.write_bytes(encode(message))
    assert file.exists(), f"a new message needs golden bytes: RLBOOST_WRITE_GOLDEN=1 pytest {__file__}"
    assert encode(message) == file.read_bytes(), "the wire format changed: older services would not read this"
    assert decode(file.read_bytes()) == message


def test_no_golden_file_is_left_of_a_message_that_is_gone() -> None:
    assert {file.stem for file in GOLDEN.glob("*.msgpack")} == set(registered())


@pytest.mark.parametrize("tag", sorted(registered()))
def test_a_reader_ignores_fields_that_it_does_not_know(tag: str) -> None:
    body = msgpack.unpackb((GOLDEN / f"{tag}.msgpack").read_bytes())
    newer = msgpack.packb({**body, "added_later": [1, 2, 3]})
    assert decode(newer) == decode((GOLDEN / f"{tag}.msgpack").read_bytes())


@pytest.mark.parametrize("tag", sorted(registered()))
def test_a_message_without_a_required_field_does_not_decode(tag: str) -> None:
    cls = registered()[tag]
    body = msgpack.unpackb((GOLDEN / f"{tag}.msgpack").read_bytes())
    for name, field in cls.model_fields.items():
        if field.is_required():
            with pytest.raises(Undecodable, match=name):
                decode(msgpack.packb({k: v for k, v in body.items() if k != name}))


@given(st.binary(max_size=80))
def test_no_bytes_make_decoding_fail_in_another_way(data: bytes) -> None:
    with contextlib.suppress(Undecodable):
        decode(data)


def test_large_message_of_many_items_is_refused_before_it_is_unpacked() -> None:
    """One byte would become an object of 56 bytes."""
    fields = msgpack.unpackb(encode(build(TokenFrame)))
    for many in (b"\xdd" + (MAX_ITEMS + 1).to_bytes(4, "big") + b"\x90" * (MAX_ITEMS + 1), b"\xff" * MAX_ITEMS * 2):
        with pytest.raises(Undecodable) as error:
            decode(msgpack.packb({**fields, "more": 0})[:-1] + many)
        assert len(str(error.value)) < 1000
    nested = [[0] * 1000] * 1000 + [[0] * 1000] * 100
    with pytest.raises(Undecodable, match="more than 1048576 items"):
        decode(msgpack.packb({**fields, "more": nested}))
    assert decode(msgpack.packb({**fields, "more": bytes(2 * MAX_ITEMS)})) == build(TokenFrame)


def test_lists_in_lists_are_counted_before_they_are_unpacked() -> None:
    """16 MiB of them took the manager 68 s and 1.2 GB: each list has too few items, and none is complete."""
    one = b"\xdd" + MAX_ITEMS.to_bytes(4, "big") + b"\x90" * (MAX_ITEMS - 1)
    with pytest.raises(Undecodable, match="more than 1048576 items"):
        decode(msgpack.packb({"t": "TokenFrame", "more": 0})[:-1] + one * 16)


_LEAVES = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text()
_BYTES = st.binary(max_size=300) | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=40))
_PACKED: st.SearchStrategy[Any] = st.recursive(
    _LEAVES | _BYTES,
    lambda inner: st.lists(inner, max_size=40) | st.dictionaries(st.text(max_size=3), inner, max_size=40),
    max_leaves=60,
)


def n_items(value: Any) -> int:
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return len(inner) + sum(map(n_items, inner))


@given(_PACKED)
def test_items_of_any_packed_value_are_counted(value: Any) -> None:
    n, packed = n_items(value), msgpack.packb(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "_SMALL_BYTES", 0)
        patch.setattr(codec, "MAX_ITEMS", n)
        codec.unpacked(packed)
        patch.setattr(codec, "MAX_ITEMS", n - 1)
        if n:
            with pytest.raises(ValueError, match=f"more than {n - 1} items"):
                codec.unpacked(packed)


def test_reason_why_bytes_are_no_message_is_short() -> None:
    """The manager logs it, and errors of msgpack quote what they have read."""
    large = {"t": "Nothing", "text": "z" * 100_000}
    for data in (msgpack.packb(large) + b"\x01", msgpack.packb({**large, "t": "z" * 100_000})):
        with pytest.raises(Undecodable) as raised:
            decode(data)
        assert len(str(raised.value)) <= 1000
        assert raised.value.__suppress_context__ or raised.value.__context__ is None


def test_a_wrong_type_is_refused_and_named() -> None:
    body = msgpack.unpackb(encode(build(TokenFrame)))
    with pytest.raises(Undecodable, match="seq"):
        decode(msgpack.packb({**body, "seq": "7"}))


@given(
    st.tuples(
        st.integers(0, 2**16 - 1),
        st.booleans(),
        st.integers(0, 2**23 - 1),
        st.integers(0, 2**16 - 1),
        st.integers(0, 255),
    )
)
def test_a_sample_id_survives_packing(parts: tuple[int, bool, int, int, int]) -> None:
    sample = SampleId(*parts)
    packed = sample.pack()
    assert 0 <= packed < 2**64
    assert SampleId.unpack(packed) == sample
    assert job_of(packed) == sample.job
    assert SampleId.unpack(group_of(packed)) == sample._replace(member=0)


def test_a_sample_id_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="member = 256"):
        SampleId(0, False, 0, 0, 256).pack()


@given(st.lists(st.integers(-(2**31), 2**31 - 1)), st.lists(st.floats(width=32, allow_nan=False)))
def test_columns_survive_packing(tokens: list[int], logprobs: list[float]) -> None:
    assert ints(pack(tokens, I32)) == tokens
    assert floats(pack(logprobs, F32)) == logprobs
