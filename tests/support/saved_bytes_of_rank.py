"""`python -m tests.support.saved_bytes_of_rank KIND MODEL...`: bytes that a rank saves for its backward pass.

Measured with and without activation checkpointing. On CPUs megatron-core needs `tests.support.megatron_cpu`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from rlboost.services.trainer.adapters.torch.rank import engine_class
from rlboost.services.trainer.adapters.torch.ranks import Layout
from rlboost.services.trainer.ports.engine import PolicySettings
from rlboost.shared.job.training import TrainerSpec
from tests.support.training_rows import training_row

N_TOKENS = 40
ROW = training_row([3], [4] * (N_TOKENS - 1), [0.0] * (N_TOKENS - 1))


def main(kind: str, *models: str) -> None:
    """Print a JSON object: activation checkpointing, `true` or `false` -> bytes of each model."""
    make = engine_class(kind)
    from transformers import AutoConfig  # noqa: PLC0415 - after megatron-core, as in a rank

    from rlboost.services.trainer.adapters.megatron.model_shape import shape_of  # noqa: PLC0415 - after megatron-core, as in a rank
    from rlboost.services.trainer.adapters.megatron.policy import with_frequencies  # noqa: PLC0415 - after megatron-core, as in a rank
    from rlboost.services.trainer.adapters.torch.trainable import local_tensor  # noqa: PLC0415 - after megatron-core, as in a rank
    from tests.support.saved_bytes import saved_bytes  # noqa: PLC0415 - after megatron-core, as in a rank

    settings = PolicySettings(activation_checkpointing=True)
    with tempfile.TemporaryDirectory() as folder:
        engine: Any = make(
            rank=0,
            local_rank=0,
            init_method=f"file://{folder}/rendezvous",
            device="cpu",
            layout=Layout.of(TrainerSpec()),
            settings=settings.model_dump(),
        )

    def bytes_of(model: str) -> int:
        config = AutoConfig.from_pretrained(model)
        shape = with_frequencies(shape_of(config), config)
        files = [str(file) for file in Path(model).glob("*.safetensors")]
        engine.load_hf({"source": model, "shape": shape, "attention": "rlboost_packed"}, files, shared=model)
        found: list[int] = []
        parameters = engine.policy.model.parameters()
        with saved_bytes(local_tensor(parameter) for _, parameter in parameters) as n_saved_bytes:

            def gradient(_loss: str, _replica: int, _index: int, column: Any) -> Any:
                found.append(n_saved_bytes())
                return column.new_zeros(len(column))

            engine.accumulate([[ROW]], gradient)
        return found[0]

    seen = {}
    for checkpointing in (engine._settings.activation_checkpointing, False):
        engine._settings = settings.model_copy(update={"activation_checkpointing": checkpointing})
        seen[json.dumps(checkpointing)] = [bytes_of(model) for model in models]
    print(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
