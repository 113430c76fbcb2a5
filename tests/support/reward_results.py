"""A reward function whose result the prompt names, right or wrong."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch


class _Unprintable(float):
    def __repr__(self) -> str:
        raise ValueError("no text for this")


RESULTS: dict[str, Any] = {
    "nothing": None,
    "number": 1.0,
    "text": "11",
    "bytes": b"\x01\x01",
    "mapping": {0: 1.0, 1: 0.0},
    "set": {0.0, 1.0},
    "matrix": np.ones((2, 1)),
    "scalar": np.float32(1.0),
    "number-texts": ["1.0", "0.0"],
    "lists": [[1.0], [0.0]],
    "mappings": [{"acc": 1.0}] * 2,
    "scores in mappings": [{"score": 1.0, "acc": 1.0}, {"score": 0.0}],
    "complex": [1j, 0.0],
    "one-element arrays": [np.ones(1), np.ones(1)],
    "huge integer": [10**400, 0],
    "huge": [1e308, -1e308],
    "float32 NaN": [np.float32("nan"), 0.0],
    "infinity": [float("inf"), 0.0],
    "booleans": [True, np.False_],
    "integers": (np.int64(1), 0),
    "decimals": [Decimal("1"), Fraction(0)],
    "array": np.array([1, 0], np.float16),
    "tensor": torch.tensor([1.0, 0.0], dtype=torch.bfloat16, requires_grad=True),
    "tensors": [torch.tensor(1), torch.tensor(0.0)],
    "generator": (float(i) for i in (1, 0)),
    "unprintable": [_Unprintable(1.0), 0.0],
    "unprintable and huge": [_Unprintable("inf"), 0.0],
}


def returned(prompts: list[str], **_: Any) -> Any:
    """Return what the prompt names."""
    return RESULTS[prompts[0]]
