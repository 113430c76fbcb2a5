"""Limits how often one address may fail to authenticate."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field

BURST = 20
"""Failures of one address that are answered at once."""
REFILL_PER_S = 1.0
ADDRESSES_MAX = 4096


@dataclass(slots=True)
class FailureLimit:
    """A token bucket for each address, for the addresses that failed last."""

    _buckets: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict)
    """Address -> failures left, and when that was computed."""

    def fail(self, address: str, now_s: float) -> int:
        """Count a failure; return after how many seconds the address may fail again, 0 if at once."""
        left, at_s = self._buckets.pop(address, (float(BURST), now_s))
        left = min(float(BURST), left + (now_s - at_s) * REFILL_PER_S)
        allowed = left >= 1.0
        self._buckets[address] = (left - 1.0 if allowed else left, now_s)
        while len(self._buckets) > ADDRESSES_MAX:
            self._buckets.popitem(last=False)
        return 0 if allowed else math.ceil((1.0 - left) / REFILL_PER_S)
