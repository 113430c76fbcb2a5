"""A policy trained with torch in one process: a causal language model of transformers, or a LoRA adapter on it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from rlboost.services.trainer.adapters.shard_tensors import tensor_of
from rlboost.services.trainer.adapters.torch.batch import columns, token_batch
from rlboost.services.trainer.adapters.torch.loaded_model import LoadedModel, load_model
from rlboost.services.trainer.adapters.torch.packing import one_row_each, packs_rows
from rlboost.services.trainer.adapters.torch.state import load_state, shards_of, snapshot_of, write_all
from rlboost.services.trainer.domain.batches.training_row import SequenceRow, TrainingRow
from rlboost.services.trainer.domain.loss import sums
from rlboost.services.trainer.domain.loss.inputs import LossFn
from rlboost.services.trainer.ports.engine import Exported, Loaded, NotFinite, Snapshot
from rlboost.services.trainer.ports.policy_settings import PolicySettings
from rlboost.shared.errors import Fatal
from rlboost.shared.model.experts import split_experts
from rlboost.shared.weights.shards import Shard

R = TypeVar("R", bound=SequenceRow)


class TorchPolicy:
    """`PolicyEngine` on one device.

    With `bfloat16` the weights and the optimizer stay in float32, because updates at small learning rates would round
    to nothing. Matrices are multiplied in bfloat16 and exported weights are rounded to it. With an adapter the frozen
    weights are in `dtype`, in which they are published; the adapter is trained and exported in float32.
    """

    def __init__(self, settings: PolicySettings, *, device: str) -> None:
        """Hold the settings, and the name of a torch device; `load_hf` creates the model."""
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)
        self.settings = settings
        self._device = torch.device(device)
        self._loaded: LoadedModel | None = None
        self._divisor = 0

    @property
    def loaded(self) -> LoadedModel:
        """The model that `load_hf` loaded."""
        assert self._loaded is not None, "call load_hf first"
        return self._loaded

    def load_hf(self, source: Path) -> None:
        """See `PolicyEngine.load_hf`."""
        self._loaded, self._divisor = None, 0  # frees the memory of an earlier one
        self._loaded = load_model(source, self.settings, self._device)
        self.offload()

    @property
    def adapter_json(self) -> str:
        """See `PolicyEngine.adapter_json`."""
        return self._loaded.adapter.json if self._loaded and self._loaded.adapter else ""

    def logprobs(self, batches: Sequence[Sequence[SequenceRow]]) -> list[bytes]:
        """See `PolicyEngine.logprobs`."""
        loaded = self.loaded
        loaded.offloader.onload_weights()
        with torch.no_grad():
            return [column for rows in self._micro_batches(batches) for column in columns(rows, loaded.forward(rows))]

    def reference_logprobs(self, batches: Sequence[Sequence[SequenceRow]]) -> list[bytes]:
        """See `PolicyEngine.reference_logprobs`."""
        if not self.settings.reference:
            raise Fatal("this engine has no reference model: construct it with PolicySettings.reference")
        loaded = self.loaded
        loaded.offloader.onload_weights()
        return [
            column for rows in self._micro_batches(batches) for column in columns(rows, loaded.reference_logprobs(rows))
        ]

    def values(self, batches: Sequence[Sequence[SequenceRow]]) -> list[bytes]:
        """See `Critic.values`."""
        if (critic := self.loaded.critic) is None:
            raise Fatal("this engine has no critic: construct it with PolicySettings.critic")
        self.loaded.offloader.onload_weights()
        return [column for rows in self._micro_batches(batches) for column in critic.values(rows)]

    def accumulate(self, batches: Sequence[Sequence[TrainingRow]], loss: LossFn) -> dict[str, float]:
        """See `PolicyEngine.accumulate`."""
        loaded, coefficient = self.loaded, self.settings.router_aux_loss_coef
        loaded.offloader.onload_weights()
        totals: dict[str, float] = {}
        for rows in self._micro_batches(batches):
            needs_reference = self.settings.reference and not all(row.reference for row in rows)
            reference = loaded.reference_logprobs(rows) if needs_reference else None
            # Covers backward too, where layers may be recomputed.
            with loaded.adapter.training() if loaded.adapter else nullcontext():
                logprobs = loaded.forward(rows)
                total, metrics = loss(token_batch(rows, logprobs, reference))
                if (balance := loaded.forward.balance) is not None:
                    if coefficient:
                        total = total + coefficient * metrics["divisor"] * balance.loss
                    metrics |= balance.sums()
                if not torch.isfinite(total):
                    raise NotFinite(f"the loss is {total.item()}")
                total.backward()
            self._divisor += int(metrics["divisor"])
            sums.add(totals, metrics)
            if loaded.critic is not None:
                sums.add(totals, loaded.critic.accumulate(rows))
        return totals

    def step(self, learning_rate: float) -> float:
        """See `PolicyEngine.step`."""
        if not self._divisor:
            return 0.0
        loaded, critic = self.loaded, self.loaded.critic
        loaded.offloader.onload()
        for parameter in loaded.parameters:
            if parameter.grad is not None:
                parameter.grad.div_(self._divisor)
        norm = float(torch.nn.utils.clip_grad_norm_(loaded.parameters, self.settings.optimizer.grad_clip))
        critic_norm = critic.clip() if critic is not None else 0.0
        if not np.isfinite(norm + critic_norm):
            self._zero_gradients()
            if critic is not None:
                critic.zero_gradients()
            critic_part = f", the critic's {critic_norm}" if critic is not None else ""
            raise NotFinite(f"the gradient's norm is {norm}{critic_part}")
        for optimizer in loaded.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()
        self._zero_gradients()
        if critic is not None:
            critic.step(learning_rate / self.settings.optimizer.lr)
        return norm

    def export_shards(self, what: Exported = "model") -> Iterator[Shard]:
        """See `PolicyEngine.export_shards`."""
        if what == "adapter":
            return shards_of((name, tensor.detach()) for name, tensor in self.loaded.trained.items())
        return shards_of(_exported(self.loaded, what, getattr(torch, self.settings.dtype)))

    def load_shards(self, shards: Iterable[Shard], what: Loaded = "base") -> None:
        """See `PolicyEngine.load_shards`."""
        tensors = split_experts(self.loaded.tensors) if what == "base" else self.loaded.trained
        missing = set(tensors)
        for shard in shards:
            tensor = tensors.get(shard.name)
            if tensor is None or tuple(tensor.shape) != shard.local_shape:
                raise Fatal(f"tensor {shard.name} of shape {list(shard.local_shape)} does not belong to this model")
            with torch.no_grad():
                tensor.copy_(tensor_of(shard))
            missing.discard(shard.name)
        if missing:
            raise Fatal(f"the weights lack {len(missing)} tensors of this model, {min(missing)} among them")

    def snapshot(self) -> Snapshot:
        """See `PolicyEngine.snapshot`."""
        loaded = self.loaded
        write = snapshot_of(loaded.trained, loaded.optimizers, generators=self._device)
        return write if loaded.critic is None else write_all(write, loaded.critic.snapshot())

    def drop_snapshot(self) -> None:
        """See `PolicyEngine.drop_snapshot`. The copy is in memory, and ends with the function that writes it."""

    def load(self, directory: Path) -> None:
        """See `PolicyEngine.load`."""
        loaded = self.loaded
        loaded.offloader.onload()
        self._zero_gradients()
        load_state(directory, loaded.trained, loaded.optimizers, generators=self._device)
        if loaded.critic is not None:
            loaded.critic.load(directory)
        self.offload()

    def offload(self) -> None:
        """See `PolicyEngine.offload`."""
        self.loaded.offloader.offload()

    def close(self) -> None:
        """See `PolicyEngine.close`."""
        self._loaded = None

    def _micro_batches(self, batches: Sequence[Sequence[R]]) -> Sequence[Sequence[R]]:
        return batches if packs_rows(self.loaded.model) else one_row_each(batches)

    def _zero_gradients(self) -> None:
        """Drop the policy's accumulated gradients."""
        self._divisor = 0
        for optimizer in self.loaded.optimizers:
            optimizer.zero_grad()


def _exported(loaded: LoadedModel, what: Exported, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the model, or of the `base` below its adapter, as they are published."""
    buffers = {name for name, _ in loaded.model.named_buffers()}
    for name, tensor in split_experts(loaded.tensors).items():
        value = tensor.detach()
        if loaded.adapter and what == "model":
            value = loaded.adapter.merged(name, value)
        # Engines have buffers, such as the biases of expert selection, in full precision too.
        yield name, value.to(dtype) if value.is_floating_point() and name not in buffers else value
