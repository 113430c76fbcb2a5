"""`python -m tests.support.saved_bytes_of_rank KIND MODEL...`: bytes that a rank saves for its backward pass.

Measured with and without activation checkpointing. On CPUs megatron-core needs `tests.support.megatron_cpu`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from rlboost.services.trainer.adapters.ranks.layout import Layout
from rlboost.services.trainer.adapters.ranks.packed import pack_rows
from rlboost.services.trainer.adapters.ranks.rank import engine_class
from rlboost.services.trainer.ports.policy_settings import PolicySettings
from rlboost.shared.job.training import TrainerSpec
from tests.support.training_rows import training_row

N_TOKENS = 40
ROW = training_row([3], [4] * (N_TOKENS - 1), [0.0] * (N_TOKENS - 1))


def main(kind: str, *models: str) -> None:
    """Print a JSON object: activation checkpointing, `true` or `false` -> bytes of each model."""
    make = engine_class(kind)
    from transformers import AutoConfig  # noqa: PLC0415 - after megatron-core, as in a rank

    from rlboost.services.trainer.adapters.megatron.model_shape import shape_of  # noqa: PLC0415 - after megatron-core, as in a rank
    from rlboost.services.trainer.adapters.megatron.rope import with_frequencies  # noqa: PLC0415 - after megatron-core, as in a rank
    from rlboost.services.trainer.adapters.ranks.offload import local_tensor  # noqa: PLC0415 - after megatron-core, as in a rank
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
        parameters = engine._policy.model.parameters()
        with saved_bytes(local_tensor(parameter) for _, parameter in parameters) as n_saved_bytes:

            def ask(question: dict[str, Any]) -> dict[str, Any]:
                found.append(n_saved_bytes())
                return {"gradient": bytes(len(question["column"]))}

            engine.accumulate([list(pack_rows([ROW]))], ask)
        return found[0]

    seen = {}
    for checkpointing in (engine._settings.activation_checkpointing, False):
        engine._settings = settings.model_copy(update={"activation_checkpointing": checkpointing})
        seen[json.dumps(checkpointing)] = [bytes_of(model) for model in models]
    print(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
