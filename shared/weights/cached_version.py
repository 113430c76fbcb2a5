"""Pulled versions as torch tensors under the model's names. Imports torch when the first tensor is read.

An adapter is merged into its base model, so that readers see an ordinary model, unless they ask for the two apart.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Container, Hashable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rlboost.shared.errors import Corrupt, NotFound
from rlboost.shared.weights.cache import PulledVersion
from rlboost.shared.weights.lora import adapter_of
from rlboost.shared.weights.manifest import Manifest, ParityReference, TensorEntry

if TYPE_CHECKING:
    import torch

    from rlboost.shared.weights.changed_words import ChangedWords

Published = dict[str, list[TensorEntry]]
"""Name -> the shards of the tensor."""


class Located(Protocol):
    """A version on this machine."""

    @property
    def location(self) -> Mapping[str, Any]:
        """See `PulledVersion.location`."""


class CachedVersion:
    """A pulled version as torch tensors: a whole model."""

    def __init__(self, pulled: PulledVersion) -> None:
        self._pulled = pulled

    @property
    def config_json(self) -> str:
        """The model's own `config.json`."""
        return self._pulled.manifest.config_json

    @property
    def location(self) -> dict[str, Any]:
        """Where the bytes are on this machine: see `PulledVersion.location`."""
        return self._pulled.location

    @property
    def contents(self) -> Mapping[str, Hashable]:
        """Name -> key of the tensor's content: equal keys in two versions of a model mean equal bytes."""
        return {name: tuple(map(_content, shards)) for name, shards in self.published.items()}

    @property
    def parity_reference(self) -> ParityReference | None:
        """The trainer's log-probabilities of canary prompts under these weights; None if it published none."""
        return _parity_reference(self._pulled.manifest)

    @cached_property
    def published(self) -> Published:
        """Name -> entries of the tensor in the manifest."""
        return _published(self._pulled.manifest)

    def unmerged(self) -> tuple[CachedVersion, None]:
        """Return this version and no adapter."""
        return self, None

    def tensors(self, names: Container[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor, or those with these names, on the CPU in its published dtype. Blocks on files.

        Raises:
            Corrupt: a file is truncated or missing.

        """
        return _tensors(self._pulled, names)

    def differing(self, loaded: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """Return the names of the tensors that `loaded` lacks or has with other bits. Slow.

        A tensor loaded in a wider dtype is equal if narrowing it yields the published bytes.
        """
        from rlboost.shared.weights import torch_tensors  # noqa: PLC0415 - a worker imports torch after it has joined

        return torch_tensors.differing(self.published, loaded)

    def changed_words(self, since: Located, names: Container[str]) -> ChangedWords | None:
        """Return the words of these tensors that differ from an older version; None if they are too many.

        Verifies the bytes of both versions as it reads them.

        Raises:
            Corrupt: a file of one of them is damaged, truncated or missing.
            OSError: the file of changed words cannot be written.

        """
        return _changed_words(since.location, self.location, names, self.published)


class AdaptedVersion:
    """An adapter version, merged into its base while its tensors are read; `unmerged` has the two apart.

    Raises:
        ConfigError: it is not a plain LoRA adapter, or not one for this model.

    """

    def __init__(self, pulled: PulledVersion, base: PulledVersion) -> None:
        self._pulled = pulled
        self._base = CachedVersion(base)
        self._published = _published(pulled.manifest)
        self._adapter = adapter_of(
            pulled.manifest.adapter_json, _shapes(self._published), _shapes(self._base.published)
        )
        self.rank, self.scaling = self._adapter.rank, self._adapter.scaling
        self._merged: dict[str, str] = {}
        """Name -> digest of each merged tensor."""

    def unmerged(self) -> tuple[CachedVersion, AdaptedVersion]:
        """Return the base, and this version as the adapter: its rank, scaling, targets and factors."""
        return self._base, self

    @property
    def targets(self) -> Collection[str]:
        """The names of the model's tensors that the adapter changes."""
        return self._adapter.factors.keys()

    def factors(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield each target with A [rank, in] and B [out, rank], on the CPU in their published dtype. Blocks on files.

        Raises:
            Corrupt: a file is truncated or missing.

        """
        tensors = dict(_tensors(self._pulled))
        yield from ((name, tensors[pair.a], tensors[pair.b]) for name, pair in self._adapter.factors.items())

    def factors_differing(self, loaded: Iterable[tuple[str, torch.Tensor, torch.Tensor]]) -> list[str]:
        """Return the names of the adapter's tensors that `loaded` lacks or has with other bits; see `differing`."""
        from rlboost.shared.weights import torch_tensors  # noqa: PLC0415 - a worker imports torch after it has joined

        factors = self._adapter.factors
        named = ((key, one) for name, *pair in loaded for key, one in zip(factors[name], pair, strict=True))
        return torch_tensors.differing(self._published, named)

    @property
    def config_json(self) -> str:
        """The model's own `config.json`."""
        return self._base.config_json

    @property
    def location(self) -> dict[str, Any]:
        """Where the bytes are on this machine: see `PulledVersion.location`."""
        return self._pulled.location

    @property
    def contents(self) -> Mapping[str, Hashable]:
        """Name -> key of the tensor's content: equal keys in two versions of a model mean equal bytes."""
        adapter, changed = self._adapter, {}
        contents = self._base.contents
        for name, pair in adapter.factors.items():
            factors = tuple(_content(shard) for factor in pair for shard in self._published[factor])
            changed[name] = (contents[name], adapter.scaling, factors)
        return {**contents, **changed}

    @property
    def parity_reference(self) -> ParityReference | None:
        """The trainer's log-probabilities of canary prompts under these weights; None if it published none."""
        return _parity_reference(self._pulled.manifest)

    def tensors(self, names: Container[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor, or those with these names, on the CPU in its published dtype. Blocks on files."""
        from rlboost.shared.weights import torch_tensors  # noqa: PLC0415 - a worker imports torch after it has joined

        adapter, factors = self._adapter, dict(_tensors(self._pulled))
        for name, tensor in self._base.tensors(names):
            if (pair := adapter.factors.get(name)) is None:
                yield name, tensor
                continue
            merged = torch_tensors.merged(tensor, factors[pair.a], factors[pair.b], adapter.scaling)
            self._merged[name] = torch_tensors.digest(merged)
            yield name, merged

    def differing(self, loaded: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """Return the names of the tensors that `loaded` lacks or has with other bits. Slow.

        A merged tensor is compared with the last result of `tensors`.
        """
        from rlboost.shared.weights import torch_tensors  # noqa: PLC0415 - a worker imports torch after it has joined

        unread = self._adapter.factors.keys() - self._merged.keys()
        for _ in self.tensors(unread) if unread else ():
            pass  # reading a tensor records its digest
        merged = {name: [_whole(self._base.published[name][0], digest)] for name, digest in self._merged.items()}
        return torch_tensors.differing({**self._base.published, **merged}, loaded)

    def changed_words(self, since: Located, names: Container[str]) -> ChangedWords | None:
        """Return the words of these tensors that differ from an older version; None if they are too many.

        Verifies the bytes of both versions as it reads them.

        Raises:
            Corrupt: a file of one of them is damaged, truncated or missing.
            OSError: the file of changed words cannot be written.

        """
        return _changed_words(since.location, self.location, names, self._base.published)


def cached_version(pulled: PulledVersion) -> CachedVersion | AdaptedVersion:
    """Return the reader for a pulled version: a whole model or an adapter.

    Raises:
        ConfigError: see `AdaptedVersion`.

    """
    return CachedVersion(pulled) if pulled.base is None else AdaptedVersion(pulled, pulled.base)


def _tensors(pulled: PulledVersion, names: Container[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    from rlboost.shared.weights import torch_tensors  # noqa: PLC0415 - a worker imports torch after it has joined

    try:
        yield from torch_tensors.tensors(pulled, names)
    except NotFound as error:
        raise Corrupt(str(error)) from error


def _changed_words(
    old: Mapping[str, Any], new: Mapping[str, Any], names: Container[str], published: Published
) -> ChangedWords | None:
    from rlboost.shared.weights.changed_words import find_changed_words  # noqa: PLC0415 - see `_tensors`

    before, after = (cached_version(PulledVersion.at(location)).tensors(names) for location in (old, new))
    n_words = sum(math.prod(shape) for shape in _shapes(published).values())
    return find_changed_words(before, after, n_words, Path(new["chunks"]))


def _parity_reference(manifest: Manifest) -> ParityReference | None:
    return ParityReference.decode(manifest.parity_json) if manifest.parity_json else None


def _published(manifest: Manifest) -> Published:
    found: defaultdict[str, list[TensorEntry]] = defaultdict(list)
    for part in manifest.parts:
        for entry in part.tensors:
            found[entry.name].append(entry)
    return dict(found)


def _shapes(published: Published) -> dict[str, tuple[int, ...]]:
    return {name: shards[0].global_shape for name, shards in published.items()}


def _content(shard: TensorEntry) -> Hashable:
    return shard.dtype, shard.offset, shard.local_shape, shard.digest


def _whole(shard: TensorEntry, digest: str) -> TensorEntry:
    """Return the entry of the whole tensor."""
    update = {"offset": (0,) * len(shard.global_shape), "local_shape": shard.global_shape, "digest": digest}
    return shard.model_copy(update=update)
