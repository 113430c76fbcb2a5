"""One rank of the trainer: its part of everything that `policy` is asked for.

All ranks get the same calls in the same order, which is what collectives need.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, distributed

from services.trainer.adapters.ranks import boxes
from services.trainer.adapters.ranks.boxes import BoxReader
from services.trainer.adapters.ranks.layout import Layout, Place
from services.trainer.adapters.ranks.model import MOMENTS, WEIGHT, Built, Model, Passes
from services.trainer.adapters.ranks.packed import Packed
from services.trainer.adapters.ranks.piece import Piece
from services.trainer.adapters.ranks.rest import RestingStorages
from shared.errors import ConfigError, Corrupt, Fatal
from shared.training import Offload, OptimizerSpec
from shared.waiting import Waits
from shared.weights.client import StoreClient
from shared.weights.manifest import digest_of
from shared.weights.publisher import Publisher, Shard

COLLECTIVE_LIMIT = timedelta(minutes=30)
"""How long a rank waits for the others before it gives up."""
STEPS_FILE = "steps.txt"

Ask = Callable[[dict[str, Any]], dict[str, Any]]
"""Sends the trainer a question and waits for the answer."""


class RankEngine(ABC):
    """Every public method is a call; `ask` is there for the loss."""

    rewritten: dict[str, int] = {}  # noqa: RUF012 - nobody writes to it
    """Modules of a library that were rewritten to run here, and in how many places."""

    def __init__(
        self,
        rank: int,
        rendezvous: str,
        device: str,
        layout: Layout,
        optimizer: dict[str, Any],
        settings: dict[str, Any],
    ) -> None:
        """Join the other ranks.

        Args:
            rank: which of them this is.
            rendezvous: a file that all of them see and that was not there before.
            device: `cpu` or `cuda`, of which a rank takes the one with its own number.
            layout: of all ranks.
            optimizer: the job's `OptimizerSpec`, as a mapping.
            settings: `temperature`, `dtype`, whether a `reference` is kept, what rests (`offload`), and whether layers
                are computed again for their gradients (`activation_checkpointing`).

        """
        if device != "cpu":
            torch.cuda.set_device(rank)
        distributed.init_process_group(
            "gloo" if device == "cpu" else "nccl",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=layout.n_ranks,
            timeout=COLLECTIVE_LIMIT,
        )
        self._device = device
        self._layout = layout
        self._place = self._joined(rank, layout)
        self._optimizer = OptimizerSpec.model_validate(optimizer)
        self._temperature: float = settings["temperature"]
        self._dtype: torch.dtype = getattr(torch, settings["dtype"])
        self._keeps_reference: bool = settings["reference"]
        self._offload: Offload = settings["offload"]
        self._recomputes: bool = settings["activation_checkpointing"]
        self._accumulated = False
        self._n_steps = 0
        self._runner = asyncio.Runner()
        self._publisher: Publisher | None = None

    # --- what each kind of rank has of its own ---

    @abstractmethod
    def _joined(self, rank: int, layout: Layout) -> Place:
        """Do what remains to be done when all ranks have met; return this one's place."""

    @abstractmethod
    def _built(self, model: dict[str, Any]) -> Built:
        """Build a model with whatever weights, and its optimizer; `model` is what the policy says of it."""

    @abstractmethod
    def _frozen(self, model: dict[str, Any]) -> tuple[Model, Passes]:
        """Build one that is not trained."""

    @property
    @abstractmethod
    def _part(self) -> int | None:
        """Return the number of this rank's part of the tensors, None where another rank has the same."""

    @property
    @abstractmethod
    def _has_logprobs(self) -> bool:
        """Tell whether log-probabilities come out here."""

    # --- the model ---

    def load_hf(self, model: dict[str, Any], files: list[str]) -> list[Piece]:
        """Build the model anew and fill it from safetensors files; return this rank's pieces of it."""
        self._model, self._passes, self._state = self._built(model)
        self._n_steps = 0
        self._accumulated = False
        weights = [parameter for _, parameter in self._model.parameters()]
        try:
            with BoxReader(Path(file) for file in files) as reader:
                self._fill(reader)
                if self._keeps_reference:
                    frozen, self._reference = self._frozen(model)
                    for name, parameter in frozen.parameters():
                        frozen.put(parameter, self._read(reader, name))
                        weights.append(parameter)
        except (OSError, ValueError, SafetensorError) as error:
            raise ConfigError(f"the model cannot be loaded: {error}") from error
        self._resting = RestingStorages(
            weights, self._model.optimizers, torch.device(self._device), self._offload, self._gradients
        )
        self.rest()
        return [piece for name, _ in self._model.parameters() for piece in self._model.map.pieces(name)]

    def load_weights(self, files: list[str]) -> None:
        """Overwrite the weights alone; the files hold just this model's tensors, as `policy` has seen to."""
        self._resting.wake()
        with BoxReader(Path(file) for file in files) as reader:
            self._fill(reader)
        self.rest()

    def _fill(self, reader: BoxReader) -> None:
        for name, parameter in self._model.parameters():
            self._state.set(parameter, WEIGHT, self._read(reader, name))

    def _read(self, reader: BoxReader, name: str) -> Tensor:
        pieces = self._model.map.pieces(name)
        return self._model.map.join(name, [reader.read(piece) for piece in pieces])

    # --- training ---

    def logprobs(self, batches: list[list[bytes]], reference: bool = False) -> list[bytes]:
        """Return float32 columns, one a micro-batch, from the rank that has them; of the frozen model if asked."""
        self._resting.wake_weights()
        passes = self._reference if reference else self._passes
        found = passes.logprobs([Packed(*batch) for batch in batches])
        return [column.numpy().tobytes() for column in found] if self._has_logprobs else []

    def accumulate(self, batches: list[list[bytes]], ask: Ask) -> None:
        """Run forward and backward; the loss's gradient is asked for."""

        def gradient_of(number: int, logprobs: Tensor) -> Tensor:
            column = logprobs.cpu().numpy().tobytes()
            answer = ask({"ask": "loss", "data": self._place.data, "batch": number, "logprobs": column})
            return torch.frombuffer(bytearray(answer["gradient"]), dtype=torch.float32)

        self._resting.wake_weights()
        self._accumulated = True
        self._passes.accumulate([Packed(*batch) for batch in batches], gradient_of)

    def step(self, learning_rate: float, divisor: int) -> float:
        """Update; return the gradient's norm. One that is not finite changes nothing but the gradients, which go."""
        self._resting.wake()
        norm = self._model.finish_gradients(divisor)
        if math.isfinite(norm):
            self._model.update(learning_rate)
            self._n_steps += 1
        self._forget()
        return norm

    def _forget(self) -> None:
        """Drop what was accumulated."""
        self._model.zero_gradients()
        self._accumulated = False

    # --- who has the device ---

    def rest(self) -> None:
        """Move to host memory what was told to rest there, until a call that computes with it."""
        self._resting.rest()

    def _gradients(self) -> tuple[Iterable[Tensor], bool]:
        return self._model.gradients(), self._accumulated

    def _held(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a tensor where it is now; to be read only."""
        return self._resting.held(tensor)

    # --- weights out ---

    def write(self, directory: str) -> None:
        """Write this rank's shards into a folder, in the dtype in which they are published."""
        self._write(Path(directory), WEIGHT, self._published)

    def digests(self) -> list[list[Any]]:
        """Return name, offset, shape, dtype and digest of this rank's shards."""
        return [[s.name, s.offset, s.local_shape, s.dtype, digest_of(s.data)] for s in self._shards()]

    def publish(self, store: dict[str, str], job_id: str, version: int, limit_s: float, deltas: dict[str, bool]) -> str:
        """Send this rank's part to the weight store; return the part's digest, empty where another rank has it all."""
        if (number := self._part) is None:
            return ""
        if self._publisher is None:
            client = StoreClient(store["url"], store["token"])
            self._publisher = Publisher(client, Waits(), limit_s=limit_s, **deltas)
        part = self._runner.run(self._publisher.publish(job_id, version, number, self._shards()))
        return part.digest

    def _shards(self) -> Iterator[Shard]:
        for piece, value in self._parts(self._published):
            raw = value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            yield Shard(*piece[:1], str(value.dtype).removeprefix("torch."), *piece[1:], raw)

    def _published(self, parameter: Tensor) -> Tensor:
        return self._held(parameter).to(self._dtype)

    def _parts(self, value_of: Callable[[Tensor], Tensor]) -> Iterator[tuple[Piece, Tensor]]:
        """Yield the pieces that this rank speaks for, of a value of each parameter's shape; all ranks must come."""
        for name, parameter in self._model.parameters():
            value = value_of(parameter)
            if self._part is None or not self._model.map.owns(name):
                continue
            for piece, part in zip(self._model.map.pieces(name), self._model.map.split(name, value), strict=True):
                if math.prod(piece.local_shape):
                    yield piece, part

    def _write(self, directory: Path, kind: str, value_of: Callable[[Tensor], Tensor]) -> None:
        held = dict(self._parts(value_of))
        if held:
            try:
                boxes.write(directory / f"{kind}-{distributed.get_rank():04d}.safetensors", held)
            except SafetensorError as error:
                raise OSError(str(error)) from error

    # --- checkpoints ---

    def save(self, directory: str) -> None:
        """Write master weights and moments, in files that any other number of ranks can read."""
        folder = Path(directory)
        try:
            for kind in (WEIGHT, *MOMENTS[: len(MOMENTS) if self._n_steps else 0]):
                self._write(folder, kind, partial(self._state.get, kind=kind))
            if distributed.get_rank() == 0:
                (folder / STEPS_FILE).write_text(str(self._n_steps), encoding="utf-8")
        except OSError as error:
            raise Fatal(f"a copy for a checkpoint cannot be written to {folder}: {error}; make room there") from error
        if self._resting.rests:
            # What parts were put together in, on the device, goes back too.
            self._resting.rest()

    def load(self, directory: str) -> None:
        """Read what `save` wrote."""
        folder = Path(directory)
        self._resting.wake()
        self._forget()
        try:
            n_steps = int((folder / STEPS_FILE).read_text(encoding="utf-8"))
            for kind in (WEIGHT, *MOMENTS[: len(MOMENTS) if n_steps else 0]):
                with BoxReader(sorted(folder.glob(f"{kind}-*.safetensors"))) as reader:
                    for name, parameter in self._model.parameters():
                        self._state.set(parameter, kind, self._read(reader, name))
        except (OSError, ValueError, SafetensorError) as error:
            raise Corrupt(f"checkpoint {directory} does not fit this model: {error}") from error
        self._state.set_steps(n_steps)
        self._n_steps = n_steps
        self.rest()
