"""Builds a policy's optimizers: AdamW for all parameters; or Muon for hidden matrices and AdamW for the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlboost.shared.job.training import OptimizerSpec


def optimizers(model: Any, parameters: Sequence[Tensor], spec: OptimizerSpec) -> list[torch.optim.Optimizer]:
    """Return the optimizers of `parameters`, which share one learning rate; each parameter has exactly one.

    Muon (https://kellerjordan.github.io/posts/muon/) orthogonalizes the momentum of a matrix with five Newton-Schulz
    steps in bfloat16. Updates are scaled to the root mean square of AdamW's, 0.2 per entry (Moonlight, arXiv
    2502.16982), so both use `lr` and `weight_decay`. Momentum is 0.95, with Nesterov.

    Args:
        model: a transformers model.
        parameters: the trained parameters.
        spec: the job's settings.

    """
    matrices = hidden_matrices(model, parameters) if spec.name == "muon" else []
    by_muon = {id(matrix) for matrix in matrices}
    others = [parameter for parameter in parameters if id(parameter) not in by_muon]
    adamw = torch.optim.AdamW(others, lr=spec.lr, betas=spec.betas, weight_decay=spec.weight_decay, fused=True)
    if not matrices:
        return [adamw]
    muon = torch.optim.Muon(matrices, lr=spec.lr, weight_decay=spec.weight_decay, adjust_lr_fn="match_rms_adamw")
    return [muon, adamw]


def hidden_matrices(model: Any, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the two-dimensional parameters except embeddings and the output head."""
    outer = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    if (head := model.get_output_embeddings()) is not None:
        outer.append(head.weight)
    excluded = {id(weight) for weight in outer}
    return [parameter for parameter in parameters if parameter.ndim == 2 and id(parameter) not in excluded]
