"""A critic trained with plain torch: the base model without its output head, and a head of one value per token.

It is a network of its own, so that updates of the policy do not change the critic's features.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModel

from rlboost.services.trainer.adapters.torch import batch
from rlboost.services.trainer.adapters.torch.activation_checkpointing import checkpoint_activations
from rlboost.services.trainer.adapters.torch.attention_choice import attention_of
from rlboost.services.trainer.adapters.torch.compilation import compile_layers
from rlboost.services.trainer.adapters.torch.experts import EXPERTS
from rlboost.services.trainer.adapters.torch.logprobs import in_dtype
from rlboost.services.trainer.adapters.torch.packing import model_inputs, packs_rows, select_rows
from rlboost.services.trainer.adapters.torch.state import load_state, snapshot_of
from rlboost.services.trainer.domain.batches.training_row import TrainingRow
from rlboost.services.trainer.domain.loss.value import value_loss
from rlboost.services.trainer.ports.engine import Snapshot
from rlboost.shared.errors import ConfigError, Corrupt
from rlboost.shared.job.algorithm import CriticSpec

_PREFIX = "critic-"
"""Prefix of its files in a checkpoint."""


class TorchCritic:
    """Predicts the return before each completion token, trained with AdamW.

    Weights and optimizer are in float32. With `bfloat16` matrices are multiplied in bfloat16, except the head.
    """

    def __init__(
        self,
        source: Path,
        spec: CriticSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
        activation_checkpointing: bool = False,
        compiled: bool = False,
    ) -> None:
        """Load the base model in `source` and add a head of zeros, so that every value is 0.

        Raises:
            ConfigError: the directory holds no model with a hidden size.

        """
        self._spec = spec
        self._dtype = dtype
        self._device = device
        try:
            config = AutoConfig.from_pretrained(source, local_files_only=True)
            body = AutoModel.from_pretrained(
                source,
                config=config,
                dtype=torch.float32,
                attn_implementation=attention_of(config),
                experts_implementation=EXPERTS,
                local_files_only=True,
            )
            width = int(body.config.get_text_config().hidden_size)
        except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as error:
            raise ConfigError(f"model {source} cannot be loaded as a critic: {error}") from error
        self._packs = packs_rows(body)
        self._body: Any = body.to(device).eval()
        if compiled:
            compile_layers(self._body, str(device))
        if activation_checkpointing:
            checkpoint_activations(self._body)
        self._weight = torch.zeros(width, device=device, requires_grad=True)
        self._bias = torch.zeros((), device=device, requires_grad=True)
        self.trained = {
            **{f"body.{name}": tensor for name, tensor in self._body.named_parameters()},
            "head.weight": self._weight,
            "head.bias": self._bias,
        }
        """All trained tensors, by name."""
        self.optimizer = torch.optim.AdamW(
            self.trained.values(), lr=spec.lr, betas=spec.betas, weight_decay=spec.weight_decay, fused=True
        )
        self._n_tokens = 0

    def values(self, rows: Sequence[TrainingRow]) -> list[bytes]:
        """Return one float32 column per row: the value before each completion token."""
        with torch.no_grad():
            return batch.columns(rows, self._forward(rows))

    def accumulate(self, rows: Sequence[TrainingRow]) -> dict[str, float]:
        """Add a micro-batch's unnormalized gradients; return its metrics, for `sums.add`.

        The metrics are `value_loss` and `value_clipped`, the number of clipped tokens. Rows need `values` and
        `returns`. A loss that is not finite shows in the gradients' norm.
        """
        values = self._forward(rows)
        before, returns = (torch.tensor(column, device=self._device) for column in batch.values(rows))
        clip = None if self._spec.value_clip == "off" else self._spec.value_clip
        losses, clipped = value_loss(values, before, returns, clip)
        total = losses.sum()
        total.backward()
        self._n_tokens += len(losses)
        return {"value_loss": total.item(), "value_clipped": float(clipped.sum())}

    def clip(self) -> float:
        """Divide the accumulated gradients by the number of tokens and clip them; return their norm before clipping."""
        for tensor in self.trained.values():
            if tensor.grad is not None:
                tensor.grad.div_(self._n_tokens)
        return float(torch.nn.utils.clip_grad_norm_(self.trained.values(), self._spec.grad_clip))

    def step(self, fraction: float) -> None:
        """Apply the clipped gradients at `fraction` of the learning rate, and zero them."""
        for group in self.optimizer.param_groups:
            group["lr"] = fraction * self._spec.lr
        self.optimizer.step()
        self.zero_gradients()

    def zero_gradients(self) -> None:
        """Drop the accumulated gradients."""
        self.optimizer.zero_grad()
        self._n_tokens = 0

    def snapshot(self) -> Snapshot:
        """Copy weights and moments to host memory; return a writer of the copy. See `PolicyEngine.snapshot`."""
        return snapshot_of(self.trained, [self.optimizer], prefix=_PREFIX)

    def load(self, directory: Path) -> None:
        """Read what a snapshot wrote, and drop the accumulated gradients.

        Raises:
            Corrupt: it does not match this critic.

        """
        self.zero_gradients()
        try:
            load_state(directory, self.trained, [self.optimizer], prefix=_PREFIX)
        except Corrupt as error:
            raise Corrupt(f"the critic in {error}") from error

    def _forward(self, rows: Sequence[TrainingRow]) -> Tensor:
        """Return the values before all trained tokens, row by row, [tokens]."""
        packed = batch.packed(rows)
        ids, positions = (torch.from_numpy(part).to(self._device) for part in (packed.ids, packed.predicts))
        with in_dtype(self._dtype, self._device):
            hidden: Tensor = self._body(**model_inputs(packed, ids, packs=self._packs)).last_hidden_state
        return select_rows(hidden[0], positions).float() @ self._weight + self._bias
