"""vLLM weight transfer engine that reads a pulled version from the worker's chunk cache. Runs in vLLM's processes."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from rlboost.services.rollout_worker.adapters.vllm.load_errors import encode_load_error
from rlboost.shared.errors import UnsuitableWeights
from rlboost.shared.weights.cache import PulledVersion
from rlboost.shared.weights.cached_version import cached_version


@dataclass
class NoInit(WeightTransferInitInfo):  # type: ignore[misc] # vLLM may not be installed
    """Nothing has to be set up: the cache is a directory of this machine."""


@dataclass
class Location(WeightTransferUpdateInfo):  # type: ignore[misc] # as above
    """See `PulledVersion.location`."""

    chunks: str
    manifest: str
    base: dict[str, Any] | None


class CacheWeightTransfer(WeightTransferEngine[NoInit, Location]):  # type: ignore[misc] # vLLM may not be installed
    """Loads whole versions. Each rank reads and verifies every tensor, and vLLM's loader takes the rank's slice of it.

    Layers are replaced whole ("layerwise reload"), since most kernels need weights that are packed or quantized after
    loading.
    """

    init_info_cls = NoInit
    update_info_cls = Location

    def init_transfer_engine(self, init_info: NoInit) -> None:
        """See `WeightTransferEngine`."""

    def start_weight_update(self) -> None:
        """See `WeightTransferEngine`."""
        parameters = {name for name, _ in self.model.named_parameters()}
        if current_platform.is_cpu():
            for module in self.model.modules():
                if getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None:
                    module.quant_method.moe_kernel = None  # vLLM packs experts only when it builds their kernel
        initialize_layerwise_reload(self.model)
        # Neither those that vLLM derives after loading, nor the second name of tied ones, which are separate now.
        self._loadable = parameters & {name for name, _ in self.model.named_parameters()}

    def receive_weights(self, update_info: Location) -> None:
        """Load a version.

        Raises:
            RuntimeError: encoded, see `load_errors`. As `UnsuitableWeights`, the version lacks a weight of the model,
                or the engine's dtype would round it; as `Corrupt`, the bytes in the cache are not those that were
                published.

        """
        weights = cached_version(PulledVersion.at(vars(update_info)))
        try:
            self._check_complete(self.model.load_weights(self._unrounded(weights.tensors())))
        except Exception as error:
            # Without this, what has been loaded would count as part of the next version.
            finalize_layerwise_reload(self.model, self.model_config)
            raise encode_load_error(error) from error

    def _check_complete(self, loaded: Set[str]) -> None:
        if missing := sorted(self._loadable - loaded):
            raise UnsuitableWeights(f"the version lacks {len(missing)} weights of the model, such as {missing[0]}")

    def _unrounded(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        dtype = self.model_config.dtype
        for name, tensor in tensors:
            # Matrices only: some models hold single vectors in a wider dtype than the rest.
            if tensor.ndim > 1 and torch.promote_types(tensor.dtype, dtype) != dtype:
                raise UnsuitableWeights(
                    f"{name} is {tensor.dtype}, which the engine's {dtype} would round: set RLBOOST_WORKER_DTYPE to "
                    f"the dtype of the weights"
                )
            yield name, tensor

    def finish_weight_update(self) -> None:
        """See `WeightTransferEngine`."""
        finalize_layerwise_reload(self.model, self.model_config)
        owners: dict[int, torch.nn.Module] = {}
        for module in self.model.modules():
            for parameter in module.parameters(recurse=False):
                # A tied layer gets no tensor, so it is not processed again; on a CPU it has a packed copy.
                if owners.setdefault(id(parameter), module) is not module and hasattr(module, "quant_method"):
                    module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """See `WeightTransferEngine`."""
