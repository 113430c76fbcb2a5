"""One of two ranks that gather a model's weights: `python -m tests.support.gathered_ranks HOW OUTPUT`, below torchrun.

HOW is `fsdp2` or `ddp`, and `-lora` follows for an adapter on the model. Rank 0 writes what it has
gathered to OUTPUT, and the other one what it has.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import peft
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from rlboost.publishing import gathered, is_sharded
from tests.support import tiny_models

MODEL = "qwen3-tied"


def policy(lora: bool) -> Any:
    """Return the model, the same in each process."""
    torch.manual_seed(5)
    model = tiny_models.make(tiny_models.CONFIGS[MODEL], 5)
    if not lora:
        return model
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


def _wrapped(model: Any, how: str) -> Any:
    if how == "fsdp2":
        mesh = init_device_mesh("cpu", (2,))
        layers = model.get_base_model() if hasattr(model, "peft_config") else model
        for layer in layers.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    return DistributedDataParallel(model)


def main(how: str, output: str) -> None:
    """Gather twice: with the model, and of an adapter without it."""
    torch.distributed.init_process_group("gloo")
    how, _, lora = how.partition("-")
    model = _wrapped(policy(bool(lora)), how)
    assert is_sharded(model) == (how == "fsdp2")
    found = [gathered(model), gathered(model, with_model=False)]
    rank = int(os.environ["RANK"])
    torch.save(
        [(one.model and dict(one.model), dict(one.adapter), one.adapter_json, one.config_json) for one in found],
        Path(output, f"{rank}.pt"),
    )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
