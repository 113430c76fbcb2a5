"""A fake `PolicyEngine` without torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from rlboost.services.trainer.domain.batches.training_row import SequenceRow, TrainingRow
from rlboost.services.trainer.domain.loss.inputs import LossFn
from rlboost.services.trainer.ports.engine import Exported, Loaded, Snapshot
from rlboost.shared.errors import Corrupt, Fatal
from rlboost.shared.weights.shards import Shard
from rlboost.shared.wire.columns import F32, I32, U8, unpack

_PEFT = "base_model.model."
_PLACES = {"a.weight": slice(0, 2), "b.weight": slice(2, 4)}
_SUMS = ("loss", "clipped_low", "clipped_high", "abs_log_ratio", "kl", "mismatch_kl", "ratio", "max_ratio")


class FakeEngine:
    """A policy of four numbers, whose gradient is the sum of advantage x token over all loss tokens.

    It never calls the loss function, which needs torch tensors.
    """

    def __init__(self, adapter_json: str = "") -> None:
        """Start without a model; with `adapter_json` the four numbers are an adapter's, on a model of four others."""
        self.adapter_json = adapter_json
        self._base = np.zeros(0, F32)
        self._weights = np.zeros(0, F32)
        self._moment = np.zeros(0, F32)
        self._gradient = np.zeros(0, np.float64)
        self._tokens = 0
        self.is_offloaded = False
        """Whether it was offloaded since it last computed."""
        self.closed = False

    def load_hf(self, source: Path) -> None:
        """Start from the same weights for any directory."""
        del source
        self._base = np.arange(5, 9, dtype=F32)
        self._weights = np.arange(1, 5, dtype=F32)
        self._moment = np.zeros(4, F32)
        self._gradient, self._tokens = np.zeros(4, np.float64), 0

    def logprobs(self, batches: Sequence[Sequence[SequenceRow]]) -> list[bytes]:
        """See `PolicyEngine.logprobs`."""
        self.is_offloaded = False
        return [np.full(row.n_loss_tokens, -1.0, F32).tobytes() for rows in batches for row in rows]

    def reference_logprobs(self, batches: Sequence[Sequence[SequenceRow]]) -> list[bytes]:
        """See `PolicyEngine.reference_logprobs`."""
        return [np.full(row.n_loss_tokens, -1.5, F32).tobytes() for rows in batches for row in rows]

    def values(self, batches: Sequence[Sequence[SequenceRow]]) -> list[bytes]:
        """See `Critic.values`."""
        return [np.full(row.n_loss_tokens, 0.5, F32).tobytes() for rows in batches for row in rows]

    def accumulate(self, batches: Sequence[Sequence[TrainingRow]], loss: LossFn) -> dict[str, float]:
        """See `PolicyEngine.accumulate`."""
        del loss
        self.is_offloaded = False
        before = self._tokens
        for row in (row for rows in batches for row in rows):
            tokens = unpack(row.completion, I32)
            if row.loss_mask:
                tokens = tokens[unpack(row.loss_mask, U8).astype(bool)]
            products = unpack(row.advantages, F32).astype(np.float64) * tokens.astype(np.float64)
            self._gradient += float(products.sum()) * np.arange(1, 5)
            self._tokens += len(tokens)
        n_tokens = float(self._tokens - before)
        return {"tokens": n_tokens, "divisor": n_tokens, **dict.fromkeys(_SUMS, 0.0)}

    def step(self, learning_rate: float) -> float:
        """See `PolicyEngine.step`."""
        if not self._tokens:
            return 0.0
        mean = (self._gradient / self._tokens).astype(F32)
        self._gradient[:], self._tokens = 0.0, 0
        self._moment = (self._moment * F32.type(0.5) + mean).astype(F32)
        self._weights = (self._weights - F32.type(learning_rate) * self._moment).astype(F32)
        return float(np.linalg.norm(mean))

    def export_shards(self, what: Exported = "model") -> Iterator[Shard]:
        """See `PolicyEngine.export_shards`."""
        values = self._weights
        if self.adapter_json and what != "adapter":
            values = self._base if what == "base" else self._base + self._weights
        for name, part in (("a.weight", values[:2]), ("b.weight", values[2:])):
            yield Shard(_PEFT * (what == "adapter") + name, "float32", (2,), (0,), (2,), part.tobytes())

    def load_shards(self, shards: Iterable[Shard], what: Loaded = "base") -> None:
        """See `PolicyEngine.load_shards`."""
        places = {_PEFT * (what == "adapter") + name: at for name, at in _PLACES.items()}
        values = self._base if self.adapter_json and what == "base" else self._weights
        for shard in shards:
            if shard.name not in places or shard.local_shape != (2,):
                raise Fatal(f"tensor {shard.name} of shape {list(shard.local_shape)} does not belong to this model")
            values[places.pop(shard.name)] = np.frombuffer(shard.data, F32)
        if places:
            raise Fatal(f"the weights lack {len(places)} tensors of this model")

    def snapshot(self) -> Snapshot:
        """See `PolicyEngine.snapshot`."""
        text = json.dumps({"weights": self._weights.tolist(), "moment": self._moment.tolist()})

        def write(directory: Path) -> None:
            (directory / "fake.json").write_text(text, encoding="utf-8")

        return write

    def drop_snapshot(self) -> None:
        """See `PolicyEngine.drop_snapshot`."""

    def load(self, directory: Path) -> None:
        """See `PolicyEngine.load`."""
        self._gradient[:], self._tokens = 0.0, 0
        try:
            state = json.loads((directory / "fake.json").read_text(encoding="utf-8"))
            self._weights, self._moment = np.asarray(state["weights"], F32), np.asarray(state["moment"], F32)
        except (OSError, ValueError, KeyError) as error:
            raise Corrupt(f"checkpoint {directory} does not fit this model: {error}") from error

    def offload(self) -> None:
        """See `PolicyEngine.offload`."""
        self.is_offloaded = True

    def close(self) -> None:
        """See `PolicyEngine.close`."""
        self.closed = True
