"""Pairs of versions that differ in some words only, as reinforcement learning publishes them. Imports torch."""

from __future__ import annotations

from collections.abc import Container, Iterable
from pathlib import Path

import torch

from rlboost.services.rollout_worker.ports import Changes
from rlboost.shared.weights.cache import CachedVersion
from rlboost.shared.weights.changed_words import bits
from tests.support.staged_versions import pulled
from tests.support.staged_weights import shard

Tensors = list[tuple[str, torch.Tensor]]


def nudged(
    tensors: Iterable[tuple[str, torch.Tensor]], fraction: float, names: Container[str] | None = None
) -> Tensors:
    """Return copies in which the lowest bit of some words of each tensor, or of those with these names, is flipped."""
    generator, changed = torch.Generator().manual_seed(0), []
    for name, tensor in tensors:
        copy = tensor.detach().clone().contiguous()
        if names is None or name in names:
            words = bits(copy.view(-1))
            words ^= (torch.rand(words.shape, generator=generator) < fraction).to(words.dtype)
        changed.append((name, copy))
    return changed


def staged(tensors: Iterable[tuple[str, torch.Tensor]], directory: Path, version: int = 0) -> CachedVersion:
    """Return the tensors as a version that was pulled into a directory."""
    return CachedVersion(pulled((shard(*item) for item in tensors), directory, version))


def changes(old: CachedVersion, new: CachedVersion) -> Changes:
    """Return what differs, with its words."""
    names = {name for name, content in new.contents.items() if old.contents[name] != content}
    return Changes(names, new.changed_words(old, names))
