"""A program `nvidia-smi` that lists GPUs which this machine does not have."""

from __future__ import annotations

from pathlib import Path

from rlboost.local.layout import Gpu

GIB = 1 << 30


def gpus(n: int) -> list[Gpu]:
    """Return GPUs as the program lists them."""
    return [Gpu(i, f"GPU-{i}", "NVIDIA H100 80GB HBM3", 81559 << 20, "570.86.15") for i in range(n)]


def install(folder: Path, n: int) -> Path:
    """Write the program into a folder for PATH; return the folder."""
    folder.mkdir(exist_ok=True)
    lines = "".join(
        f"{gpu.index}, {gpu.uuid}, {gpu.name}, 81559, 00000000:{0xF0 + gpu.index:02X}:00.0, {gpu.driver}\n"
        for gpu in gpus(n)
    )
    (folder / "list.csv").write_text(lines)
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat {folder}/list.csv\n")
    program.chmod(0o755)
    return folder
