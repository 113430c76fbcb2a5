"""vLLM weight transfer engine that reads pulled versions from the worker's chunk cache. Runs in vLLM's processes.

Where a rank holds the tensors of a checkpoint is found by the model's own weight loaders: they run with tensors that
have shapes and no memory, and what they would copy is recorded: which slice of which tensor goes into which part of
which parameter. So fused parameters and tensor parallelism are as the loaders have them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from rlboost.services.rollout_worker.adapters.vllm.load_errors import encode_load_error
from rlboost.services.rollout_worker.adapters.vllm.plugin import is_unpacked
from rlboost.shared.errors import UnsuitableWeights
from rlboost.shared.weights.cache import PulledVersion, cached_version
from rlboost.shared.weights.changed_words import ChangedWords, Placement, is_slice, write_words

Placements = dict[str, list[Placement]]
_PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
"""Methods of layers that compute with their weights as loaded: nothing is derived from them. Packed ones have no memory
that a loader could write to."""


_WRAPPED = ".base_layer."
"""What vLLM inserts into the names of a layer that adapters may change."""


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


logger = logging.getLogger(__name__)


@dataclass
class NoInit(WeightTransferInitInfo):  # type: ignore[misc] # vLLM may not be installed
    """Nothing has to be set up: the cache is a directory of this machine."""


@dataclass
class Update(WeightTransferUpdateInfo):  # type: ignore[misc] # as above
    """A version, and what of it differs from the loaded one."""

    chunks: str
    manifest: str
    base: dict[str, Any] | None
    """See `PulledVersion.location`."""
    failures: str
    """Folder for what goes wrong, a file for each rank. If several ranks raised, vLLM would take the error of one for
    its answer to the next call."""
    words: dict[str, Any] | None = None
    """See `ChangedWords.location`; None to load all tensors."""


class CacheWeightTransfer(WeightTransferEngine[NoInit, Update]):  # type: ignore[misc] # vLLM may not be installed
    """Loads versions from the worker's chunk cache.

    Of a whole version each rank reads and verifies every tensor, and vLLM's loader takes the rank's slice of it. Layers
    are replaced whole ("layerwise reload"), since most kernels need weights that are packed or quantized after loading.
    Changed words are written into the rank's slices in place; see `placements` for the engines that allow it.
    """

    init_info_cls = NoInit
    update_info_cls = Update
    _placements: Placements | str = "nothing is loaded"
    """Where the loaded weights are; a string says why that is not known."""

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """See `WeightTransferEngine`."""

    def start_weight_update(self) -> None:
        """See `WeightTransferEngine`; `receive_weights` decides what has to be prepared."""

    def receive_weights(self, update_info: Update) -> None:
        """Load a version.

        An error goes into a file of `update_info.failures`, see `load_errors`: `UnsuitableWeights` if the version lacks
        a weight of the model, or the engine's dtype would round it; `Corrupt` if the bytes in the cache are not those
        that were published.
        """
        location = vars(update_info)
        try:
            if update_info.words is None or not self._written(ChangedWords.at(update_info.words)):
                self._reload(PulledVersion.at(location))
        except Exception as error:
            self._placements = "the last load failed"
            failure = Path(update_info.failures) / str(self.parallel_config.rank)
            failure.write_text(str(encode_load_error(error)), encoding="utf-8")
            logger.exception("the load failed")

    def _written(self, words: ChangedWords) -> bool:
        """Write changed words in place; return False, and say why, if that is impossible."""
        why = self._placements
        if not isinstance(why, str):
            with torch.no_grad():
                why = write_words(why, words.read())
        if why:
            words.excuse(self.parallel_config.rank).write_text(why)
        return not why

    def _reload(self, pulled: PulledVersion) -> None:
        methods = {
            type(module.quant_method).__name__ for module in self.model.modules() if hasattr(module, "quant_method")
        }
        if self.vllm_config.quant_config and all(name.startswith(("Unquantized", "None")) for name in methods):
            raise UnsuitableWeights(
                f"vllm quantizes no layer of this model with {self.model_config.quantization}, which "
                "RLBOOST_WORKER_VLLM_ARGS asks for: use a method for its layers, such as fp8_per_channel, or remove it"
            )
        parameters = {name for name, _ in self.model.named_parameters()}
        if current_platform.is_cpu():
            for module in self.model.modules():
                if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
                    module.quant_method.moe_kernel = None  # vLLM packs experts only when it builds their kernel
        initialize_layerwise_reload(self.model)
        # Neither those that vLLM derives after loading, nor the second name of tied ones, which are separate now.
        loadable = parameters & {name for name, _ in self.model.named_parameters()}
        try:
            weights = cached_version(pulled)
            shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
            loaded = self.model.load_weights(self._unrounded(weights.tensors(), shapes))
            if missing := sorted({name.replace(_WRAPPED, ".") for name in loadable} - loaded):
                raise UnsuitableWeights(f"the version lacks {len(missing)} weights of the model, such as {missing[0]}")
        finally:
            # Without this, what a failed load has loaded would count as part of the next version.
            finalize_layerwise_reload(self.model, self.model_config)
        self._process_tied()
        try:
            self._placements = find_placements(self.model, shapes)
        except NoPlacements as why:
            self._placements = str(why)

    def _unrounded(
        self, tensors: Iterator[tuple[str, torch.Tensor]], shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        dtype = self.model_config.dtype
        for name, tensor in tensors:
            # Matrices only: some models hold single vectors in a wider dtype than the rest.
            if tensor.ndim > 1 and torch.promote_types(tensor.dtype, dtype) != dtype:
                raise UnsuitableWeights(
                    f"{name} is {tensor.dtype}, which the engine's {dtype} would round: set RLBOOST_WORKER_DTYPE to "
                    f"the dtype of the weights, or publish them as {dtype} (trainer.dtype)"
                )
            shapes[name] = tuple(tensor.shape), tensor.dtype
            yield name, tensor

    def _process_tied(self) -> None:
        owners: dict[int, torch.nn.Module] = {}
        for module in self.model.modules():
            for parameter in module.parameters(recurse=False):
                # A tied layer gets no tensor, so it is not processed again; on a CPU it has a packed copy.
                if owners.setdefault(id(parameter), module) is not module and hasattr(module, "quant_method"):
                    module.quant_method.process_weights_after_loading(module)
        if current_platform.is_cpu() and is_unpacked():
            for module in self.model.modules():
                if hasattr(module, "cpu_linear"):
                    module.cpu_linear = torch.nn.functional.linear  # output layers are packed all the same

    def finish_weight_update(self) -> None:
        """See `WeightTransferEngine`."""

    def shutdown(self) -> None:
        """See `WeightTransferEngine`."""
