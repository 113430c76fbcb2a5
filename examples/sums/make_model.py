"""Write Countdown's model with a tokenizer of characters: `python -m rlboost.examples.sums.make_model --out DIR`.

`model/`, which `rlboost init` copies, was made from it with the job warmup.yaml:

    rlboost init sums && cd sums
    python -m rlboost.examples.sums.make_model --out untrained
    rlboost up --workers 0 --detach
    rlboost run warmup.yaml model=untrained steps=600 optimizer.warmup_steps=20 --follow
    python -m rlboost.examples.sums.make_model --rounded .rlboost/runs/JOB/model --out model
"""

from __future__ import annotations

from rlboost.examples.countdown import model
from rlboost.examples.countdown.task import BOS, EOS, PAD, VOCABULARY_SIZE

_USED = (PAD, BOS, EOS, "\n", *map(chr, range(ord(" "), ord("~") + 1)))
VOCABULARY = (*_USED, *(f"<unused{i}>" for i in range(VOCABULARY_SIZE - len(_USED))))
"""The text of each token, by token id: what ASCII can print, one character each."""


if __name__ == "__main__":
    model.main(VOCABULARY)
