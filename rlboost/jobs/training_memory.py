"""What an update of the torch backend holds on each GPU, by purpose; `memory` has the trainer's state.

Tests compare these bytes with what torch saves for the backward pass. A CUDA context, libraries' workspaces and
fragmentation come on top.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from rlboost.jobs.memory import TrainedModel, added_parameters, state_bytes, trained_model
from rlboost.jobs.model_path import is_hub_id, nearest
from rlboost.jobs.model_size import ModelSize, size_of
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.spec import JobSpec
from rlboost.shared.job.training import TrainerSpec
from rlboost.shared.model.folder import read_config
from rlboost.shared.model.logit_limits import CHUNK_LOGITS, MAX_LOGITS


class Estimate(NamedTuple):
    """The memory of a job's training."""

    parameters: int
    active_parameters: int
    """Parameters that compute one token; fewer than all in a mixture of experts."""
    gpus: int
    tokens: int
    """Tokens of one GPU's part of a micro-batch."""
    bytes: dict[str, int]
    """Purpose -> bytes on each GPU, and `total`; only `state` where the rest is unknown."""


def estimate(spec: JobSpec, longest_sample: int = 0) -> Estimate:
    """Return the memory of a job whose model is a local folder, of which only `config.json` is read.

    Args:
        spec: the job.
        longest_sample: tokens of the longest sample with its prompt; 0: `sampling.max_tokens`, and with `kind: sft`,
            whose samples are not known here, a GPU's part of a micro-batch.

    Raises:
        ConfigError: the job trains nothing, or the model is not a local folder, or of an unknown kind.

    """
    if spec.kind == "eval":
        raise ConfigError("a job of kind eval trains nothing: give a job of kind rl or sft")
    folder = Path(spec.model).expanduser()
    if not folder.is_dir():
        raise ConfigError(_no_folder(spec.model))
    config = read_config(folder)
    size, trainer = size_of(config.get("text_config", config)), spec.trainer
    longest_sample = longest_sample or (spec.sampling.max_tokens if spec.kind == "rl" else 0)
    n_tokens = max(trainer.micro_batch_tokens // trainer.data_parallel, longest_sample)
    n_tokens = -(-n_tokens // trainer.context_parallel)
    model = trained_model(spec, size.total, size.in_experts, added_parameters(spec, size))
    if spec.adapter is not None or trainer.backend == "megatron":
        found = {"state": state_bytes(model, trainer)}
    else:
        update = update_memory(size, model, trainer, n_tokens)
        found = {**update._asdict(), "total": update.total}
    return Estimate(size.total, size.active, trainer.n_ranks, n_tokens, found)


def _no_folder(model: str) -> str:
    if is_hub_id(model):
        how = f"download its settings: 'hf download {model} config.json --local-dir DIR', and add model=DIR"
    else:
        how = "name the folder with the model's config.json" + (f" ({found})" if (found := nearest(model)) else "")
    return f"model: there is no folder {model}: {how}"


class UpdateMemory(NamedTuple):
    """Bytes on each GPU at the peak of an update."""

    state: int
    """Weights, gradients, moments, the reference model, and a critic."""
    activations: int
    """Saved for the backward pass."""
    recomputed_layer: int
    """Activations of the layer that is being recomputed, with activation checkpointing."""
    logits: int
    """Logits of a chunk of tokens, their gradient, and a part of both in float32."""
    working_weights: int
    """Weights in bfloat16 for matrix products; with FSDP2, gathered weights."""

    @property
    def total(self) -> int:
        """Return the peak: logits are freed before a layer is recomputed."""
        return self.state + self.activations + self.working_weights + max(self.logits, self.recomputed_layer)


def update_memory(size: ModelSize, model: TrainedModel, spec: TrainerSpec, n_tokens: int) -> UpdateMemory:
    """Return the bytes of an update.

    Args:
        size: sizes of the model.
        model: what is trained.
        spec: the job file's section `trainer`, of the torch backend.
        n_tokens: number of tokens in one GPU's part of a micro-batch, all of them trained.

    """
    half = spec.dtype == "bfloat16"
    layer = n_tokens * token_bytes(size, half=half)
    checkpointed = spec.activation_checkpointing
    activations = size.layers * (4 * n_tokens * size.hidden if checkpointed else layer)
    activations += 12 * n_tokens * size.hidden  # the last norm
    n_logits = n_tokens * size.vocabulary
    logits = 2 * (2 if half else 4) * min(MAX_LOGITS, n_logits)
    # Their softmax; in bfloat16 also a copy of them.
    logits += (2 if half else 1) * 4 * min(CHUNK_LOGITS, n_logits)
    n_cast = (1 if checkpointed else size.layers) * size.layer + size.vocabulary * size.hidden
    working = 2 * n_cast if half else 0
    if spec.n_shards > 1:
        # The root's own parameters stay gathered for the whole pass, a layer's while it computes.
        working += 4 * (size.embeddings + size.layer)
    return UpdateMemory(state_bytes(model, spec), activations, layer if checkpointed else 0, logits, working)


def token_bytes(size: ModelSize, *, half: bool) -> int:
    """Return what a layer saves of each token for its backward pass; `half`: with matrices in bfloat16.

    Norms save their input and two intermediate results in float32; attention its queries, keys, values and output; a
    gated MLP four results as wide as itself; experts also each token's input and output, once per expert.
    """
    element = 2 if half else 4
    saved = (26 if half else 24) * size.hidden + 2 * element * (size.query + size.key)
    if size.qk_norm:
        saved += (6 if half else 8) * (size.query + size.key)
    saved += 4 * element * size.mlp * max(1, size.experts_per_token)
    return saved + 2 * element * size.hidden * size.experts_per_token + 4 * size.experts
