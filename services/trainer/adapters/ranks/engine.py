"""One rank of the trainer, which executes the calls that `policy` sends to all ranks.

All ranks get the same calls in the same order, as collectives require.
"""

from __future__ import annotations

import asyncio
import math
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, distributed

from rlboost.services.trainer.adapters.ranks.layout import Coordinates, Layout
from rlboost.services.trainer.adapters.ranks.offload import StorageOffloader
from rlboost.services.trainer.adapters.ranks.packed import Balancing, PackedBatch
from rlboost.services.trainer.adapters.ranks.sharded_tensors import SliceReader, write_slices
from rlboost.services.trainer.adapters.ranks.tensor_slice import TensorSlice
from rlboost.services.trainer.adapters.ranks.trainable import MOMENTS, WEIGHT, Frozen, Model, Trainable
from rlboost.services.trainer.ports.engine import Loaded
from rlboost.shared.disk_space import write_error
from rlboost.shared.errors import ConfigError, Corrupt, DiskFull
from rlboost.shared.job.training import LoraSpec, Offload, OptimizerSpec
from rlboost.shared.waiting import Waits
from rlboost.shared.weights.client import StoreClient
from rlboost.shared.weights.manifest import digest_of
from rlboost.shared.weights.publisher import Publisher, Shard, chunks_among
from rlboost.shared.wire.routed_experts import RoutedShape

COLLECTIVE_LIMIT = timedelta(minutes=30)
"""Timeout of a collective operation."""
STEPS_FILE = "steps.txt"

AskTrainer = Callable[[dict[str, Any]], dict[str, Any]]
"""Sends a question to the trainer and waits for the answer."""


class RankEngine(ABC):
    """Base class of the backends' ranks. The trainer calls the public methods by name."""

    def __init__(
        self,
        rank: int,
        local_rank: int,
        init_method: str,
        device: str,
        layout: Layout,
        optimizer: dict[str, Any],
        settings: dict[str, Any],
    ) -> None:
        """Join the process group.

        Args:
            rank: this rank's number.
            local_rank: its number on its machine.
            init_method: where the ranks find each other: `file://PATH` of a new file, or `env://`.
            device: `cpu`, or `cuda` for the GPU with the local rank's number.
            layout: degrees of parallelism.
            optimizer: the job's `OptimizerSpec`, as a mapping.
            settings: `temperature`, `dtype`, `reference` (keep a frozen copy of the loaded weights), `offload`,
                `activation_checkpointing`, `compile`, `balancing`, `replayed`, `max_logits`, `lora` (a `LoraSpec` as a
                mapping, or None), `seed`.

        """
        if device != "cpu":
            _require_gpu(local_rank)
            torch.cuda.set_device(local_rank)
        distributed.init_process_group(
            "gloo" if device == "cpu" else "nccl",
            init_method=init_method,
            rank=rank,
            world_size=layout.n_ranks,
            timeout=COLLECTIVE_LIMIT,
        )
        self._device = device
        self._layout = layout
        self._coordinates = self._init_parallel(rank, layout)
        self._optimizer = OptimizerSpec.model_validate(optimizer)
        self._temperature: float = settings["temperature"]
        self._dtype: torch.dtype = getattr(torch, settings["dtype"])
        self._keeps_reference: bool = settings["reference"]
        self._offload: Offload = settings["offload"]
        self._activation_checkpointing: bool = settings["activation_checkpointing"]
        self._compiled: bool = settings["compile"]
        self._balancing = Balancing(*settings["balancing"])
        self._replayed = RoutedShape(*settings["replayed"]) if settings["replayed"] else None
        self._max_logits: int = settings["max_logits"]
        self._lora = LoraSpec.model_validate(settings["lora"]) if settings["lora"] else None
        self._seed: int = settings["seed"]
        self._n_accumulated = 0
        """Calls of `accumulate` since the last step."""
        self._n_steps = 0
        self._runner = asyncio.Runner()
        self._publisher: Publisher | None = None

    # --- what a backend implements ---

    @abstractmethod
    def _init_parallel(self, rank: int, layout: Layout) -> Coordinates:
        """Initialize the backend's parallel groups; return this rank's coordinates."""

    @abstractmethod
    def _build(self, model: dict[str, Any]) -> Trainable:
        """Build what is trained, with uninitialized weights, from the policy's `_model_arguments`."""

    @abstractmethod
    def _build_reference(self, model: dict[str, Any]) -> Frozen:
        """Build the frozen reference model, with uninitialized weights."""

    @property
    @abstractmethod
    def _part_number(self) -> int | None:
        """The part of a published version that this rank uploads; None if another rank uploads the same tensors."""

    @property
    @abstractmethod
    def _has_logprobs(self) -> bool:
        """True if this rank computes log-probabilities."""

    # --- the model ---

    def load_hf(self, model: dict[str, Any], files: list[str], shared: str) -> dict[str, Any]:
        """Build the model and load it from safetensors files.

        Args:
            model: the policy's `_model_arguments`.
            files: the safetensors files.
            shared: a directory that the trainer created where it writes checkpoints; a rank that does not see it is on
                a machine without the shared file system.

        Returns:
            This rank's slices of the `base` model and of the `adapter`, and `adapter_json`.

        """
        if not Path(shared).is_dir():
            raise ConfigError(
                f"machine {socket.gethostname()} does not have the trainer's folder {Path(shared).parent}: put "
                "RLBOOST_TRAINER_DIR on a file system that all machines of the trainer share, under the same path"
            )
        self._policy = self._build(model)
        self._n_steps = self._n_accumulated = 0
        self._frozen = self._policy.below
        if self._frozen is None and self._keeps_reference:
            self._frozen = self._build_reference(model)
        try:
            with SliceReader(Path(file) for file in files) as reader:
                _fill(self._policy, reader)
                if self._frozen is not None:
                    _fill_frozen(self._frozen.model, reader)
        except (OSError, ValueError, SafetensorError) as error:
            raise ConfigError(f"the model cannot be loaded: {error}") from error
        models: list[Model] = [self._policy.model, *([self._frozen.model] if self._frozen is not None else [])]
        self._offloader = StorageOffloader(
            [parameter for one in models for _, parameter in one.parameters()],
            self._policy.model.optimizers,
            torch.device(self._device),
            self._offload,
            self._gradients,
        )
        self.offload()
        adapter = _slices_of(self._policy.model) if self._policy.below else []
        return {"base": _slices_of(self._loaded("base")), "adapter": adapter, "adapter_json": self._policy.adapter_json}

    def load_weights(self, files: list[str], what: Loaded) -> None:
        """Overwrite the weights only, from files that `policy` has checked against this model."""
        self._offloader.onload()
        with SliceReader(Path(file) for file in files) as reader:
            if what == "base" and self._policy.below is not None:
                _fill_frozen(self._policy.below.model, reader)
            else:
                _fill(self._policy._replace(initial={}), reader)
        self.offload()

    def _loaded(self, what: Loaded) -> Model:
        """Return the whole model, or the adapter that is trained on it."""
        below = self._policy.below
        return below.model if below is not None and what == "base" else self._policy.model

    # --- training ---

    def logprobs(self, batches: list[list[bytes]], reference: bool = False) -> list[bytes]:
        """Return one float32 column per micro-batch, on ranks that compute them.

        `reference` selects the weights that `load_hf` loaded.
        """
        self._offloader.onload_weights()
        if reference:
            assert self._frozen is not None, "this engine has no reference model"
            columns = self._frozen.passes.logprobs([PackedBatch(*batch) for batch in batches])
        else:
            columns = self._policy.passes.logprobs([PackedBatch(*batch) for batch in batches])
        return [column.numpy().tobytes() for column in columns] if self._has_logprobs else []

    def accumulate(self, batches: list[list[bytes]], ask: AskTrainer) -> dict[str, float]:
        """Run forward and backward over micro-batches, asking the trainer for the gradient of the loss.

        Returns:
            Sums about the routers of a mixture of experts, see `domain.loss.sums`.

        """

        def loss_gradient(index: int, logprobs: Tensor) -> Tensor:
            column = logprobs.cpu().numpy().tobytes()
            answer = ask({"ask": "loss", "data": self._coordinates.data, "batch": index, "logprobs": column})
            return torch.frombuffer(bytearray(answer["gradient"]), dtype=torch.float32)

        self._offloader.onload_weights()
        self._n_accumulated += 1
        return self._policy.passes.accumulate([PackedBatch(*batch) for batch in batches], loss_gradient)

    def step(self, learning_rate: float, divisor: int) -> float:
        """Update and zero the gradients; return their norm. If the norm is not finite, weights stay as they are."""
        self._offloader.onload()
        norm = self._policy.model.finish_gradients(divisor)
        if math.isfinite(norm):
            self._policy.model.update(learning_rate)
            self._n_steps += 1
        self._zero_gradients()
        return norm

    def _zero_gradients(self) -> None:
        self._policy.model.zero_gradients()
        self._n_accumulated = 0

    # --- offloading ---

    def offload(self) -> None:
        """Move tensors to host memory, as `trainer.offload` says, until a call that computes with them."""
        self._offloader.offload()

    def _gradients(self) -> tuple[Iterable[Tensor], bool]:
        return self._policy.model.gradients(), self._n_accumulated > 0

    def _local_value(self, tensor: Tensor) -> Tensor:
        """Return this rank's slice of a tensor, on host or device, read-only."""
        return self._offloader.local_value(tensor)

    # --- publishing ---

    def write(self, directory: str, what: Loaded) -> None:
        """Write this rank's slices into a directory, in the published dtype."""
        self._write(Path(directory), WEIGHT, self._loaded(what), self._published(what))

    def digests(self) -> list[list[Any]]:
        """Return name, offset, shape, dtype and digest of this rank's shards of the whole model."""
        return [[s.name, s.offset, s.local_shape, s.dtype, digest_of(s.data)] for s in self._shards()]

    def chunks_among(self, digests: list[str]) -> list[bytes]:
        """Return those chunks of this rank's part of the whole model that have these digests."""
        return [data for _, data in chunks_among(self._shards(), set(digests))]

    def publish(self, store: dict[str, str], job_id: str, version: int, limit_s: float, deltas: bool) -> str:
        """Upload this rank's part of the whole model to the weight store; return its digest, `""` without a part."""
        if (number := self._part_number) is None:
            return ""
        if self._publisher is None:
            client = StoreClient(store["url"], store["token"])
            self._publisher = Publisher(client, Waits(), limit_s=limit_s, deltas=deltas)
        part = self._runner.run(self._publisher.publish(job_id, version, number, self._shards()))
        return part.digest

    def _shards(self) -> Iterator[Shard]:
        for s, value in self._owned_slices(self._loaded("base"), self._published("base")):
            raw = value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            dtype = str(value.dtype).removeprefix("torch.")
            yield Shard(s.name, dtype, s.global_shape, s.offset, s.local_shape, raw)

    def _published(self, what: Loaded) -> Callable[[Tensor], Tensor]:
        """Return a function that returns this rank's slice of a parameter in the published dtype."""

        def value_of(parameter: Tensor) -> Tensor:
            value = self._local_value(parameter)
            # Engines have buffers, such as the biases of expert selection, in full precision too; so are adapters.
            return value.to(self._dtype) if what == "base" and isinstance(parameter, torch.nn.Parameter) else value

        return value_of

    def _owned_slices(self, model: Model, value_of: Callable[[Tensor], Tensor]) -> Iterator[tuple[TensorSlice, Tensor]]:
        """Yield the slices that this rank exports, of a value of each parameter's shape. All ranks must iterate."""
        weight_map = model.weight_map
        for name, parameter in model.parameters():
            value = value_of(parameter)
            if self._part_number is None or not weight_map.owns(name):
                continue
            for s, local in zip(weight_map.slices(name), weight_map.split(name, value), strict=True):
                if math.prod(s.local_shape):
                    yield s, local

    def _write(self, directory: Path, kind: str, model: Model, value_of: Callable[[Tensor], Tensor]) -> None:
        """Write this rank's slices of one kind into a file of its own, after all ranks have gathered.

        Raises:
            DiskFull, Fatal: it cannot be written.

        """
        values = dict(self._owned_slices(model, value_of))
        if values:
            file = directory / f"{kind}-{distributed.get_rank():04d}.safetensors"
            with _disk_errors(file):
                write_slices(file, values)

    # --- checkpoints ---

    def save(self, directory: str) -> None:
        """Write master weights and moments of what is trained, in files that any other layout can read.

        Raises:
            DiskFull: there is no space on this rank's machine. All ranks can take the next call.
            Fatal: a file cannot be written for another reason.

        """
        folder = Path(directory)
        full: DiskFull | None = None
        # The disk of one rank may be full: it still gathers every kind with the others.
        for kind in (WEIGHT, *MOMENTS[: len(MOMENTS) if self._n_steps else 0]):
            try:
                self._write(folder, kind, self._policy.model, partial(self._policy.state.get, kind=kind))
            except DiskFull as error:
                full = error
        if self._offloader.is_offloaded:
            # Free the device buffers in which slices were gathered.
            self._offloader.offload()
        if full is not None:
            raise full
        if distributed.get_rank() == 0:
            with _disk_errors(file := folder / STEPS_FILE):
                file.write_text(str(self._n_steps), encoding="utf-8")

    def load(self, directory: str) -> None:
        """Read what `save` wrote, in any layout."""
        folder = Path(directory)
        self._offloader.onload()
        self._zero_gradients()
        try:
            n_steps = int((folder / STEPS_FILE).read_text(encoding="utf-8"))
            for kind in (WEIGHT, *MOMENTS[: len(MOMENTS) if n_steps else 0]):
                with SliceReader(sorted(folder.glob(f"{kind}-*.safetensors"))) as reader:
                    for name, parameter in self._policy.model.parameters():
                        self._policy.state.set(parameter, kind, _read(self._policy.model, name, reader))
        except (OSError, ValueError, SafetensorError) as error:
            raise Corrupt(f"checkpoint {directory} does not match this model: {error}") from error
        self._policy.state.set_steps(n_steps)
        self._n_steps = n_steps
        self.offload()


def _fill(trainable: Trainable, reader: SliceReader) -> None:
    """Overwrite what is trained with initial values and those of files."""
    for name, parameter in trainable.model.parameters():
        trainable.state.set(parameter, WEIGHT, _read(trainable.model, name, reader, trainable.initial))


def _fill_frozen(model: Model, reader: SliceReader) -> None:
    for name, parameter in model.parameters():
        model.put(parameter, _read(model, name, reader))


def _read(model: Model, name: str, reader: SliceReader, initial: Mapping[str, Tensor] = MappingProxyType({})) -> Tensor:
    """Return this rank's value of a parameter: a part of its initial value if it has one, otherwise of files."""
    whole = initial.get(name)
    slices = model.weight_map.slices(name)
    return model.weight_map.join(name, [reader.read(s) if whole is None else s.of(whole) for s in slices])


def _slices_of(model: Model) -> list[TensorSlice]:
    return [s for name, _ in model.parameters() for s in model.weight_map.slices(name)]


@contextmanager
def _disk_errors(file: Path) -> Iterator[None]:
    """Translate errors of writing a file."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise write_error(error, f"{file} cannot be written: {error}; free space there") from error


def _require_gpu(local_rank: int) -> None:
    if (n_gpus := torch.cuda.device_count()) <= local_rank:
        raise ConfigError(
            f"machine {socket.gethostname()} has {n_gpus} GPUs for {local_rank + 1} or more ranks of the trainer: "
            "lower one of trainer.tensor_parallel, pipeline_parallel, context_parallel and data_parallel, or raise "
            "trainer.nodes"
        )
