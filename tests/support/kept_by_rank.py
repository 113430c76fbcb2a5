"""`python -m tests.support.kept_by_rank KIND MODEL...`: what a rank keeps for the backward pass, with and without
activation checkpointing. A process of its own: megatron-core must be compiled for this machine.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from services.trainer.adapters.ranks.layout import Layout
from services.trainer.adapters.ranks.packed import packed
from services.trainer.adapters.ranks.rank import _engine_class
from services.trainer.ports import Row
from shared.columns import F32, I32, pack
from shared.training import OptimizerSpec, TrainerSpec

N_TOKENS = 40
ROW = Row(pack([3], I32), pack([4] * (N_TOKENS - 1), I32), pack([0.0] * (N_TOKENS - 1), F32), 1.0)


def main(kind: str, *models: str) -> None:
    """Print a JSON object: `true` or `false` -> each model's bytes."""
    engine_class = _engine_class(kind)
    from transformers import AutoConfig  # noqa: PLC0415 - behind the hook, as in a rank

    from services.trainer.adapters.megatron.shape import shape_of  # noqa: PLC0415 - its like
    from services.trainer.adapters.ranks.rest import own_part  # noqa: PLC0415 - its like
    from tests.support.kept import counting  # noqa: PLC0415 - its like

    settings = {"temperature": 1.0, "dtype": "float32", "reference": False, "offload": "none"}
    with tempfile.TemporaryDirectory() as folder:
        engine: Any = engine_class(
            rank=0,
            rendezvous=f"{folder}/rendezvous",
            device="cpu",
            layout=Layout.of(TrainerSpec()),
            optimizer=OptimizerSpec().model_dump(),
            settings={**settings, "activation_checkpointing": True},
        )

    def kept_of(model: str) -> int:
        shape = shape_of(AutoConfig.from_pretrained(model))
        engine.load_hf({"source": model, "shape": shape}, [str(file) for file in Path(model).glob("*.safetensors")])
        found: list[int] = []
        with counting(own_part(parameter) for _, parameter in engine._model.parameters()) as kept_bytes:

            def ask(question: dict[str, Any]) -> dict[str, Any]:
                found.append(kept_bytes())
                return {"gradient": bytes(len(question["logprobs"]))}

            engine.accumulate([list(packed([ROW]))], ask)
        return found[0]

    seen = {}
    for recomputes in (engine._recomputes, False):
        engine._recomputes = recomputes
        seen[json.dumps(recomputes)] = [kept_of(model) for model in models]
    print(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
