"""Entry point of the group `vllm.general_plugins`: vLLM calls `register` in each of its processes."""

from __future__ import annotations

import os
import threading
from functools import wraps
from multiprocessing import parent_process
from multiprocessing.process import BaseProcess
from typing import Any

NAME = "rlboost"
"""Name of the entry point and of the weight transfer engine."""
PARENT_VARIABLE = "RLBOOST_VLLM_PARENT"
"""Holds the process id of the worker."""
UNPACKED_VARIABLE = "RLBOOST_VLLM_UNPACKED"
"""Set where linear layers shall compute with their weights as loaded: see `VllmOptions.pack_weights`."""
N_GENERATED = "rlboost_n_generated"
"""Extra argument of a request: how many tokens at the end of its prompt are those of its answer so far."""


def is_unpacked() -> bool:
    """Return True if this process shall not pack weights."""
    return bool(os.environ.get(UNPACKED_VARIABLE))


def register() -> None:
    """Register the weight transfer engine and what continues grammars; in a worker's engine core, watch the worker."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory  # noqa: PLC0415 - the factory has no vllm

    WeightTransferEngineFactory.register_engine(
        NAME, "rlboost.services.rollout_worker.adapters.vllm.weight_transfer", "CacheWeightTransfer"
    )
    if is_unpacked():
        from vllm.model_executor.layers.linear import LinearBase  # noqa: PLC0415 - only vLLM's processes need it

        LinearBase._cpu_skip_gemm_dispatch = True  # noqa: SLF001 - which vLLM sets for some layers
    _continue_grammars()
    parent = parent_process()
    if parent is not None and os.environ.get(PARENT_VARIABLE) == str(parent.pid):
        threading.Thread(target=_exit_after, args=(parent,), name="exit-with-worker", daemon=True).start()


def _continue_grammars() -> None:
    """Have a request's grammar begin after the tokens of its answer so far, and not with the next one, as in vLLM."""
    from vllm.v1.structured_output import StructuredOutputManager  # noqa: PLC0415 - only vLLM's processes need it

    create = StructuredOutputManager._create_grammar  # noqa: SLF001 - vLLM has no public way
    if create.__module__ == __name__:
        return

    @wraps(create, assigned=())
    def create_continued(manager: Any, request: Any) -> Any:
        grammar = create(manager, request)
        n = (request.sampling_params.extra_args or {}).get(N_GENERATED, 0)
        if n and not grammar.accept_tokens(request.request_id, request.prompt_token_ids[-n:]):
            raise ValueError("the tokens of the answer so far do not match its grammar")
        return grammar

    StructuredOutputManager._create_grammar = create_continued  # noqa: SLF001 - as above


def _exit_after(worker: BaseProcess) -> None:
    """Exit when the worker has died: a killed worker cannot end its engine core."""
    worker.join()
    os._exit(1)
