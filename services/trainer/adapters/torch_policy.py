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
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from services.trainer.adapters import torch_rows
from services.trainer.adapters.torch_critic import TorchCritic
from services.trainer.adapters.torch_lora import Adapter
from services.trainer.adapters.torch_rest import Resting
from services.trainer.adapters.torch_state import captured, distinct, in_turn, load_state, shards_of
from services.trainer.domain import sums
from services.trainer.domain.batching import n_padded
from services.trainer.domain.tokens import LossFn, TokenBatch
from services.trainer.ports import Exported, Loaded, NotFinite, RankInfo, Row, Snapshot
from shared.algorithm import CriticSpec
from shared.errors import ConfigError, Fatal
from shared.training import LoraSpec, Offload, OptimizerSpec
from shared.weights.publisher import Shard


class TorchPolicy:
    """`PolicyEngine` on one device.

    With `bfloat16` the weights and the optimizer stay in float32, matrices are multiplied in bfloat16, and what is
    exported is rounded to bfloat16: small learning rates would vanish in bfloat16 weights. Below an adapter the frozen
    weights are in `dtype`, as they are published; the adapter is in float32, and so exported.
    """

    rank = RankInfo()

    def __init__(  # noqa: PLR0913 - what a job may choose of it
        self,
        optimizer: OptimizerSpec,
        *,
        temperature: float,
        dtype: str,
        device: str,
        lora: LoraSpec | None = None,
        seed: int = 0,
        reference: bool = False,
        critic: CriticSpec | None = None,
        offload: Offload = "none",
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
                copy of them on the device, or nothing below an adapter; and one more forward pass, unless rows have
                them already.
            critic: the value model to train along; None for none.
            offload: what `rest` moves to host memory.

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
        self._critic_spec = critic
        self._offload = offload
        self._critic: TorchCritic | None = None
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
        self._tensors = self._trained = distinct(self._model.state_dict(keep_vars=True))
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
        if self._critic_spec is not None:
            self._critic = TorchCritic(source, self._critic_spec, dtype=self._dtype, device=self._device)
        models = [self._model, *([self._reference] if self._reference is not None else [])]
        weights = [parameter for model in models for parameter in model.parameters()]
        optimizers: list[torch.optim.Optimizer] = [self._optimizer]
        if self._critic is not None:
            weights += self._critic.trained.values()
            optimizers.append(self._critic.optimizer)
        self._resting = Resting(weights, optimizers, self._device, self._offload)
        self.rest()

    @property
    def adapter_json(self) -> str:
        """See `PolicyEngine.adapter_json`."""
        return self._adapter.json if self._adapter else ""

    def logprobs(self, batches: Sequence[Sequence[Row]]) -> list[bytes]:
        """See `PolicyEngine.logprobs`."""
        self._resting.wake_weights()
        with torch.no_grad():
            return [column for rows in batches for column in torch_rows.columns(rows, self._forward(rows))]

    def reference_logprobs(self, batches: Sequence[Sequence[Row]]) -> list[bytes]:
        """See `PolicyEngine.reference_logprobs`."""
        if not self._keeps_reference:
            raise Fatal("this engine was made without a reference")
        self._resting.wake_weights()
        return [column for rows in batches for column in torch_rows.columns(rows, self._starting_logprobs(rows))]

    def values(self, batches: Sequence[Sequence[Row]]) -> list[bytes]:
        """See `Critic.values`."""
        if self._critic is None:
            raise Fatal("this engine was made without a critic")
        self._resting.wake_weights()
        return [column for rows in batches for column in self._critic.values(rows)]

    def accumulate(self, batches: Sequence[Sequence[Row]], loss: LossFn) -> dict[str, float]:
        """See `PolicyEngine.accumulate`."""
        self._resting.wake_weights()
        numbers: dict[str, float] = {}
        for rows in batches:
            reference = self._reference_column(rows)
            with self._adapter.training() if self._adapter else nullcontext():
                logprobs = self._forward(rows)
            proximal = torch_rows.proximal(rows)
            batch = TokenBatch(
                logprobs,
                self._column(torch_rows.sampled(rows)),
                self._column(torch_rows.advantages(rows)),
                tuple(torch_rows.lengths(rows)),
                None if proximal is None else self._column(proximal),
                reference,
            )
            total, part = loss(batch)
            if not torch.isfinite(total):
                raise NotFinite(f"the loss is {total.item()}")
            total.backward()  # type: ignore[no-untyped-call]  # torch has no annotation there
            self._divisor += int(part["divisor"])
            sums.add(numbers, {**part, "padded_tokens": n_padded(rows)})
            if self._critic is not None:
                sums.add(numbers, self._critic.accumulate(rows))
        return numbers

    def step(self, learning_rate: float) -> float:
        """See `PolicyEngine.step`."""
        if not self._divisor:
            return 0.0
        self._resting.wake()
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.div_(self._divisor)
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._spec.grad_clip))
        critic_norm = self._critic.clip() if self._critic is not None else 0.0
        self._divisor = 0
        if not np.isfinite(norm + critic_norm):
            self._optimizer.zero_grad()
            if self._critic is not None:
                self._critic.forget()
            raise NotFinite(f"the gradient's norm is {norm}" + f", the critic's {critic_norm}" * bool(self._critic))
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._critic is not None:
            self._critic.step(learning_rate / self._spec.lr)
        return norm

    def export_shards(self, what: Exported = "model") -> Iterator[Shard]:
        """See `PolicyEngine.export_shards`."""
        if what == "adapter":
            return shards_of((name, tensor.detach()) for name, tensor in self._trained.items())
        return shards_of((name, self._exported(name, tensor.detach(), what)) for name, tensor in self._tensors.items())

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

    def snapshot(self) -> Snapshot:
        """See `PolicyEngine.snapshot`."""
        write = captured(self._trained, self._optimizer, self._device)
        return write if self._critic is None else in_turn(write, self._critic.snapshot())

    def load(self, directory: Path) -> None:
        """See `PolicyEngine.load`."""
        self._resting.wake()
        load_state(directory, self._trained, self._optimizer, self._device)
        if self._critic is not None:
            self._critic.load(directory)
        self.rest()

    def rest(self) -> None:
        """See `PolicyEngine.rest`."""
        self._resting.rest()

    def close(self) -> None:
        """See `PolicyEngine.close`."""
        self._adapter = self._reference = self._critic = None
        for name in ("_resting", "_optimizer", "_parameters", "_trained", "_tensors", "_model"):
            self.__dict__.pop(name, None)

    def _exported(self, name: str, value: Tensor, what: Exported) -> Tensor:
        if self._adapter and what == "model":
            value = self._adapter.merged(name, value)
        return value.to(self._dtype) if value.is_floating_point() else value

    def _reference_column(self, rows: Sequence[Row]) -> Tensor | None:
        """Return what the weights of the job's beginning say, which the rows may have already, for the loss."""
        if (known := torch_rows.reference(rows)) is not None:
            return self._column(known)
        return self._starting_logprobs(rows) if self._keeps_reference else None

    def _starting_logprobs(self, rows: Sequence[Row]) -> Tensor:
        """Return what the weights of the job's beginning say of all completion tokens, [tokens]."""
        with torch.no_grad(), self._adapter.without() if self._adapter else nullcontext():
            return self._forward(rows, self._reference)

    def _forward(self, rows: Sequence[Row], model: Any = None) -> Tensor:
        """Return the log-probabilities of all completion tokens, row after row, [tokens]."""
        ids, predicts = torch_rows.padded(rows)
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
