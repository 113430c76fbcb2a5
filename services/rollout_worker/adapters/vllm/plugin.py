"""Entry point of the group `vllm.general_plugins`: vLLM calls `register` in each of its processes."""

from __future__ import annotations

import os
import threading
from multiprocessing import parent_process
from multiprocessing.process import BaseProcess

NAME = "rlboost"
"""Name of the entry point and of the weight transfer engine."""
PARENT_VARIABLE = "RLBOOST_VLLM_PARENT"
"""Holds the process id of the worker."""
UNPACKED_VARIABLE = "RLBOOST_VLLM_UNPACKED"
"""Set where linear layers shall compute with their weights as loaded: see `VllmOptions.pack_weights`."""


def is_unpacked() -> bool:
    """Return True if this process shall not pack weights."""
    return bool(os.environ.get(UNPACKED_VARIABLE))


def register() -> None:
    """Register the weight transfer engine; in the engine core of a worker, watch the worker."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory  # noqa: PLC0415 - the factory has no vllm

    WeightTransferEngineFactory.register_engine(
        NAME, "rlboost.services.rollout_worker.adapters.vllm.weight_transfer", "CacheWeightTransfer"
    )
    if is_unpacked():
        from vllm.model_executor.layers.linear import LinearBase  # noqa: PLC0415 - only vLLM's processes need it

        LinearBase._cpu_skip_gemm_dispatch = True  # noqa: SLF001 - which vLLM sets for some layers
    parent = parent_process()
    if parent is not None and os.environ.get(PARENT_VARIABLE) == str(parent.pid):
        threading.Thread(target=_exit_after, args=(parent,), name="exit-with-worker", daemon=True).start()


def _exit_after(worker: BaseProcess) -> None:
    """Exit when the worker has died: a killed worker cannot end its engine core."""
    worker.join()
    os._exit(1)
