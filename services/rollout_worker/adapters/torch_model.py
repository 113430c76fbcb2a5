"""A Hugging Face causal LM without weights, checked to be one that the slot cache runs right, and its weights.

transformers builds the model from `config.json`; nothing here knows a family. What the slot cache cannot do is refused
at construction: by name where the configuration says it, and by comparing a short run with the model's own forward
pass for everything else.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from services.rollout_worker.adapters.hf_tensors import check_nothing_missing, target_of
from services.rollout_worker.adapters.torch_cache import ATTENTION, SlotCache
from services.rollout_worker.domain.kv_room import Room
from shared.errors import ConfigError
from shared.kv_rows import QUANTUM

Model = Any
"""A `transformers.PreTrainedModel` with a language-model head."""

_CANNOT, _INSTEAD = "the torch engine cannot run", "use the vllm engine"
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Rotary frequencies that depend on the longest row of the batch: a sample would depend on its neighbours."""


def build(directory: Path, dtype: torch.dtype, device: torch.device) -> Model:
    """Build the model that `config.json` describes, with arbitrary weights, ready for `slot_cache` calls.

    Raises:
        ConfigError: there is no usable `config.json`, or the slot cache cannot run such a model.

    """
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        _refuse_by_name(config)
        _check_by_running(_from_config(_shallow(config), torch.float32, device))
        model = _from_config(config, dtype, device)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{directory}: no causal language model can be built from its config.json: {error}"
        ) from error
    _use_slot_cache(model)
    return model


def _from_config(config: Any, dtype: torch.dtype, device: torch.device) -> Model:
    # The arbitrary weights come from torch's generator, which is left as it was.
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type="cuda"), device:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="eager", trust_remote_code=False
        )
    return model.eval().requires_grad_(requires_grad=False)


def _shallow(config: Any) -> Any:
    """Return the configuration with two layers, enough to see whether a family's attention runs right."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = min(text.num_hidden_layers, 2)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:2]
    return config


def _use_slot_cache(model: Model) -> None:
    model.set_attn_implementation(ATTENTION)
    _fuse_norms(model)


def max_length(model: Model) -> int:
    """Return how many positions the model has."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not positions:
        raise ConfigError(f"config.json of {model.config.model_type} names no max_position_embeddings; set one")
    return int(positions)


def _refuse_by_name(config: Any) -> None:
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        raise ConfigError(f"{_CANNOT} {config.model_type}: it has {', '.join(sorted(kinds))} layers; {_INSTEAD}")
    rope = (getattr(text, "rope_parameters", None) or {}).get("rope_type")
    if rope in _LENGTH_DEPENDENT_ROPE:
        raise ConfigError(f"{_CANNOT} {config.model_type}: its rotary scaling is {rope!r}; {_INSTEAD}")


@torch.inference_mode()
def _check_by_running(model: Model) -> None:
    """Compare prefill and decode of two rows of different lengths with the model's own forward pass."""
    tokens = torch.arange(2 * 9, device=model.device).view(2, 9) * 7 % model.get_input_embeddings().num_embeddings
    prefilled = np.array([6, 3])
    for parameter in model.parameters():
        if parameter.ndim > 1:
            # Well scaled, so that attention weighs as much as the rest: the usual start would hide an error in it.
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    own = model(input_ids=tokens, use_cache=False).logits
    _use_slot_cache(model)
    cache = SlotCache(Room(slots=2, max_len=9, tokens=1 << 20), model.dtype, model.device)
    cache.fit(prefilled + 1, held=0)
    # The first row's prefix in two passes: the second one attends to what the first one left in the cache.
    prefill(model, tokens[:, :4], cache.begin_prefill(np.arange(2), np.zeros(2, np.int64), np.array([4, 3])), cache)
    prefill(model, tokens[:1, 4:6], cache.begin_prefill(np.array([0]), np.array([4]), np.array([2])), cache)
    for positions in (prefilled, prefilled + 1):
        cache.begin_decode(positions)
        at = torch.from_numpy(positions).to(model.device)
        logits = decode(model, tokens[[0, 1], at], at, cache)
        if not torch.allclose(logits, own[[0, 1], at], rtol=0, atol=1e-3 * float(own.abs().max())):
            raise ConfigError(
                f"{_CANNOT} {model.config.model_type}: its logits differ from the model's own forward pass; {_INSTEAD}"
            )


def prefill(model: Model, tokens: torch.Tensor, positions: torch.Tensor, cache: SlotCache) -> None:
    """Fill the cache with tokens [batch, length] at the positions that `cache.begin_prefill` gave."""
    model.base_model(input_ids=tokens, position_ids=positions, use_cache=False, slot_cache=cache)


@torch.inference_mode()
def kv_token_bytes(model: Model) -> int:
    """Return what the keys and values of one token take in all layers."""
    cache = SlotCache(Room(slots=1, max_len=1, tokens=QUANTUM), model.dtype, model.device)
    cache.fit(np.zeros(1, np.int64), held=0)
    positions = cache.begin_prefill(np.zeros(1, np.int64), np.zeros(1, np.int64), np.ones(1, np.int64))
    prefill(model, torch.zeros_like(positions), positions, cache)
    return cache.token_bytes


def decode(model: Model, tokens: torch.Tensor, positions: torch.Tensor, cache: SlotCache) -> torch.Tensor:
    """Return the logits [n, vocabulary] after one token [n] of each row, at the positions that `begin_decode` got."""
    output = model(
        input_ids=tokens[:, None], position_ids=positions[:, None], use_cache=False, slot_cache=cache, logits_to_keep=1
    )
    logits: torch.Tensor = output.logits[:, -1]
    return logits


class _RMSNorm(nn.Module):
    """RMS normalisation over the last dimension, with as few kernels as there can be.

    torch's own is one kernel on an accelerator but six on a CPU, where a decode step of a small model consists of
    little else than the cost of starting kernels: there, |x| and one division do it.
    """

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self._eps = eps
        self._root = weight.shape[0] ** 0.5
        self._floor = torch.tensor(eps**0.5 * self._root, device=weight.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cpu" or x.dtype != torch.float32:
            return functional.rms_norm(x, self.weight.shape, self.weight, self._eps)
        norm = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self._floor)
        return (x / norm).mul_(self.weight * self._root)


def _fuse_norms(model: Model) -> None:
    """Replace each module that computes plain RMS normalisation in half a dozen kernels.

    What a module computes is tried, not guessed from its name; its weight stays the same parameter under the same name.
    """
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            fused = _fused(norm)
            if fused is not None:
                setattr(parent, name, fused)


def _fused(norm: nn.Module) -> _RMSNorm | None:
    weight = getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if "RMSNorm" not in type(norm).__name__ or not isinstance(weight, nn.Parameter) or not isinstance(eps, float):
        return None
    fused, kept = _RMSNorm(weight, eps), weight.clone()
    weight.copy_(torch.linspace(0.5, 1.5, weight.shape[0]))
    x = torch.linspace(-3, 2, 4 * weight.shape[0], device=weight.device, dtype=weight.dtype).view(4, -1)
    tolerance = 1e-5 if weight.dtype == torch.float32 else 2e-2
    same = torch.allclose(norm(x), fused(x), rtol=tolerance, atol=tolerance)
    weight.copy_(kept)
    return fused if same else None


class Weights:
    """What is loaded: views of the model's tensors under their Hugging Face names; ties show as shared memory."""

    def __init__(self, model: Model) -> None:
        self._tensors: dict[str, torch.Tensor] = model.state_dict()
        self.complete = False
        """Whether every tensor has been loaded, and no load has failed since."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._tensors.items())

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors in place. Every tensor must be given, unless all have been before.

        Raises:
            ConfigError: a tensor is unknown, missing, of another shape, or would be rounded.

        """
        may_be_partial, self.complete = self.complete, False
        given: set[int] = set()
        for name, tensor in tensors:
            target = target_of(name, tensor, self._tensors)
            target.copy_(tensor)
            given.add(target.data_ptr())
        if not may_be_partial:
            check_nothing_missing([name for name, own in self._tensors.items() if own.data_ptr() not in given])
        self.complete = True
