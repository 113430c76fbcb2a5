"""Lets megatron-core run where there is no CUDA, on gloo: for tests, and for trying a layout before renting GPUs.

megatron-core names the device in its sources (`device="cuda"`, `torch.cuda.current_device()`) and has no switch for
that. `install` makes the import system rewrite those words while it compiles `megatron.core`: no file is changed, no
bytecode is written, line numbers stay, and where CUDA is there nothing happens at all. What the words are depends on
the release, so it is pinned, and a test names the modules that must have been rewritten.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import decode_source
from types import CodeType, ModuleType

import torch

_PACKAGE = "megatron.core"
_NOT_REWRITTEN = ".fsdp"
"""Part of the names of modules that are neither used nor fit to run without CUDA."""
_RULES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"torch\.cuda\.current_device\(\)", 'torch.device("cpu")'),
        (r"""(device\s*(?::\s*str\s*)?=\s*)(['"])cuda\2""", r'\1"cpu"'),
        (r"""torch\.device\((['"])cuda\1\)""", 'torch.device("cpu")'),
        (r"""torch\.autocast\((['"])cuda\1""", 'torch.autocast("cpu"'),
        (r"""device_type\s*=\s*(['"])cuda\1""", 'device_type="cpu"'),
        (r"""(['"])torch\.cuda\.(Float|Half|BFloat16)Tensor\1""", r"'torch.\2Tensor'"),
        (r"\.cuda\((?:torch\.device\(\"cpu\"\)|non_blocking=True)?\)", ".cpu()"),
        (r"torch\.cuda\.(?:synchronize|empty_cache)\(\)", "None"),
        (r"torch\.cuda\.(get_rng_state|set_rng_state|manual_seed)\(", r"torch.\1("),
    )
)

_rewritten: dict[str, int] = {}


def install() -> None:
    """Have `megatron.core` compiled for this machine. Call it before the first import of that.

    Raises:
        RuntimeError: it was imported before.

    """
    if torch.cuda.is_available() or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if any(name.startswith(_PACKAGE) for name in sys.modules):
        raise RuntimeError(f"{_PACKAGE} was imported before the hook that makes it run without CUDA")
    sys.meta_path.insert(0, _Finder())


def rewritten() -> dict[str, int]:
    """Return how many places were rewritten in each module that was imported so far."""
    return dict(_rewritten)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(_PACKAGE) or _NOT_REWRITTEN in fullname:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        # Bytecode files are neither read nor written: the text is not the file's.
        path = self.get_filename(fullname)
        text = decode_source(self.get_data(path))
        for pattern, replacement in _RULES:
            text, n = pattern.subn(replacement, text)
            if n:
                _rewritten[fullname] = _rewritten.get(fullname, 0) + n
        code: CodeType = compile(text, path, "exec", dont_inherit=True)
        return code

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if module.__name__ == f"{_PACKAGE}.tensor_parallel.random":
            vars(module).update(_get_cuda_rng_state=_rng_state, _set_cuda_rng_state=_set_rng_state)
        elif module.__name__ == f"{_PACKAGE}.jit":
            # Compiling small fusions takes seconds and wants a C++ compiler.
            vars(module).update(jit_fuser=lambda function: function)


def _rng_state(_device: object = None, **_: object) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_: object, **__: object) -> None:
    torch.set_rng_state(state)
