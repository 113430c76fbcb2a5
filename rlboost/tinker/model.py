"""The model that `rlboost tinker` trains: one base model with LoRA adapters (PEFT), one for each Tinker model.

All methods block, and are called by one thread. A checkpoint is a folder that PEFT loads as it is, with the state of
the optimizer next to it.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from peft.utils.save_and_load import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlboost.publishing import Weights, weights_of
from rlboost.shared.errors import ConfigError
from rlboost.shared.model.folder import merge_eos_ids
from rlboost.shared.weights.lora import config_json_of
from rlboost.shared.weights.torch_tensors import module_tensors
from rlboost.tinker.wire import Adam, Datum, LoraOptions

ALPHA = 32.0
"""LoRA's alpha of all ranks, so that a learning rate suits any rank (as Tinker's)."""
MICRO_BATCH_TOKENS = 4096
"""Tokens, with padding, of one forward pass, unless a single sequence is longer."""
_SCORED = "scored"
"""Name of the adapter whose log-probabilities were computed last."""
_ADAPTER, _OPTIMIZER, _INFO = "adapter_model.safetensors", "optimizer.safetensors", "tinker.json"


# --- losses -----------------------------------------------------------------------------------------------------------

Inputs = Mapping[str, Tensor]
_RL = ("target_tokens", "logprobs", "advantages")


def _cross_entropy(logprobs: Tensor, given: Inputs) -> Tensor:
    return -(logprobs * given["weights"]).sum()


def _importance_sampling(logprobs: Tensor, given: Inputs) -> Tensor:
    return -((logprobs - given["logprobs"]).exp() * given["advantages"]).sum()


def _ppo(
    logprobs: Tensor, given: Inputs, *, clip_low_threshold: float = 0.8, clip_high_threshold: float = 1.2
) -> Tensor:
    """PPO's clipped objective (arXiv 1707.06347), for each token."""
    ratio = (logprobs - given["logprobs"]).exp()
    clipped = ratio.clamp(clip_low_threshold, clip_high_threshold)
    return -torch.minimum(ratio * given["advantages"], clipped * given["advantages"]).sum()


def _cispo(
    logprobs: Tensor, given: Inputs, *, clip_low_threshold: float = 0.8, clip_high_threshold: float = 1.2
) -> Tensor:
    """CISPO (arXiv 2506.13585): the clipped ratio weighs the log-probability, and has no gradient."""
    ratio = (logprobs - given["logprobs"]).exp().clamp(clip_low_threshold, clip_high_threshold)
    return -(ratio.detach() * logprobs * given["advantages"]).sum()


_CLIP = frozenset({"clip_low_threshold", "clip_high_threshold"})
LOSSES: Mapping[str, tuple[tuple[str, ...], frozenset[str], Callable[..., Tensor]]] = {
    "cross_entropy": (("target_tokens", "weights"), frozenset(), _cross_entropy),
    "importance_sampling": (_RL, frozenset(), _importance_sampling),
    "ppo": (_RL, _CLIP, _ppo),
    "cispo": (_RL, _CLIP, _cispo),
}
"""Loss -> the tensors of a sequence that it needs, keys of its `loss_fn_config`, and the sum that it is."""


def loss_of(name: str, config: Mapping[str, Any]) -> tuple[tuple[str, ...], Callable[..., Tensor]]:
    """Return the tensors that a loss needs, and the loss with its configuration.

    Raises:
        ConfigError: there is no such loss, or it has no such key.

    """
    if name not in LOSSES:
        known = ", ".join(LOSSES)
        raise ConfigError(f"loss_fn: {name!r} is not supported: use {known}, or forward_backward_custom with your own")
    needed, keys, function = LOSSES[name]
    for key, value in config.items():
        if key not in keys:
            takes = f"it takes {', '.join(sorted(keys))}" if keys else "it takes none"
            raise ConfigError(f"loss_fn_config: {name} has no {key!r}: {takes}")
        if not isinstance(value, float) or not math.isfinite(value):
            raise ConfigError(f"loss_fn_config: {key} is {value!r}: give a number")
    return needed, partial(function, **config)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def read_info(folder: Path) -> dict[str, Any]:
    """Return what was saved about a checkpoint.

    Raises:
        ConfigError: there is none.

    """
    try:
        info: dict[str, Any] = json.loads((folder / _INFO).read_text(encoding="utf-8"))
    except OSError as error:
        what = f"{folder.parent.name}/{folder.name} of {folder.parent.parent.name}"
        raise ConfigError(f"there is no checkpoint {what}: it has expired, was deleted, or never saved") from error
    return info


def saved_weights(folder: Path) -> tuple[dict[str, Tensor], str]:
    """Return the tensors and the configuration of a saved adapter."""
    return load_file(folder / _ADAPTER), (folder / "adapter_config.json").read_text(encoding="utf-8")


@dataclass(slots=True)
class _Adapter:
    options: LoraOptions
    parameters: dict[str, torch.nn.Parameter]
    """By names that all adapters have in common."""
    optimizer: torch.optim.AdamW
    failed: str = ""
    """Why gradients of this step are missing; empty if none are."""
    steps: int = 0


@dataclass(slots=True)
class LoraModel:
    """A base model and its adapters, on one device.

    Args:
        path: folder or Hugging Face id.
        device: such as `cuda:0`.

    """

    path: str
    device: str
    _model: Any = field(init=False)
    _peft: Any = field(init=False, default=None)
    """The model with its adapters; None before the first."""
    base: Weights = field(init=False)
    """What is published of it: with an output layer of its own, which an adapter can change."""
    end_tokens: tuple[int, ...] = field(init=False)
    context: int = field(init=False)
    vocabulary: int = field(init=False)
    _layers: dict[str, str] = field(init=False)
    """Linear layer -> its part of the model: `attn`, `mlp` or `unembed`."""
    _experts: str = field(init=False)
    """A tensor with all experts of a layer, empty if there is none."""
    _adapters: dict[str, _Adapter] = field(init=False, default_factory=dict)
    _scored: Path | None = field(init=False, default=None)
    _n_created: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """Load the base model, which blocks for as long as it takes."""
        try:
            model = AutoModelForCausalLM.from_pretrained(self.path, dtype="auto").to(self.device).eval()
        except (OSError, ValueError) as error:
            raise ConfigError(f"the model {self.path!r} cannot be loaded: {error}") from error
        model.requires_grad_(False)
        output, embedded = model.get_output_embeddings(), model.get_input_embeddings()
        if output.weight is embedded.weight:
            output.weight = torch.nn.Parameter(output.weight.detach().clone(), requires_grad=False)
            model.config.tie_word_embeddings = False
        self._model = model
        linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
        parts = {name: "unembed" if model.get_submodule(name) is output else _part_of(name) for name in linear}
        self._layers = {name: part for name, part in parts.items() if part}
        packed = (name for name, tensor in model.named_parameters() if tensor.dim() == 3 and "experts" in name)
        self._experts = next(packed, "")
        config_json = weights_of(model).config_json
        self.base = Weights(dict(module_tensors(model)), config_json)
        self.vocabulary = embedded.weight.shape[0]
        self.context = getattr(model.config, "max_position_embeddings", None) or 1 << 20
        try:
            of_tokenizer = AutoTokenizer.from_pretrained(self.path).eos_token_id
        except (OSError, ValueError):
            of_tokenizer = None
        generation = model.generation_config.eos_token_id if model.generation_config else None
        self.end_tokens = merge_eos_ids(of_tokenizer, model.config.eos_token_id, generation)

    # --- adapters ---

    def create(self, name: str, options: LoraOptions) -> None:
        """Add an adapter that changes nothing yet.

        Args:
            name: of the adapter, without dots.
            options: its rank, and what it adapts.

        Raises:
            ConfigError: the model has no such layers, or its experts are no layers that LoRA adapts.

        """
        config = LoraConfig(
            r=options.rank,
            lora_alpha=ALPHA,
            target_modules=self._targets(options),
            task_type="CAUSAL_LM",
            base_model_name_or_path=self.path,
        )
        self._n_created += 1
        with torch.random.fork_rng(devices=[] if self.device == "cpu" else None):
            torch.manual_seed(self._n_created if options.seed is None else options.seed)
            self._add(name, config)
        marker = f".{name}."
        own = {key.replace(marker, "."): value for key, value in self._peft.named_parameters() if marker in key}
        # Its parameters of a step are set by the step.
        self._adapters[name] = _Adapter(options, own, torch.optim.AdamW(own.values(), lr=0.0))

    def _targets(self, options: LoraOptions) -> list[str]:
        chosen = {"attn": options.train_attn, "mlp": options.train_mlp, "unembed": options.train_unembed}
        if options.train_mlp and self._experts:
            raise ConfigError(f"train_mlp: {self._experts} is no linear layer that LoRA adapts: train_mlp=False")
        found = sorted(name for name, part in self._layers.items() if chosen[part])
        if not found:
            raise ConfigError("lora_config: nothing is trained: set train_attn, train_mlp or train_unembed")
        return found

    def _add(self, name: str, config: LoraConfig) -> None:
        if self._peft is None:
            self._peft = get_peft_model(self._model, config, adapter_name=name)
        else:
            self._peft.add_adapter(name, config)

    def remove(self, name: str) -> None:
        """Forget an adapter that is not saved."""
        if self._adapters.pop(name, None):
            self._delete(name)

    def _delete(self, name: str) -> None:
        with warnings.catch_warnings():  # another one becomes active; each call sets its own
            warnings.simplefilter("ignore")
            self._peft.delete_adapter(name)
        # PEFT would go on with the adapter that is gone.
        if not self._peft.peft_config:
            self._model, self._peft = self._peft.unload(), None
        elif self._peft.active_adapter not in self._peft.peft_config:
            self._peft.set_adapter(next(iter(self._peft.peft_config)))

    def options(self, name: str) -> LoraOptions:
        """Return what an adapter adapts."""
        return self._adapters[name].options

    # --- training ---

    def fail(self, name: str, reason: str) -> None:
        """Let the next step of an adapter fail, since it lacks gradients."""
        self._adapters[name].failed = reason

    def forward_backward(
        self, name: str, data: Sequence[Datum], loss_fn: str, config: Mapping[str, Any], *, backward: bool
    ) -> tuple[list[NDArray[np.float32]], float]:
        """Compute a loss, and add its gradients to those of earlier calls.

        Args:
            name: of the adapter.
            data: sequences; the loss is a sum over all their tokens.
            loss_fn: one of `LOSSES`.
            config: of the loss.
            backward: whether gradients are computed. If this fails then, the next `step` fails too.

        Returns:
            log-probabilities of the targets of each sequence, [n] or [n, k], and the loss.

        Raises:
            ConfigError: the loss, a sequence or a tensor of it is wrong, or the loss is not finite.

        """
        try:
            needed, loss_function = loss_of(loss_fn, config)
            for i, datum in enumerate(data):
                self._check(f"data[{i}]", datum, needed, loss_fn)
            return self._losses(name, data, loss_function, backward=backward)
        except Exception as error:
            if backward:
                self.fail(name, str(error))
            raise

    def _losses(
        self, name: str, data: Sequence[Datum], loss_function: Callable[..., Tensor], *, backward: bool
    ) -> tuple[list[NDArray[np.float32]], float]:
        self._peft.set_adapter(name)
        found: dict[int, NDArray[np.float32]] = {}
        total = 0.0
        for batch in _micro_batches([len(datum.tokens) for datum in data]):
            with torch.set_grad_enabled(backward):
                rows = self._logits([data[i].tokens for i in batch])
                losses = []
                for row, i in zip(rows, batch, strict=True):
                    given = {
                        key: torch.from_numpy(array.copy()).to(self.device) for key, array in data[i].inputs.items()
                    }
                    targets = given["target_tokens"].long()
                    logits = row[: len(data[i].tokens)].float()
                    picked = logits.gather(-1, targets.reshape(len(targets), -1)).reshape(targets.shape)
                    normalizer = logits.logsumexp(-1)
                    logprobs = picked - (normalizer if targets.dim() == 1 else normalizer[:, None])
                    losses.append(loss_function(logprobs, given))
                    found[i] = logprobs.detach().cpu().numpy()
                loss = torch.stack(losses).sum()
            if not loss.isfinite():
                raise ConfigError(f"the loss is {loss.item()}: check weights, advantages and logprobs of the data")
            if backward:
                loss.backward()
            total += loss.item()
        return [found[i] for i in range(len(data))], total

    def _logits(self, sequences: Sequence[NDArray[np.int64]]) -> Tensor:
        """Return logits [batch, longest, vocabulary]; padding is at the end, where attention is causal."""
        ids = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.long)
        for row, tokens in zip(ids, sequences, strict=True):
            row[: len(tokens)] = torch.from_numpy(tokens.copy())
        logits: Tensor = (self._peft or self._model)(input_ids=ids.to(self.device), use_cache=False).logits
        return logits

    def _check(self, place: str, datum: Datum, needed: Sequence[str], loss_fn: str) -> None:
        self.check_tokens(f"{place}.model_input", datum.tokens)
        if set(datum.inputs) != set(needed):
            given = ", ".join(sorted(datum.inputs)) or "nothing"
            raise ConfigError(f"{place}.loss_fn_inputs: {loss_fn} takes {', '.join(needed)}, and {given} is given")
        targets = datum.inputs["target_tokens"]
        if targets.ndim > 1 and (loss_fn != "cross_entropy" or targets.ndim > 2):
            raise ConfigError(
                f"{place}: target_tokens has the shape {targets.shape}: {loss_fn} takes one for each token"
            )
        if len(targets) != len(datum.tokens):
            raise ConfigError(f"{place}: model_input has {len(datum.tokens)} tokens, and target_tokens {len(targets)}")
        _check_ids(f"{place}: target_tokens", targets, self.vocabulary)
        for key, array in datum.inputs.items():
            if array.shape != targets.shape:
                raise ConfigError(f"{place}: {key} has the shape {array.shape}, and target_tokens {targets.shape}")
            if not np.isfinite(array).all():
                raise ConfigError(f"{place}: {key} has a value that is not finite")

    def check_tokens(self, place: str, tokens: Sequence[int] | NDArray[np.int64]) -> None:
        """Check that the model can read a sequence.

        Raises:
            ConfigError: it is empty, too long, or has a token that is none.

        """
        if not 0 < len(tokens) <= self.context:
            raise ConfigError(f"{place}: {len(tokens)} tokens: the model reads 1 to {self.context}")
        _check_ids(place, np.asarray(tokens), self.vocabulary)

    def step(self, name: str, given: Adam) -> dict[str, float]:
        """Change an adapter by one step of Adam, and forget the gradients; return metrics.

        Raises:
            ConfigError: there are no gradients, not all of them, or they are not finite.

        """
        adapter = self._adapters[name]
        failed, adapter.failed = adapter.failed, ""
        parameters = [parameter for parameter in adapter.parameters.values() if parameter.grad is not None]
        try:
            if failed:
                raise ConfigError(f"no step was made, as a forward_backward of this step has failed: {failed}")
            if not parameters:
                raise ConfigError("there are no gradients: call forward_backward before each optim_step")
            limit = given.grad_clip_norm or math.inf
            norm = torch.nn.utils.clip_grad_norm_(parameters, limit).item()
            if not math.isfinite(norm):
                raise ConfigError(f"no step was made, as the norm of the gradients is {norm}")
            (group,) = adapter.optimizer.param_groups
            group |= {"lr": given.learning_rate, "betas": (given.beta1, given.beta2), "eps": given.eps}
            group["weight_decay"] = given.weight_decay
            adapter.optimizer.step()
            adapter.steps += 1
        finally:
            adapter.optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": norm}

    # --- log-probabilities ---

    @torch.no_grad()
    def score(self, folder: Path | None, tokens: Sequence[int]) -> tuple[NDArray[np.float32], Tensor]:
        """Return the log-probability of each token of a sequence, NaN for the first, and logits of the one after it.

        Args:
            folder: of the saved adapter; None for the base model.
            tokens: the sequence.

        """
        sequence = np.asarray(tokens, np.int64)
        if folder is None and self._peft is not None:
            with self._peft.disable_adapter():
                logits = self._logits([sequence])[0].float()
        else:
            if folder is not None:
                self._load_scored(folder)
            logits = self._logits([sequence])[0].float()
        found = np.full(len(sequence), np.nan, np.float32)
        targets = torch.from_numpy(sequence[1:]).to(self.device)
        picked = logits[:-1].gather(-1, targets[:, None])[:, 0] - logits[:-1].logsumexp(-1)
        found[1:] = picked.cpu().numpy()
        return found, logits[-1]

    def _load_scored(self, folder: Path) -> None:
        if self._scored != folder:
            tensors, _ = saved_weights(folder)
            if self._scored is not None:
                self._delete(_SCORED)
            self._scored = None
            self._add(_SCORED, LoraConfig.from_pretrained(str(folder)))
            self._scored = folder
            set_peft_model_state_dict(self._peft, tensors, adapter_name=_SCORED)
        self._peft.set_adapter(_SCORED)

    # --- checkpoints ---

    def save(self, name: str, folder: Path, info: Mapping[str, Any], *, optimizer: bool) -> None:
        """Write an adapter as a folder of PEFT, whole or not at all."""
        adapter = self._adapters[name]
        writing = folder.with_name(f".{folder.name}.{os.getpid()}")
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
        tensors = get_peft_model_state_dict(self._peft, adapter_name=name, save_embedding_layers=False)
        save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, writing / _ADAPTER)
        (writing / "adapter_config.json").write_text(config_json_of(self._peft.peft_config[name]), encoding="utf-8")
        if optimizer:
            save_file(_state_of(adapter), writing / _OPTIMIZER)
        about = {**info, "lora_config": adapter.options.model_dump(), "steps": adapter.steps}
        (writing / _INFO).write_text(json.dumps(about), encoding="utf-8")
        replaced = folder.with_name(f"{writing.name}.replaced")
        if folder.exists():
            folder.rename(replaced)
        writing.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)
        if self._scored == folder:  # other weights are below the same name
            self._delete(_SCORED)
            self._scored = None

    def load(self, name: str, folder: Path, *, optimizer: bool) -> None:
        """Load a checkpoint into an adapter, with or without the state of its optimizer.

        Raises:
            ConfigError: the checkpoint has another rank or other layers, or no optimizer.

        """
        adapter, info = self._adapters[name], read_info(folder)
        kept = adapter.options.model_dump(exclude={"seed"})
        if kept != (saved := {key: value for key, value in info["lora_config"].items() if key != "seed"}):
            raise ConfigError(f"the checkpoint has {saved}, and the model {kept}: create a model from the checkpoint")
        if optimizer and not (folder / _OPTIMIZER).is_file():
            raise ConfigError("the checkpoint has no optimizer: it was saved to sample with; load it without one")
        set_peft_model_state_dict(self._peft, load_file(folder / _ADAPTER), adapter_name=name)
        adapter.optimizer.zero_grad(set_to_none=True)
        adapter.optimizer.state.clear()
        adapter.failed, adapter.steps = "", 0
        if optimizer:
            adapter.steps = info["steps"]
            state = load_file(folder / _OPTIMIZER, device=self.device)
            for key, parameter in adapter.parameters.items():
                own = {part: state[f"{key}/{part}"] for part in ("exp_avg", "exp_avg_sq") if f"{key}/{part}" in state}
                if own:
                    step = torch.tensor(float(adapter.steps))
                    adapter.optimizer.state[parameter] = {"step": step, **own}


def _state_of(adapter: _Adapter) -> dict[str, Tensor]:
    return {
        f"{key}/{part}": tensor
        for key, parameter in adapter.parameters.items()
        for part, tensor in adapter.optimizer.state.get(parameter, {}).items()
        if part != "step"
    }


def _part_of(name: str) -> str:
    """Return the part of a model that a linear layer belongs to, empty if LoRA leaves it alone."""
    if ".mlp." in name or "feed_forward" in name:
        return "mlp"
    return "attn" if "attn" in name else ""


def _check_ids(place: str, tokens: NDArray[Any], vocabulary: int) -> None:
    outside = tokens[(tokens < 0) | (tokens >= vocabulary)]
    if len(outside):
        raise ConfigError(f"{place}: {outside[0]} is no token of the model, which has {vocabulary}")


def _micro_batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield the indexes of sequences that are computed together, each at most `MICRO_BATCH_TOKENS` with padding."""
    batch = list[int]()
    for i in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if batch and lengths[batch[0]] * (len(batch) + 1) > MICRO_BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch
