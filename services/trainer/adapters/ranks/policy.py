"""A policy trained by several rank processes.

The ranks have the model and the optimizer. Batching and the loss stay in the trainer: ranks get packed token ids and
ask for the gradient of the loss with respect to the log-probabilities, which is all that backward needs. Tensors go
between ranks and trainer as files, because only the final export and a rare repair need them in the trainer.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import AutoConfig

from rlboost.services.trainer.adapters.ranks.calls import Launcher, RankCalls
from rlboost.services.trainer.adapters.ranks.layout import Coordinates, Layout
from rlboost.services.trainer.adapters.ranks.losses import LossAnswers
from rlboost.services.trainer.adapters.ranks.packed import pack_rows
from rlboost.services.trainer.adapters.ranks.processes import LocalRanks
from rlboost.services.trainer.adapters.ranks.scratch_dir import ScratchDir, remove_stale
from rlboost.services.trainer.adapters.ranks.sharded_tensors import write_slices
from rlboost.services.trainer.adapters.ranks.shards import RankShards, merged_shards, whole_shards
from rlboost.services.trainer.adapters.ranks.tensor_slice import TensorSlice
from rlboost.services.trainer.adapters.shard_tensors import tensor_of
from rlboost.services.trainer.adapters.torch.packing import one_row_each
from rlboost.services.trainer.domain.batches.batching import select
from rlboost.services.trainer.domain.batches.partition import partition
from rlboost.services.trainer.domain.batches.training_row import SequenceRow, TrainingRow
from rlboost.services.trainer.domain.loss import sums
from rlboost.services.trainer.domain.loss.inputs import LossFn
from rlboost.services.trainer.ports.engine import Exported, Loaded, NotFinite, Snapshot
from rlboost.services.trainer.ports.policy_settings import PolicySettings
from rlboost.shared.disk_space import write_error
from rlboost.shared.errors import ConfigError, DiskFull, Fatal
from rlboost.shared.model.experts import require_known_experts, require_mixture
from rlboost.shared.model.folder import read_config, require_unquantized
from rlboost.shared.weights.shards import Shard
from rlboost.shared.wire.columns import F32, unpack

R = TypeVar("R", bound=SequenceRow)

_BATCHES_PER_STAGE = 4
"""Parts into which a micro-batch is split per pipeline stage. With fewer the stages idle longer."""

_SHARDS_PER_FILE = 16
"""Bounds the tensors in memory at a time, and keeps the number of files that each rank opens low."""


class RanksPolicy(ABC):
    """`PolicyEngine` on rank processes, of this machine or of several."""

    adapter_json = ""

    kind: str
    """Kind of the ranks: `megatron` or `fsdp`."""

    def __init__(
        self,
        settings: PolicySettings,
        layout: Layout,
        *,
        device: str,
        folder: Path | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        """Describe the ranks; `load_hf` starts them.

        Args:
            settings: the ranks get them too.
            layout: the degrees of parallelism; the launcher may start fewer ranks.
            device: `cpu`, or `cuda` for one GPU per rank.
            folder: parent of scratch directories; the system's temporary directory if None. Ranks on other machines
                must have it under the same path.
            launcher: starts the ranks; on this machine if None.

        Raises:
            ConfigError: there are fewer GPUs than ranks.

        """
        self.settings = settings
        self._layout = layout
        device = device.partition(":")[0]
        if launcher is None:
            _require_devices(device, layout)
            launcher = LocalRanks(layout, device)
        self._launcher = launcher
        self._folder = folder
        self._packs_rows = True
        self._divisor = self._n_tokens = 0
        self._shapes: dict[Loaded, dict[str, tuple[int, ...]]] = {"base": {}, "adapter": {}}
        self._captured: ScratchDir | None = None
        """The newest snapshot, until `drop_snapshot` removes it. `_capture_lock` is held while its files are linked."""
        self._capture_lock = threading.Lock()
        self._ranks = RankCalls(self.kind, launcher, {"device": device, "settings": settings.model_dump()})

    @abstractmethod
    def _model_arguments(self, source: Path, config: Any) -> dict[str, Any]:
        """Return the arguments from which a rank builds the model.

        Raises:
            ConfigError: the layout does not fit the model.

        """

    def load_hf(self, source: Path) -> None:
        """See `PolicyEngine.load_hf`."""
        self._layout = self._launcher.layout
        require_unquantized(read_config(source))
        require_known_experts(source)
        if self.settings.router_aux_loss_coef:
            require_mixture(source, "trainer.router_aux_loss_coef")
        if self._layout.expert > 1:
            require_mixture(source, "trainer.expert_parallel")
        try:
            model = self._model_arguments(source, AutoConfig.from_pretrained(source, local_files_only=True))
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"model {source} cannot be loaded as a causal language model: {error}") from error
        files = sorted(str(file) for file in source.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"model {source} has no .safetensors file: save it again with save_pretrained")
        self._divisor = self._n_tokens = 0
        if self._folder is not None:
            remove_stale(self._folder)
        try:
            with ScratchDir(self._folder) as shared:
                answers = self._ranks.call("load_hf", {"model": model, "files": files, "shared": str(shared)})
        except ConfigError as error:
            raise ConfigError(f"model {source}: {error}") from error
        for what, shapes in self._shapes.items():
            shapes.clear()
            shapes |= {name: tuple(shape) for answer in answers for name, shape, *_ in answer[what]}
        self.adapter_json = answers[0]["adapter_json"]

    def logprobs(self, batches: Sequence[Sequence[SequenceRow]]) -> list[bytes]:
        """See `PolicyEngine.logprobs`."""
        return self._columns(batches, "logprobs")

    def reference_logprobs(self, batches: Sequence[Sequence[SequenceRow]]) -> list[bytes]:
        """See `PolicyEngine.reference_logprobs`."""
        return self._columns(batches, "logprobs", reference=True)

    def values(self, batches: Sequence[Sequence[SequenceRow]]) -> list[bytes]:
        """See `Critic.values`."""
        if self.settings.critic is None:
            raise Fatal("this engine has no critic: construct it with PolicySettings.critic")
        return self._columns(batches, "values")

    def _columns(self, batches: Sequence[Sequence[SequenceRow]], call: str, **arguments: Any) -> list[bytes]:
        """Return a column of each row from a call of the ranks."""
        rows, split = _flat(batches), self._split(batches)
        columns = [b""] * len(rows)
        replicas = [select(rows, replica) for replica in split]
        for indices, of_replica in zip(split, self._of_replicas(replicas, call, **arguments), strict=True):
            for batch, column in zip(indices, of_replica, strict=True):
                ends = np.cumsum([rows[index].n_loss_tokens for index in batch])
                for index, value in zip(batch, np.split(unpack(column, F32), ends[:-1]), strict=True):
                    columns[index] = value.tobytes()
        return columns

    def _of_replicas(
        self, replicas: Sequence[Sequence[Sequence[SequenceRow]]], call: str, **arguments: Any
    ) -> list[list[bytes]]:
        """Return each replica's columns, one per micro-batch."""
        of_replicas: list[list[bytes]] = [[] for _ in replicas]
        for rank, columns in enumerate(self._ranks.call(call, self._packed(replicas, **arguments))):
            of_replicas[self._replica(rank)] += columns
        return of_replicas

    def accumulate(self, batches: Sequence[Sequence[TrainingRow]], loss: LossFn) -> dict[str, float]:
        """See `PolicyEngine.accumulate`."""
        rows = _flat(batches)
        replicas = [select(rows, replica) for replica in self._split(batches)]
        needs_reference = self.settings.reference and not all(row.reference for row in rows)
        references = self._of_replicas(replicas, "logprobs", reference=True) if needs_reference else None
        answers = LossAnswers(replicas, loss, references, self.settings.critic)
        routings = self._ranks.call("accumulate", self._packed(replicas), answers)
        for routing in routings:
            sums.add(answers.totals, routing)
        self._divisor += int(answers.totals.get("divisor", 0))
        self._n_tokens += sum(row.n_loss_tokens for row in rows)
        if answers.not_finite:
            raise NotFinite(f"the loss is {answers.not_finite[0]}")
        return answers.totals

    def step(self, learning_rate: float) -> float:
        """See `PolicyEngine.step`."""
        rates, divisors = [learning_rate], [self._divisor]
        if self.settings.critic is not None:
            rates.append(learning_rate / self.settings.optimizer.lr * self.settings.critic.lr)
            divisors.append(self._n_tokens)
        self._divisor = self._n_tokens = 0
        if not divisors[0]:
            return 0.0
        norms: list[float] = self._ranks.call("step", {"learning_rates": rates, "divisors": divisors})[0]
        if not all(map(math.isfinite, norms)):
            raise NotFinite("the gradient's norm is " + ", the critic's ".join(map(str, norms)))
        return norms[0]

    def export_shards(self, what: Exported = "model") -> Iterator[Shard]:
        """See `PolicyEngine.export_shards`. The tensors are whole."""
        if what == "adapter":
            return whole_shards(self._ranks, what, self._shapes[what], self._folder)
        base = RankShards(self._ranks, self._shapes["base"], self._folder)
        if what == "base" or not self.adapter_json:
            return base
        return merged_shards(base, self.export_shards("adapter"), self.adapter_json, self._shapes["base"])

    def load_shards(self, shards: Iterable[Shard], what: Loaded = "base") -> None:
        """See `PolicyEngine.load_shards`."""
        shapes = self._shapes[what]
        missing = set(shapes)
        with ScratchDir(self._folder) as folder:
            files: list[str] = []
            shards = iter(shards)
            while group := list(itertools.islice(shards, _SHARDS_PER_FILE)):
                for shard in group:
                    if shapes.get(shard.name) != shard.local_shape:
                        shape = list(shard.local_shape)
                        raise Fatal(f"tensor {shard.name} of shape {shape} does not belong to this model")
                    missing.discard(shard.name)
                files.append(str(folder / f"{len(files):04d}.safetensors"))
                write_slices(Path(files[-1]), {TensorSlice(s.name, *s[2:5]): tensor_of(s) for s in group})
            if missing:
                raise Fatal(f"the weights lack {len(missing)} tensors of this model, {min(missing)} among them")
            self._ranks.call("load_weights", {"files": files, "what": what})

    def snapshot(self) -> Snapshot:
        """See `PolicyEngine.snapshot`. Each rank writes files of its own, which any other layout can read.

        The copy is these files. Digests and the flush to disk follow when the checkpoint is saved.

        Raises:
            DiskFull: there is no space for them; the same call may be repeated.

        """
        self.drop_snapshot()
        try:
            captured = self._captured = ScratchDir(self._folder)
        except OSError as error:
            raise write_error(error, f"{self._folder} cannot be written: {error}; free space there") from error
        try:
            self._ranks.call("save", {"directory": captured.name})
        except DiskFull:
            self.drop_snapshot()  # others need the space that a part of it takes
            raise

        def write(directory: Path) -> None:
            # A concurrent `close` waits for the links; they are made at once, unless the folder is on another disk.
            with self._capture_lock:
                if self._captured is not captured:
                    raise FileNotFoundError(f"{captured.name}: the snapshot was dropped before it was written")
                for file in Path(captured.name).iterdir():
                    _link_or_copy(file, directory / file.name)

        return write

    def load(self, directory: Path) -> None:
        """See `PolicyEngine.load`. The checkpoint may be of another layout."""
        self._divisor = self._n_tokens = 0
        self._ranks.call("load", {"directory": str(directory)})

    def offload(self) -> None:
        """See `PolicyEngine.offload`. Does nothing before `load_hf`: there are no ranks yet."""
        if self.settings.offload != "none" and self._shapes["base"]:
            self._ranks.call("offload", {})

    def close(self) -> None:
        """See `PolicyEngine.close`."""
        self._ranks.close()
        self.drop_snapshot()

    def drop_snapshot(self) -> None:
        """See `PolicyEngine.drop_snapshot`."""
        with self._capture_lock:
            captured, self._captured = self._captured, None
        if captured is not None:
            captured.cleanup()

    def _split(self, batches: Sequence[Sequence[SequenceRow]]) -> list[list[list[int]]]:
        """Split micro-batches among the data-parallel replicas, balanced by tokens.

        Returns:
            The micro-batches of each replica, as indices of all rows.

        """
        layout = self._layout
        n_per_replica = 1 if layout.pipeline == 1 else _BATCHES_PER_STAGE * layout.pipeline
        replicas: list[list[list[int]]] = [[] for _ in range(layout.data)]
        first = 0
        for rows in batches:
            for n, indices in enumerate(partition([row.n_tokens for row in rows], layout.data * n_per_replica)):
                if indices:
                    part = [first + index for index in indices]
                    replicas[n % layout.data] += [part] if self._packs_rows else one_row_each([part])
            first += len(rows)
        return replicas

    def _packed(self, replicas: Sequence[Sequence[Sequence[SequenceRow]]], **arguments: Any) -> list[dict[str, Any]]:
        """Return each rank's arguments."""
        of_replica = [{"batches": [pack_rows(rows) for rows in replica], **arguments} for replica in replicas]
        return [of_replica[self._replica(rank)] for rank in range(self._layout.n_ranks)]

    def _replica(self, rank: int) -> int:
        return Coordinates.of(rank, self._layout).data


def _flat(batches: Sequence[Sequence[R]]) -> list[R]:
    return [row for rows in batches for row in rows]


def _require_devices(device: str, layout: Layout) -> None:
    if device == "cuda" and torch.cuda.device_count() < layout.n_ranks:
        raise ConfigError(
            f"trainer.tensor_parallel x pipeline_parallel x context_parallel x data_parallel is {layout.n_ranks}, but "
            f"there are {torch.cuda.device_count()} GPUs: each rank needs a GPU of its own; lower one of them"
        )


def _link_or_copy(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except OSError:  # on another disk, or one without links
        shutil.copyfile(file, target)
