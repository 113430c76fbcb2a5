"""What lets verl train without a GPU: a platform whose device is the CPU. verl imports it in each of its processes.

    VERL_PLATFORM=cpu VERL_ENGINE_DEVICE=cuda VERL_USE_EXTERNAL_MODULES=verl_on_cpu,rlboost.verl

Its engine for GPUs (FSDP2) runs then, as it names no device itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry

CPU = torch.device("cpu")
_initialize = torch.distributed.init_process_group


def _device_module() -> ModuleType:
    """Return what verl takes for `torch.cuda`."""
    module = ModuleType("torch_device_of_verl")
    for name in ("empty_cache", "set_device", "synchronize", "ipc_collect", "reset_peak_memory_stats"):
        setattr(module, name, lambda *_: None)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(module, name, lambda *_: 0)
    vars(module).update(
        mem_get_info=lambda *_: (0, 0),
        is_available=lambda: False,
        current_device=lambda: CPU,
        device_count=lambda: 1,
        get_device_name=lambda *_: "CPU",
    )
    return module


def _init_process_group(*given: Any, **options: Any) -> None:
    """Initialize it without the second of two backends for the CPU."""
    if options.get("backend") == "cpu:gloo,cpu:gloo":
        options["backend"] = "gloo"
    _initialize(*given, **options)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):  # type: ignore[misc] # verl may not be installed
    """A CPU in the place of a GPU, for which Ray is told to have some."""

    device_name = "cpu"
    device_module = _device_module()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return CPU

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def communication_backend_name(self) -> str:
        return "gloo"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield


torch.distributed.init_process_group = _init_process_group
