"""Applies entries: adjacent token frames at once, every other entry by itself. Dead-letters those that are invalid."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, islice

import structlog

from rlboost.services.rollout_manager.domain.effects import DeadLetterEntry
from rlboost.services.rollout_manager.domain.world import World
from rlboost.shared.errors import RLBoostError, Unprocessable
from rlboost.shared.messages import TokenFrame
from rlboost.shared.streams.dead_letters import report_dead_letter
from rlboost.shared.streams.entries import Entry

log = structlog.get_logger(__name__)

MAX_FRAMES_PER_BATCH = 512
"""Larger batches are no faster a frame (benchmarks.token_plane), and need more memory."""

Invalid = list[tuple[Entry, Unprocessable]]
"""Entries without an effect, each with its error."""


class PoisonFound(RLBoostError):
    """Applying entries failed unexpectedly and may have left the world half changed: rebuild it, then apply the rest.

    The entries are recorded in the `PoisonEntries` that the caller has passed, so that the next try gets past them.
    """


class PoisonEntries:
    """The entries that one manager cannot apply. They are skipped, so that one entry never stops the manager."""

    def __init__(self) -> None:
        self._reasons: dict[tuple[str, str], str] = {}
        self._suspects: set[tuple[str, str]] = set()
        """Entries of failed batches, which are applied one by one."""

    def reason(self, entry: Entry) -> str | None:
        """Return why an entry is skipped, None if it is not."""
        return self._reasons.get((entry.stream, entry.id))

    def is_single(self, entry: Entry) -> bool:
        """Return True if an entry must be applied by itself."""
        key = entry.stream, entry.id
        return key in self._suspects or key in self._reasons

    def add(self, entries: Sequence[Entry], error: Exception) -> PoisonFound:
        """Record that these entries failed together; return the exception to raise."""
        keys = [(entry.stream, entry.id) for entry in entries]
        if len(keys) == 1:
            self._reasons[keys[0]] = f"it cannot be applied: {error!r}"
            log.error("entry_failed", stream=keys[0][0], entry=keys[0][1], exc_info=error)
        else:
            self._suspects.update(keys)
        return PoisonFound(f"{len(keys)} entries from {keys[0]} on: {error!r}")


def apply_in_batches(
    entries: Iterable[Entry],
    apply_frames: Callable[[list[TokenFrame]], None],
    apply_entry: Callable[[Entry], None],
    poison: PoisonEntries,
) -> Invalid:
    """Apply entries in order; return the invalid ones.

    Args:
        entries: in the order in which they apply.
        apply_frames: applies several frames; raises Unprocessable, without any effect, if one of them is invalid.
        apply_entry: applies any single entry.
        poison: entries to skip.

    Raises:
        PoisonFound: an entry failed unexpectedly.

    """
    invalid: Invalid = []
    for batch in _batches(entries, poison):
        frames = [entry.message for entry in batch if isinstance(entry.message, TokenFrame)]
        if len(frames) > 1:
            try:
                apply_frames(frames)
                continue
            except Unprocessable:
                pass  # apply them one by one to find the invalid frame
            except Exception as error:
                raise poison.add(batch, error) from error
        invalid += apply_each(batch, apply_entry, poison)
    return invalid


def apply_each(entries: Iterable[Entry], apply_entry: Callable[[Entry], None], poison: PoisonEntries) -> Invalid:
    """Apply entries one by one; see `apply_in_batches`."""
    invalid: Invalid = []
    for entry in entries:
        if reason := poison.reason(entry):
            invalid.append((entry, Unprocessable(reason)))
            continue
        try:
            apply_entry(entry)
        except Unprocessable as error:
            invalid.append((entry, error))
        except Exception as error:
            raise poison.add([entry], error) from error
    return invalid


def dead_letter(world: World, invalid: Invalid) -> None:
    """Append invalid entries to the dead letters, in one transaction with the position after them."""
    for entry, error in invalid:
        report_dead_letter(entry.stream, entry.id, str(error))
        world.outbox.add(DeadLetterEntry(entry.stream, entry.id, entry.message, str(error)))


def _batches(entries: Iterable[Entry], poison: PoisonEntries) -> Iterator[list[Entry]]:
    def is_batched(entry: Entry) -> bool:
        return isinstance(entry.message, TokenFrame) and not poison.is_single(entry)

    for batched, group in groupby(entries, key=is_batched):
        while batch := list(islice(group, MAX_FRAMES_PER_BATCH if batched else 1)):
            yield batch
