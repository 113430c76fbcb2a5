"""The options of a vLLM engine. Importing this imports no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlboost.shared.messages import SAMPLING_OPTIONS, Sampling

LOGPROBS_MODES = ("processed_logprobs", "raw_logprobs")
"""Values of vLLM's `logprobs_mode` that are log-probabilities of the whole distribution for some requests: the first,
the default, at any temperature without top-p; the second with any top-p at temperature 1."""
REFUSED_ARGUMENTS: Mapping[str, str] = {
    "logits_processors": "it changes the distribution that tokens are drawn from, and training needs the model's own",
    "override_generation_config": "it sets defaults of sampling, which only the job file and clients may set",
    "watermark_config": "a watermark changes the distribution that tokens are drawn from",
    "diffusion_config": "training needs a log-probability of each token given all tokens before it",
    "enable_trace_replay": "it replaces sampled tokens by recorded ones",
    "enable_lora": "RLBOOST_WORKER_MAX_ADAPTERS says how many adapters it holds",
    "mm_processor_kwargs": "images are computed as the trainer prepares them",
    "mm_encoder_attn_dtype": "images are computed in the dtype of the trainer",
    "mm_encoder_only": "a worker generates text",
    "enable_mm_embeds": "images are computed with the published weights",
    "video_pruning_rate": "models see images, and no videos",
    "limit_mm_per_prompt": 'a prompt has all images of its row, so only {"image": 0} is accepted',
    "runner": "a worker generates text",
    "convert": "a worker generates text",
    "spec_model": "vllm would draft with random weights, as workers load only those that are published",
}
"""Engine arguments that are refused, most since no sample could be trained on with them -> why.

RLBoost sets `generation_config`, so vLLM does not apply a model's own top-k or penalties."""
SUSPECT_ARGUMENTS: Mapping[str, str] = {
    "speculative_config": "with which vllm 0.32 reports wrong log-probabilities, on CPUs at least",
    "spec_method": "with which vllm 0.32 reports wrong log-probabilities, on CPUs at least",
    "logprobs_mode": "raw_logprobs is for jobs at temperature 1",
    "scheduler_cls": "a scheduler of your own",
    "worker_cls": "a worker class of your own",
    "worker_extension_cls": "a worker class of your own",
}
"""Engine arguments that are accepted if the sampling check passes -> what an error about it says.

All that are in neither table are accepted in the same way, without a reason."""
_DRAFT_METHODS = ("ngram", "ngram_gpu", "suffix", "custom_class")
"""Methods of speculative decoding without weights of their own."""
LOGITS_PROCESSOR_PLUGINS = "vllm.logits_processors"
"""Entry point group of packages whose logits processors vLLM applies to every request once they are installed."""
_LOWEST_TEMPERATURE = 0.01
"""vLLM samples at this temperature if a lower one, above 0, is requested."""


@dataclass(frozen=True)
class VllmOptions:
    """How to start vLLM."""

    slots: int
    """Maximum number of running requests."""
    device: str = "cpu"
    """The device that the installed vLLM was built for: "cpu" or "cuda"."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of weights, activations and cache; sampling is in float32."""
    kv_cache_bytes: int = 0
    """0 = on a GPU vLLM's default, most of the free memory; on a CPU 256 MiB."""
    gpu_memory_utilization: float = 0.0
    """Fraction of each GPU's memory for weights, activations and KV cache; 0 = vLLM's default. Unused on a CPU."""
    tensor_parallel: int = 1
    """Number of devices over which the model is split."""
    enable_sleep: bool = False
    """True if a suspended engine frees device memory, including weights, where vLLM supports it."""
    pack_weights: bool = True
    """On a CPU: pack the weights of linear layers for speed, so that each version is loaded whole."""
    max_adapters: int = 0
    """How many jobs it serves at once with LoRA adapters of the same weights; 0 = adapters are merged."""
    max_adapter_rank: int = 64
    """An adapter of a higher rank is merged."""
    served_model: str = ""
    """Folder of the model that the engine also serves to others: it starts with these weights and keeps them."""
    vllm_args: Mapping[str, Any] = field(default_factory=dict)
    """More of vLLM's `AsyncEngineArgs`; see `arguments.check_arguments`."""

    @property
    def logprobs_mode(self) -> str:
        """Return which log-probabilities vLLM reports."""
        return str(self.vllm_args.get("logprobs_mode", LOGPROBS_MODES[0]))

    @property
    def suspects(self) -> str:
        """Return what to try if the engine samples wrongly: which arguments may be the cause; empty without any."""
        if not self.vllm_args:
            return ""
        named = [f"{name} ({reason})" if (reason := SUSPECT_ARGUMENTS.get(name)) else name for name in self.vllm_args]
        return f"Remove what may be the cause from RLBOOST_WORKER_VLLM_ARGS, which sets {', '.join(named)}."


def argument_error(name: str, value: object) -> str:
    """Return why an engine argument with this value is refused; empty if the sampling check decides."""
    if name == "logprobs_mode" and value not in LOGPROBS_MODES:
        return f"logprobs_mode {value!r} has no log-probabilities to train on: use {' or '.join(LOGPROBS_MODES)}"
    if name == "spec_method" and value:
        name, value = "speculative_config", {"method": value}
    if name == "speculative_config" and isinstance(value, Mapping):
        return _drafts_error(value)
    reason = REFUSED_ARGUMENTS.get(name, "")
    if name == "limit_mm_per_prompt" and value in ({"image": 0}, {"image": 0, "video": 0}):
        return ""
    return f"{name} is refused: {reason}: remove it" if reason and value else ""


def _drafts_error(config: Mapping[str, Any]) -> str:
    method = config.get("method")
    if config.get("rejection_sample_method") == "synthetic":
        return "speculative_config: rejection_sample_method synthetic accepts drafts at any probability: use standard"
    if method not in _DRAFT_METHODS and not config.get("draft_load_config"):
        return (
            f"speculative_config: method {method!r} drafts with weights of its own, which would be random, as workers "
            f"load only those that are published: use {', '.join(_DRAFT_METHODS)}, or give draft_load_config"
        )
    return ""


def supported_options(vllm_args: Mapping[str, Any], *, has_grammars: bool, sees_images: bool = False) -> frozenset[str]:
    """Return the options of clients that vLLM supports with these engine arguments."""
    without = {"stop", "batch_invariant"} | (set() if has_grammars else {"grammar"})
    if not sees_images or vllm_args.get("language_model_only") or vllm_args.get("limit_mm_per_prompt"):
        without.add("images")
    if vllm_args.get("speculative_config") or vllm_args.get("spec_method"):
        # vLLM ignores them, or changes what it accepts; it scores no last token.
        without |= {"grammar", "logit_bias", "min_p", "min_tokens", "forced"}
    if vllm_args.get("kv_sharing_fast_prefill"):
        without.add("forced")  # its log-probabilities of given tokens are wrong then
    return frozenset(SAMPLING_OPTIONS).difference(without)


def logprobs_error(mode: str, sampling: Sampling) -> str:
    """Return why vLLM cannot report log-probabilities of the whole distribution for a request; empty if it can.

    Args:
        mode: vLLM's `logprobs_mode`.
        sampling: of the request.

    """
    if 0 < sampling.temperature < _LOWEST_TEMPERATURE:
        return (
            f"sampling.temperature is {sampling.temperature}, and vllm samples at {_LOWEST_TEMPERATURE} or more: raise "
            "it, or use torch workers"
        )
    if sampling.forced and sampling.temperature != 1:
        return (
            f"sampling.temperature is {sampling.temperature}, and vllm scores given tokens at temperature 1: set it to "
            "1, or serve the teacher by torch workers"
        )
    if mode == "raw_logprobs" and sampling.temperature not in {0, 1}:
        return (
            f"sampling.temperature is {sampling.temperature}, and this worker reports log-probabilities at temperature "
            "1: remove logprobs_mode from its RLBOOST_WORKER_VLLM_ARGS, or set the temperature to 1"
        )
    limits = {"top_p": sampling.top_p < 1, "top_k": sampling.top_k, "min_p": sampling.min_p}
    # At temperature 0, vLLM applies the last one only.
    limits = {**(limits if sampling.temperature else {}), "min_tokens": sampling.min_tokens}
    if mode != "raw_logprobs" and (name := next((name for name, is_set in limits.items() if is_set), "")):
        return (
            f"sampling.{name} is {getattr(sampling, name)}, and this worker reports log-probabilities among the tokens "
            "that may be drawn, which differ from the trainer's: start vllm workers with RLBOOST_WORKER_VLLM_ARGS="
            """'{"logprobs_mode": "raw_logprobs"}', which needs temperature 1, or use torch workers, or leave """
            f"{name} out"
        )
    return ""
