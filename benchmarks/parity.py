"""How far rounding to bfloat16, and one wrong layer, move the log-probabilities of the parity check.

    python -m benchmarks.parity

Random models on one CPU core. Each number is the mean absolute difference from the trainer's log-probabilities (mixed
precision), as a fraction of their spread; a cell has the least and the largest over logits of several sizes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from rlboost.services.trainer.domain.canary_prompts import PROMPT_TOKENS, build_canary_prompts

VOCABULARY = 2048
LOGIT_STDS = (0.5, 1.5, 4.5)
"""From untrained to confident."""
KINDS: dict[str, Any] = {"qwen3": Qwen3Config, "llama": LlamaConfig}
MODELS = [
    ("qwen3", 64, 4, 0),
    ("llama", 64, 8, 0),
    ("gpt2", 64, 4, 0),
    ("qwen3", 128, 16, 0),
    ("llama", 256, 32, 0),
    ("qwen3-moe", 64, 4, 8),
    ("qwen3-moe", 64, 8, 32),
    ("qwen3-moe", 64, 16, 64),
]
"""Kind, width, layers, experts."""
_OUTPUTS = ("o_proj.weight", "down_proj.weight", "down_proj", "c_proj.weight")
_IDS = torch.tensor([[*p, *c] for p, c in build_canary_prompts(VOCABULARY, temperature=1.0, dtype="bfloat16").rows])


def model_of(kind: str, width: int, layers: int, experts: int, logit_std: float) -> Any:
    """Return a random float32 model whose logits have this standard deviation."""
    torch.manual_seed(layers)
    limits = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if kind == "gpt2":
        config: Any = GPT2Config(**limits, n_embd=width, n_layer=layers, n_head=4, n_positions=64)
    else:
        sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": width // 4}
        more = {"num_experts": experts, "num_experts_per_tok": max(2, experts // 8)} if experts else {}
        more |= {"moe_intermediate_size": width // 2, "norm_topk_prob": True} if experts else {}
        made = Qwen3MoeConfig if experts else KINDS[kind]
        config = made(**limits, **sizes, **heads, **more, max_position_embeddings=64, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        elif name.endswith("weight"):
            parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
    model.get_output_embeddings().weight.mul_(logit_std / model(_IDS).logits.std())
    return model


def logprobs(model: Any, *, mixed: bool = False) -> npt.NDArray[np.float64]:
    """Return the log-probabilities of the probe's completions."""
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        rows = model(_IDS).logits.double().log_softmax(-1)[:, PROMPT_TOKENS - 1 : -1]
    found: npt.NDArray[np.float64] = rows.gather(-1, _IDS[:, PROMPT_TOKENS:, None]).flatten().numpy()
    return found


def skipped(layer: Any) -> None:
    """Let a layer add nothing."""
    for name, parameter in layer.named_parameters():
        if name.endswith(_OUTPUTS):
            parameter.zero_()


def replaced(layer: Any) -> None:
    """Give a layer other random matrices."""
    for parameter in layer.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)


def reversed_matrix(layer: Any) -> None:
    """Reverse the rows of a layer's last matrix; the order of its experts, if it has some."""
    last = [parameter for parameter in layer.parameters() if parameter.ndim > 1][-1]
    last.copy_(last.flip(0))


def without_norms(layer: Any) -> None:
    """Leave the weights of a layer's norms out."""
    for name, parameter in layer.named_parameters():
        if parameter.ndim == 1 and name.endswith("weight"):
            parameter.fill_(1)


ERRORS: list[Callable[[Any], None]] = [skipped, replaced, reversed_matrix, without_norms]


def measure(model: Any) -> list[float]:
    """Return the differences of a correct bfloat16 model, and of one with each of `ERRORS` in a middle layer."""
    trainer, found = logprobs(model, mixed=True), []
    for error in (None, *ERRORS):
        engine = copy.deepcopy(model)
        layers = engine.transformer.h if hasattr(engine, "transformer") else engine.model.layers
        if error is not None:
            error(layers[len(layers) // 2])
        found.append(float(np.abs(logprobs(engine.bfloat16()) - trainer).mean() / trainer.std()))
    return found


def main() -> None:
    """Print one row per model."""
    torch.set_num_threads(1)
    print("| bfloat16 | correct | " + " | ".join(error.__name__.replace("_", " ") for error in ERRORS) + " |")
    print("|---" * (2 + len(ERRORS)) + "|")
    for kind, width, layers, experts in MODELS:
        runs = [measure(model_of(kind, width, layers, experts, logit_std)) for logit_std in LOGIT_STDS]
        cells = [f"{min(column):.3f} to {max(column):.3f}" for column in zip(*runs, strict=True)]
        name = f"{kind}, {width} wide, {layers} layers" + (f", {experts} experts" if experts else "")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
