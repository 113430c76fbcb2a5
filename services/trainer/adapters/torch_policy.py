"""A policy trained with plain torch: a causal language model of transformers, or an adapter on it; AdamW, one process.

Rows are padded on the right and given without an attention mask: under the causal mask no real token sees a pad. The
output head runs on completion tokens only.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from services.trainer.adapters.torch_lora import Adapter
from services.trainer.domain import sums
from services.trainer.domain.tokens import LossFn, TokenBatch
from services.trainer.ports import Exported, Loaded, NotFinite, RankInfo, Row
from shared.columns import F32, I32, unpack
from shared.errors import ConfigError, Corrupt, Fatal
from shared.training import LoraSpec, OptimizerSpec
from shared.weights.publisher import Shard

_MODEL_FILE = "model.safetensors"
_OPTIMIZER_FILE = "optimizer.safetensors"
_RNG, _CUDA_RNG = "rng", "rng.cuda"


class TorchPolicy:
    """`PolicyEngine` on one device.

    With `bfloat16` the weights and the optimizer stay in float32, matrices are multiplied in bfloat16, and what is
    exported is rounded to bfloat16: small learning rates would vanish in bfloat16 weights. Below an adapter the frozen
    weights are in `dtype`, as they are published; the adapter is in float32, and so exported.
    """

    rank = RankInfo()

    def __init__(
        self,
        optimizer: OptimizerSpec,
        *,
        temperature: float,
        dtype: str,
        device: str,
        lora: LoraSpec | None = None,
        seed: int = 0,
        reference: bool = False,
    ) -> None:
        """Prepare; `load_hf` makes the model.

        Args:
            optimizer: AdamW's settings.
            temperature: the sampling temperature; log-probabilities are of that distribution.
            dtype: `float32` or `bfloat16`.
            device: a torch device.
            lora: the adapter to train; None to train the model itself.
            seed: of the adapter's first values.
            reference: whether losses get the log-probabilities of the weights that `load_hf` loaded. It costs one more
                copy of them on the device, or nothing below an adapter; and one more forward pass.

        """
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)
        self._spec = optimizer
        self._temperature = temperature
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._device = torch.device(device)
        self._lora = lora
        self._seed = seed
        self._keeps_reference = reference
        self._adapter: Adapter | None = None
        self._reference: Any = None
        self._divisor = 0
        self._selected: Tensor | None = None

    def load_hf(self, source: Path) -> None:
        """See `PolicyEngine.load_hf`."""
        transformers_logging.disable_progress_bar()
        try:
            model = AutoModelForCausalLM.from_pretrained(
                source,
                dtype=self._dtype if self._lora else torch.float32,
                attn_implementation="sdpa",
                local_files_only=True,
            )
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ConfigError(f"model {source} cannot be loaded as a causal language model: {error}") from error
        # Kept in evaluation mode: dropout would make the trained distribution another than the sampled one.
        self._model: Any = model.to(self._device).eval()
        self._tensors = self._trained = _distinct(self._model.state_dict(keep_vars=True))
        if self._lora is not None:
            self._adapter = Adapter(self._model, self._tensors, self._lora, self._seed)
            self._trained = self._adapter.tensors
            self._model.eval()
        elif self._keeps_reference:
            self._reference = copy.deepcopy(self._model).requires_grad_(False)
            self._reference.get_output_embeddings().register_forward_pre_hook(self._select)
        self._model.get_output_embeddings().register_forward_pre_hook(self._select)
        self._parameters = [tensor for tensor in self._trained.values() if tensor.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=self._spec.lr,
            betas=self._spec.betas,
            weight_decay=self._spec.weight_decay,
            fused=True,
        )

    @property
    def adapter_json(self) -> str:
        """See `PolicyEngine.adapter_json`."""
        return self._adapter.json if self._adapter else ""

    def logprobs(self, batches: Sequence[Sequence[Row]]) -> list[bytes]:
        """See `PolicyEngine.logprobs`."""
        columns: list[bytes] = []
        with torch.no_grad():
            for rows in batches:
                values = self._forward(rows).cpu().numpy().astype(F32)
                ends = np.cumsum([len(row.completion) // I32.itemsize for row in rows])
                columns += [part.tobytes() for part in np.split(values, ends[:-1])]
        return columns

    def accumulate(self, batches: Sequence[Sequence[Row]], loss: LossFn) -> dict[str, float]:
        """See `PolicyEngine.accumulate`."""
        numbers: dict[str, float] = {}
        for rows in batches:
            reference = self._reference_logprobs(rows)
            with self._adapter.training() if self._adapter else nullcontext():
                logprobs = self._forward(rows)
            sampled = np.concatenate([unpack(row.logprobs, F32) for row in rows])
            lengths = [len(row.completion) // I32.itemsize for row in rows]
            advantages = np.repeat(np.asarray([row.advantage for row in rows], F32), lengths)
            proximal = None
            if all(row.proximal for row in rows):
                proximal = self._column(np.concatenate([unpack(row.proximal, F32) for row in rows]))
            batch = TokenBatch(
                logprobs,
                self._column(sampled),
                self._column(advantages),
                tuple(lengths),
                proximal,
                reference,
            )
            total, part = loss(batch)
            if not torch.isfinite(total):
                raise NotFinite(f"the loss is {total.item()}")
            total.backward()  # type: ignore[no-untyped-call]  # torch has no annotation there
            self._divisor += int(part["divisor"])
            sums.add(numbers, part)
        return numbers

    def step(self, learning_rate: float) -> float:
        """See `PolicyEngine.step`."""
        if not self._divisor:
            return 0.0
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.div_(self._divisor)
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._spec.grad_clip))
        self._divisor = 0
        if not np.isfinite(norm):
            self._optimizer.zero_grad()
            raise NotFinite(f"the gradient's norm is {norm}")
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        return norm

    def export_shards(self, what: Exported = "model") -> Iterator[Shard]:
        """See `PolicyEngine.export_shards`."""
        if what == "adapter":
            yield from (_shard(name, tensor.detach()) for name, tensor in self._trained.items())
            return
        for name, tensor in self._tensors.items():
            value = tensor.detach()
            if self._adapter and what == "model":
                value = self._adapter.merged(name, value)
            yield _shard(name, value.to(self._dtype) if value.is_floating_point() else value)

    def load_shards(self, shards: Iterable[Shard], what: Loaded = "base") -> None:
        """See `PolicyEngine.load_shards`."""
        tensors = self._tensors if what == "base" else self._trained
        missing = set(tensors)
        for shard in shards:
            tensor = tensors.get(shard.name)
            if tensor is None or tuple(tensor.shape) != shard.local_shape:
                raise Fatal(f"tensor {shard.name} of shape {list(shard.local_shape)} does not belong to this model")
            dtype = getattr(torch, shard.dtype)
            value = torch.frombuffer(bytearray(shard.data), dtype=dtype).reshape(shard.local_shape)
            with torch.no_grad():
                tensor.copy_(value)
            missing.discard(shard.name)
        if missing:
            raise Fatal(f"the weights lack {len(missing)} tensors of this model, {min(missing)} among them")

    def save(self, directory: Path) -> None:
        """See `PolicyEngine.save`."""
        weights = {name: tensor.detach() for name, tensor in self._trained.items()}
        state = {
            f"{index}.{key}": value
            for index, values in self._optimizer.state_dict()["state"].items()
            for key, value in values.items()
        }
        try:
            save_file(weights, directory / _MODEL_FILE)
            save_file(state | self._generators(), directory / _OPTIMIZER_FILE)
        except SafetensorError as error:
            raise OSError(str(error)) from error

    def load(self, directory: Path) -> None:
        """See `PolicyEngine.load`."""
        try:
            tensors = load_file(directory / _MODEL_FILE)
            state = load_file(directory / _OPTIMIZER_FILE)
            with torch.no_grad():
                for name, tensor in self._trained.items():
                    tensor.copy_(tensors[name])
            torch.set_rng_state(state.pop(_RNG))
            if self._device.type == "cuda":
                torch.cuda.set_rng_state(state.pop(_CUDA_RNG), self._device)
            self._optimizer.load_state_dict(
                {"state": _by_index(state), "param_groups": self._optimizer.state_dict()["param_groups"]}
            )
        except (OSError, KeyError, ValueError, RuntimeError, SafetensorError) as error:
            raise Corrupt(f"checkpoint {directory} does not fit this model: {error}") from error

    def close(self) -> None:
        """See `PolicyEngine.close`."""
        self._adapter = self._reference = None
        for name in ("_optimizer", "_parameters", "_trained", "_tensors", "_model"):
            self.__dict__.pop(name, None)

    def _generators(self) -> dict[str, Tensor]:
        """Return the states that an adapter's dropout draws from."""
        states = {_RNG: torch.get_rng_state()}
        if self._device.type == "cuda":
            states[_CUDA_RNG] = torch.cuda.get_rng_state(self._device)
        return states

    def _reference_logprobs(self, rows: Sequence[Row]) -> Tensor | None:
        """Return what the weights of the job's beginning say of all completion tokens, [tokens]."""
        if not self._keeps_reference:
            return None
        with torch.no_grad(), self._adapter.without() if self._adapter else nullcontext():
            return self._forward(rows, self._reference)

    def _forward(self, rows: Sequence[Row], model: Any = None) -> Tensor:
        """Return the log-probabilities of all completion tokens, row after row, [tokens]."""
        ids, predicts = _padded(rows)
        token_ids = torch.from_numpy(ids).to(self._device)
        self._selected = torch.from_numpy(predicts).to(self._device)
        with self._autocast():
            logits: Tensor = (model or self._model)(input_ids=token_ids, use_cache=False).logits[0]
        targets = token_ids[:, 1:][self._selected[:, :-1]]
        return -functional.cross_entropy(logits.float() / self._temperature, targets, reduction="none")

    def _select(self, _head: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        """Give the output head only the positions that predict a completion token, [1, tokens, hidden].

        As a hook in front of the head it leaves whatever a family does to its logits in place.
        """
        return (inputs[0][self._selected].unsqueeze(0),)

    def _autocast(self) -> AbstractContextManager[None]:
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._dtype is torch.bfloat16)

    def _column(self, values: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def _padded(rows: Sequence[Row]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return token ids [rows, longest] and a mask of the positions whose *next* token is a completion's."""
    width = max(row.n_tokens for row in rows)
    ids = np.zeros((len(rows), width), np.int64)
    predicts = np.zeros((len(rows), width), np.bool_)
    for i, row in enumerate(rows):
        prompt, completion = unpack(row.prompt, I32), unpack(row.completion, I32)
        end = len(prompt) + len(completion)
        ids[i, : len(prompt)] = prompt
        ids[i, len(prompt) : end] = completion
        predicts[i, len(prompt) - 1 : end - 1] = True
    return ids, predicts


def _distinct(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Leave out all but the first of tensors that share their memory, as Hugging Face does when it saves."""
    seen: set[tuple[int, int]] = set()
    found = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.numel())
        if key not in seen:
            seen.add(key)
            found[name] = tensor
    return found


def _shard(name: str, value: Tensor) -> Shard:
    raw = value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    shape = tuple(value.shape)
    return Shard(name, str(value.dtype).removeprefix("torch."), shape, (0,) * len(shape), shape, raw)


def _by_index(flat: dict[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    nested: dict[int, dict[str, Tensor]] = {}
    for path, tensor in flat.items():
        index, _, key = path.partition(".")
        nested.setdefault(int(index), {})[key] = tensor
    return nested
