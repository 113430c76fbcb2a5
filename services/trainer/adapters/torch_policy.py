"""A policy trained with plain torch: any causal language model of transformers, AdamW, one process.

Rows are padded on the right and given without an attention mask: under the causal mask no real token sees a pad. The
output head runs on completion tokens only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
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

from services.trainer.ports import LossFn, RankInfo, Row
from shared.columns import F32, I32, unpack
from shared.errors import ConfigError, Corrupt, Fatal
from shared.jobspec import OptimizerSpec
from shared.weights.publisher import Shard

_MODEL_FILE = "model.safetensors"
_OPTIMIZER_FILE = "optimizer.safetensors"
_RNG = "rng"


class TorchPolicy:
    """`PolicyEngine` on one device.

    With `bfloat16` the weights and the optimizer stay in float32, matrices are multiplied in bfloat16, and what is
    exported is rounded to bfloat16: small learning rates would vanish in bfloat16 weights.
    """

    rank = RankInfo()

    def __init__(self, optimizer: OptimizerSpec, *, temperature: float, dtype: str, device: str) -> None:
        """Prepare; `load_hf` makes the model.

        Args:
            optimizer: AdamW's settings.
            temperature: the sampling temperature; log-probabilities are of that distribution.
            dtype: `float32` or `bfloat16`.
            device: a torch device.

        """
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)
        self._spec = optimizer
        self._temperature = temperature
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._device = torch.device(device)
        self._accumulated_tokens = 0
        self._selected: Tensor | None = None

    def load_hf(self, source: Path) -> None:
        """See `PolicyEngine.load_hf`."""
        transformers_logging.disable_progress_bar()
        try:
            model = AutoModelForCausalLM.from_pretrained(
                source, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
            )
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ConfigError(f"model {source} cannot be loaded as a causal language model: {error}") from error
        # Kept in evaluation mode: dropout would make the trained distribution another than the sampled one.
        self._model: Any = model.to(self._device).eval()
        self._model.get_output_embeddings().register_forward_pre_hook(self._select)
        self._tensors = _distinct(self._model.state_dict(keep_vars=True))
        self._parameters = [tensor for tensor in self._tensors.values() if tensor.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=self._spec.lr,
            betas=self._spec.betas,
            weight_decay=self._spec.weight_decay,
            fused=True,
        )

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
        sums: dict[str, float] = {}
        for rows in batches:
            logprobs = self._forward(rows)
            rollout = np.concatenate([unpack(row.logprobs, F32) for row in rows])
            lengths = [len(row.completion) // I32.itemsize for row in rows]
            advantages = np.repeat(np.asarray([row.advantage for row in rows], F32), lengths)
            proximal = None
            if all(row.proximal for row in rows):
                proximal = self._column(np.concatenate([unpack(row.proximal, F32) for row in rows]))
            total, batch_sums = loss(logprobs, self._column(rollout), self._column(advantages), proximal)
            total.backward()  # type: ignore[no-untyped-call]  # torch has no annotation there
            self._accumulated_tokens += logprobs.numel()
            for name, value in batch_sums.items():
                sums[name] = sums.get(name, 0.0) + value
        return sums

    def step(self, learning_rate: float) -> float:
        """See `PolicyEngine.step`."""
        if not self._accumulated_tokens:
            return 0.0
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.div_(self._accumulated_tokens)
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._spec.grad_clip))
        self._accumulated_tokens = 0
        if not np.isfinite(norm):
            self._optimizer.zero_grad()
            raise Fatal(f"the gradient's norm is {norm}: lower optimizer.lr, or look for bad data in this step")
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        return norm

    def export_shards(self) -> Iterator[Shard]:
        """See `PolicyEngine.export_shards`."""
        for name, tensor in self._tensors.items():
            value = tensor.detach()
            if value.is_floating_point():
                value = value.to(self._dtype)
            raw = value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            shape = tuple(tensor.shape)
            dtype = str(value.dtype).removeprefix("torch.")
            yield Shard(name, dtype, shape, (0,) * len(shape), shape, raw)

    def load_shards(self, shards: Iterable[Shard]) -> None:
        """See `PolicyEngine.load_shards`."""
        missing = set(self._tensors)
        for shard in shards:
            tensor = self._tensors.get(shard.name)
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
        weights = {name: tensor.detach() for name, tensor in self._tensors.items()}
        state = {
            f"{index}.{key}": value
            for index, values in self._optimizer.state_dict()["state"].items()
            for key, value in values.items()
        }
        try:
            save_file(weights, directory / _MODEL_FILE)
            save_file(state | {_RNG: torch.get_rng_state()}, directory / _OPTIMIZER_FILE)
        except SafetensorError as error:
            raise OSError(str(error)) from error

    def load(self, directory: Path) -> None:
        """See `PolicyEngine.load`."""
        try:
            tensors = load_file(directory / _MODEL_FILE)
            state = load_file(directory / _OPTIMIZER_FILE)
            with torch.no_grad():
                for name, tensor in self._tensors.items():
                    tensor.copy_(tensors[name])
            torch.set_rng_state(state.pop(_RNG))
            self._optimizer.load_state_dict(
                {"state": _by_index(state), "param_groups": self._optimizer.state_dict()["param_groups"]}
            )
        except (OSError, KeyError, ValueError, RuntimeError, SafetensorError) as error:
            raise Corrupt(f"checkpoint {directory} does not fit this model: {error}") from error

    def close(self) -> None:
        """See `PolicyEngine.close`."""
        for name in ("_optimizer", "_parameters", "_tensors", "_model"):
            self.__dict__.pop(name, None)

    def _forward(self, rows: Sequence[Row]) -> Tensor:
        """Return the log-probabilities of all completion tokens, row after row, [tokens]."""
        ids, predicts = _padded(rows)
        token_ids = torch.from_numpy(ids).to(self._device)
        self._selected = torch.from_numpy(predicts).to(self._device)
        with self._autocast():
            logits: Tensor = self._model(input_ids=token_ids, use_cache=False).logits[0]
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


def _by_index(flat: dict[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    nested: dict[int, dict[str, Tensor]] = {}
    for path, tensor in flat.items():
        index, _, key = path.partition(".")
        nested.setdefault(int(index), {})[key] = tensor
    return nested
