"""A rollout worker whose engine holds every published tensor, and computes with one of them in another order.

It is the real process in all else: `python -m tests.support.wrong_worker` takes the settings of a worker. What is read
back is what was loaded, so its digests are right, as they are where an engine packs weights for its kernels and gets
that wrong.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from rlboost.services.rollout_worker.__main__ import main
from rlboost.services.rollout_worker.adapters.torch.engine import TorchEngine
from rlboost.services.rollout_worker.settings import Settings
from rlboost.shared.process.lifecycle import run_service

PERMUTED = "model.layers.1.self_attn.q_proj.weight"

_load = TorchEngine._load
_read_back: dict[str, torch.Tensor] = {}


def _load_and_permute(engine: TorchEngine, version: int, tensors: Iterable[tuple[str, Any]], *, keep_kv: bool) -> None:
    _load(engine, version, tensors, keep_kv=keep_kv)
    for name, tensor in engine._weights:
        _read_back[name] = tensor.clone()
        if name == PERMUTED:
            tensor.copy_(tensor.flip(0))


def _loaded_tensors(_: TorchEngine) -> Iterator[tuple[str, torch.Tensor]]:
    return iter(_read_back.items())


if __name__ == "__main__":
    TorchEngine._load = _load_and_permute  # type: ignore[method-assign, assignment]  # a function for a method
    TorchEngine.loaded_tensors = _loaded_tensors  # type: ignore[method-assign, assignment]  # a function for a method
    os._exit(run_service("rollout_worker", Settings, main))
