"""One vLLM engine that serves its model to others, by vLLM's OpenAI routes, and generates samples of jobs.

Requests of others are scheduled first. Samples have adapters of the model, whose weights nothing replaces: what would
pause the engine, or load weights into it, does not reach it.
"""

from __future__ import annotations

import asyncio
import difflib
import secrets
import time
from argparse import Namespace
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from copy import copy
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from fastapi import FastAPI, Response
from safetensors.torch import load_file
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.openai.chat_completion.api_router import attach_router as attach_chat_router
from vllm.entrypoints.openai.completion.api_router import attach_router as attach_completion_router
from vllm.entrypoints.openai.models.api_router import attach_router as attach_models_router
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM

from rlboost.services.rollout_worker.adapters.vllm.arguments import check_device, engine_args
from rlboost.services.rollout_worker.adapters.vllm.engine import VllmEngine
from rlboost.services.rollout_worker.adapters.vllm.options import VllmOptions
from rlboost.services.rollout_worker.domain.load import EngineStats
from rlboost.services.rollout_worker.ports import EngineFailed, StagedWeights
from rlboost.shared.errors import ConfigError, RLBoostError
from rlboost.shared.model.folder import tensor_names
from rlboost.shared.process.lifecycle import until_stop
from rlboost.shared.weights.cache import CachedVersion

_SAMPLE_PRIORITY = 1 << 30
"""vLLM schedules lower ones first; requests have 0."""
_ARGUMENTS = (
    *("served_model_name", "response_role", "fingerprint_mode", "fingerprint_value", "log_error_stack"),
    *("chat_template", "chat_template_content_format", "default_chat_template_kwargs"),
    *("trust_request_chat_template", "trust_request_mm_kwargs"),
    *("enable_auto_tool_choice", "tool_call_parser", "tool_strict_level", "exclude_tools_when_tool_choice_none"),
    *("return_tokens_as_token_ids", "enable_prompt_tokens_details", "enable_force_include_usage"),
    *("sse_keep_alive_interval", "enable_request_id_headers"),
    *("allow_credentials", "allowed_origins", "allowed_methods", "allowed_headers"),
)
"""Arguments of vLLM's server that these routes follow; the others have another place here, or none."""
_MAX_TIMES = 10_000
"""Times to the first token that are kept until they are taken; the newest."""
_LIVENESS_S = 1.0
_TASKS = ("generate",)


def start(options: VllmOptions) -> AsyncLLM:
    """Start vLLM with the model of `options.served_model`; blocks for long.

    Raises:
        ConfigError: it cannot run this model here, or hold adapters next to its weights.

    """
    check_device(options.device)
    if options.vllm_args.get("scheduling_policy", "priority") != "priority":
        raise ConfigError(
            "RLBOOST_WORKER_VLLM_ARGS: requests come before samples by priority: remove scheduling_policy"
        )
    try:
        llm = AsyncLLM.from_engine_args(engine_args(Path(options.served_model), options))
    except RLBoostError:
        raise
    except Exception as error:  # vLLM and transformers raise any for a model that they cannot run
        raise ConfigError(f"vllm cannot serve {options.served_model} (RLBOOST_WORKER_BASE_MODEL): {error}") from error
    if llm.vllm_config.lora_config is None:
        llm.shutdown()
        raise ConfigError(
            f"vllm holds no adapters next to the weights of {options.served_model}: serve it by 'vllm serve', and join "
            "a worker with --beside"
        )
    return llm


class _Part:
    """What one of the two users of an engine may do with it."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)


class _Samples(_Part):
    """The engine as `VllmEngine` has it. After a pause, that ends its own requests, one by one."""

    def generate(self, *args: Any, **options: Any) -> Any:
        return self._llm.generate(*args, **options, priority=_SAMPLE_PRIORITY)

    async def pause_generation(self, **_: Any) -> None:
        """Leave the engine running."""

    async def resume_generation(self) -> None:
        """Leave the engine running."""

    async def start_weight_update(self) -> None:
        raise RuntimeError("the weights of a model that is served are never replaced")

    def shutdown(self) -> None:
        """Leave the engine running."""


class _Requests(_Part):
    """The engine as vLLM's OpenAI routes have it; a `serving.ServingTimes`."""

    def __init__(self, llm: AsyncLLM) -> None:
        super().__init__(llm)
        self.n_running = 0
        self._ids = count()
        self._waiting: dict[int, float] = {}
        """Number of a request without a token -> when it came (monotonic), the oldest first."""
        self._first_tokens_s: deque[float] = deque(maxlen=_MAX_TIMES)

    async def add_lora(self, _: Any) -> bool:
        raise RuntimeError("this server has no adapters")

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncIterator[Any]:
        """See `AsyncLLM`. Of an answer that is sent whole, vLLM yields its parts, too: the first one has a time."""
        if options.get("priority"):
            raise ValueError("priority: this server schedules all requests alike: leave it out")
        if is_whole := params.output_kind == RequestOutputKind.FINAL_ONLY:
            params = copy(params)
            params.output_kind = RequestOutputKind.CUMULATIVE
        choices: dict[int, CompletionOutput] = {}
        number, began = next(self._ids), time.monotonic()
        self._waiting[number] = began
        self.n_running += 1
        try:
            async for output in self._llm.generate(prompt, params, request_id, **options):
                if self._waiting.pop(number, None) is not None:
                    self._first_tokens_s.append(time.monotonic() - began)
                if is_whole:
                    choices.update((choice.index, choice) for choice in output.outputs)
                    output.outputs = [choices[index] for index in sorted(choices)]
                if output.finished or not is_whole:
                    yield output
        finally:
            self._waiting.pop(number, None)
            self.n_running -= 1

    def take_first_tokens_s(self) -> list[float]:
        taken = list(self._first_tokens_s)
        self._first_tokens_s.clear()
        return taken

    def longest_wait_s(self) -> float:
        return time.monotonic() - next(iter(self._waiting.values())) if self._waiting else 0.0


class ServingEngine(VllmEngine):
    """A `VllmEngine` next to others' requests: its weights are those that are served."""

    def __init__(self, llm: AsyncLLM, options: VllmOptions, requests: _Requests) -> None:
        super().__init__(_Samples(llm), replace(options, enable_sleep=False))
        self._others = requests
        self._n_loads = secrets.randbits(128)  # a part of the salt of samples, which clients must not guess
        self._requests.begin_version(0)

    def stats(self) -> EngineStats:
        """See `ports.Engine`. While others have requests, samples may have to wait for them."""
        stats = super().stats()
        return replace(stats, can_generate=stats.can_generate and not self._others.n_running)

    async def close(self) -> None:
        """Drop all requests and adapters; vLLM runs on."""
        await super().close()
        if not self.llm.errored:
            for adapter in self._adapters.values():
                await self.llm.remove_lora(adapter.lora_int_id)


class Front:
    """The HTTP side of an engine that serves its model.

    Args:
        llm: see `start`.
        options: what it was started with.

    """

    def __init__(self, llm: AsyncLLM, options: VllmOptions) -> None:
        self.llm = llm
        self.requests = _Requests(llm)
        self._options = options

    def engine(self) -> ServingEngine:
        """Return an engine for samples; there may be one at a time."""
        return ServingEngine(self.llm, self._options, self.requests)

    async def app(self, arguments: Mapping[str, Any]) -> FastAPI:
        """Return the routes of the OpenAI API that are served, and no others; clients know no adapter.

        Args:
            arguments: some of `_ARGUMENTS`.

        Raises:
            ConfigError: one is not among these, or vLLM cannot use it.

        """
        args = _namespace(arguments)
        args.structured_outputs_config = self.llm.vllm_config.structured_outputs_config  # has the reasoning parser
        args.model, names = self._options.served_model, args.served_model_name
        args.served_model_name = [names] if isinstance(names, str) else names or [Path(args.model).name]
        app = FastAPI(openapi_url=None)
        app.state.args, app.state.server = args, SimpleNamespace(should_exit=False)
        for attach in (attach_models_router, attach_chat_router, attach_completion_router):
            attach(app)
        app.get("/health")(self._health)
        init_exception_handler(app)
        try:
            init_entrypoints_middleware(args, app, _TASKS)
            await init_app_state(self.requests, app.state, args, _TASKS)
        except Exception as error:  # of an unknown parser, or an unreadable template
            raise ConfigError(f"RLBOOST_WORKER_SERVE_ARGS: vllm cannot serve with these: {error}") from error
        return app

    async def watch(self, stop: asyncio.Event) -> None:
        """Return at the stop.

        Raises:
            EngineFailed: vLLM died.

        """
        while not await until_stop(stop, _LIVENESS_S):
            if self.llm.errored:
                raise EngineFailed(f"vllm, which serves the model, died: {self.llm.dead_error!r}; see its messages")

    async def _health(self) -> Response:
        return Response(status_code=503 if self.llm.errored else 200)

    def differing(self, model: StagedWeights) -> list[str]:
        """Return the names of a version's tensors that are not those that are served; blocks."""
        return model.differing(self._served_as(model))

    def _served_as(self, model: StagedWeights) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of the folder that are the same in the engine's dtype and in the version's."""
        folder = Path(self._options.served_model)
        name_of, dtype = tensor_names(folder), getattr(torch, self._options.dtype)
        published = cast("CachedVersion", model).published
        for path in sorted(folder.glob("*.safetensors")):
            for given, tensor in load_file(path).items():
                name, served = name_of(given), tensor.to(dtype)
                if name in published and served.to(getattr(torch, published[name][0].dtype)).to(dtype).equal(served):
                    yield name, served


def _namespace(arguments: Mapping[str, Any]) -> Namespace:
    args: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    for name, value in arguments.items():
        if name not in _ARGUMENTS:
            similar = difflib.get_close_matches(name, _ARGUMENTS, 1)
            raise ConfigError(
                f"RLBOOST_WORKER_SERVE_ARGS: {name} is not one of {', '.join(sorted(_ARGUMENTS))} "
                "(RLBOOST_WORKER_SERVE is the address, clients' keys are in VLLM_API_KEY): "
                + (f"did you mean {similar[0]}?" if similar else "remove it")
            )
        default = getattr(args, name)
        if default is not None and not isinstance(value, type(default)):
            raise ConfigError(
                f"RLBOOST_WORKER_SERVE_ARGS: {name} is {value!r}: give a {type(default).__name__}, such as {default!r}"
            )
        setattr(args, name, value)
    return args
