"""Builds a Hugging Face causal LM from `config.json`, checks that the slot cache supports it, and loads its weights.

transformers builds the model; this module is independent of model families. Models that the slot cache does not support
are refused at construction: by name if the configuration tells, otherwise by comparing a short run with the model's own
forward pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from rlboost.services.rollout_worker.adapters.torch.slot_cache import ATTENTION, SlotCache
from rlboost.services.rollout_worker.adapters.torch.vision import PassInputs
from rlboost.services.rollout_worker.domain.load import QUANTUM, KvCapacity
from rlboost.services.rollout_worker.ports import Sequences
from rlboost.shared.data.vision import FAMILIES, TEXT
from rlboost.shared.errors import ConfigError, RLBoostError, UnsuitableWeights
from rlboost.shared.model import experts
from rlboost.shared.model.file_names import by_file_name, names_in_files, older_name
from rlboost.shared.model.folder import require_unquantized
from rlboost.shared.weights.changed_words import Placement, Words, write_words

# --- Checks of published tensors against those that an engine has -----------------------------------------------------


def target_of(name: str, tensor: torch.Tensor, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the target tensor that `tensor` is to be loaded into.

    Raises:
        UnsuitableWeights: there is none, its shape differs, or its dtype would round the tensor.

    """
    target = targets.get(name)
    if target is None:
        raise UnsuitableWeights(f"weights: the model has no tensor {name!r}; it does not match config.json")
    if tensor.shape != target.shape:
        raise UnsuitableWeights(f"weights: {name} is {tuple(tensor.shape)}, config.json requires {tuple(target.shape)}")
    if torch.promote_types(tensor.dtype, target.dtype) != target.dtype:
        raise UnsuitableWeights(
            f"weights: {name} is {tensor.dtype} and the engine's {target.dtype} would round it; "
            f"set RLBOOST_WORKER_DTYPE to the dtype of the weights, or publish them as {target.dtype} (trainer.dtype)"
        )
    return target


# --- Models, and their weights ----------------------------------------------------------------------------------------


Model = Any
"""A `transformers.PreTrainedModel` with a language-model head."""

_UNSUPPORTED, _ALTERNATIVE = "the torch engine does not support", "use the vllm engine"
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Rotary frequencies that depend on the longest sequence of the batch: a sample would depend on others."""


def build(directory: Path, dtype: torch.dtype, device: torch.device) -> Model:
    """Build the model that `config.json` describes, with arbitrary weights, ready for `slot_cache` calls.

    Raises:
        UnsuitableWeights: `config.json` is unusable, or the slot cache does not support the model.

    """
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        _refuse_by_config(config)
        _check_by_running(_from_config(_shallow(config), torch.float32, device))
        model = _from_config(config, dtype, device)
    except (RLBoostError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:  # transformers raises any, such as AttributeError for a dtype that does not exist
        raise UnsuitableWeights(
            f"{directory}: no causal language model can be built from its config.json: {error}"
        ) from error
    _use_slot_cache(model)
    return model


def _from_config(config: Any, dtype: torch.dtype, device: torch.device) -> Model:
    # The arbitrary weights use torch's random generator, whose state is restored.
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type="cuda"), device:
        torch.manual_seed(0)
        has_towers = config.get_text_config() is not config
        kind: Any = AutoModelForImageTextToText if has_towers else AutoModelForCausalLM
        model = kind.from_config(config, dtype=dtype, attn_implementation="eager", trust_remote_code=False)
    saved = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in saved and buffer.is_floating_point():
            buffer.data = buffer.data.float()  # published in full precision, such as biases of expert selection
    return model.eval().requires_grad_(requires_grad=False)


def _shallow(config: Any) -> Any:
    """Return the configuration with at most two layers, enough to check a family's attention."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = min(text.num_hidden_layers, 2)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:2]
    if config.model_type in FAMILIES:
        config.vision_config.depth = 1
        if hasattr(config.vision_config, "deepstack_visual_indexes"):
            config.vision_config.deepstack_visual_indexes = []
    return config


def _use_slot_cache(model: Model) -> None:
    has_towers = model.config.get_text_config() is not model.config
    model.set_attn_implementation({TEXT: ATTENTION, "vision_config": "sdpa"} if has_towers else ATTENTION)
    _fuse_norms(model)


def max_length(model: Model) -> int:
    """Return the model's maximum length in tokens."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not positions:
        raise UnsuitableWeights(f"config.json of {model.config.model_type} has no max_position_embeddings: add it")
    return int(positions)


def _refuse_by_config(config: Any) -> None:
    try:
        require_unquantized(config.to_dict())
    except ConfigError as error:
        raise UnsuitableWeights(str(error)) from error
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        layers = ", ".join(sorted(kinds))
        raise UnsuitableWeights(f"{_UNSUPPORTED} {config.model_type}: it has {layers} layers; {_ALTERNATIVE}")
    rope = (getattr(text, "rope_parameters", None) or {}).get("rope_type")
    if rope in _LENGTH_DEPENDENT_ROPE:
        raise UnsuitableWeights(f"{_UNSUPPORTED} {config.model_type}: its rotary scaling is {rope!r}; {_ALTERNATIVE}")


@torch.inference_mode()
def _check_by_running(model: Model) -> None:
    """Compare prefill and decode of two slots of different lengths with the model's own forward pass."""
    tokens = torch.arange(2 * 9, device=model.device).view(2, 9) * 7 % model.get_input_embeddings().num_embeddings
    prefilled = np.array([6, 3])
    for parameter in model.parameters():
        if parameter.ndim > 1:
            # Scaled so that attention contributes as much as other layers: the default would hide an error in it.
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    own = model(input_ids=tokens, use_cache=False).logits
    _use_slot_cache(model)
    cache = SlotCache(KvCapacity(slots=2, max_len=9, tokens=1 << 20), model.dtype, model.device)
    cache.fit(prefilled + 1, held=0)
    # The first slot's prefix in two passes: the second pass attends to what the first has cached.
    first = cache.begin_prefill(np.arange(2), np.zeros(2, np.int64), np.array([4, 3]))
    prefill(model, PassInputs(tokens[:, :4], first), cache)
    second = cache.begin_prefill(np.array([0]), np.array([4]), np.array([2]))
    prefill(model, PassInputs(tokens[:1, 4:6], second), cache)
    for positions in (prefilled, prefilled + 1):
        cache.begin_decode(positions)
        at = torch.from_numpy(positions).to(model.device)
        logits = decode(model, PassInputs(tokens[[0, 1], at][:, None], at[:, None]), cache)
        if not torch.allclose(logits, own[[0, 1], at], rtol=0, atol=1e-3 * float(own.abs().max())):
            raise UnsuitableWeights(
                f"{_UNSUPPORTED} {model.config.model_type}: its logits differ from the model's own forward pass; "
                f"{_ALTERNATIVE}"
            )


def prefill(model: Model, inputs: PassInputs, cache: SlotCache) -> None:
    """Fill the cache with tokens [batch, length] at the positions that `cache.begin_prefill` gave."""
    if inputs.visual is None:
        model.base_model(input_ids=inputs.tokens, position_ids=inputs.positions, use_cache=False, slot_cache=cache)
    else:
        _visual_hidden(model, inputs, cache)


def _visual_hidden(model: Model, inputs: PassInputs, cache: SlotCache) -> torch.Tensor:
    """Return the last hidden states [batch, length, hidden] of a pass with tokens of images."""
    visual = inputs.visual
    assert visual is not None
    given: dict[str, Any] = {"position_ids": inputs.positions, "use_cache": False, "slot_cache": cache}
    if visual.deepstack:
        given |= {"visual_pos_masks": visual.is_visual, "deepstack_visual_embeds": visual.deepstack}
    hidden: torch.Tensor = model.base_model.language_model(inputs_embeds=visual.embeddings, **given).last_hidden_state
    return hidden


@torch.inference_mode()
def kv_token_bytes(model: Model) -> int:
    """Return the size of one token's keys and values in all layers."""
    cache = SlotCache(KvCapacity(slots=1, max_len=1, tokens=QUANTUM), model.dtype, model.device)
    cache.fit(np.zeros(1, np.int64), held=0)
    positions = cache.begin_prefill(np.zeros(1, np.int64), np.zeros(1, np.int64), np.ones(1, np.int64))
    prefill(model, PassInputs(torch.zeros_like(positions), positions), cache)
    return cache.token_bytes


def decode(model: Model, inputs: PassInputs, cache: SlotCache) -> torch.Tensor:
    """Return the logits [n, vocabulary] after one token [n, 1] per slot, at the positions given to `begin_decode`."""
    output = model(
        input_ids=inputs.tokens,
        position_ids=inputs.positions,
        use_cache=False,
        slot_cache=cache,
        logits_to_keep=1,
    )
    logits: torch.Tensor = output.logits[:, -1]
    return logits


def verify(model: Model, inputs: PassInputs, cache: SlotCache) -> torch.Tensor:
    """Return the logits [tokens, vocabulary] after each of the tokens [1, tokens], at those of `begin_verify`."""
    if inputs.visual is not None:
        seen: torch.Tensor = model.get_output_embeddings()(_visual_hidden(model, inputs, cache))[0]
        return seen
    output = model(input_ids=inputs.tokens, position_ids=inputs.positions, use_cache=False, slot_cache=cache)
    logits: torch.Tensor = output.logits[0]
    return logits


InputsOf = Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64], torch.Tensor], PassInputs]
"""Returns the arguments of a pass; `vision.Vision.inputs` describes slots, tokens and positions."""
FIXED_ROWS = 16
"""Tokens of each pass of `compute_rows`: kernels choose the order of their sums by the shape of a pass."""


def compute_rows(
    model: Model,
    tokens: npt.NDArray[np.int64],
    slots: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    cache: SlotCache,
    inputs_of: InputsOf,
) -> torch.Tensor:
    """Return the logits [n, vocabulary] after tokens [n] of slots [n] at positions [n], which are cached.

    The tokens of a slot are in order, and all before them are cached. No bit of a row depends on the other rows.
    `inputs_of` is called before each pass with the slot of each of its rows; padding has slot -1.
    """
    found = []
    for start in range(0, len(slots), FIXED_ROWS):
        some = slice(start, start + FIXED_ROWS)
        padding = 0, FIXED_ROWS - len(slots[some])
        of_slots = np.pad(slots[some], padding, constant_values=-1)
        at = cache.begin_rows(of_slots, np.pad(positions[some], padding))
        inputs = inputs_of(of_slots[None], np.pad(tokens[some], padding)[None], at)
        found.append(verify(model, inputs, cache)[: len(slots[some])])
    return torch.cat(found)


# --- Records the experts that a model's routers select in a forward pass ----------------------------------------------


Experts = Callable[[int], npt.NDArray[np.int64]]
"""A batch size -> the experts of the pass, [batch, tokens, layers, experts per token]."""


class RoutingRecorder:
    """The routers of a transformers model."""

    def __init__(self, model: Any) -> None:
        """Register a hook on each router of `model`."""
        config = model.config.to_dict()
        self.shape = experts.shape_of_routing(config) if config["model_type"] in experts.FAMILIES else None
        """Shape of the routed experts; None if the model is dense or of an untested family."""
        self._selected: dict[int, torch.Tensor] | None = None
        for number, gate in experts.routers_of(model) if self.shape else ():
            gate.register_forward_hook(partial(self._on_output, number))

    @contextmanager
    def recording(self, *, enabled: bool) -> Iterator[Experts]:
        """Record the pass within the context, if `enabled`; yields what returns its experts after it."""
        selected: dict[int, torch.Tensor] = {}
        self._selected = selected if enabled else None
        try:
            yield partial(self._experts, selected)
        finally:
            self._selected = None

    def _experts(self, selected: dict[int, torch.Tensor], n: int) -> npt.NDArray[np.int64]:
        assert self.shape is not None
        none = torch.zeros_like(next(iter(selected.values())))
        stacked = torch.stack([selected.get(layer, none) for layer in range(self.shape.layers)], 1).cpu().numpy()
        found: npt.NDArray[np.int64] = stacked.reshape(n, -1, self.shape.layers, self.shape.experts_per_token)
        return found

    def _on_output(self, layer: int, _gate: Any, _inputs: Any, output: Any) -> None:
        if self._selected is not None:
            self._selected[layer] = experts.require_routing(output)[2]


# --- Fast normalization, and the loaded weights -----------------------------------------------------------------------


class _RMSNorm(nn.Module):
    """RMS normalization over the last dimension with few kernels.

    torch's implementation is one kernel on a GPU but six on a CPU, where launching kernels dominates the decode step of
    a small model. On a CPU this uses a vector norm and one division.
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
    """Replace each module that computes plain RMS normalization.

    A module is replaced only if its output matches; its weight stays the same parameter under the same name.
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
    fused, original = _RMSNorm(weight, eps), weight.clone()
    weight.copy_(torch.linspace(0.5, 1.5, weight.shape[0]))
    x = torch.linspace(-3, 2, 4 * weight.shape[0], device=weight.device, dtype=weight.dtype).view(4, -1)
    tolerance = 1e-5 if weight.dtype == torch.float32 else 2e-2
    same = torch.allclose(norm(x), fused(x), rtol=tolerance, atol=tolerance)
    weight.copy_(original)
    return fused if same else None


class Weights:
    """The loaded weights: views of the model's tensors by Hugging Face name; tied tensors share memory."""

    def __init__(self, model: Model) -> None:
        tensors: dict[str, torch.Tensor] = model.state_dict()
        names = names_in_files(model)
        # Those of a model's files, which only trainers have, may be its own names or older ones.
        saved = by_file_name(tensors, names)
        self._tensors = {**{older_name(name): one for name, one in saved.items()}, **tensors, **saved}
        self._matrices = {name: own for name, own in names.items() if len(own) > 1}
        self.complete = False
        """True if every tensor has been loaded and no load has failed since."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._tensors.items())

    def write(self, changed: Iterable[Words]) -> str:
        """Write changed words in place; return why all tensors must be loaded instead, else empty."""
        was_complete, self.complete = self.complete, False
        if not was_complete:
            return "the last load failed"
        why = write_words({name: [Placement.whole(own)] for name, own in self._tensors.items()}, changed)
        self.complete = not why
        return why

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors in place. Every tensor must be given, unless all have been before.

        Raises:
            UnsuitableWeights: a tensor is unknown, missing, of the wrong shape, or would be rounded.

        """
        may_be_partial, self.complete = self.complete, False
        loaded: set[int] = set()
        for name, tensor in tensors:
            target = target_of(name, tensor, self._tensors)
            target.copy_(tensor)
            loaded.update(self._tensors[own].data_ptr() for own in self._matrices.get(name, (name,)))
        missing = [name for name, own in self._tensors.items() if own.data_ptr() not in loaded]
        if missing and not may_be_partial:
            raise UnsuitableWeights(f"weights: {len(missing)} tensors are missing, the first is {missing[0]!r}")
        self.complete = True


# --- Scores given tokens with the torch engine's model: one causal forward pass without a KV cache --------------------


class _NoCache:
    """Replaces the slot cache: each token attends to those before it in the same pass."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """See `SlotCache.attend`."""
        del layer
        grouped = query.shape[1] != key.shape[1]
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=grouped
        )
        return attended.transpose(1, 2)


def score(model: Model, sequences: Sequences, temperature: float) -> list[list[float]]:
    """Return each completion token's log-probability; see `ports.Engine.score`."""
    length = max(len(prompt) + len(completion) for prompt, completion in sequences)
    padded = [
        [*prompt, *completion] + [0] * (length - len(prompt) - len(completion)) for prompt, completion in sequences
    ]
    ids = torch.tensor(padded, device=model.device)
    positions = torch.arange(length, device=ids.device).expand_as(ids)
    logits = model(input_ids=ids, position_ids=positions, use_cache=False, slot_cache=_NoCache()).logits[:, :-1]
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1).gather(2, ids[:, 1:, None])[..., 0].tolist()
    return [
        scores[len(prompt) - 1 : len(prompt) + len(completion) - 1]
        for scores, (prompt, completion) in zip(logprobs, sequences, strict=True)
    ]
