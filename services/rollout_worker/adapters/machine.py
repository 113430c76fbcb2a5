"""The memory of the worker's process and of its device, and the URL at which other workers reach it.

Device memory is read through NVIDIA's management library, not CUDA: it needs no CUDA context, waits for no kernel, and
cannot disturb an engine that records a graph on another thread.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import structlog

from rlboost.services.rollout_worker.domain.load import Memory
from rlboost.shared.http.server_url import server_url

log = structlog.get_logger(__name__)

_LIBRARY = "libnvidia-ml.so.1"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class _Info(ctypes.Structure):
    """`nvmlMemory_t`."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class MemoryProbe:
    """Returns the memory in use when called; 0 for values that are unknown on this machine.

    Args:
        device: the engine's device in torch's notation: `cpu`, `cuda`, `cuda:1`.

    """

    def __init__(self, device: str) -> None:
        kind, _, index = device.partition(":")
        self._nvml: Any = None
        self._handle = ctypes.c_void_p()
        if kind == "cuda":
            self._open(int(index or 0))

    def __call__(self) -> Memory:
        """Read the counters; takes microseconds."""
        if self._nvml is None:
            return Memory(resident_bytes())
        info = _Info()
        failed = self._nvml.nvmlDeviceGetMemoryInfo(self._handle, ctypes.byref(info))
        return Memory(resident_bytes()) if failed else Memory(resident_bytes(), info.used, info.total)

    def _open(self, index: int) -> None:
        """Load the library and find the device with this CUDA index."""
        try:
            nvml = ctypes.CDLL(_LIBRARY)
            failed = nvml.nvmlInit_v2() or _find(nvml, index, self._handle)
        except (OSError, AttributeError) as error:
            failed = error
        if failed:
            log.warning("device_memory_unknown", device=index, error=str(failed))
        else:
            self._nvml = nvml


def resident_bytes(statm: Path = Path("/proc/self/statm")) -> int:
    """Return this process's resident memory; 0 if `/proc` does not tell."""
    try:
        return int(statm.read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


def _find(nvml: Any, index: int, handle: ctypes.c_void_p) -> int:
    """Find a device; return NVML's error code, 0 for success."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    name = visible[index] if index < len(visible) else str(index)
    if name.isdigit():
        return int(nvml.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(handle)))
    return int(nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)))


OFF = "off"
_ANY_PORT = 9  # discard; connecting a UDP socket sends nothing


def peer_url(setting: str, host: str, port: int, manager_url: str, *, tls: bool = False) -> str:
    """Return the URL for other workers, empty for none.

    Args:
        setting: the URL itself, `off`, or empty: then it is derived.
        host: the address that the worker listens on; for a wildcard, the source address toward the manager is used.
        port: the port that it listens on.
        manager_url: selects the network for a wildcard.
        tls: the worker serves HTTPS.

    """
    if setting:
        return "" if setting == OFF else setting.rstrip("/")
    if host in {"0.0.0.0", "::", ""}:  # noqa: S104 - compared, not listened on
        host = _outbound(urlsplit(manager_url).hostname or "", host)
    if not host:
        return ""
    return server_url(host, port, tls=tls)


def listen_address(setting: str, manager_url: str) -> str:
    """Return the configured address, or the one from which the manager is reached; loopback if it is not known."""
    manager = urlsplit(manager_url).hostname or ""
    return setting or _outbound(manager, "0.0.0.0") or _outbound(manager, "::") or "127.0.0.1"  # noqa: S104 - for the family


def _outbound(manager: str, wildcard: str) -> str:
    """Return the source address toward the manager, of the wildcard's family; empty if there is none."""
    family = socket.AF_INET6 if ":" in wildcard else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((manager, _ANY_PORT))
            return str(ipaddress.ip_address(probe.getsockname()[0]))
    except (OSError, ValueError):
        return ""
