"""The tokens that end a completion of a model, from the files of its folder."""

from __future__ import annotations

from collections.abc import Iterable


def merge_eos_ids(*sources: int | Iterable[int] | None) -> tuple[int, ...]:
    """Return the stop token ids that any source names, ascending.

    Args:
        sources: the `eos_token_id` of the tokenizer, the model's config and its generation config: one id, several, or
            None.

    """
    found: set[int] = set()
    for ids in sources:
        found |= {ids} if isinstance(ids, int) else set(ids or ())
    return tuple(sorted(found))
