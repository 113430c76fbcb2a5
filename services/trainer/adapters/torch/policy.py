"""A policy trained with torch in one process: a causal language model of transformers, or a LoRA adapter on it."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from rlboost.services.trainer.adapters.torch.activation_checkpointing import checkpoint_activations
from rlboost.services.trainer.adapters.torch.attention_choice import attention_of
from rlboost.services.trainer.adapters.torch.batch import DUMMY_ROWS, columns, token_batch
from rlboost.services.trainer.adapters.torch.compilation import compile_layers
from rlboost.services.trainer.adapters.torch.critic import TorchCritic
from rlboost.services.trainer.adapters.torch.experts import EXPERTS
from rlboost.services.trainer.adapters.torch.logprobs import LogprobPass
from rlboost.services.trainer.adapters.torch.lora import Adapter
from rlboost.services.trainer.adapters.torch.offload import Offloader
from rlboost.services.trainer.adapters.torch.optimizers import optimizers
from rlboost.services.trainer.adapters.torch.packing import one_row_each, packs_rows
from rlboost.services.trainer.adapters.torch.state import load_state, shards_of, snapshot_of, without_aliases, write_all
from rlboost.services.trainer.domain.batches.training_row import SequenceRow, TrainingRow
from rlboost.services.trainer.domain.loss import sums
from rlboost.services.trainer.domain.loss.inputs import LossFn
from rlboost.services.trainer.ports.engine import Exported, Loaded, NotFinite, Snapshot
from rlboost.services.trainer.ports.policy_settings import PolicySettings
from rlboost.shared.errors import ConfigError, Fatal
from rlboost.shared.job.training import LoraSpec
from rlboost.shared.model.experts import require_known_experts, require_mixture, split_experts
from rlboost.shared.model.folder import read_config, require_unquantized
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
        self._dtype: torch.dtype = getattr(torch, settings.dtype)
        self._device = torch.device(device)
        self._critic: TorchCritic | None = None
        self._adapter: Adapter | None = None
        self._reference: Any = None
        self._divisor = 0

    def load_hf(self, source: Path) -> None:
        """See `PolicyEngine.load_hf`."""
        transformers_logging.disable_progress_bar()
        require_unquantized(read_config(source))
        require_known_experts(source)
        if self.settings.router_aux_loss_coef:
            require_mixture(source, "trainer.router_aux_loss_coef")
        try:
            config = AutoConfig.from_pretrained(source, local_files_only=True)
            model = AutoModelForCausalLM.from_pretrained(
                source,
                config=config,
                dtype=self._dtype if self.settings.lora else torch.float32,
                attn_implementation=attention_of(config),
                experts_implementation=EXPERTS,
                local_files_only=True,
            )
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ConfigError(f"model {source} cannot be loaded as a causal language model: {error}") from error
        self._packs = packs_rows(model)
        # In evaluation mode: with dropout the trained distribution would differ from the sampled one.
        self._model: Any = model.to(self._device).eval()
        self._tensors = self._trained = without_aliases(self._model.state_dict(keep_vars=True))
        self._buffers = {name for name, _ in self._model.named_buffers()}
        if self.settings.lora is not None:
            self._adapter = self._new_adapter(self.settings.lora)
            self._trained = self._adapter.tensors
        elif self.settings.reference:
            self._reference = copy.deepcopy(self._model).requires_grad_(False)
        if self.settings.compile:
            torch.compiler.reset()  # the code of earlier jobs counts towards torch's limit of variants
            compile_layers(self._model, str(self._device))
        if self.settings.activation_checkpointing:
            checkpoint_activations(self._model)
        self._forward = self._logprob_pass(self._model, balances=bool(self.settings.router_aux_loss_coef))
        self._forward_reference = self._forward if self._reference is None else self._logprob_pass(self._reference)
        self._parameters = [tensor for tensor in self._trained.values() if tensor.requires_grad]
        self._optimizers = optimizers(self._model, self._parameters, self.settings.optimizer)
        self._zero_gradients()
        if self.settings.critic is not None:
            self._critic = TorchCritic(
                source,
                self.settings.critic,
                dtype=self._dtype,
                device=self._device,
                activation_checkpointing=self.settings.activation_checkpointing,
                compiled=self.settings.compile,
            )
        models = [self._model, *([self._reference] if self._reference is not None else [])]
        weights = [parameter for model in models for parameter in model.parameters()]
        optimizers_to_offload = list(self._optimizers)
        if self._critic is not None:
            weights += self._critic.trained.values()
            optimizers_to_offload.append(self._critic.optimizer)
        if self.settings.replayed or self.settings.router_aux_loss_coef:
            with torch.no_grad():
                self._forward(DUMMY_ROWS)  # which checks the routers
        self._offloader = Offloader(weights, optimizers_to_offload, self._device, self.settings.offload)
        self.offload()

    @property
    def adapter_json(self) -> str:
        """See `PolicyEngine.adapter_json`."""
        return self._adapter.json if self._adapter else ""

    def logprobs(self, batches: Sequence[Sequence[SequenceRow]]) -> list[bytes]:
        """See `PolicyEngine.logprobs`."""
        self._offloader.onload_weights()
        with torch.no_grad():
            return [column for rows in self._micro_batches(batches) for column in columns(rows, self._forward(rows))]

    def reference_logprobs(self, batches: Sequence[Sequence[SequenceRow]]) -> list[bytes]:
        """See `PolicyEngine.reference_logprobs`."""
        if not self.settings.reference:
            raise Fatal("this engine has no reference model: construct it with PolicySettings.reference")
        self._offloader.onload_weights()
        return [
            column for rows in self._micro_batches(batches) for column in columns(rows, self._reference_logprobs(rows))
        ]

    def values(self, batches: Sequence[Sequence[SequenceRow]]) -> list[bytes]:
        """See `Critic.values`."""
        if self._critic is None:
            raise Fatal("this engine has no critic: construct it with PolicySettings.critic")
        self._offloader.onload_weights()
        return [column for rows in self._micro_batches(batches) for column in self._critic.values(rows)]

    def accumulate(self, batches: Sequence[Sequence[TrainingRow]], loss: LossFn) -> dict[str, float]:
        """See `PolicyEngine.accumulate`."""
        self._offloader.onload_weights()
        totals: dict[str, float] = {}
        for rows in self._micro_batches(batches):
            reference = self._reference_logprobs(rows) if self.settings.reference and not _has_reference(rows) else None
            # Covers backward too, where layers may be recomputed.
            with self._adapter.training() if self._adapter else nullcontext():
                logprobs = self._forward(rows)
                total, metrics = loss(token_batch(rows, logprobs, reference))
                if (balance := self._forward.balance) is not None:
                    if self.settings.router_aux_loss_coef:
                        total = total + self.settings.router_aux_loss_coef * metrics["divisor"] * balance.loss
                    metrics |= balance.sums()
                if not torch.isfinite(total):
                    raise NotFinite(f"the loss is {total.item()}")
                total.backward()
            self._divisor += int(metrics["divisor"])
            sums.add(totals, metrics)
            if self._critic is not None:
                sums.add(totals, self._critic.accumulate(rows))
        return totals

    def step(self, learning_rate: float) -> float:
        """See `PolicyEngine.step`."""
        if not self._divisor:
            return 0.0
        self._offloader.onload()
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.div_(self._divisor)
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self.settings.optimizer.grad_clip))
        critic_norm = self._critic.clip() if self._critic is not None else 0.0
        if not np.isfinite(norm + critic_norm):
            self._zero_gradients()
            if self._critic is not None:
                self._critic.zero_gradients()
            raise NotFinite(f"the gradient's norm is {norm}" + f", the critic's {critic_norm}" * bool(self._critic))
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()
        self._zero_gradients()
        if self._critic is not None:
            self._critic.step(learning_rate / self.settings.optimizer.lr)
        return norm

    def export_shards(self, what: Exported = "model") -> Iterator[Shard]:
        """See `PolicyEngine.export_shards`."""
        if what == "adapter":
            return shards_of((name, tensor.detach()) for name, tensor in self._trained.items())
        tensors = split_experts(self._tensors)
        return shards_of((name, self._exported(name, tensor.detach(), what)) for name, tensor in tensors.items())

    def load_shards(self, shards: Iterable[Shard], what: Loaded = "base") -> None:
        """See `PolicyEngine.load_shards`."""
        tensors = split_experts(self._tensors) if what == "base" else self._trained
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
        write = snapshot_of(self._trained, self._optimizers, generators=self._device)
        return write if self._critic is None else write_all(write, self._critic.snapshot())

    def drop_snapshot(self) -> None:
        """See `PolicyEngine.drop_snapshot`. The copy is in memory, and ends with the function that writes it."""

    def load(self, directory: Path) -> None:
        """See `PolicyEngine.load`."""
        self._offloader.onload()
        self._zero_gradients()
        load_state(directory, self._trained, self._optimizers, generators=self._device)
        if self._critic is not None:
            self._critic.load(directory)
        self.offload()

    def offload(self) -> None:
        """See `PolicyEngine.offload`."""
        self._offloader.offload()

    def close(self) -> None:
        """See `PolicyEngine.close`."""
        self._adapter = self._reference = self._critic = None
        for name in (
            "_offloader",
            "_forward",
            "_forward_reference",
            "_optimizers",
            "_parameters",
            "_trained",
            "_tensors",
            "_model",
        ):
            self.__dict__.pop(name, None)

    def _new_adapter(self, spec: LoraSpec) -> Adapter:
        adapter = Adapter(self._model, {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}, spec)
        values = adapter.initial_values(self.settings.seed)
        with torch.no_grad():
            for name, tensor in adapter.tensors.items():
                tensor.copy_(values[name])
        torch.manual_seed(self.settings.seed)  # of its dropout
        return adapter

    def _micro_batches(self, batches: Sequence[Sequence[R]]) -> Sequence[Sequence[R]]:
        return batches if self._packs else one_row_each(batches)

    def _zero_gradients(self) -> None:
        """Drop the policy's accumulated gradients."""
        self._divisor = 0
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def _exported(self, name: str, value: Tensor, what: Exported) -> Tensor:
        if self._adapter and what == "model":
            value = self._adapter.merged(name, value)
        # Engines have buffers, such as the biases of expert selection, in full precision too.
        return value.to(self._dtype) if value.is_floating_point() and name not in self._buffers else value

    def _reference_logprobs(self, rows: Sequence[SequenceRow]) -> Tensor:
        """Return the log-probabilities of all trained tokens under the weights that `load_hf` loaded, [tokens]."""
        with torch.no_grad(), self._adapter.without() if self._adapter else nullcontext():
            return self._forward_reference(rows)

    def _logprob_pass(self, model: Any, *, balances: bool = False) -> LogprobPass:
        return LogprobPass(
            model,
            temperature=self.settings.temperature,
            dtype=self._dtype,
            device=self._device,
            max_logits=self.settings.max_logits,
            replayed=self.settings.replayed,
            balances=balances,
        )


def _has_reference(rows: Sequence[TrainingRow]) -> bool:
    return all(row.reference for row in rows)
