"""The base class of messages, and the table of their tags."""

from __future__ import annotations

from typing import ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict


class Message(BaseModel):
    """Base of all messages."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)
    tag: ClassVar[str] = ""


_REGISTRY: dict[str, type[Message]] = {}

M = TypeVar("M", bound=type[Message])


def message(cls: M) -> M:
    """Register a message class under its tag (its own name, unless it sets one)."""
    cls.tag = cls.tag or cls.__name__
    if cls.tag in _REGISTRY:
        raise ValueError(f"two messages with the tag {cls.tag!r}")
    _REGISTRY[cls.tag] = cls
    return cls


def registered() -> dict[str, type[Message]]:
    """Return a copy of the tag -> class table, for tests and documentation."""
    return dict(_REGISTRY)


def class_of(tag: str) -> type[Message]:
    """Return the class of a tag.

    Raises:
        KeyError: the tag is unknown.

    """
    return _REGISTRY[tag]
