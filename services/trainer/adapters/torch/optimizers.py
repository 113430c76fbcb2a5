"""What updates a policy: AdamW all of it; or Muon the hidden layers' matrices, and AdamW the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shared.errors import ConfigError
from shared.training import OptimizerSpec


def optimizers(model: Any, parameters: Sequence[Tensor], spec: OptimizerSpec) -> list[torch.optim.Optimizer]:
    """Return the optimizers of `parameters`, of which each has one; all follow one learning rate.

    Muon, of https://kellerjordan.github.io/posts/muon/: the momentum of a matrix, with all its singular values made
    about 1 by five Newton-Schulz steps in bfloat16. Its size is then that of AdamW's updates, 0.2 in each entry's root
    mean square (Moonlight, arXiv 2502.16982), so both follow `lr` and `weight_decay`. Momentum is 0.95, Nesterov's.

    Args:
        model: a transformers model.
        parameters: what is trained of it.
        spec: the job's.

    Raises:
        ConfigError: this torch has no Muon.

    """
    matrices = hidden_matrices(model, parameters) if spec.name == "muon" else []
    by_muon = {id(matrix) for matrix in matrices}
    rest = [parameter for parameter in parameters if id(parameter) not in by_muon]
    adamw = torch.optim.AdamW(rest, lr=spec.lr, betas=spec.betas, weight_decay=spec.weight_decay, fused=True)
    if not matrices:
        return [adamw]
    if not hasattr(torch.optim, "Muon"):
        raise ConfigError(
            f"optimizer.name: muon needs torch 2.9 or later, and this is {torch.__version__}: upgrade it, or set adamw"
        )
    muon = torch.optim.Muon(matrices, lr=spec.lr, weight_decay=spec.weight_decay, adjust_lr_fn="match_rms_adamw")
    return [muon, adamw]


def hidden_matrices(model: Any, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the parameters of two dimensions that are no table of embeddings and not the output head."""
    outer = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    if (head := model.get_output_embeddings()) is not None:
        outer.append(head.weight)
    excluded = {id(weight) for weight in outer}
    return [parameter for parameter in parameters if parameter.ndim == 2 and id(parameter) not in excluded]
