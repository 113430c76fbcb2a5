"""Entry point of the group `vllm.general_plugins`: vLLM calls `register` in each of its processes."""

from __future__ import annotations

import os
import sys
import threading
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import parent_process
from multiprocessing.process import BaseProcess
from typing import Any

NAME = "rlboost"
"""Name of the entry point and of the weight transfer engine."""
PARENT_VARIABLE = "RLBOOST_VLLM_PARENT"
"""Holds the process id of the worker."""
UNPACKED_VARIABLE = "RLBOOST_VLLM_UNPACKED"
"""Set where linear layers shall compute with their weights as loaded: see `VllmOptions.pack_weights`."""
VISION_MODELS = {"qwen2_5_vl": "RLBoostQwen25VL", "qwen3_vl": "RLBoostQwen3VL"}
"""Family of models that see images -> its class in the module `vision`."""
N_GENERATED = "rlboost_n_generated"
"""Extra argument of a request: how many tokens at the end of its prompt are those of its answer so far."""


def is_unpacked() -> bool:
    """Return True if this process shall not pack weights."""
    return bool(os.environ.get(UNPACKED_VARIABLE))


def register() -> None:
    """Register the weight transfer engine, models and what continues grammars; in an engine core, watch the worker."""
    from vllm import ModelRegistry  # noqa: PLC0415 - as below
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory  # noqa: PLC0415 - the factory has no vllm

    WeightTransferEngineFactory.register_engine(
        NAME, "rlboost.services.rollout_worker.adapters.vllm.weight_transfer", "CacheWeightTransfer"
    )
    for name in VISION_MODELS.values():
        if name not in ModelRegistry.models:  # vLLM warns of a second time
            ModelRegistry.register_model(name, f"rlboost.services.rollout_worker.adapters.vllm.vision:{name}")
    if is_unpacked():
        from vllm.model_executor.layers.linear import LinearBase  # noqa: PLC0415 - only vLLM's processes need it

        LinearBase._cpu_skip_gemm_dispatch = True  # noqa: SLF001 - which vLLM sets for some layers
    if find_spec("torchvision") is None:
        replace_torchvision()
    _continue_grammars()
    parent = parent_process()
    if parent is None:
        return
    _compute_parts_of_seeded_prompts()
    if os.environ.get(PARENT_VARIABLE) == str(parent.pid):
        threading.Thread(target=_exit_after, args=(parent,), name="exit-with-worker", daemon=True).start()


def replace_torchvision() -> None:
    """Have vLLM's models import the modules of transformers that need only PIL; they get no images by these."""
    for family, name in {"gemma3": "Gemma3", "pixtral": "Pixtral", "qwen2_vl": "Qwen2VL"}.items():
        package = f"transformers.models.{family}"
        module = import_module(f"{package}.image_processing_pil_{family}")
        setattr(module, f"{name}ImageProcessor", getattr(module, f"{name}ImageProcessorPil"))
        sys.modules.setdefault(f"{package}.image_processing_{family}", module)


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


def _compute_parts_of_seeded_prompts() -> None:
    """Have CPUs compute a part of a prompt: vLLM 0.32 rewinds a request's generator then, and those of CPUs cannot.

    The token after such a part is drawn and dropped, so its request draws the next ones with later random numbers.
    """
    from vllm.platforms import current_platform  # noqa: PLC0415 - as above

    if not current_platform.is_cpu():
        return
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # noqa: PLC0415 - as above

    finish = GPUModelRunner._bookkeeping_sync  # noqa: SLF001 - as above
    if finish.__module__ == __name__:
        return

    @wraps(finish, assigned=())
    def finish_without_rewinding(runner: Any, *args: Any, **kwargs: Any) -> Any:
        batch, generators = runner.input_batch, runner.input_batch.generators
        is_partial = runner.discard_request_mask.np
        batch.generators = {i: generator for i, generator in generators.items() if not is_partial[i]}
        try:
            return finish(runner, *args, **kwargs)
        finally:
            batch.generators = generators

    GPUModelRunner._bookkeeping_sync = finish_without_rewinding  # noqa: SLF001 - as above


def _exit_after(worker: BaseProcess) -> None:
    """Exit when the worker has died: a killed worker cannot end its engine core."""
    worker.join()
    os._exit(1)
