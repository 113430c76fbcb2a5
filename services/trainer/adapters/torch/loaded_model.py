"""A model on one device, with everything that trains it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from rlboost.services.trainer.adapters.torch.activation_checkpointing import checkpoint_activations
from rlboost.services.trainer.adapters.torch.attention_choice import attention_of
from rlboost.services.trainer.adapters.torch.batch import DUMMY_ROWS
from rlboost.services.trainer.adapters.torch.compilation import compile_layers
from rlboost.services.trainer.adapters.torch.critic import TorchCritic
from rlboost.services.trainer.adapters.torch.experts import EXPERTS
from rlboost.services.trainer.adapters.torch.logprobs import LogprobPass
from rlboost.services.trainer.adapters.torch.lora import Adapter
from rlboost.services.trainer.adapters.torch.offload import Offloader
from rlboost.services.trainer.adapters.torch.optimizers import optimizers
from rlboost.services.trainer.adapters.torch.state import without_aliases
from rlboost.services.trainer.domain.batches.training_row import SequenceRow
from rlboost.services.trainer.ports.policy_settings import PolicySettings
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.training import LoraSpec
from rlboost.shared.model.experts import require_known_experts, require_mixture
from rlboost.shared.model.folder import read_config, require_unquantized


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What `load_model` builds."""

    model: Any
    """A causal language model of transformers."""
    reference: Any
    """A frozen copy of it; None if losses need none, or if an adapter is trained."""
    tensors: Mapping[str, Tensor]
    """The model's tensors; those that share memory once, as Hugging Face saves them."""
    adapter: Adapter | None
    trained: Mapping[str, Tensor]
    """The tensors of a checkpoint: the adapter's, or else the model's."""
    parameters: Sequence[Tensor]
    """The tensors of `trained` that the optimizers update."""
    optimizers: Sequence[torch.optim.Optimizer]
    critic: TorchCritic | None
    forward: LogprobPass
    forward_reference: LogprobPass
    """Passes of the copy, or of the model if there is no copy."""
    offloader: Offloader

    def reference_logprobs(self, rows: Sequence[SequenceRow]) -> Tensor:
        """Return the log-probabilities of all trained tokens under the weights that were loaded, [tokens]."""
        with torch.no_grad(), self.adapter.without() if self.adapter else nullcontext():
            return self.forward_reference(rows)


def load_model(source: Path, settings: PolicySettings, device: torch.device) -> LoadedModel:
    """Load a model of transformers, and build what trains it.

    Raises:
        ConfigError: the directory holds no trainable causal language model, or does not support the settings.

    """
    dtype: torch.dtype = getattr(torch, settings.dtype)
    balances = bool(settings.router_aux_loss_coef)
    # In evaluation mode: with dropout the trained distribution would differ from the sampled one.
    model = _causal_language_model(source, settings, dtype).to(device).eval()
    tensors = trained = without_aliases(model.state_dict(keep_vars=True))
    adapter, reference = None, None
    if settings.lora is not None:
        adapter = _adapter(model, tensors, settings.lora, settings.seed)
        trained = adapter.tensors
    elif settings.reference:
        reference = copy.deepcopy(model).requires_grad_(False)
    if settings.compile:
        torch.compiler.reset()  # the code of earlier jobs counts towards torch's limit of variants
        compile_layers(model, str(device))
    if settings.activation_checkpointing:
        checkpoint_activations(model)
    forward = _logprob_pass(model, settings, dtype, device, balances=balances)
    forward_reference = forward if reference is None else _logprob_pass(reference, settings, dtype, device)
    parameters = [tensor for tensor in trained.values() if tensor.requires_grad]
    own_optimizers = optimizers(model, parameters, settings.optimizer)
    critic = None
    if settings.critic is not None:
        critic = TorchCritic(
            source,
            settings.critic,
            dtype=dtype,
            device=device,
            activation_checkpointing=settings.activation_checkpointing,
            compiled=settings.compile,
        )
    if settings.replayed or balances:
        with torch.no_grad():
            forward(DUMMY_ROWS)  # which checks the routers
    weights = [*model.parameters(), *(reference.parameters() if reference is not None else ())]
    to_offload = list(own_optimizers)
    if critic is not None:
        weights += critic.trained.values()
        to_offload.append(critic.optimizer)
    return LoadedModel(
        model=model,
        reference=reference,
        tensors=tensors,
        adapter=adapter,
        trained=trained,
        parameters=parameters,
        optimizers=own_optimizers,
        critic=critic,
        forward=forward,
        forward_reference=forward_reference,
        offloader=Offloader(weights, to_offload, device, settings.offload),
    )


def _causal_language_model(source: Path, settings: PolicySettings, dtype: torch.dtype) -> Any:
    transformers_logging.disable_progress_bar()
    require_unquantized(read_config(source))
    require_known_experts(source)
    if settings.router_aux_loss_coef:
        require_mixture(source, "trainer.router_aux_loss_coef")
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=True)
        return AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=dtype if settings.lora else torch.float32,
            attn_implementation=attention_of(config),
            experts_implementation=EXPERTS,
            local_files_only=True,
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(f"model {source} cannot be loaded as a causal language model: {error}") from error


def _adapter(model: Any, tensors: Mapping[str, Tensor], spec: LoraSpec, seed: int) -> Adapter:
    adapter = Adapter(model, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, spec)
    values = adapter.initial_values(seed)
    with torch.no_grad():
        for name, tensor in adapter.tensors.items():
            tensor.copy_(values[name])
    torch.manual_seed(seed)  # of its dropout
    return adapter


def _logprob_pass(
    model: Any, settings: PolicySettings, dtype: torch.dtype, device: torch.device, *, balances: bool = False
) -> LogprobPass:
    return LogprobPass(
        model,
        temperature=settings.temperature,
        dtype=dtype,
        device=device,
        max_logits=settings.max_logits,
        replayed=settings.replayed,
        balances=balances,
    )
