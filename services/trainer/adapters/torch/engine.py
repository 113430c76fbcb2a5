"""One rank of the trainer, which executes the calls that `policy` makes on all ranks.

A rank has a process of its own, or is alone in the trainer's. All ranks get the same calls in the same order, as
collectives require.
"""

from __future__ import annotations

import asyncio
import math
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, distributed
from torch.profiler import ProfilerActivity

from rlboost.services.trainer.adapters.checkpoint_folder import CRITIC_PREFIX
from rlboost.services.trainer.adapters.torch.ranks import Coordinates, Layout
from rlboost.services.trainer.adapters.torch.tensors import SliceReader
from rlboost.services.trainer.adapters.torch.trainable import (
    WEIGHT,
    Balancing,
    Forward,
    Frozen,
    MicroBatch,
    Model,
    Offloader,
    RankFiles,
    Trainable,
    exported_slices,
    fill,
    fill_frozen,
    load_checkpoint,
    local_tensor,
    slices_of,
    write_file,
)
from rlboost.services.trainer.adapters.weights import host_shards, tensor_of
from rlboost.services.trainer.ports.engine import MAX_TRACE_BYTES, Loaded, PolicySettings, Snapshot
from rlboost.shared.errors import ConfigError
from rlboost.shared.job.algorithm import CriticSpec
from rlboost.shared.model.folder import tensor_names
from rlboost.shared.process.waiting import Waits
from rlboost.shared.weights.client import StoreClient
from rlboost.shared.weights.manifest import Shard, chunks_among, digest_of
from rlboost.shared.weights.publisher import Publisher

COLLECTIVE_LIMIT = timedelta(minutes=30)
"""Timeout of a collective operation."""

GradientFn = Callable[[str, int, int, Tensor], Tensor]
"""(`loss` or `value_loss`, data-parallel replica, index of the micro-batch, log-probabilities or values) -> gradient of
that loss with respect to them. The trainer computes it. With entropies below the log-probabilities, [2, tokens]."""


class RankEngine(ABC):
    """Base class of the backends' ranks. The trainer calls the public methods by name."""

    def __init__(
        self,
        *,
        device: str,
        layout: Layout,
        settings: PolicySettings | dict[str, Any],
        rank: int = 0,
        local_rank: int = 0,
        init_method: str = "",
    ) -> None:
        """Join the process group.

        Args:
            device: `cpu`, or `cuda` for the GPU with the local rank's number.
            layout: degrees of parallelism.
            settings: the `PolicySettings`, or a mapping of them.
            rank: this rank's number.
            local_rank: number of this rank on its machine.
            init_method: where the ranks find each other: `file://PATH` of a new file, or `env://`. If empty, the rank
                is alone in the trainer's process, without a group, and `device` is any of torch's.

        """
        if init_method:
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
        self._rank = rank
        self._device = device
        self._layout = layout
        self._coordinates = self._init_parallel(rank, layout)
        self._settings = PolicySettings.model_validate(settings)
        self._dtype: torch.dtype = getattr(torch, self._settings.dtype)
        self._balancing = Balancing(self._settings.router_aux_loss_coef, self._settings.aggregation)
        self._n_accumulated = 0
        """Calls of `accumulate` since the last step."""
        self._n_steps = 0
        self._runner: asyncio.Runner | None = None
        self._publisher: Publisher | None = None
        self._profile: torch.profiler.profile | None = None
        self._trace = Path()
        """The file of the profile."""

    # --- what a backend implements ---

    @abstractmethod
    def _init_parallel(self, rank: int, layout: Layout) -> Coordinates:
        """Initialize the backend's parallel groups; return this rank's coordinates."""

    @abstractmethod
    def _build(self, model: dict[str, Any]) -> Trainable:
        """Build what is trained, with uninitialized weights, from the policy's `_model_arguments`."""

    @abstractmethod
    def _build_reference(self, model: dict[str, Any]) -> Frozen:
        """Build the frozen reference model, with uninitialized weights; `model` is the policy's or the teacher's."""

    @abstractmethod
    def _build_critic(self, model: dict[str, Any], spec: CriticSpec) -> Trainable:
        """Build the critic, with uninitialized weights.

        Raises:
            ConfigError: the backend has none.

        """

    @property
    @abstractmethod
    def _part_number(self) -> int | None:
        """The part of a published version that this rank uploads; None if another rank uploads the same tensors."""

    @property
    @abstractmethod
    def _has_logprobs(self) -> bool:
        """True if this rank computes log-probabilities."""

    @property
    def _reads_files(self) -> bool:
        """True if models are built without weights; False if `_build` and the others load them."""
        return True

    @property
    def _exports(self) -> bool:
        """True if this rank exports its slices of tensors."""
        return self._part_number is not None

    @property
    def _files(self) -> RankFiles:
        return RankFiles(self._rank, self._exports)

    # --- the model ---

    def load_hf(
        self,
        model: dict[str, Any],
        files: Sequence[str],
        shared: str,
        teacher: dict[str, Any] | None = None,
        teacher_files: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Build the model and load it from safetensors files.

        Args:
            model: the policy's `_model_arguments`.
            files: the safetensors files.
            shared: a directory that the trainer created where it writes checkpoints; a rank that does not see it is on
                a machine without the shared file system. Empty in the trainer's process.
            teacher: the arguments of the model that is the reference; None: it is the model itself, if there is one.
            teacher_files: its safetensors files.

        Returns:
            This rank's slices of the `base` model and of the `adapter`, and `adapter_json`.

        """
        if shared and not Path(shared).is_dir():
            raise ConfigError(
                f"machine {socket.gethostname()} does not have the trainer's folder {Path(shared).parent}: put "
                "RLBOOST_TRAINER_DIR on a file system that all machines of the trainer share, under the same path"
            )
        self.policy = self._build(model)
        self._n_steps = self._n_accumulated = 0
        self.critic = self._build_critic(model, spec) if (spec := self._settings.critic) else None
        self._trained = {"": self.policy} | ({CRITIC_PREFIX: self.critic} if self.critic else {})
        frozen = [(base, files)] if (base := self.policy.base) is not None else []
        self._reference = base
        if self._settings.reference and (base is None or teacher is not None):
            self._reference = self._build_reference(teacher or model)
            frozen.append((self._reference, teacher_files if teacher else files))
        try:
            with ExitStack() as stack:
                reader = stack.enter_context(_reader_of(files)) if self._reads_files else None
                for trainable in self._trained.values():
                    fill(trainable, reader, trainable.initial)
            for one, its_files in frozen if self._reads_files else ():
                with _reader_of(its_files) as its_reader:
                    fill_frozen(one.model, its_reader)
        except (OSError, ValueError, SafetensorError) as error:
            raise ConfigError(f"the model cannot be loaded: {error}") from error
        trained = [trainable.model for trainable in self._trained.values()]
        models: list[Model] = [*trained, *(one.model for one, _ in frozen)]
        self._offloader = Offloader(
            [parameter for one in models for _, parameter in one.parameters()],
            [optimizer for one in trained for optimizer in one.optimizers],
            torch.device(self._device),
            self._settings.offload,
            self._gradients,
        )
        self.offload()
        adapter = slices_of(self.policy.model) if self.policy.base else []
        return {"base": slices_of(self._loaded("base")), "adapter": adapter, "adapter_json": self.policy.adapter_json}

    def load_weights(self, files: list[str], what: Loaded) -> None:
        """Overwrite the weights only, from files that `policy` has checked against this model."""
        self._offloader.onload()
        with SliceReader(Path(file) for file in files) as reader:
            if (frozen := self.policy.frozen(what)) is not None:
                fill_frozen(frozen.model, reader)
            else:
                fill(self.policy, reader)
        self.offload()

    def overwrite(self, shards: Iterable[Shard], what: Loaded) -> None:
        """Overwrite the weights only, with whole tensors that `policy` has checked against this model."""
        self._offloader.onload()
        model = self._loaded(what)
        views = {
            s.name: view
            for name, parameter in model.parameters()
            for s, view in zip(
                model.weight_map.slices(name), model.weight_map.split(name, local_tensor(parameter)), strict=True
            )
        }
        for shard in shards:
            views[shard.name].copy_(tensor_of(shard))
        self.offload()

    def _loaded(self, what: Loaded) -> Model:
        """Return the whole model, or the adapter that is trained on it."""
        frozen = self.policy.frozen(what)
        return self.policy.model if frozen is None else frozen.model

    # --- training ---

    def logprobs(self, batches: Sequence[MicroBatch], reference: bool = False) -> list[bytes]:
        """Return one float32 column per micro-batch, on ranks that compute them.

        `reference` selects the reference model.
        """
        self._offloader.onload_weights()
        if reference:
            assert self._reference is not None, "this engine has no reference model"
            return self._columns(self._reference.passes, batches)
        return self._columns(self.policy.passes, batches)

    def values(self, batches: Sequence[MicroBatch]) -> list[bytes]:
        """Return the critic's values in the same form."""
        self._offloader.onload_weights()
        assert self.critic is not None, "this engine has no critic"
        return self._columns(self.critic.passes, batches)

    def _columns(self, passes: Forward, batches: Sequence[MicroBatch]) -> list[bytes]:
        columns = passes.columns(batches)
        return [column.numpy().tobytes() for column in columns] if self._has_logprobs else []

    def accumulate(self, batches: Sequence[MicroBatch], gradient: GradientFn) -> dict[str, float]:
        """Run forward and backward over micro-batches, with the gradients of the losses from the trainer.

        Returns:
            Sums about the routers of a mixture of experts, see `domain.loss.function`.

        """
        self._offloader.onload_weights()
        self._n_accumulated += 1
        replica = self._coordinates.data
        routing = self.policy.passes.accumulate(batches, partial(gradient, "loss", replica))
        if self.critic is not None:
            self.critic.passes.accumulate(batches, partial(gradient, "value_loss", replica))
        return routing

    def step(self, learning_rates: list[float], divisors: list[int]) -> list[float]:
        """Update and zero the gradients; return their norms. If one is not finite, all weights stay as they are.

        The arguments and the result are those of the policy, and of the critic if there is one.
        """
        self._offloader.onload()
        models = [trainable.model for trainable in self._trained.values()]
        norms = [model.finish_gradients(divisor) for model, divisor in zip(models, divisors, strict=True)]
        if all(map(math.isfinite, norms)):
            for model, learning_rate in zip(models, learning_rates, strict=True):
                model.update(learning_rate)
            self._n_steps += 1
        self._zero_gradients()
        return norms

    def _zero_gradients(self) -> None:
        for trainable in self._trained.values():
            trainable.model.zero_gradients()
        self._n_accumulated = 0

    # --- offloading ---

    def start_profile(self, folder: str) -> str:
        """Record what this rank computes; return why it cannot, empty if it does."""
        self._profile = None
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        try:
            recording = torch.profiler.profile(activities=activities)
            recording.start()
        except Exception as error:  # noqa: BLE001 - torch's profiler, without which the job continues
            return f"rank {self._rank} records no trace: {error}"
        self._profile = recording
        self._trace = Path(folder, f"rank-{self._rank}.json.gz")
        return ""

    def end_profile(self) -> None:
        """Record nothing more."""
        if self._profile is not None:
            self._profile.stop()

    def write_profile(self) -> str:
        """Write what was recorded; return why there is no file, empty if there is one."""
        recording, self._profile = self._profile, None
        if recording is None:
            return ""
        try:
            self._trace.parent.mkdir(parents=True, exist_ok=True)
            recording.export_chrome_trace(str(self._trace))
            if (n_bytes := self._trace.stat().st_size) > MAX_TRACE_BYTES:
                self._trace.unlink()
                return f"the trace of rank {self._rank} had {n_bytes:,} bytes, more than {MAX_TRACE_BYTES:,}: deleted"
        except (OSError, RuntimeError) as error:
            return f"the trace of rank {self._rank} cannot be written: {error}"
        return ""

    def offload(self) -> None:
        """Move tensors to host memory, as `trainer.offload` says, until a call that computes with them."""
        self._offloader.offload()

    def _gradients(self) -> tuple[Iterable[Tensor], bool]:
        gradients = chain.from_iterable(trainable.model.gradients() for trainable in self._trained.values())
        return gradients, self._n_accumulated > 0

    def _local_value(self, tensor: Tensor) -> Tensor:
        """Return this rank's slice of a tensor, on host or device, read-only."""
        return self._offloader.local_value(tensor)

    # --- publishing ---

    def write(self, directory: str, what: Loaded) -> None:
        """Write this rank's slices into a directory, in the published dtype."""
        name, values = self._files.slices(WEIGHT, self._loaded(what), self._published(what))
        write_file(Path(directory, name), values)

    def digests(self) -> list[list[Any]]:
        """Return name, offset, shape, dtype and digest of this rank's shards of the whole model."""
        return [[s.name, s.offset, s.local_shape, s.dtype, digest_of(s.data)] for s in self.shards()]

    def chunks_among(self, digests: list[str]) -> list[bytes]:
        """Return those chunks of this rank's part of the whole model that have these digests."""
        return [data for _, data in chunks_among(self.shards(), set(digests))]

    def publish(self, store: dict[str, str], job_id: str, version: int, limit_s: float, deltas: bool) -> str:
        """Upload this rank's part of the whole model to the weight store; return its digest, `""` without a part."""
        if (number := self._part_number) is None:
            return ""
        if self._publisher is None or self._runner is None:
            client = StoreClient(store["url"], store["token"])
            self._publisher = Publisher(client, Waits(), limit_s=limit_s, deltas=deltas)
            self._runner = asyncio.Runner()
        part = self._runner.run(self._publisher.publish(job_id, version, number, self.shards()))
        return part.digest

    def shards(self, what: Loaded = "base") -> Iterator[Shard]:
        """Yield this rank's shards of the whole model or of the adapter, in the published dtype."""
        return host_shards(exported_slices(self._loaded(what), self._published(what), exports=self._exports))

    def _published(self, what: Loaded) -> Callable[[Tensor], Tensor]:
        """Return a function that returns this rank's slice of a parameter in the published dtype."""

        def value_of(parameter: Tensor) -> Tensor:
            value = self._local_value(parameter)
            # Engines have buffers, such as the biases of expert selection, in full precision too; so are adapters.
            return value.to(self._dtype) if what == "base" and isinstance(parameter, torch.nn.Parameter) else value

        return value_of

    # --- checkpoints ---

    def save(self, directory: str) -> None:
        """Write what is trained; see `RankFiles.save`."""
        try:
            self._files.save(Path(directory), self._trained, self._n_steps)
        finally:
            if self._offloader.is_offloaded:
                # Free the device buffers in which slices were gathered.
                self._offloader.offload()

    def capture(self) -> Snapshot:
        """Copy what is trained; see `RankFiles.capture`."""
        return self._files.capture(self._trained, self._n_steps)

    def load(self, directory: str) -> None:
        """Read what `save` or `capture` wrote, in any layout."""
        self._offloader.onload()
        self._zero_gradients()
        self._n_steps = load_checkpoint(Path(directory), self._trained)
        self.offload()


def _reader_of(files: Sequence[str]) -> SliceReader:
    """Return a reader of the files of a Hugging Face directory, by the names of transformers' model."""
    paths = [*map(Path, files)]
    return SliceReader(paths, tensor_names(paths[0].parent))


def _require_gpu(local_rank: int) -> None:
    if (n_gpus := torch.cuda.device_count()) <= local_rank:
        raise ConfigError(
            f"machine {socket.gethostname()} has {n_gpus} GPUs for {local_rank + 1} or more ranks of the trainer: "
            "lower one of trainer.tensor_parallel, pipeline_parallel, context_parallel and data_parallel, or raise "
            "trainer.nodes"
        )
