"""What a worker says of its memory. NVIDIA's library is a fake here: there is no GPU."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from rlboost.services.rollout_worker.adapters import machine
from rlboost.services.rollout_worker.adapters.machine import MemoryProbe, resident_bytes
from rlboost.services.rollout_worker.domain.load import Memory


class FakeNvml:
    """Devices with 80 GB, of which as many are used as the number that they were found under says."""

    def __init__(self, failing: str = "") -> None:
        self.asked: list[int | bytes] = []
        self._failing = failing

    def nvmlInit_v2(self) -> int:  # noqa: N802 - its name
        return int(self._failing == "init")

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:  # noqa: N802 - its name
        self.asked.append(index)
        handle._obj.value = index
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:  # noqa: N802 - its name
        self.asked.append(uuid)
        handle._obj.value = 7
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, info: Any) -> int:  # noqa: N802 - its name
        info._obj.total, info._obj.used = 80, handle.value or 0
        return int(self._failing == "info")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def test_cpu_probe_reports_process_memory_only() -> None:
    now = MemoryProbe("cpu")()
    assert 10e6 < now.resident_bytes < 1e12
    assert (now.device_used_bytes, now.device_total_bytes) == (0, 0)


def test_resident_bytes_without_proc_is_0(tmp_path: Path) -> None:
    assert resident_bytes(tmp_path / "none") == 0


@pytest.mark.parametrize(
    ("device", "visible", "asked"),
    [
        ("cuda", "", 0),
        ("cuda:1", "", 1),
        ("cuda:1", "3,5", 5),
        ("cuda:1", "GPU-aaaa,GPU-bbbb", b"GPU-bbbb"),
    ],
)
def test_probe_finds_the_device_by_cuda_index(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, device: str, visible: str, asked: int | bytes
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    now = MemoryProbe(device)()
    assert nvml.asked == [asked]
    assert now.device_total_bytes == 80
    assert now.device_used_bytes == (asked if isinstance(asked, int) else 7)


@pytest.mark.parametrize("failing", ["init", "info"])
def test_probe_of_a_failing_device_is_unknown(monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: FakeNvml(failing))
    memory = MemoryProbe("cuda")()
    assert memory == Memory(resident_bytes=memory.resident_bytes)
    assert memory.resident_bytes == pytest.approx(resident_bytes(), rel=0.5)


def test_probe_without_the_library_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_LIBRARY", "libnothing.so.0")
    assert MemoryProbe("cuda")().device_total_bytes == 0
