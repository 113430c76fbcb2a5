"""The throughput of a kind of worker, as the manager has learned it."""

from __future__ import annotations

from rlboost.shared.messages.fields import Count, Finite, Role, Seconds
from rlboost.shared.messages.registry import Message


class EngineProfile(Message):
    """Throughput of a kind of worker: a decode step takes `step_s + per_sample_s * samples + per_kv_token_s * tokens`.

    `samples` are in the batch, `tokens` in its KV cache.
    """

    kind: str
    role: Role
    workers: Count
    """Number of workers of this kind and role now."""
    slots: Count
    """The most samples that an engine runs at once."""
    kv_tokens: Count
    """The KV cache's capacity in tokens; 0 if unknown."""
    price_per_hour: Finite
    """Dollars for one worker; the median."""
    step_s: Seconds
    per_sample_s: Seconds
    per_kv_token_s: Seconds
    update_s: Seconds
    """Median time of their last weight updates."""
    update_pause_s: Seconds = 0.0
    """Part of it in which the engine could not generate: after the download."""
