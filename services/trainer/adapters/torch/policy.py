"""A policy trained by one rank in this process, or by several rank processes.

The ranks have the model and the optimizer. Batching and the loss stay in the trainer: ranks get rows and ask for the
gradient of the loss with respect to the log-probabilities, which is all that backward needs. Tensors go between rank
processes and trainer as files, because only the final export and a rare repair need them in the trainer.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from rlboost.services.trainer.adapters.tokens import UNLOADABLE
from rlboost.services.trainer.adapters.torch.attention import PACKED, one_row_each
from rlboost.services.trainer.adapters.torch.fsdp import FsdpRank
from rlboost.services.trainer.adapters.torch.layers import attention_of, require_packed
from rlboost.services.trainer.adapters.torch.passes import summed_value_loss, token_batch
from rlboost.services.trainer.adapters.torch.ranks import (
    Coordinates,
    Launcher,
    Layout,
    LocalRanks,
    RankCalls,
    TensorSlice,
    require_divisible_heads,
)
from rlboost.services.trainer.adapters.torch.tensors import ScratchDir, remove_stale, write_slices
from rlboost.services.trainer.adapters.weights import RankShards, merged_shards, tensor_of, whole_shards
from rlboost.services.trainer.domain.loss.function import LossFn, add_sums
from rlboost.services.trainer.domain.plan import SequenceRow, TrainingRow, partition, select
from rlboost.services.trainer.ports.engine import (
    PROFILED_BATCHES,
    Exported,
    Loaded,
    NotFinite,
    PolicySettings,
    Snapshot,
)
from rlboost.shared.errors import ConfigError, DiskFull, Fatal
from rlboost.shared.files import write_error
from rlboost.shared.job.algorithm import TEACHER, CriticSpec
from rlboost.shared.model.experts import require_mixture
from rlboost.shared.model.folder import (
    is_classifier,
    read_config,
    require_language_model,
    require_scores,
    require_unquantized,
    require_whole_weights,
)
from rlboost.shared.weights.manifest import Shard
from rlboost.shared.wire import F32, unpack

R = TypeVar("R", bound=SequenceRow)
ReplicaBatches = Sequence[Sequence[TrainingRow]]
"""Micro-batches of one data-parallel replica."""
ONE_RANK = Layout(1, 1, 1, sequence_parallel=False, distributed_optimizer=False)

_BATCHES_PER_STAGE = 4
"""Parts into which a micro-batch is split per pipeline stage. With fewer the stages idle longer."""

_SHARDS_PER_FILE = 16
"""Bounds the tensors in memory at a time, and keeps the number of files that each rank opens low."""


class RanksPolicy(ABC):
    """`PolicyEngine` on ranks: one in this process, or processes of this machine or of several."""

    adapter_json = ""

    kind: str
    """Kind of the ranks: `megatron` or `fsdp`. A single rank of `fsdp` has the whole model."""

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

        One rank of the torch backend is in this process, unless a launcher is given.

        Args:
            settings: the ranks get them too.
            layout: the degrees of parallelism; the launcher may start fewer ranks.
            device: `cpu`, or `cuda` for one GPU per rank; the name of a device for one in this process.
            folder: parent of scratch directories; the system's temporary directory if None. Ranks on other machines
                must have it under the same path.
            launcher: starts the ranks; on this machine if None.

        Raises:
            ConfigError: there are fewer GPUs than ranks.

        """
        self.settings = settings
        self._layout = layout
        self._device = device
        self._local: FsdpRank | None = None
        """The only rank, in this process, once the model is loaded."""
        self._ranks: RankCalls | None = None
        if self.kind != "fsdp" or layout.n_ranks > 1 or launcher is not None:
            device = device.partition(":")[0]
            if launcher is None:
                _require_devices(device, layout)
                launcher = LocalRanks(layout, device)
            self._ranks = RankCalls(self.kind, launcher, {"device": device, "settings": settings.model_dump()})
        elif "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)
        self._launcher = launcher
        self._folder = folder
        self._packs_rows = True
        self._divisor = self._n_tokens = 0
        self._n_to_profile = 0
        """Micro-batches that are still to be recorded."""
        self._shapes: dict[Loaded, dict[str, tuple[int, ...]]] = {"base": {}, "adapter": {}}
        self._captured: ScratchDir | None = None
        """The newest snapshot, until `drop_snapshot` removes it. `_capture_lock` is held while its files are linked."""
        self._capture_lock = threading.Lock()

    @abstractmethod
    def _model_arguments(self, source: Path, config: Any) -> dict[str, Any]:
        """Return the arguments from which a rank builds the model.

        Raises:
            ConfigError: the layout does not fit the model.

        """

    def load_hf(self, source: Path) -> None:
        if self._launcher is not None:
            self._layout = self._launcher.layout
        transformers_logging.disable_progress_bar()
        self._drop_rank()
        self._divisor = self._n_tokens = 0
        if self.settings.router_aux_loss_coef:
            require_mixture(source, "trainer.router_aux_loss_coef")
        if self._layout.expert > 1:
            require_mixture(source, "trainer.expert_parallel")
        model = self._arguments(source)
        teacher = self._teacher_arguments(Path(self.settings.teacher)) if self.settings.teacher else {}
        if self._ranks is None:
            self._local = FsdpRank(device=self._device, layout=self._layout, settings=self.settings)
            answers = [self._local.load_hf(model, **teacher)]
        else:
            answers = self._load_ranks(self._ranks, source, model, teacher)
        for what, shapes in self._shapes.items():
            shapes.clear()
            shapes |= {name: tuple(shape) for answer in answers for name, shape, *_ in answer[what]}
        self.adapter_json = answers[0]["adapter_json"]

    def _arguments(self, source: Path) -> dict[str, Any]:
        """Return the arguments from which a rank builds the model in a directory, once its files are checked."""
        config = read_config(source)
        require_unquantized(config)
        if not self.settings.scores:
            require_language_model(config)
        elif is_classifier(config):
            require_scores(source)
        try:
            model = self._model_arguments(source, AutoConfig.from_pretrained(source, local_files_only=True))
        except UNLOADABLE as error:
            raise ConfigError(f"model {source} cannot be loaded as a causal language model: {error}") from error
        require_whole_weights(source)
        return model

    def _teacher_arguments(self, source: Path) -> dict[str, Any]:
        packs_rows = self._packs_rows
        try:
            teacher = self._arguments(source)
            files = _files(source) if self._ranks is not None else []
        except ConfigError as error:
            raise ConfigError(f"{TEACHER}: {error}") from error
        self._packs_rows &= packs_rows
        return {"teacher": teacher, "teacher_files": files}

    def _load_ranks(
        self, ranks: RankCalls, source: Path, model: dict[str, Any], teacher: dict[str, Any]
    ) -> list[dict[str, Any]]:
        files = _files(source)
        if self._folder is not None:
            remove_stale(self._folder)
        try:
            with ScratchDir(self._folder) as shared:
                return ranks.call("load_hf", {"model": model, "files": files, "shared": str(shared), **teacher})
        except ConfigError as error:
            raise ConfigError(f"model {source}: {error}") from error

    @property
    def rank(self) -> FsdpRank:
        """The rank in this process, with the model that `load_hf` loaded."""
        assert self._local is not None, "call load_hf first"
        return self._local

    def logprobs(self, batches: Sequence[Sequence[SequenceRow]]) -> list[bytes]:
        return self._columns(batches, "logprobs")

    def reference_logprobs(self, batches: Sequence[Sequence[SequenceRow]]) -> list[bytes]:
        if not self.settings.reference:
            raise Fatal("this engine has no reference model: construct it with PolicySettings.reference")
        return self._columns(batches, "logprobs", reference=True)

    def values(self, batches: Sequence[Sequence[SequenceRow]]) -> list[bytes]:
        if self.settings.critic is None:
            raise Fatal("this engine has no critic: construct it with PolicySettings.critic")
        return self._columns(batches, "values")

    def _columns(self, batches: Sequence[Sequence[SequenceRow]], call: str, **arguments: Any) -> list[bytes]:
        """Return a column of each row from a call of the ranks."""
        rows, split = _flat(batches), self._split(batches)
        columns = [b""] * len(rows)
        replicas = [select(rows, replica) for replica in split]
        self._count_profiled(len(batches))
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
        if self._ranks is None:
            return [getattr(self.rank, call)(replicas[0], **arguments)]
        of_replicas: list[list[bytes]] = [[] for _ in replicas]
        for rank, columns in enumerate(self._ranks.call(call, self._packed(replicas, **arguments))):
            of_replicas[self._replica(rank)] += columns
        return of_replicas

    def accumulate(self, batches: Sequence[Sequence[TrainingRow]], loss: LossFn) -> dict[str, float]:
        rows = _flat(batches)
        replicas = [select(rows, replica) for replica in self._split(batches)]
        needs_reference = self.settings.reference and not all(row.reference for row in rows)
        references = self._of_replicas(replicas, "logprobs", reference=True) if needs_reference else None
        losses = Losses(replicas, loss, references, self.settings.critic)
        try:
            if self._ranks is None:
                routings = [self.rank.accumulate(replicas[0], losses.gradient)]
            else:
                routings = self._ranks.call("accumulate", self._packed(replicas), losses.answer)
        finally:
            self._divisor += int(losses.totals.get("divisor", 0))
            self._n_tokens += sum(row.n_loss_tokens for row in rows)
        self._count_profiled(len(batches))
        for routing in routings:
            add_sums(losses.totals, routing)
        if losses.not_finite is not None:
            raise losses.not_finite
        return losses.totals

    def step(self, learning_rate: float) -> float:
        rates, divisors = [learning_rate], [self._divisor]
        if self.settings.critic is not None:
            rates.append(learning_rate / self.settings.optimizer.lr * self.settings.critic.lr)
            divisors.append(self._n_tokens)
        self._divisor = self._n_tokens = 0
        if not divisors[0]:
            return 0.0
        norms: list[float] = self._call("step", learning_rates=rates, divisors=divisors)[0]
        if not all(map(math.isfinite, norms)):
            raise NotFinite("the gradient's norm is " + ", the critic's ".join(map(str, norms)))
        return norms[0]

    def export_shards(self, what: Exported = "model") -> Iterator[Shard]:
        """See `PolicyEngine.export_shards`. The tensors are whole."""
        base: Iterator[Shard]
        if what == "adapter":
            if self._ranks is None:
                return self.rank.shards(what)
            return whole_shards(self._ranks, what, self._shapes[what], self._folder)
        if self._ranks is None:
            base = self.rank.shards()
        else:
            base = RankShards(self._ranks, self._shapes["base"], self._folder)
        if what == "base" or not self.adapter_json:
            return base
        return merged_shards(base, self.export_shards("adapter"), self.adapter_json, self._shapes["base"])

    def load_shards(self, shards: Iterable[Shard], what: Loaded = "base") -> None:
        shards = _checked(shards, self._shapes[what])
        if self._ranks is None:
            self.rank.overwrite(shards, what)
            return
        with ScratchDir(self._folder) as folder:
            files: list[str] = []
            while group := list(itertools.islice(shards, _SHARDS_PER_FILE)):
                files.append(str(folder / f"{len(files):04d}.safetensors"))
                write_slices(Path(files[-1]), {TensorSlice(s.name, *s[2:5]): tensor_of(s) for s in group})
            self._ranks.call("load_weights", {"files": files, "what": what})

    def snapshot(self) -> Snapshot:
        """See `PolicyEngine.snapshot`. Each rank writes files of its own, which any other layout can read.

        In this process the copy is in memory. Otherwise it is these files; digests and the flush to disk follow when
        the checkpoint is saved.

        Raises:
            DiskFull: there is no space for them; the same call may be repeated.

        """
        if self._ranks is None:
            return self.rank.capture()
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
        self._call("load", directory=str(directory))

    def offload(self) -> None:
        """See `PolicyEngine.offload`. Does nothing before `load_hf`: there are no ranks yet."""
        if self.settings.offload != "none" and self._shapes["base"]:
            self._call("offload")

    def start_profile(self, folder: Path) -> list[str]:
        self._n_to_profile = PROFILED_BATCHES
        return [*filter(None, self._call("start_profile", folder=str(folder)))]

    def _count_profiled(self, n_batches: int) -> None:
        if self._n_to_profile > 0:
            self._n_to_profile -= n_batches
            if self._n_to_profile <= 0:
                self._call("end_profile")

    def stop_profile(self) -> list[str]:
        if self._n_to_profile > 0:
            self._call("end_profile")
        self._n_to_profile = 0
        return [*filter(None, self._call("write_profile"))]

    def close(self) -> None:
        self._drop_rank()
        if self._ranks is not None:
            self._ranks.close()
        self.drop_snapshot()

    def drop_snapshot(self) -> None:
        with self._capture_lock:
            captured, self._captured = self._captured, None
        if captured is not None:
            captured.cleanup()

    def _drop_rank(self) -> None:
        """Free the memory of the rank in this process, whose parts refer to each other."""
        if self._local is not None:
            self._local = None
            gc.collect()

    def _call(self, name: str, **arguments: Any) -> list[Any]:
        """Make the same call on every rank; return their results."""
        if self._ranks is None:
            return [getattr(self.rank, name)(**arguments)]
        return self._ranks.call(name, arguments)

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
        of_replica = [
            {"batches": [[_columns_of(row) for row in rows] for rows in replica], **arguments} for replica in replicas
        ]
        return [of_replica[self._replica(rank)] for rank in range(self._layout.n_ranks)]

    def _replica(self, rank: int) -> int:
        return Coordinates.of(rank, self._layout).data


# --- The policy of transformers' models ------------------------------------------------------------------------------


class TorchPolicy(RanksPolicy):
    """`RanksPolicy` on transformers, with FSDP2 if there are several ranks.

    With `bfloat16` the weights and the optimizer stay in float32, because updates at small learning rates would round
    to nothing. Matrices are multiplied in bfloat16 and exported weights are rounded to it. With an adapter the frozen
    weights are in `dtype`, in which they are published; the adapter is trained and exported in float32.
    """

    kind = "fsdp"

    def __init__(self, settings: PolicySettings, layout: Layout = ONE_RANK, **others: Any) -> None:
        super().__init__(settings, layout, **others)

    def _model_arguments(self, source: Path, config: Any) -> dict[str, Any]:
        attention = attention_of(config)
        self._packs_rows = attention == PACKED
        if self._layout.context > 1:
            require_packed(config, attention)
            require_divisible_heads(config.get_text_config().num_attention_heads, self._layout.context)
        return {"source": str(source), "attention": attention}


def _files(source: Path) -> list[str]:
    """Return a model's weights.

    Raises:
        ConfigError: there are none that ranks can read.

    """
    if found := sorted(str(file) for file in source.glob("*.safetensors")):
        return found
    raise ConfigError(f"model {source} has no .safetensors file: save it again with save_pretrained")


# --- Losses -----------------------------------------------------------------------------------------------------------


class Losses:
    """Computes the losses of one `accumulate`, and their gradients with respect to log-probabilities or values."""

    def __init__(
        self,
        replicas: Sequence[ReplicaBatches],
        loss: LossFn,
        references: Sequence[Sequence[bytes]] | None,
        critic: CriticSpec | None,
    ) -> None:
        """Compute them for these micro-batches.

        Args:
            replicas: the micro-batches.
            loss: the policy's.
            references: columns of log-probabilities under the reference model, one per micro-batch; None to take the
                rows' own.
            critic: the critic's settings, if there is one.

        """
        self._replicas = replicas
        self._loss = loss
        self._references = references
        self._critic = critic
        self.totals: dict[str, float] = {}
        """Sums of the losses' metrics, for `add_sums`."""
        self.not_finite: NotFinite | None = None
        """The first loss in an `answer` that is NaN or infinite. Such losses add nothing."""

    def gradient(self, kind: str, replica: int, index: int, column: Tensor) -> Tensor:
        """Return the gradient of a micro-batch's loss; see `engine.GradientFn`. It is on the column's device.

        Raises:
            NotFinite: the policy's loss is NaN or infinite.

        """
        rows, column = self._replicas[replica][index], column.requires_grad_()
        if kind == "value_loss":
            assert self._critic is not None
            total, metrics = summed_value_loss(rows, column, self._critic)
        else:
            reference = _column(self._references[replica][index]).to(column.device) if self._references else None
            logprobs, *entropies = column.view(-1, sum(row.n_loss_tokens for row in rows))
            total, metrics = self._loss(token_batch(rows, logprobs, reference, *entropies))
            if not torch.isfinite(total):
                raise NotFinite(f"the loss is {total.item()}")
        add_sums(self.totals, metrics)
        (gradient,) = torch.autograd.grad(total, [column])
        return gradient

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a question of a rank process: float32 bytes of the gradient."""
        try:
            place = question["ask"], question["data"], question["batch"]
            return {"gradient": self.gradient(*place, _column(question["column"])).numpy().tobytes()}
        except NotFinite as error:
            # The other ranks are in the same collective: answer with a gradient of zeros.
            self.not_finite = self.not_finite or error
            return {"gradient": bytes(len(question["column"]))}


def _column(values: bytes) -> Tensor:
    return torch.frombuffer(bytearray(values), dtype=torch.float32)


# --- Helpers ----------------------------------------------------------------------------------------------------------


def _checked(shards: Iterable[Shard], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Shard]:
    """Yield whole tensors; raises Fatal if one does not belong to a model with these shapes, or if one is missing."""
    missing = set(shapes)
    for shard in shards:
        if shapes.get(shard.name) != shard.local_shape:
            raise Fatal(f"tensor {shard.name} of shape {list(shard.local_shape)} does not belong to this model")
        missing.discard(shard.name)
        yield shard
    if missing:
        raise Fatal(f"the weights lack {len(missing)} tensors of this model, {min(missing)} among them")


def _columns_of(row: SequenceRow) -> tuple[Any, ...]:
    """Return what a rank needs of a row, as arguments of `SequenceRow`; the loss stays here."""
    return row.prompt, row.completion, b"", row.loss_mask, row.routed_experts, row.images


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
