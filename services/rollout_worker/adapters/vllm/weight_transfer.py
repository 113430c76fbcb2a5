"""vLLM weight transfer engine that reads pulled versions from the worker's chunk cache. Runs in vLLM's processes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from rlboost.services.rollout_worker.adapters.in_place import write_words
from rlboost.services.rollout_worker.adapters.vllm.load_errors import encode_load_error
from rlboost.services.rollout_worker.adapters.vllm.placements import NoPlacements, Placements, find_placements
from rlboost.services.rollout_worker.adapters.vllm.plugin import is_unpacked
from rlboost.shared.errors import UnsuitableWeights
from rlboost.shared.weights.cache import PulledVersion
from rlboost.shared.weights.cached_version import cached_version
from rlboost.shared.weights.changed_words import ChangedWords

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
            if missing := sorted(loadable - loaded):
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
                    f"the dtype of the weights"
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
