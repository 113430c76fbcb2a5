"""Bytes that a job needs on each GPU, from sizes alone. Pure; the figures are those of docs/gpu-memory.md.

These are lower bounds: activations, logits, CUDA contexts and libraries come on top.

The last part lists the GPUs that train and serve a model with common settings: those bytes plus a CUDA context.
Trainers: bfloat16, AdamW, activation checkpointing, and one micro-batch of as many tokens as the longest sample on each
GPU, all of them trained. Workers: vLLM with bfloat16 weights. Computed, not measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rlboost.jobs.hub import is_hub_id, nearest
from rlboost.jobs.vision_memory import TowerSize, tower_of
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.images import require_supported
from rlboost.shared.job.spec import JobSpec
from rlboost.shared.job.training import CHUNK_LOGITS, MAX_LOGITS, LoraSpec, TrainerSpec
from rlboost.shared.model.folder import read_config

# --- The sizes of a decoder from its Hugging Face configuration, without its weights. Pure ----------------------------


FAMILIES = ("llama", "mistral", "qwen2", "qwen2_5_vl", "qwen3", "qwen3_moe", "qwen3_vl")
"""Model types with grouped-query attention and a gated MLP or experts in every layer."""


@dataclass(frozen=True)
class ModelSize:
    """The dimensions that determine the number of weights and of activations."""

    layers: int
    hidden: int
    query: int
    """Heads times their size."""
    key: int
    """Key heads times their size."""
    mlp: int
    """Width of the MLP, or of one expert."""
    vocabulary: int
    tied: bool = False
    qk_norm: bool = False
    experts: int = 0
    """Experts per layer, 0 in a dense model."""
    experts_per_token: int = 0
    tower: TowerSize | None = None
    """Of a model that sees images."""

    @property
    def embeddings(self) -> int:
        """Return the parameters of the embedding and the output head."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def reward_model(self) -> int:
        """Return the parameters of a reward model: the output head is replaced by one of one score."""
        return self.total - (0 if self.tied else self.vocabulary * self.hidden) + self.hidden

    @property
    def critic(self) -> int:
        """Return the parameters of a critic, whose head has a bias."""
        return self.reward_model + 1

    @property
    def layer(self) -> int:
        """Return the parameters of a layer."""
        return self._layer(max(1, self.experts))

    @property
    def total(self) -> int:
        """Return all parameters, without biases and norms of heads."""
        return self.layers * self.layer + self.embeddings + self.hidden + self.in_tower

    @property
    def in_tower(self) -> int:
        """Return the parameters of the vision tower."""
        return self.tower.total if self.tower is not None else 0

    @property
    def in_experts(self) -> int:
        """Return the parameters of experts."""
        return self.layers * self.experts * 3 * self.hidden * self.mlp

    @property
    def active(self) -> int:
        """Return the parameters that compute one token of text."""
        return self.layers * self._layer(max(1, self.experts_per_token)) + self.embeddings + self.hidden

    def image_tokens(self, n_tokens: int, given: int | None = None) -> int:
        """Return how many of some tokens are of images: those given, or all, and none if the model sees no images.

        Raises:
            ConfigError: more are given.

        """
        most = n_tokens if self.tower is not None else 0
        if given is not None and given > most:
            raise ConfigError(f"{given} tokens of images: a micro-batch of this model has at most {most}: lower them")
        return most if given is None else given

    def _layer(self, n_experts: int) -> int:
        attention = self.hidden * 2 * (self.query + self.key)
        return attention + n_experts * 3 * self.hidden * self.mlp + self.experts * self.hidden + 2 * self.hidden


def adapter_parameters(size: ModelSize, lora: LoraSpec) -> int:
    """Return the parameters of an adapter: its rank times inputs and outputs of each layer that it adapts.

    Experts, which are one tensor per layer, have no adapter.
    """
    widths = {
        "self_attn.q_proj": size.hidden + size.query,
        "self_attn.k_proj": size.hidden + size.key,
        "self_attn.v_proj": size.hidden + size.key,
        "self_attn.o_proj": size.query + size.hidden,
    }
    if not size.experts:
        widths |= {f"mlp.{name}": size.hidden + size.mlp for name in ("gate_proj", "up_proj", "down_proj")}
    layers = {f"model.layers.{i}.{name}": width for i in range(size.layers) for name, width in widths.items()}
    targets = lora.targets
    adapted = [
        width
        for name, width in layers.items()
        if isinstance(targets, str) or any(f".{name}".endswith(f".{target}") for target in targets)
    ]
    return lora.rank * sum(adapted)


def size_of(config: Mapping[str, Any]) -> ModelSize:
    """Return the sizes that `config.json` describes.

    Raises:
        ConfigError: another kind of model, or a key is missing.

    """
    family, whole, config = config.get("model_type"), config, config.get("text_config", config)
    if family not in FAMILIES:
        raise ConfigError(f"model type {family}: its memory cannot be computed (known: {', '.join(FAMILIES)})")
    is_mixture = family == "qwen3_moe"
    if is_mixture and (config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1):
        raise ConfigError("mlp_only_layers, decoder_sparse_step: memory is computed for experts in every layer only")
    try:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        head_dim = config.get("head_dim") or hidden // heads
        return ModelSize(
            layers=config["num_hidden_layers"],
            hidden=hidden,
            query=heads * head_dim,
            key=(config.get("num_key_value_heads") or heads) * head_dim,
            mlp=config["moe_intermediate_size" if is_mixture else "intermediate_size"],
            vocabulary=config["vocab_size"],
            tied=whole.get("tie_word_embeddings", config.get("tie_word_embeddings", False)),
            qk_norm=family.startswith("qwen3"),
            experts=_n_experts(config) if is_mixture else 0,
            experts_per_token=config["num_experts_per_tok"] if is_mixture else 0,
            tower=tower_of(whole),
        )
    except KeyError as error:
        raise ConfigError(f"config.json has no {error.args[0]}: add it") from error


def _n_experts(config: Mapping[str, Any]) -> int:
    # transformers saves the key under another name than the models' authors.
    n: int = config["num_experts"] if "num_experts" in config else config["num_local_experts"]
    return n


# --- What a job needs on each GPU -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainedModel:
    """What determines the size of the trainer's state."""

    n_parameters: int
    frozen: bool = False
    """True if only an adapter is trained."""
    has_reference: bool = False
    """True if a frozen copy of the model is kept for a KL penalty or pairs."""
    has_entropies: bool = False
    """True if losses have an entropy bonus."""
    muon: bool = False
    n_in_experts: int = 0
    """How many of the parameters are in experts, which megatron's `expert_parallel` divides."""
    n_frozen: int = 0
    """How many of them are in towers that are not trained; only with torch, and without an adapter."""
    n_added: int = 0
    """Parameters of an adapter and of a critic, which AdamW trains in float32; only with torch."""
    n_teacher: int = 0
    """Parameters of a teacher, which is frozen."""
    scores: bool = False
    """True if it is a reward model, which has no logits."""
    n_reward_models: int = 0
    """Parameters of the reward models that score its completions, of all copies; on one GPU, whole."""


def added_parameters(spec: JobSpec, size: ModelSize) -> int:
    """Return the parameters of a job's adapter and of its critic."""
    n_added = adapter_parameters(size, spec.adapter) if spec.kind != "eval" and spec.adapter is not None else 0
    return n_added + (size.critic if spec.kind == "rl" and spec.algorithm.critic is not None else 0)


def teacher_parameters(spec: JobSpec) -> int:
    """Return the parameters of a teacher that the trainer holds, 0 without one.

    Raises:
        ConfigError: the teacher is not a local folder, or of an unknown kind.

    """
    if not spec.held_teacher:
        return 0
    return size_of(read_config(Path(spec.held_teacher).expanduser())).total


def scoring_parameters(spec: JobSpec) -> int:
    """Return the parameters of the reward models that score a job's completions, in all of its reward processes.

    Raises:
        ConfigError: one is not a local folder, or of an unknown kind.

    """
    configs = [read_config(Path(model).expanduser()) for model in spec.held_reward_models]
    n_processes = spec.reward.workers if spec.reward is not None else 0
    return n_processes * sum(size_of(config).reward_model for config in configs)


def trained_model(
    spec: JobSpec,
    n_parameters: int,
    n_in_experts: int = 0,
    n_added: int = 0,
    n_teacher: int = 0,
    n_reward_models: int = 0,
    *,
    n_in_tower: int = 0,
    trains_tower: bool = True,
) -> TrainedModel:
    """Return what a job trains.

    Args:
        spec: the job.
        n_parameters: number of the model's parameters.
        n_in_experts: how many of them are in experts.
        n_added: see `added_parameters`.
        n_teacher: see `teacher_parameters`.
        n_reward_models: see `scoring_parameters`.
        n_in_tower: how many parameters are in towers for images or sound.
        trains_tower: False if the family's towers are never trained.

    """
    return TrainedModel(
        n_parameters,
        frozen=spec.adapter is not None,
        has_reference=spec.needs_reference and spec.adapter is None and spec.teacher is None,
        has_entropies=spec.kind == "rl" and spec.algorithm.entropy_coef > 0,
        muon=spec.optimizer.name == "muon",
        n_in_experts=n_in_experts,
        n_frozen=n_in_tower if spec.adapter is None and (spec.trainer.freeze_vision_tower or not trains_tower) else 0,
        n_added=n_added,
        n_teacher=n_teacher,
        scores=spec.kind == "reward",
        n_reward_models=n_reward_models,
    )


def state_bytes(model: TrainedModel, spec: TrainerSpec) -> int:
    """Return weights, optimizer state and gradients on each of the trainer's GPUs during an update.

    Per parameter: 16 bytes in float32 (weights 4, AdamW's moments 8, gradients 4), with Muon 12; 18 with megatron in
    bfloat16 (a float32 master copy); 4 or 2 if frozen, of a teacher too, 4 in a frozen vision tower; 16 of an adapter
    or a critic. FSDP2 divides them by `fsdp_size`, by default `data_parallel` x `context_parallel`; megatron by
    `tensor_parallel` x `pipeline_parallel`, those of experts also by `expert_parallel`; moments and master copies by
    `data_parallel` x `context_parallel` with `distributed_optimizer`, of experts too.
    Reward models are whole on the first GPU, 4 or 2 bytes per parameter, also while engines generate.
    """
    n_split = spec.n_shards if spec.backend == "torch" else spec.tensor_parallel * spec.pipeline_parallel
    added = 16 * model.n_added / spec.n_shards + _frozen_width(spec) * model.n_teacher / n_split
    return math.ceil(_on_each_gpu(model, *_per_parameter(model, spec), spec) + added) + _scoring_bytes(model, spec)


def _frozen_width(spec: TrainerSpec) -> int:
    return 2 if spec.dtype == "bfloat16" else 4


def _scoring_bytes(model: TrainedModel, spec: TrainerSpec) -> int:
    return _frozen_width(spec) * model.n_reward_models


def generating_bytes(model: TrainedModel, spec: TrainerSpec) -> int:
    """Return what of that state stays on each GPU while reserved engines generate: `trainer.offload` moves the rest.

    Gradients, 4 bytes per parameter, exist only during an update; with megatron always, unless they are offloaded.
    """
    if spec.offload == "all":
        return _scoring_bytes(model, spec)
    stay = spec.backend == "megatron" and spec.offload == "none"
    gradients = 0.0 if model.frozen or stay else 4.0
    optimizer = _per_parameter(model, spec)[1] if spec.offload == "optimizer" else 0.0
    freed = _on_each_gpu(model, gradients, optimizer, spec)
    freed += (12 if spec.offload == "optimizer" else 4) * model.n_added / spec.n_shards
    return max(0, state_bytes(model, spec) - math.floor(freed))


def _per_parameter(model: TrainedModel, spec: TrainerSpec) -> tuple[float, float]:
    """Return bytes per parameter: of weights and gradients, and of the optimizer (moments and master copies)."""
    half = spec.dtype == "bfloat16"
    if model.frozen:
        weights, optimizer = (2.0 if half else 4.0), 0.0
    elif spec.backend == "megatron" and half:
        weights, optimizer = 6.0, 12.0
    else:
        weights, optimizer = 8.0, (4.0 if model.muon else 8.0)
    if model.has_reference:
        weights += 2.0 if spec.backend == "megatron" and half else 4.0
    return weights, optimizer


def _on_each_gpu(model: TrainedModel, weights: float, optimizer: float, spec: TrainerSpec) -> float:
    """Return bytes on each GPU for this many bytes per parameter: of weights and gradients, and of the optimizer."""
    if spec.backend == "torch":
        return (model.n_parameters * (weights + optimizer) - model.n_frozen * (4 + optimizer)) / spec.n_shards
    in_replica = model.n_parameters - model.n_in_experts * (1 - 1 / spec.expert_parallel)
    n_copies = spec.data_parallel * spec.context_parallel
    updated = model.n_parameters / n_copies if spec.distributed_optimizer else in_replica
    return (in_replica * weights + updated * optimizer) / (spec.tensor_parallel * spec.pipeline_parallel)


def kv_token_bytes(n_layers: int, n_kv_heads: int, head_dim: int) -> int:
    """Return the bytes of keys and values of one token in all layers, in bfloat16."""
    return 2 * n_layers * n_kv_heads * head_dim * 2


def engine_bytes(n_parameters: int, kv_bytes_per_token: int, max_tokens: int, tensor_parallel: int) -> int:
    """Return bfloat16 weights and the KV cache of one sample on each GPU of an engine."""
    return math.ceil((2 * n_parameters + kv_bytes_per_token * max_tokens) / tensor_parallel)


# --- What an update of the torch backend holds on each GPU, by purpose ------------------------------------------------
# Tests compare these bytes with what torch saves for the backward pass. A CUDA context, libraries' workspaces and
# fragmentation come on top.


class Estimate(NamedTuple):
    """The memory of a job's training."""

    parameters: int
    active_parameters: int
    """Parameters that compute one token; fewer than all in a mixture of experts."""
    gpus: int
    tokens: int
    """Tokens of one GPU's part of a micro-batch."""
    image_tokens: int
    """How many of them are of images, each computed once."""
    bytes: dict[str, int]
    """Purpose -> bytes on each GPU, and `total`; only `state` where the rest is unknown."""


def estimate(spec: JobSpec, longest_sample: int = 0, image_tokens: int | None = None) -> Estimate:
    """Return the memory of a job whose model is a local folder; only its `config.json` is read.

    Args:
        spec: the job.
        longest_sample: tokens of the longest sample with its prompt; 0: `sampling.max_tokens`, and with `kind: sft`,
            `dpo` and `reward`, whose samples are not known here, a GPU's part of a micro-batch.
        image_tokens: those of images in a GPU's part of a micro-batch; None: all, if the model sees images.

    Raises:
        ConfigError: the job trains nothing, or the model is not a local folder, of an unknown kind, or one that the job
            does not support.

    """
    if spec.kind == "eval":
        raise ConfigError("a job of kind eval trains nothing: give a job of kind rl, sft, dpo or reward")
    folder = Path(spec.model).expanduser()
    if not folder.is_dir():
        raise ConfigError(_no_folder(spec.model))
    config = read_config(folder)
    size, trainer = size_of(config), spec.trainer
    require_supported(spec, config)
    longest_sample = longest_sample or (spec.sampling.max_tokens if spec.kind == "rl" else 0)
    n_tokens = max(trainer.micro_batch_tokens // trainer.data_parallel, longest_sample)
    n_tokens = -(-n_tokens // trainer.context_parallel)
    added = added_parameters(spec, size), teacher_parameters(spec), scoring_parameters(spec)
    n_trained = size.reward_model if spec.kind == "reward" else size.total
    model = trained_model(spec, n_trained, size.in_experts, *added, n_in_tower=size.in_tower)
    n_of_images = size.image_tokens(n_tokens, image_tokens)
    if spec.adapter is not None or trainer.backend == "megatron":
        found = {"state": state_bytes(model, trainer)}
    else:
        update = update_memory(size, model, trainer, n_tokens, n_of_images)
        found = {**update._asdict(), "total": update.total}
        if size.tower is None:
            del found["images"]
    return Estimate(n_trained, size.active, trainer.n_ranks, n_tokens, n_of_images, found)


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
    images: int
    """Saved by the vision tower for the backward pass."""
    logits: int
    """Logits of a chunk of tokens, their gradient, and a part of both in float32."""
    working_weights: int
    """Weights in bfloat16 for matrix products; with FSDP2, gathered weights."""

    @property
    def total(self) -> int:
        """Return the peak: logits are freed before a layer is recomputed."""
        saved = self.activations + self.images
        return self.state + saved + self.working_weights + max(self.logits, self.recomputed_layer)


def update_memory(
    size: ModelSize, model: TrainedModel, spec: TrainerSpec, n_tokens: int, image_tokens: int | None = None
) -> UpdateMemory:
    """Return the bytes of an update.

    Args:
        size: sizes of the model.
        model: what is trained.
        spec: the job file's section `trainer`, of the torch backend.
        n_tokens: number of tokens in one GPU's part of a micro-batch, all of them trained.
        image_tokens: see `estimate`.

    """
    half = spec.dtype == "bfloat16"
    layer = n_tokens * token_bytes(size, half=half)
    checkpointed = spec.activation_checkpointing
    activations = size.layers * (4 * n_tokens * size.hidden if checkpointed else layer)
    activations += 12 * n_tokens * size.hidden  # the last norm
    n_logits = 0 if model.scores else n_tokens * size.vocabulary
    logits = 2 * (2 if half else 4) * min(MAX_LOGITS, n_logits)
    # Their softmax; in bfloat16 also a copy of them; the terms of entropies.
    logits += (1 + half + model.has_entropies) * 4 * min(CHUNK_LOGITS, n_logits)
    n_cast = (1 if checkpointed else size.layers) * size.layer + (0 if model.scores else size.vocabulary * size.hidden)
    recomputed, images, in_root, largest = layer if checkpointed else 0, 0, size.embeddings, size.layer
    if (tower := size.tower) is not None:
        n_patches = size.image_tokens(n_tokens, image_tokens) * tower.patches_per_token
        is_frozen = model.frozen or model.n_frozen > 0
        images = n_patches * tower.saved_bytes(half=half, checkpointed=checkpointed, frozen=is_frozen)
        if not is_frozen:
            recomputed = max(recomputed, n_patches * tower.layer_bytes(half=half) if checkpointed else 0)
            n_cast += tower.root if checkpointed else tower.total
        in_root, largest = in_root + tower.root, max(largest, tower.layer)
    working = 2 * n_cast if half else 0
    if spec.n_shards > 1:
        # The root's own parameters stay gathered for the whole pass, a layer's while it computes.
        working += 4 * (in_root + largest)
    return UpdateMemory(state_bytes(model, spec), activations, recomputed, images, logits, working)


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


GPUS = {"24 GB": 22.5, "48 GB": 44.5, "80 GB": 79.2, "141 GB": 139.8}
"""Name -> GiB that CUDA reports."""
_GIB = 1 << 30
_CONTEXT_GIB = 1.5
"""CUDA context and libraries' workspaces."""
_UTILIZATION = 0.9
"""Part of a GPU's memory that vLLM takes."""
_KV_FILL = 0.85
"""Part of vLLM's cache that the manager fills."""


def full_gib(size: ModelSize, tokens: int, gpus: int = 1, image_tokens: int | None = None) -> float:
    """Return the trainer's peak on each GPU: float32 weights, gradients and moments, sharded by FSDP2."""
    return _gib(size, TrainedModel(size.total), tokens, gpus, image_tokens)


def lora_gib(size: ModelSize, tokens: int, lora: LoraSpec, image_tokens: int | None = None) -> float:
    """Return the trainer's peak with a bfloat16 base, which is not cast for matmuls, and a float32 adapter."""
    model = TrainedModel(size.total, frozen=True, n_added=adapter_parameters(size, lora))
    update = update_memory(size, model, _trainer(1), tokens, image_tokens)
    layer_inputs = 2 * tokens * size.hidden * size.layers
    update = update._replace(working_weights=0, activations=update.activations - layer_inputs)
    return update.total / _GIB + _CONTEXT_GIB


def n_samples(size: ModelSize, tokens: int, gib: float, *, fp8: bool = False) -> int:
    """Return how many samples of this many tokens a worker's KV cache holds next to bfloat16 weights.

    With `fp8`, all weights but embeddings, the output head and a vision tower have one byte.
    """
    n_bytes = 2 * size.total - fp8 * size.layers * size.layer
    free = gib * _UTILIZATION - _CONTEXT_GIB - n_bytes / _GIB
    # `size.key` is the size of all key heads.
    return max(int(free * _KV_FILL * _GIB / (kv_token_bytes(size.layers, 1, size.key) * tokens)), 0)


def smallest(gib: float) -> str:
    """Return the name of the smallest GPU with that memory."""
    return next((name for name, size in GPUS.items() if gib <= size), "none")


class Variant(NamedTuple):
    """A way to train a model."""

    name: str
    gib: float
    """Peak on each of the trainer's GPUs."""
    gpu: str
    """The smallest that has it, or `none`."""
    generating_gib: dict[str, float]
    """`trainer.offload` -> what stays on each GPU while a reserved engine generates on it."""


class ModelFit(NamedTuple):
    """What fits of a model."""

    parameters: int
    active_parameters: int
    """Parameters that compute one token; fewer than all in a mixture of experts."""
    tokens: int
    image_tokens: int
    """How many of them are of images."""
    variants: list[Variant]
    samples: dict[str, int]
    """GPU of a worker -> samples that its KV cache holds; 0: the model does not fit."""
    samples_fp8: dict[str, int]
    """The same with weights that vLLM quantizes to fp8."""


def fit_of(config: Mapping[str, Any], tokens: int, image_tokens: int | None = None) -> ModelFit:
    """Return what fits of the model that a `config.json` describes.

    Args:
        config: the model's configuration.
        tokens: of the longest sample with its prompt.
        image_tokens: how many of them are of images; None: all, if the model sees images.

    Raises:
        ConfigError: a kind of model whose memory cannot be computed.

    """
    size, lora = size_of(config), LoraSpec(rank=32, alpha=64)
    n_of_images = size.image_tokens(tokens, image_tokens)
    whole = TrainedModel(size.total)
    adapted = TrainedModel(size.total, frozen=True, n_added=adapter_parameters(size, lora))
    muon = TrainedModel(size.total, muon=True)
    found = [
        _variant("all weights, 1 GPU", full_gib(size, tokens, 1, n_of_images), whole),
        _variant("all weights with Muon, 1 GPU", _gib(size, muon, tokens, 1, n_of_images), muon),
        *(
            _variant(f"all weights, each of {n} GPUs", full_gib(size, tokens, n, n_of_images), whole, n)
            for n in (2, 4, 8)
        ),
        _variant(f"LoRA of rank {lora.rank}, 1 GPU", lora_gib(size, tokens, lora, n_of_images), adapted),
    ]
    samples, fp8 = (
        {name: n_samples(size, tokens, gib, fp8=fp8) for name, gib in GPUS.items()} for fp8 in (False, True)
    )
    return ModelFit(size.total, size.active, tokens, n_of_images, found, samples, fp8)


def _variant(name: str, gib: float, model: TrainedModel, gpus: int = 1) -> Variant:
    stays = {
        offload: generating_bytes(model, _trainer(gpus).model_copy(update={"offload": offload})) / _GIB + _CONTEXT_GIB
        for offload in ("none", "optimizer", "all")
    }
    return Variant(name, gib, smallest(gib), stays)


def _gib(size: ModelSize, model: TrainedModel, tokens: int, gpus: int, image_tokens: int | None) -> float:
    return update_memory(size, model, _trainer(gpus), tokens, image_tokens).total / _GIB + _CONTEXT_GIB


def _trainer(gpus: int) -> TrainerSpec:
    return TrainerSpec(dtype="bfloat16", data_parallel=gpus, activation_checkpointing=True)
