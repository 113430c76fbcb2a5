"""Entries applied in portions: token frames that stand together at once, everything else by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, islice

from shared.bus import Entry
from shared.errors import Bury
from shared.messages import TokenFrame

FRAMES_AT_ONCE = 512
"""Beyond so many, a frame costs no less (benchmarks.token_plane), and what is held at once stays small."""


def apply(
    entries: Iterable[Entry], take_frames: Callable[[list[TokenFrame]], None], take_one: Callable[[Entry], None]
) -> list[tuple[Entry, Bury]]:
    """Apply entries in order; return those that make no sense, each with the reason.

    Args:
        entries: in the order in which they count.
        take_frames: applies frames at once; raises Bury, and has changed nothing, when one of them makes no sense.
        take_one: applies any one entry.

    """
    unusable: list[tuple[Entry, Bury]] = []
    for run in _runs(entries):
        frames = [entry.message for entry in run if isinstance(entry.message, TokenFrame)]
        if len(frames) > 1:
            try:
                take_frames(frames)
                continue
            except Bury:
                pass  # one of them: which one is found one by one
        for entry in run:
            try:
                take_one(entry)
            except Bury as error:
                unusable.append((entry, error))
    return unusable


def _runs(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    for are_frames, group in groupby(entries, key=lambda entry: isinstance(entry.message, TokenFrame)):
        while run := list(islice(group, FRAMES_AT_ONCE if are_frames else 1)):
            yield run
