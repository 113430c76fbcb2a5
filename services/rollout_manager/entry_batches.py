"""Applies entries in batches: adjacent token frames at once, every other entry by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, islice

from rlboost.shared.bus import Entry
from rlboost.shared.errors import Unprocessable
from rlboost.shared.messages import TokenFrame

MAX_FRAMES_PER_BATCH = 512
"""Larger batches are no faster a frame (benchmarks.token_plane), and need more memory."""


def apply_in_batches(
    entries: Iterable[Entry], apply_frames: Callable[[list[TokenFrame]], None], apply_entry: Callable[[Entry], None]
) -> list[tuple[Entry, Unprocessable]]:
    """Apply entries in order; return the invalid ones, each with its error.

    Args:
        entries: in the order in which they apply.
        apply_frames: applies several frames; raises Unprocessable, without any effect, if one of them is invalid.
        apply_entry: applies any single entry.

    """
    invalid: list[tuple[Entry, Unprocessable]] = []
    for batch in _batches(entries):
        frames = [entry.message for entry in batch if isinstance(entry.message, TokenFrame)]
        if len(frames) > 1:
            try:
                apply_frames(frames)
                continue
            except Unprocessable:
                pass  # apply them one by one to find the invalid frame
        for entry in batch:
            try:
                apply_entry(entry)
            except Unprocessable as error:
                invalid.append((entry, error))
    return invalid


def _batches(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    for are_frames, group in groupby(entries, key=lambda entry: isinstance(entry.message, TokenFrame)):
        while batch := list(islice(group, MAX_FRAMES_PER_BATCH if are_frames else 1)):
            yield batch
