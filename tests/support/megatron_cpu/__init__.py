"""Environments in which megatron-core runs without CUDA: `sitecustomize` in this folder does it."""

from __future__ import annotations

import os
from pathlib import Path


def python_path() -> str:
    """Return a PYTHONPATH that starts with this folder, for processes that import megatron-core on CPUs."""
    folder = str(Path(__file__).parent)
    others = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([folder, *(other for other in others if other not in {"", folder})])
