"""A policy trained by several processes together, the ranks.

The ranks know the model and the optimizer. What a batch consists of and what the loss is stays here: they are given
packed token ids and ask for the loss's gradient with respect to the log-probabilities, which is all that backward
needs. Tensors pass between them and here as files, since only the last export and a rare repair want them here.
"""

from __future__ import annotations

import itertools
import math
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

from services.trainer.adapters.ranks import boxes
from services.trainer.adapters.ranks.aside import Aside, clear
from services.trainer.adapters.ranks.boxes import BoxReader
from services.trainer.adapters.ranks.layout import Layout, Place
from services.trainer.adapters.ranks.packed import packed
from services.trainer.adapters.ranks.piece import Piece
from services.trainer.adapters.ranks.processes import Ranks
from services.trainer.adapters.torch.batch import token_batch
from services.trainer.domain import sums
from services.trainer.domain.spread import spread
from services.trainer.domain.tokens import LossFn
from services.trainer.ports import Exported, Loaded, NotFinite, RankInfo, Row, Snapshot
from shared.columns import F32, unpack
from shared.errors import ConfigError, Fatal
from shared.training import OptimizerSpec, TrainerSpec
from shared.weights.publisher import Shard

_BATCHES_PER_STAGE = 4
"""Into how many each micro-batch is cut for every pipeline stage: with few the stages wait for each other."""

_SHARDS_A_FILE = 16
"""Tensors held at a time, and few enough files for every rank to have all of them open."""

_Share = list[list[Row]]
"""Micro-batches of one data-parallel replica."""


class RanksPolicy(ABC):
    """`PolicyEngine` on ranks that this process starts."""

    rank = RankInfo()
    adapter_json = ""

    def __init__(
        self,
        kind: str,
        spec: TrainerSpec,
        optimizer: OptimizerSpec,
        *,
        temperature: float,
        device: str,
        reference: bool = False,
        folder: Path | None = None,
    ) -> None:
        """Prepare; `load_hf` starts the ranks.

        Args:
            kind: of the ranks: `megatron` or `fsdp`.
            spec: how the model is cut up, and its dtype.
            optimizer: AdamW's settings.
            temperature: the sampling temperature; log-probabilities are of that distribution.
            device: `cpu`, or `cuda` for as many GPUs of this machine as there are ranks.
            reference: whether losses get the log-probabilities of the weights that `load_hf` loaded. It costs one more
                copy of them on the devices, and one more forward pass.
            folder: where tensors may lie for a while; the machine's place for such files where it is None.

        Raises:
            ConfigError: there are too few GPUs.

        """
        self._layout = Layout.of(spec)
        device = device.partition(":")[0]
        _count_devices(device, self._layout)
        self._keeps_reference = reference
        self._offload = spec.offload
        self._folder = folder
        self._divisor = 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._captured: Aside | None = None
        """What was captured and is not being written yet; whoever takes it from here removes it."""
        self._capture_lock = threading.Lock()

        def introduction(rank: int, rendezvous: str) -> dict[str, Any]:
            return {
                "rank": rank,
                "rendezvous": rendezvous,
                "device": device,
                "layout": self._layout,
                "optimizer": optimizer.model_dump(),
                "settings": {
                    "temperature": temperature,
                    "dtype": spec.dtype,
                    "reference": reference,
                    "offload": spec.offload,
                    "activation_checkpointing": spec.activation_checkpointing,
                },
            }

        self._ranks = Ranks(kind, self._layout.n_ranks, device, introduction)

    @abstractmethod
    def _described(self, source: Path, config: Any) -> dict[str, Any]:
        """Return what the ranks have to know of a model to build it.

        Raises:
            ConfigError: it cannot be cut up so.

        """

    @property
    def rewritten(self) -> dict[str, int]:
        """Modules of a library that were rewritten to run here, and in how many places."""
        return self._ranks.rewritten

    def load_hf(self, source: Path) -> None:
        """See `PolicyEngine.load_hf`."""
        try:
            model = self._described(source, AutoConfig.from_pretrained(source, local_files_only=True))
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"model {source} cannot be loaded as a causal language model: {error}") from error
        files = sorted(str(file) for file in source.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"model {source} has no .safetensors file: save it again with save_pretrained")
        self._divisor = 0
        if self._folder is not None:
            clear(self._folder)
        try:
            answers = self._ranks.call("load_hf", {"model": model, "files": files})
        except ConfigError as error:
            raise ConfigError(f"model {source}: {error}") from error
        self._shapes = {name: tuple(whole) for pieces in answers for name, whole, *_ in pieces}

    def logprobs(self, batches: Sequence[Sequence[Row]]) -> list[bytes]:
        """See `PolicyEngine.logprobs`."""
        return self._columns(batches, reference=False)

    def reference_logprobs(self, batches: Sequence[Sequence[Row]]) -> list[bytes]:
        """See `PolicyEngine.reference_logprobs`."""
        return self._columns(batches, reference=True)

    def _columns(self, batches: Sequence[Sequence[Row]], *, reference: bool) -> list[bytes]:
        shares = self._shares(batches)
        found = self._logprobs(shares, reference=reference)
        columns: dict[int, bytes] = {}
        for share, parts in zip(shares, found, strict=True):
            for rows, column in zip(share, parts, strict=True):
                ends = np.cumsum([row.n_trained for row in rows])
                values = np.split(unpack(column, F32), ends[:-1])
                columns |= {id(row): value.tobytes() for row, value in zip(rows, values, strict=True)}
        return [columns[id(row)] for rows in batches for row in rows]

    def _logprobs(self, shares: Sequence[_Share], *, reference: bool = False) -> list[list[bytes]]:
        """Return each replica's columns, one a micro-batch."""
        found: list[list[bytes]] = [[] for _ in shares]
        for rank, columns in enumerate(self._ranks.call("logprobs", self._packed(shares, reference=reference))):
            found[self._replica(rank)] += columns
        return found

    def accumulate(self, batches: Sequence[Sequence[Row]], loss: LossFn) -> dict[str, float]:
        """See `PolicyEngine.accumulate`."""
        shares = self._shares(batches)
        asks = self._keeps_reference and not all(row.reference for rows in batches for row in rows)
        references = self._logprobs(shares, reference=True) if asks else None
        numbers: dict[str, float] = {}
        broken: list[float] = []

        def answer(question: dict[str, Any]) -> dict[str, Any]:
            replica, number = question["data"], question["batch"]
            reference = references[replica][number] if references else None
            logprobs = _column(question["logprobs"]).requires_grad_()
            batch = token_batch(shares[replica][number], logprobs, None if reference is None else _column(reference))
            total, part = loss(batch)
            if not torch.isfinite(total):
                # The other ranks are in the middle of theirs: this one adds nothing.
                broken.append(float(total.detach()))
                return {"gradient": bytes(len(question["logprobs"]))}
            sums.add(numbers, part)
            (gradient,) = torch.autograd.grad(total, [batch.logprobs])
            return {"gradient": gradient.numpy().tobytes()}

        self._ranks.call("accumulate", self._packed(shares), answer)
        self._divisor += int(numbers.get("divisor", 0))
        if broken:
            raise NotFinite(f"the loss is {broken[0]}")
        return numbers

    def step(self, learning_rate: float) -> float:
        """See `PolicyEngine.step`."""
        divisor, self._divisor = self._divisor, 0
        if not divisor:
            return 0.0
        norm: float = self._ranks.call("step", {"learning_rate": learning_rate, "divisor": divisor})[0]
        if not math.isfinite(norm):
            raise NotFinite(f"the gradient's norm is {norm}")
        return norm

    def export_shards(self, what: Exported = "model") -> Iterator[Shard]:
        """See `PolicyEngine.export_shards`. The tensors are whole."""
        del what  # there is no adapter
        with Aside(self._folder) as folder:
            self._ranks.call("write", {"directory": str(folder)})
            with BoxReader(sorted(folder.iterdir())) as reader:
                for name, shape in self._shapes.items():
                    value = reader.read(Piece(name, shape, (0,) * len(shape), shape))
                    raw = value.reshape(-1).view(torch.uint8).numpy().data
                    yield Shard(name, str(value.dtype).removeprefix("torch."), shape, (0,) * len(shape), shape, raw)

    def load_shards(self, shards: Iterable[Shard], what: Loaded = "base") -> None:
        """See `PolicyEngine.load_shards`."""
        del what
        missing = set(self._shapes)
        with Aside(self._folder) as folder:
            files: list[str] = []
            shards = iter(shards)
            while group := list(itertools.islice(shards, _SHARDS_A_FILE)):
                for shard in group:
                    if self._shapes.get(shard.name) != shard.local_shape:
                        shape = list(shard.local_shape)
                        raise Fatal(f"tensor {shard.name} of shape {shape} does not belong to this model")
                    missing.discard(shard.name)
                files.append(str(folder / f"{len(files):04d}.safetensors"))
                boxes.write(Path(files[-1]), {Piece(shard.name, *shard[2:5]): _tensor(shard) for shard in group})
            if missing:
                raise Fatal(f"the weights lack {len(missing)} tensors of this model, {min(missing)} among them")
            self._ranks.call("load_weights", {"files": files})

    def digests(self) -> dict[tuple[str, tuple[int, ...], tuple[int, ...], str], str]:
        """Return (name, offset, shape, dtype) -> digest of every rank's shards."""
        return {
            (name, tuple(offset), tuple(shape), dtype): digest
            for found in self._ranks.call("digests", {})
            for name, offset, shape, dtype, digest in found
        }

    def publish(
        self, store: dict[str, str], job_id: str, version: int, *, limit_s: float, deltas: dict[str, bool]
    ) -> list[str]:
        """Have each rank send its part of a version to the weight store; return the parts' digests, in their order.

        Args:
            store: its `url` and `token`.
            job_id: whose weights.
            version: which.
            limit_s: how long the store may be away.
            deltas: `deltas` and `small` of `Publisher`.

        Raises:
            Timeout: the store was away for longer than `limit_s`.

        """
        arguments = {"store": store, "job_id": job_id, "version": version, "limit_s": limit_s, "deltas": deltas}
        return [digest for digest in self._ranks.call("publish", arguments) if digest]

    def snapshot(self) -> Snapshot:
        """See `PolicyEngine.snapshot`. Each rank writes files of its own; ranks in other numbers can read them.

        The copy is these files: what a checkpoint waits for beyond them, digests and the disk, comes when it is kept.
        """
        self._forget_captured()
        captured = self._captured = Aside(self._folder)
        self._ranks.call("save", {"directory": captured.name})

        def write(directory: Path) -> None:
            # A job that ends meanwhile must not remove what is on its way.
            with self._capture_lock:
                if self._captured is not captured:
                    raise FileNotFoundError(f"{captured.name} was given up before it was written")
                self._captured = None
            with captured as aside:
                for file in aside.iterdir():
                    shutil.move(file, directory)

        return write

    def load(self, directory: Path) -> None:
        """See `PolicyEngine.load`. The checkpoint may be of another layout."""
        self._divisor = 0
        self._ranks.call("load", {"directory": str(directory)})

    def rest(self) -> None:
        """See `PolicyEngine.rest`. Before `load_hf` there are no ranks, and so nothing to move."""
        if self._offload != "none" and self._shapes:
            self._ranks.call("rest", {})

    def close(self) -> None:
        """See `PolicyEngine.close`."""
        self._ranks.close()
        self._forget_captured()

    def _forget_captured(self) -> None:
        with self._capture_lock:
            captured, self._captured = self._captured, None
        if captured is not None:
            captured.cleanup()

    def _shares(self, batches: Sequence[Sequence[Row]]) -> list[_Share]:
        """Return each replica's micro-batches."""
        layout = self._layout
        n_each = 1 if layout.pipeline == 1 else _BATCHES_PER_STAGE * layout.pipeline
        shares: list[_Share] = [[] for _ in range(layout.data)]
        for rows in batches:
            parts = spread([row.n_tokens for row in rows], layout.data * n_each)
            for number, part in enumerate(parts):
                if part:
                    shares[number % layout.data].append([rows[i] for i in part])
        return shares

    def _packed(self, shares: Sequence[_Share], **arguments: Any) -> list[dict[str, Any]]:
        """Return each rank's arguments."""
        arguments_of = [{"batches": [packed(rows) for rows in share], **arguments} for share in shares]
        return [arguments_of[self._replica(rank)] for rank in range(self._layout.n_ranks)]

    def _replica(self, rank: int) -> int:
        return Place.of(rank, self._layout).data


def _count_devices(device: str, layout: Layout) -> None:
    if device == "cuda" and torch.cuda.device_count() < layout.n_ranks:
        raise ConfigError(
            f"trainer.tensor_parallel x pipeline_parallel x data_parallel is {layout.n_ranks}, but there are "
            f"{torch.cuda.device_count()} GPUs: all ranks run on the trainer's machine, with a GPU each"
        )


def _column(values: bytes) -> Tensor:
    return torch.frombuffer(bytearray(values), dtype=torch.float32)


def _tensor(shard: Shard) -> Tensor:
    return torch.frombuffer(bytearray(shard.data), dtype=getattr(torch, shard.dtype)).reshape(shard.local_shape)
