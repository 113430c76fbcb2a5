"""A critic trained with plain torch in one process.

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

from rlboost.services.trainer.adapters.checkpoints.files import CRITIC_PREFIX
from rlboost.services.trainer.adapters.torch import batch
from rlboost.services.trainer.adapters.torch.activation_checkpointing import checkpoint_activations
from rlboost.services.trainer.adapters.torch.attention_choice import attention_of
from rlboost.services.trainer.adapters.torch.compilation import compile_layers
from rlboost.services.trainer.adapters.torch.experts import EXPERTS
from rlboost.services.trainer.adapters.torch.state import load_state, snapshot_of
from rlboost.services.trainer.adapters.torch.value_model import ValueModel, ValuePass, summed_value_loss
from rlboost.services.trainer.domain.batches.training_row import SequenceRow, TrainingRow
from rlboost.services.trainer.ports.engine import Snapshot
from rlboost.shared.errors import ConfigError, Corrupt
from rlboost.shared.job.algorithm import CriticSpec


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
        try:
            config = AutoConfig.from_pretrained(source, local_files_only=True)
            body: Any = AutoModel.from_pretrained(
                source,
                config=config,
                dtype=torch.float32,
                attn_implementation=attention_of(config),
                experts_implementation=EXPERTS,
                local_files_only=True,
            )
            model = ValueModel(body.eval()).to(device)
        except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as error:
            raise ConfigError(f"model {source} cannot be loaded as a critic: {error}") from error
        if compiled:
            compile_layers(body, str(device))
        if activation_checkpointing:
            checkpoint_activations(body)
        self.forward = ValuePass(model, dtype=dtype, device=device)
        self.trained: dict[str, Tensor] = dict(model.named_parameters())
        """All trained tensors, by name."""
        self.optimizer = torch.optim.AdamW(
            self.trained.values(), lr=spec.lr, betas=spec.betas, weight_decay=spec.weight_decay, fused=True
        )
        self._n_tokens = 0

    def values(self, rows: Sequence[SequenceRow]) -> list[bytes]:
        """Return one float32 column per row: the value before each completion token."""
        with torch.no_grad():
            return batch.columns(rows, self.forward(rows))

    def accumulate(self, rows: Sequence[TrainingRow]) -> dict[str, float]:
        """Add a micro-batch's unnormalized gradients; return its metrics, for `sums.add`.

        They are those of `summed_value_loss`. A loss that is not finite shows in the gradients' norm.
        """
        values = self.forward(rows)
        total, metrics = summed_value_loss(rows, values, self._spec)
        total.backward()
        self._n_tokens += len(values)
        return metrics

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
        return snapshot_of(self.trained, [self.optimizer], prefix=CRITIC_PREFIX)

    def load(self, directory: Path) -> None:
        """Read what a snapshot wrote, and drop the accumulated gradients.

        Raises:
            Corrupt: it does not match this critic.

        """
        self.zero_gradients()
        try:
            load_state(directory, self.trained, [self.optimizer], prefix=CRITIC_PREFIX)
        except Corrupt as error:
            raise Corrupt(f"the critic in {error}") from error
