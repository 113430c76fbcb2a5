"""What a trainer of your own publishes: versions of a model, or of a LoRA adapter on one.

Of an adapter (PEFT), the first version is the model below it, and each later one the adapter alone, as in jobs of the
trainer service with `elastic.weights: lora`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rlboost.shared.errors import ConfigError, Conflict
from rlboost.shared.model.folder import require_unquantized, require_unquantized_tensor, tensor_names, vocabulary_size
from rlboost.shared.process.waiting import Waits
from rlboost.shared.weights.client import StoreClient
from rlboost.shared.weights.lora import Shape, adapter_of, config_json_of, wrapped_names
from rlboost.shared.weights.publisher import Publisher

if TYPE_CHECKING:
    import torch

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""What activation checkpointing and torch.compile put into the names of tensors."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of one version."""

    model: Any
    """A module, tensors by their Hugging Face names, or a folder; below an adapter no module, and None if the model is
    published."""
    config_json: str = ""
    """The model's configuration; empty: that of the version before."""
    adapter: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tensors of a LoRA adapter on the model, by PEFT's names; empty: it has none."""
    adapter_json: str = ""
    """PEFT's `adapter_config.json`."""


def weights_of(given: Any, config: Mapping[str, Any] | str | Path | None = None) -> Weights:
    """Return what `Fleet.publish` is given as weights.

    Args:
        given: a module, which PEFT may have wrapped; tensors by name; a folder; or `Weights`.
        config: the model's configuration, if `given` has none.

    Raises:
        ConfigError: it has an adapter, and not that alone is trained and active.

    """
    if isinstance(given, Weights):
        return given
    config_json = _config_json(given, config)
    if not hasattr(given, "peft_config"):
        return Weights(given, config_json)
    from rlboost.shared.weights.torch_tensors import module_tensors  # noqa: PLC0415 - imports torch

    return _adapted(given, dict(module_tensors(given)), config_json, with_model=True)


def weights_of_folders(adapter: str | Path, model: str | Path) -> Weights:
    """Return the weights of an adapter that PEFT has saved, on the model of a folder.

    Raises:
        OSError, ValueError: the adapter's folder cannot be read.

    """
    from safetensors import SafetensorError  # noqa: PLC0415 - a library of those who load models
    from safetensors.torch import load_file  # noqa: PLC0415 - imports torch

    files = [Path(adapter, name) for name in ("adapter_config.json", "adapter_model.safetensors")]
    if missing := [file.name for file in files if not file.is_file()]:
        raise FileNotFoundError(f"it has no file {missing[0]}")
    try:
        config, tensors = json.loads(files[0].read_text(encoding="utf-8")), load_file(files[1])
    except SafetensorError as error:
        raise ValueError(f"{files[1].name}: {error}") from error
    return Weights(str(model), _config_json(str(model), None), tensors, json.dumps(config, sort_keys=True))


def gathered(module: torch.nn.Module, *, with_model: bool = True) -> Weights:
    """Return a module's whole weights on the CPU of rank 0, gathered once if its parameters are sharded (FSDP2).

    All ranks call it. What it returns in the others has no tensors.

    Args:
        module: as it is trained: wrapped by FSDP2, DDP, torch.compile or PEFT, or by none of them.
        with_model: False: of an adapter, not of the frozen model below it.

    Raises:
        ConfigError: it is sharded by DeepSpeed ZeRO-3 or FSDP1, or has an adapter, and not that alone is trained.

    """
    from torch import Tensor  # noqa: PLC0415
    from torch.distributed.checkpoint.state_dict import (  # noqa: PLC0415 - imports torch
        StateDictOptions,
        get_model_state_dict,
    )

    if any(hasattr(tensor, "ds_id") for tensor in module.parameters()):
        raise ConfigError("DeepSpeed ZeRO-3 is not supported with a fleet: use FSDP2 (fsdp_version: 2)")
    if _is_fsdp1(module):
        raise ConfigError("FSDP1 is not supported with a fleet: use FSDP2 (fsdp_version: 2)")
    own = _unwrapped(module)
    is_adapted = hasattr(own, "peft_config")
    options = StateDictOptions(
        full_state_dict=True, cpu_offload=True, ignore_frozen_params=is_adapted and not with_model
    )
    tensors = get_model_state_dict(module, options=options)
    unique = {_without_wrappers(name) for name, _ in own.named_parameters()}
    tied = {_without_wrappers(name) for name, _ in own.named_parameters(remove_duplicate=False)} - unique
    named = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor) and name not in tied}
    config_json = _config_json(own, None)
    return _adapted(own, named, config_json, with_model=with_model) if is_adapted else Weights(named, config_json)


def is_sharded(module: torch.nn.Module) -> bool:
    """Return True if no rank has all tensors of a module."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - imports torch

    return _is_fsdp1(module) or any(
        isinstance(tensor, DTensor) or hasattr(tensor, "ds_id") for tensor in module.parameters()
    )


def _is_fsdp1(module: torch.nn.Module) -> bool:
    from torch.distributed.fsdp import FullyShardedDataParallel  # noqa: PLC0415 - imports torch

    return any(isinstance(part, FullyShardedDataParallel) for part in module.modules())


def _unwrapped(module: Any) -> Any:
    """Return the model itself, whose attributes are its own."""
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415 - imports torch

    while hasattr(module, "_orig_mod") or isinstance(module, DistributedDataParallel):
        module = module.module if isinstance(module, DistributedDataParallel) else module._orig_mod  # noqa: SLF001
    return module


def _without_wrappers(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _adapted(model: Any, tensors: Mapping[str, torch.Tensor], config_json: str, *, with_model: bool) -> Weights:
    """Return the weights of a model that PEFT has wrapped.

    Args:
        model: what PEFT returned.
        tensors: of model and adapter, by the names of the wrapped model; none in ranks that publish nothing.
        config_json: as in `Weights`.
        with_model: whether `tensors` has the model's own.

    """
    active = list(model.active_adapters)
    if len(active) != 1 or (name := active[0]) not in model.peft_config:
        raise ConfigError(f"peft_config: the adapters {active} are active: activate one")
    if any(getattr(layer, "merged", False) for layer in model.modules()):
        raise ConfigError(
            "the adapter is merged into the model: publish it before merge_adapter or after unmerge_adapter"
        )
    names = wrapped_names(tensors, name)
    trained = (_without_wrappers(own) for own, tensor in model.named_parameters() if tensor.requires_grad)
    if others := sorted(wrapped_names(trained, name).model):
        raise ConfigError(
            f"{others[0]} is trained, and is no tensor of the adapter, which alone is published: freeze it, or train "
            "the whole model"
        )
    adapter = {own: tensors[given] for given, own in names.adapter.items()}
    below = {own: tensors[given] for given, own in names.model.items()} if with_model else None
    return Weights(below, config_json, adapter, config_json_of(model.peft_config[name]))


def _check_adapter(weights: Weights) -> None:
    """Check that workers can merge an adapter into its model."""
    model = dict(_kinds_of(weights.model))
    for name, (_, dtype) in model.items():
        require_unquantized_tensor(name, dtype)
    adapter = {name: tuple(tensor.shape) for name, tensor in weights.adapter.items()}
    try:
        adapter_of(weights.adapter_json, adapter, {name: shape for name, (shape, _) in model.items()})
    except ConfigError as error:
        raise ConfigError(
            f"peft_config: {error}. Use a LoraConfig for linear layers, without use_dora, use_rslora, bias, "
            "modules_to_save and patterns of ranks, or train the whole model"
        ) from error


def _kinds_of(model: Mapping[str, torch.Tensor] | str) -> Iterator[tuple[str, tuple[Shape, str]]]:
    """Yield name, shape and dtype of the tensors of a model, or of a folder with one."""
    if not isinstance(model, str):
        for name, tensor in model.items():
            yield name, (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        return
    from safetensors import safe_open  # noqa: PLC0415 - a library of those who load models

    name_of = tensor_names(Path(model))
    for path in sorted(Path(model).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                kind = file.get_slice(name)
                yield name_of(name), (tuple(kind.get_shape()), kind.get_dtype())


def _places_of(model: Mapping[str, torch.Tensor] | str) -> dict[str, int]:
    if isinstance(model, str):
        return {model: 0}
    return {name: tensor.data_ptr() for name, tensor in model.items()}


def _config_json(weights: Any, config: Mapping[str, Any] | str | Path | None) -> str:
    """Return a model's configuration as JSON, empty if it is not given."""
    if isinstance(config, Mapping):
        return json.dumps(config)
    if config is None and hasattr(weights, "config"):
        model = weights.get_base_model() if hasattr(weights, "peft_config") else weights
        # A model that was never saved has none, and vLLM needs it. FSDP2 puts a class of its own before the model's.
        unsaved = {
            "architectures": [type(model).__name__.removeprefix("FSDP")],
            "dtype": str(model.dtype).removeprefix("torch."),
        }
        own = json.loads(model.config.to_json_string(use_diff=False))
        return json.dumps(own | {key: value for key, value in unsaved.items() if own.get(key) is None})
    folder = config or (weights if isinstance(weights, str | Path) else None)
    return "" if folder is None else Path(folder, "config.json").read_text(encoding="utf-8")


class WeightFolder:
    """A folder with weights, which a gateway publishes: it runs on this machine, or shares the folder.

    Args:
        path: of the folder; empty: a temporary one.

    """

    def __init__(self, path: str | Path = "") -> None:
        self._temporary = None if path else TemporaryDirectory(prefix="rlboost-weights-")
        self._path = Path(path or getattr(self._temporary, "name", "")).absolute()

    def write(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Path:
        """Replace what the folder has; return its path."""
        from safetensors.torch import save_file  # noqa: PLC0415 - imports torch

        self._path.mkdir(parents=True, exist_ok=True)
        # Of tensors that share memory, save_file takes none.
        found = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors}
        save_file(found, self._path / "model.safetensors")
        return self._path

    def close(self) -> None:
        """Remove the folder, if it is temporary."""
        if self._temporary is not None:
            self._temporary.cleanup()


class Versions:
    """The versions of one job, whose trainer publishes the next one.

    Args:
        store: the weight store, with the trainer's access.
        job_id: the job.
        resume: whether the first weights may be those of the newest version, which is continued then.
        deltas: publish lossless deltas, which costs host memory for one copy of the model.
        limit_s: how long to retry while the store is unavailable.

    """

    def __init__(self, store: StoreClient, job_id: str, *, resume: bool, deltas: bool, limit_s: float) -> None:
        self._job_id, self._may_have_newest = job_id, resume
        self._publisher = Publisher(store, Waits(), limit_s=limit_s, deltas=deltas)
        self._adapters = Publisher(store, Waits(), limit_s=limit_s) if deltas else self._publisher
        """Of adapters, which are no deltas of models."""
        self.newest = -1
        """The newest version; -1 before the first."""
        self.is_adapter = False
        """Whether that is an adapter's."""
        self._base = -1
        """The version of the model below adapters; -1 before this trainer has published an adapter."""
        self._base_places: dict[str, int] = {}
        """Name -> address of each tensor of that model: it is frozen, and read again if it has moved."""
        self._newest_model = -1
        """The newest version that is a model, as far as it is known; -1 before the first."""
        self._config_json = ""
        self._committed: tuple[str, ...] = ()
        """Digest and configurations of the newest version; empty before this trainer had its weights."""
        self.vocab_size = 0
        """How many token ids the published model's configuration has; 0 if it does not say, and before the first."""
        self.dtype = ""
        """Of most of the model's bytes, such as `bfloat16`; empty before it was published."""

    async def load(self) -> None:
        """Ask the store for the newest version."""
        head = await self._publisher.head(self._job_id)
        if head is None:
            self._may_have_newest = False
            return
        self.newest = head.version
        self.is_adapter = head.base_version is not None
        self._newest_model = head.version if head.base_version is None else head.base_version

    async def publish(self, weights: Weights, *, if_changed: bool) -> int:
        """Publish the next version, or continue the newest one. See `AsyncFleet.publish`."""
        self._config_json = weights.config_json or self._config_json
        if not self._config_json:
            raise ConfigError("give config: the configuration of the model (config.json) with the first version")
        try:
            config = json.loads(self._config_json)
        except ValueError as error:
            raise ConfigError(f"config: the model's configuration is not JSON ({error}): give config.json") from error
        if not isinstance(config, dict):
            raise ConfigError("config: the model's configuration is not a JSON object: give config.json")
        require_unquantized(config)
        self.vocab_size = vocabulary_size(config)
        if weights.adapter and weights.model is not None:
            places = _places_of(weights.model)
            if places != self._base_places:
                _check_adapter(weights)
                await self._publish_base(weights.model)
                self._base_places = places
        if weights.adapter and self._base < 0:
            raise ConfigError("the model below the adapter is not published: publish both first")
        if self._may_have_newest:
            self._may_have_newest = False
            with suppress(Conflict):  # the newest version has other weights
                await self._commit(self.newest, weights)
                return self.newest
        await self._commit_next(weights, if_changed=if_changed)
        return self.newest

    async def _publish_base(self, model: Any) -> None:
        """Publish the model below an adapter, unless it is the one that is published."""
        known = self._base if self._base >= 0 else self._newest_model
        if known >= 0:
            with suppress(Conflict):  # it is another model, or retained no more
                await self._commit(known, Weights(model))
                self._base = known
                return
        await self._commit_next(Weights(model))
        self._base, self._may_have_newest = self.newest, False

    async def _commit_next(self, weights: Weights, *, if_changed: bool = False) -> None:
        """Commit the version after the newest one; nothing if only changes are committed, and there is none."""
        if not await self._commit(self.newest + 1, weights, if_changed=if_changed):
            return
        self.newest, self.is_adapter = self.newest + 1, bool(weights.adapter)
        if not self.is_adapter:
            self._newest_model = self.newest

    async def _commit(self, version: int, weights: Weights, *, if_changed: bool = False) -> bool:
        """Publish and commit a version; return False if only changes are committed, and there is none."""
        from rlboost.shared.weights.torch_tensors import named_shards  # noqa: PLC0415 - imports torch

        publisher = self._adapters if weights.adapter else self._publisher
        part = await publisher.publish(self._job_id, version, 0, named_shards(weights.adapter or weights.model))
        if not weights.adapter:
            sizes = Counter[str]()
            for tensor in part.tensors:
                sizes[tensor.dtype] += tensor.n_bytes
            self.dtype = max(sizes, key=sizes.__getitem__, default="")
        base = self._base if weights.adapter else None
        content = part.model_copy(update={"edges": ()}).digest, self._config_json, str(base), weights.adapter_json
        if if_changed and content == self._committed:
            return False
        await publisher.commit(
            self._job_id,
            version,
            expect=self.newest,
            part_digests=[part.digest],
            config_json=self._config_json,
            base_version=base,
            adapter_json=weights.adapter_json,
        )
        self._committed = content
        return True
