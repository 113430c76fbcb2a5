"""vLLM worker extension: overwrites weights in place and reads loaded tensors back.

vLLM fuses and shards tensors as it loads them. To read a tensor back under its published name, the extension records
the copies that vLLM's loader makes: which slice of the published tensor went to which part of which parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers import utils as vllm_layers
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform

CLASS = f"{__name__}.WeightsExtension"
"""The value of `EngineArgs.worker_extension_cls`."""


class LoadedSlice(NamedTuple):
    """A slice of a published tensor, and where it is loaded."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    """Offset, size and stride in elements within the contiguous published tensor."""
    loaded: torch.Tensor
    """A view of the parameter that holds the slice, of shape `size`."""


class WeightsExtension:
    """Methods that vLLM adds to its worker class, called by collective RPC. The prefix avoids name clashes."""

    model_runner: Any
    _rlboost_slices: dict[str, list[LoadedSlice]]

    def rlboost_unsupported_reason(self) -> str:
        """Return why this model's weights cannot be overwritten in place and read back; empty if they can."""
        for name, module in self.model_runner.get_model().named_modules():
            method = getattr(module, "quant_method", None)
            if method is not None and type(method) not in {UnquantizedLinearMethod, UnquantizedEmbeddingMethod}:
                return f"{name} ({type(module).__name__}) stores its weights in its own format"
        if self.model_runner.model_config.use_mla:
            return "latent attention stores its weights in its own format"
        return ""

    def rlboost_load_tensors(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load tensors by the model's own loader."""
        recorder = _CopyRecorder()
        with torch.no_grad(), recorder:
            self.model_runner.get_model().load_weights(recorder.record(tensors))
        self._rlboost_slices = {**getattr(self, "_rlboost_slices", {}), **recorder.slices}

    def rlboost_load_tensor_files(self, files: Sequence[str]) -> None:
        """Load safetensors files."""
        self.rlboost_load_tensors(item for file in files for item in load_file(file).items())

    def rlboost_read_tensor(self, name: str) -> list[LoadedSlice]:
        """Return this worker's slices of a tensor; within one process they share the parameter's memory."""
        return self._rlboost_slices.get(name, [])


class _CopyRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's own
    """Records where the tensors that pass `record` are copied to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.slices: dict[str, list[LoadedSlice]] = {}
        self._current: tuple[str, torch.Tensor] | None = None

    def record(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor, and record its copies until the iterator advances."""
        for name, given in tensors:
            tensor = given.contiguous()
            self.slices[name] = []
            self._current = name, tensor
            yield name, tensor
        self._current = None

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.copy_.default and self._current is not None:
            name, tensor = self._current
            loaded, source = args[:2]
            if source.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
                offset = source.storage_offset() - tensor.storage_offset()
                self.slices[name].append(LoadedSlice(offset, tuple(source.shape), source.stride(), loaded.detach()))
        return func(*args, **(kwargs or {}))


def _plain_linear(layer: Any, remove_weight: bool) -> None:  # noqa: ARG001 - vLLM's signature
    layer.cpu_linear = torch.nn.functional.linear


if current_platform.is_cpu():
    # On a CPU vLLM packs each linear layer's weights for its kernel and drops the original. Packed weights can neither
    # be overwritten in place nor read back, and a tied output layer silently keeps its old packing after a reload.
    vllm_layers.dispatch_cpu_unquantized_gemm = _plain_linear
