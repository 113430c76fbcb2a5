"""LoRA adapters next to the weights of a model: each row of a pass gets the low-rank product of its own adapter.

Rows of several adapters share a pass: the model's own product is computed once for all of them, and each adapter's
product for its rows is added (multi-LoRA serving as in Punica, arXiv 2310.18547, and S-LoRA, arXiv 2311.03285).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rlboost.services.rollout_worker.ports import StagedAdapter

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Held:
    """One adapter in the engine's memory: W x becomes W x + scaling * B A x."""

    scaling: float
    factors: dict[str, tuple[Tensor, Tensor]]
    """Name of W [out, in] -> A [rank, in] and B [out, rank], float32."""


class Adapters:
    """The adapters of one model, by job. Used on the engine's thread.

    Args:
        model: its linear layers can be adapted, except those of its vision tower.
        max_rank: maximum rank of an adapter.

    """

    def __init__(self, model: nn.Module, max_rank: int) -> None:
        named = model.named_modules(remove_duplicate=False)
        self._layers = {f"{name}.weight": module for name, module in named if type(module) is nn.Linear}
        # A head that shares the embedding's memory is adapted with it or not at all.
        tied = {embedding.weight.data_ptr() for embedding in model.modules() if isinstance(embedding, nn.Embedding)}
        self._layers = {name: one for name, one in self._layers.items() if one.weight.data_ptr() not in tied}
        # The rows of a vision tower are patches of images, which belong to no sequence of a pass.
        tower = set(visual.modules()) if (visual := getattr(getattr(model, "model", None), "visual", None)) else set()
        self._layers = {name: one for name, one in self._layers.items() if one not in tower}
        self._device = next(model.parameters()).device
        self._max_rank = max_rank
        self._held: dict[str, _Held] = {}
        self._hooks: dict[str, torch.utils.hooks.RemovableHandle] = {}
        self._groups: list[tuple[_Held, Tensor | None]] = []
        """The adapters of the next pass, each with its rows; None: all rows."""
        self._by_row = False

    def refusal(self, adapter: StagedAdapter) -> str:
        """Return why an adapter cannot be held next to the weights, so that it must be merged; empty if it can."""
        if adapter.rank > self._max_rank:
            return f"its rank {adapter.rank} is above RLBOOST_WORKER_MAX_ADAPTER_RANK, {self._max_rank}"
        others = sorted(name for name in adapter.targets if name not in self._layers)
        return f"{others[0]} is not a linear layer of its own in this engine" if others else ""

    def load(self, job_id: str, adapter: StagedAdapter | None) -> None:
        """Hold the adapter of a job instead of an earlier one; with None, its rows get the weights alone."""
        self.unload(job_id)
        if adapter is not None:
            pairs = {
                name: (a.to(self._device, torch.float32), b.to(self._device, torch.float32))
                for name, a, b in adapter.factors()
            }
            self._held[job_id] = _Held(adapter.scaling, pairs)
        self._hook()

    def unload(self, job_id: str) -> None:
        """Drop the adapter of a job, if it has one."""
        self._held.pop(job_id, None)
        self._hook()

    def clear(self) -> None:
        """Drop all adapters: the weights that they belong to are replaced."""
        self._held.clear()
        self._hook()

    def factors(self, job_id: str) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the name of each tensor that a job's adapter changes, with A and B."""
        held = self._held.get(job_id)
        yield from ((name, a, b) for name, (a, b) in (held.factors if held else {}).items())

    def select(self, jobs: Sequence[str], rows: int | Ints = 1, *, by_row: bool = False) -> None:
        """Set whose adapter applies to each row of the next passes.

        Args:
            jobs: one for each sequence of the pass.
            rows: how many rows, in order, belong to each.
            by_row: compute each adapter for all rows, so that no bit of a row depends on how many others it has.

        """
        self._groups, self._by_row = [], by_row
        if not self._held:
            return
        for job_id, held in self._held.items():
            mine = np.array([job == job_id for job in jobs], np.bool_)
            if mine.all():
                self._groups.append((held, None))
            elif mine.any():
                chosen = np.flatnonzero(np.repeat(mine, rows))
                self._groups.append((held, torch.from_numpy(chosen).to(self._device)))

    def _hook(self) -> None:
        """Let exactly the layers that an adapter changes call `_add` after their own product."""
        self._groups = []
        needed = {name for held in self._held.values() for name in held.factors}
        for name in [name for name in self._hooks if name not in needed]:
            self._hooks.pop(name).remove()
        for name in needed - self._hooks.keys():
            self._hooks[name] = self._layers[name].register_forward_hook(partial(self._add, name))

    def _add(self, name: str, layer: nn.Linear, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        x, y = inputs[0].reshape(-1, layer.in_features), output.view(-1, layer.out_features)
        for held, rows in self._groups:
            if (pair := held.factors.get(name)) is None:
                continue
            if rows is None:
                y += _product(x, *pair, held.scaling).to(y.dtype)
            elif self._by_row:
                y.index_add_(0, rows, _product(x, *pair, held.scaling).to(y.dtype)[rows])
            else:
                y.index_add_(0, rows, _product(x[rows], *pair, held.scaling).to(y.dtype))
        return output


def _product(x: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Return scaling * B A x of each row [rows, out], in float32."""
    return (x.float() @ a.T).mul_(scaling) @ b.T


def jobs_of(slots: Iterable[int], jobs: Sequence[str]) -> list[str]:
    """Return the job of each slot; padding, slot -1, has none."""
    return [jobs[slot] if slot >= 0 else "" for slot in slots]
