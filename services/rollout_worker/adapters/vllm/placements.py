"""Where a rank of vLLM holds the tensors of a checkpoint, as the model's own weight loaders place them.

The loaders run with tensors that have shapes and no memory, and what they would copy is recorded: which slice of which
tensor goes into which part of which parameter. So fused parameters and tensor parallelism are as the loaders have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from rlboost.services.rollout_worker.adapters.in_place import Placement, is_slice

Placements = dict[str, list[Placement]]
_PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""Methods of layers that compute with their weights as loaded: nothing is derived from them. Packed ones have no memory
that a loader could write to."""


class NoPlacements(Exception):
    """The engine's memory cannot be written in place."""


def find_placements(model: Any, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> Placements:
    """Return the placements of a checkpoint's tensors in this rank's memory; they stay valid until the next reload.

    Args:
        model: loaded.
        tensors: name -> shape and dtype.

    Raises:
        NoPlacements: vLLM packs or quantizes the weights, derives others from them, or a loader does more than copying.

    """
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method) not in _PLAIN:
            raise NoPlacements(f"{name} may hold other than the loaded weights, by its {type(method).__name__}")
        if getattr(module, "cpu_linear", functional.linear) is not functional.linear:
            raise NoPlacements("vllm packs weights for this CPU (RLBOOST_WORKER_PACK_WEIGHTS)")
        if type(module).__name__.startswith("MLA"):
            raise NoPlacements(f"{name} computes with weights that are derived from the loaded ones")
    recorder = _Recorder(tensors)
    try:
        with recorder:
            model.load_weights(recorder.sources.items())
    except Exception as error:  # the loaders of models raise any
        raise NoPlacements(f"vllm's loaders do more than copy weights into its memory: {error}") from error
    _check_covered(model, recorder.placements)
    return recorder.placements


def _check_covered(model: torch.nn.Module, placements: Placements) -> None:
    """Raise `NoPlacements` if a loader fills a parameter, or a part of it, by other means than copying."""
    covered: dict[int, int] = {}
    for place in chain.from_iterable(placements.values()):
        covered[_storage(place.target)] = covered.get(_storage(place.target), 0) + place.target.numel()
    padded = {
        id(module.weight)
        for module in model.modules()
        if type(getattr(module, "quant_method", None)) is UnquantizedEmbeddingMethod
    }
    for name, parameter in model.named_parameters():
        n_covered = covered.get(_storage(parameter), 0)
        if n_covered != parameter.numel() and not (id(parameter) in padded and n_covered):
            raise NoPlacements(f"vllm's loaders copy {n_covered} of {parameter.numel()} words of {name}")


class _Recorder(TorchDispatchMode):
    """Records copies from `sources`, and writes nothing."""

    def __init__(self, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch has no types for it
        self.placements: Placements = {name: [] for name in tensors}
        self.sources = {
            name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in tensors.items()
        }
        self._names = {_storage(source): name for name, source in self.sources.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is torch.ops.aten.copy_.default and args[1].is_meta:
            self._record(*args[:2])
            return args[0]
        if any(isinstance(arg, torch.Tensor) and arg.is_meta for arg in args) and not func.is_view:
            raise NotImplementedError(f"{func} of a tensor of the checkpoint")
        if func._schema.is_mutable:  # noqa: SLF001 - as torch's own dispatch modes do
            return args[0]  # such as zeros into padding, which are there already
        return func(*args, **(kwargs or {}))

    def _record(self, target: torch.Tensor, source: torch.Tensor) -> None:
        name = self._names[_storage(source)]
        if target.shape != source.shape or not is_slice(source, self.sources[name].shape):
            raise NotImplementedError(f"{tuple(source.shape)} of {name} into {tuple(target.shape)}")
        self.placements[name].append(Placement(target, source))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - what torch compares storages by
