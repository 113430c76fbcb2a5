"""Warn about learning rates that usually ruin a model."""

from __future__ import annotations

from rlboost.shared.job.spec import JobSpec

SMALL_MODEL = 10_000_000
"""Parameters; models below it, trained from scratch for tests, need and bear rates of 1e-3."""
HIGHEST = {("rl", "full"): 1e-4, ("rl", "lora"): 1e-3, ("sft", "full"): 1e-3, ("sft", "lora"): 5e-3}
"""Highest learning rates of AdamW by kind of job and of weights, about ten times the usual ones or more.

Usual are 1e-6 for RL of all weights, the default of TRL's and verl's GRPO, and 1e-5 for fine-tuning; LoRA takes ten
times these or more, as its product starts at zero.
"""
_USUAL = {("rl", "full"): "1e-6", ("rl", "lora"): "1e-5", ("sft", "full"): "1e-5", ("sft", "lora"): "1e-4"}


def lr_advice(spec: JobSpec, n_parameters: int | None) -> str:
    """Return a warning about `optimizer.lr`, empty if there is none.

    Args:
        spec: any job.
        n_parameters: size of the model; None if unknown, as for a Hugging Face id, which is taken for a large one.

    """
    if spec.kind == "eval" or spec.optimizer.name != "adamw":
        return ""  # Muon's updates are orthogonalized: its rates are larger
    if n_parameters is not None and n_parameters < SMALL_MODEL:
        return ""
    case = (spec.kind, "full" if spec.adapter is None else "lora")
    if spec.optimizer.lr <= HIGHEST[case]:
        return ""
    size = "a pretrained model" if n_parameters is None else f"a model of {n_parameters / 1e6:.0f} M parameters"
    return (
        f"optimizer.lr: {spec.optimizer.lr:g} is likely to ruin {size}: start with {_USUAL[case]}, which is usual for "
        f"{'all weights' if case[1] == 'full' else 'LoRA'} with kind: {spec.kind}"
    )
