"""What runs inside vLLM's worker, beside the model: weights in place, and reading back what was loaded.

vLLM fuses and shards tensors as it loads them. To read a tensor back under its published name, the copies that its
loader makes are watched: each says which part of the published tensor went to which part of which parameter.
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
"""What `EngineArgs.worker_extension_cls` is told."""


class Piece(NamedTuple):
    """A part of a published tensor, and where it is loaded."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    """Where the part lies in the contiguous published tensor, counted in elements."""
    loaded: torch.Tensor
    """A view of the parameter that holds it, of the shape `size`."""


class WeightsExtension:
    """Methods that vLLM adds to its worker class; each is called by one collective RPC."""

    model_runner: Any
    _rlboost_pieces: dict[str, list[Piece]]

    def rlboost_why_not(self) -> str:
        """Return why this model's weights cannot be replaced in place and read back; empty if they can."""
        for name, module in self.model_runner.get_model().named_modules():
            method = getattr(module, "quant_method", None)
            if method is not None and type(method) not in {UnquantizedLinearMethod, UnquantizedEmbeddingMethod}:
                return f"{name} ({type(module).__name__}) keeps its weights in a form of its own"
        if self.model_runner.model_config.use_mla:
            return "latent attention keeps its weights in a form of its own"
        return ""

    def rlboost_load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load tensors through the model's own loader."""
        watched = _Watch()
        with torch.no_grad(), watched:
            self.model_runner.get_model().load_weights(watched.passing(tensors))
        self._rlboost_pieces = {**getattr(self, "_rlboost_pieces", {}), **watched.pieces}

    def rlboost_load_files(self, files: Sequence[str]) -> None:
        """Load safetensors files."""
        self.rlboost_load(item for file in files for item in load_file(file).items())

    def rlboost_read(self, name: str) -> list[Piece]:
        """Return the pieces of a tensor that this worker has loaded; the same memory within one process."""
        return self._rlboost_pieces.get(name, [])


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's own
    """Notes where each tensor that passes is copied to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pieces: dict[str, list[Piece]] = {}
        self._passing: tuple[str, torch.Tensor] | None = None

    def passing(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor; copies of it are noted until the next one is asked for."""
        for name, given in tensors:
            tensor = given.contiguous()
            self.pieces[name] = []
            self._passing = name, tensor
            yield name, tensor
        self._passing = None

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.copy_.default and self._passing is not None:
            name, passing = self._passing
            loaded, source = args[:2]
            if source.untyped_storage().data_ptr() == passing.untyped_storage().data_ptr():
                offset = source.storage_offset() - passing.storage_offset()
                self.pieces[name].append(Piece(offset, tuple(source.shape), source.stride(), loaded.detach()))
        return func(*args, **(kwargs or {}))


def _plain_linear(layer: Any, remove_weight: bool) -> None:  # noqa: ARG001 - vLLM's signature
    layer.cpu_linear = torch.nn.functional.linear


if current_platform.is_cpu():
    # On a CPU vLLM packs each linear layer's weights for its kernel and drops the original. What is packed can neither
    # be replaced in place nor be read back, and a tied output layer silently keeps its old packing through a reload.
    vllm_layers.dispatch_cpu_unquantized_gemm = _plain_linear
