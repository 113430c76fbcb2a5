"""Versions in a puller's cache as tensors under the model's names. Imports torch only when tensors are asked for.

An adapter is merged into the model that it belongs to, so whoever reads gets an ordinary model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from shared.canary import Canary
from shared.weights.lora import adapter_of
from shared.weights.manifest import Manifest, TensorEntry
from shared.weights.pulled import PulledVersion

if TYPE_CHECKING:
    import torch

Published = dict[str, list[TensorEntry]]
"""By name, the shards that make up each tensor."""


class StoredVersion:
    """A whole model."""

    def __init__(self, pulled: PulledVersion) -> None:
        """Read what a puller has brought."""
        self._pulled = pulled

    @property
    def config_json(self) -> str:
        """The model's own `config.json`."""
        return self._pulled.manifest.config_json

    @property
    def contents(self) -> Mapping[str, Hashable]:
        """By name, what stands for each tensor's bytes: where it is equal in two versions of a model, so are they."""
        return {name: tuple(map(_content, shards)) for name, shards in self.published.items()}

    @property
    def canary(self) -> Canary | None:
        """What the trainer says of a fixed probe under these weights; None where it says nothing."""
        return _canary(self._pulled.manifest)

    @cached_property
    def published(self) -> Published:
        """What the manifest says of each tensor."""
        return _published(self._pulled.manifest)

    def tensors(self, names: Container[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor, or those of these names, on the CPU, in its published dtype. Reads files."""
        from shared.weights import torch_tensors  # noqa: PLC0415 - a worker imports torch after it has joined

        return torch_tensors.tensors(self._pulled, names)

    def differing(self, loaded: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """Return the names of the tensors that are not among `loaded` bit for bit. Takes long.

        A tensor loaded in a wider dtype counts as equal when narrowing it gives the published bytes.
        """
        from shared.weights import torch_tensors  # noqa: PLC0415 - a worker imports torch after it has joined

        return torch_tensors.differing(self.published, loaded)


class AdaptedVersion:
    """An adapter, merged into its base as its tensors are read.

    Raises:
        ConfigError: it is no plain LoRA adapter, or not one of this model.

    """

    def __init__(self, pulled: PulledVersion, base: PulledVersion) -> None:
        """Read what a puller has brought, and what it belongs to."""
        self._pulled = pulled
        self._base = StoredVersion(base)
        self._published = _published(pulled.manifest)
        self._adapter = adapter_of(
            pulled.manifest.adapter_json, _shapes(self._published), _shapes(self._base.published)
        )
        self._merged: dict[str, str] = {}
        """Digests of the tensors that were merged."""

    @property
    def config_json(self) -> str:
        """The model's own `config.json`."""
        return self._base.config_json

    @property
    def contents(self) -> Mapping[str, Hashable]:
        """By name, what stands for each tensor's bytes: where it is equal in two versions of a model, so are they."""
        adapter, changed = self._adapter, {}
        contents = self._base.contents
        for name, pair in adapter.factors.items():
            factors = tuple(_content(shard) for factor in pair for shard in self._published[factor])
            changed[name] = (contents[name], adapter.scaling, factors)
        return {**contents, **changed}

    @property
    def canary(self) -> Canary | None:
        """What the trainer says of a fixed probe under these weights; None where it says nothing."""
        return _canary(self._pulled.manifest)

    def tensors(self, names: Container[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor, or those of these names, on the CPU, in its published dtype. Reads files."""
        from shared.weights import torch_tensors  # noqa: PLC0415 - a worker imports torch after it has joined

        adapter, factors = self._adapter, dict(torch_tensors.tensors(self._pulled))
        for name, tensor in self._base.tensors(names):
            if (pair := adapter.factors.get(name)) is None:
                yield name, tensor
                continue
            merged = torch_tensors.merged(tensor, factors[pair.a], factors[pair.b], adapter.scaling)
            self._merged[name] = torch_tensors.digest(merged)
            yield name, merged

    def differing(self, loaded: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """Return the names of the tensors that are not among `loaded` bit for bit. Takes long.

        A merged tensor is compared with what `tensors` made last.
        """
        from shared.weights import torch_tensors  # noqa: PLC0415 - a worker imports torch after it has joined

        unread = self._adapter.factors.keys() - self._merged.keys()
        for _ in self.tensors(unread) if unread else ():
            pass  # reading it notes its digest
        merged = {name: [_whole(self._base.published[name][0], digest)] for name, digest in self._merged.items()}
        return torch_tensors.differing({**self._base.published, **merged}, loaded)


def stored_version(pulled: PulledVersion) -> StoredVersion | AdaptedVersion:
    """Return what a puller has brought, a whole model or an adapter.

    Raises:
        ConfigError: see `AdaptedVersion`.

    """
    return StoredVersion(pulled) if pulled.base is None else AdaptedVersion(pulled, pulled.base)


def _canary(manifest: Manifest) -> Canary | None:
    return Canary.decode(manifest.canary_json) if manifest.canary_json else None


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
    """Return an entry of the whole tensor."""
    update = {"offset": (0,) * len(shard.global_shape), "local_shape": shard.global_shape, "digest": digest}
    return shard.model_copy(update=update)
