"""Makes megatron-core run without CUDA, on gloo, in any Python process that has this folder in PYTHONPATH.

megatron-core names the device in its sources (`device="cuda"`, `torch.cuda.current_device()`) and has no switch for it.
This module, which Python imports at startup, rewrites those expressions while `megatron.core` is compiled. No file is
changed, no bytecode is written, line numbers stay, and nothing is rewritten where CUDA is available. The expressions
depend on the release, so it is pinned, and `tests/adapters/trainer/test_megatron_policy.py` names the modules that
must change.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import decode_source
from types import CodeType, ModuleType
from typing import Any

_PACKAGE = "megatron.core"
_SKIPPED = ".fsdp"
"""Part of the names of modules that are not used and cannot run without CUDA."""
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
        # gloo exchanges tensors of equal size only; NCCL does it as these functions do.
        (r"torch\.distributed\.all_gather\((?=output_tensor_list,)", "_all_gather("),
        (r"torch\.distributed\.reduce_scatter\((?=output, input_tensor_list,)", "_reduce_scatter("),
        (r"torch\.is_tensor\(tensor\) and tensor\.is_cuda", "torch.is_tensor(tensor)"),
        (r"tensor\.record_stream\(torch\.cuda\.current_stream\(\)\)", "None"),
        (r"torch\.cuda\.(Stream|stream|current_stream)\(", r"torch.cpu.\1("),
        (r"self\.cuda_dtoh_stream\.record_event\(\)", "torch.cpu.Event()"),
        (r"torch\.cuda\.(get_rng_state|set_rng_state|manual_seed)\(", r"torch.\1("),
    )
)

rewritten: dict[str, int] = {}
"""Imported module -> number of rewritten expressions."""


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(_PACKAGE) or _SKIPPED in fullname or _has_cuda():
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        # Neither reads nor writes bytecode files: the source is not the file's.
        path = self.get_filename(fullname)
        source = decode_source(self.get_data(path))
        for pattern, replacement in _RULES:
            source, n = pattern.subn(replacement, source)
            if n:
                rewritten[fullname] = rewritten.get(fullname, 0) + n
        code: CodeType = compile(source, path, "exec", dont_inherit=True)
        return code

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if module.__name__ == f"{_PACKAGE}.tensor_parallel.random":
            vars(module).update(_get_cuda_rng_state=_rng_state, _set_cuda_rng_state=_set_rng_state)
        elif module.__name__ == f"{_PACKAGE}.tensor_parallel.mappings":
            vars(module).update(_all_gather=_all_gather, _reduce_scatter=_reduce_scatter)
        elif module.__name__ == f"{_PACKAGE}.jit":
            # Compiling small fusions takes seconds and needs a C++ compiler.
            vars(module).update(jit_fuser=lambda function: function)


def _has_cuda() -> bool:
    import torch  # noqa: PLC0415 - not in every process at startup

    return torch.cuda.is_available()


def _rng_state(_device: object = None, **_: object) -> Any:
    import torch  # noqa: PLC0415 - not in every process at startup

    return torch.get_rng_state()


def _set_rng_state(state: Any, *_: object, **__: object) -> None:
    import torch  # noqa: PLC0415 - not in every process at startup

    torch.set_rng_state(state)


def _all_gather(outputs: Sequence[Any], value: Any, group: Any) -> None:
    from torch import distributed  # noqa: PLC0415 - not in every process at startup

    outputs[group.rank()].copy_(value)
    for rank, output in enumerate(outputs):
        if output.numel():
            distributed.broadcast(output, group=group, group_src=rank)


def _reduce_scatter(output: Any, values: Sequence[Any], group: Any) -> None:
    from torch import distributed  # noqa: PLC0415 - not in every process at startup

    for rank, value in enumerate(values):
        total = value.clone()
        if total.numel():
            distributed.reduce(total, group=group, group_dst=rank)
        if rank == group.rank():
            output.copy_(total)


sys.meta_path.insert(0, _Finder())
