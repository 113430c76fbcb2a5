"""The routes of vLLM (0.32) that a gateway answers: access, errors, and the app."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from ipaddress import ip_address
from typing import Any, Literal
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from rlboost.fleet import Superseded
from rlboost.gateway.gateway import PAUSE_LIMIT_S, Gateway, Refused, body_of, given, message_of
from rlboost.gateway.sglang_routes import add_sglang, server_info
from rlboost.shared.errors import ConfigError, Conflict, RLBoostError
from rlboost.shared.http.access import credential_of, is_token

_PROXIED = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
_NCCL = (
    "the workers of a fleet come and go, so none is a rank of the trainer: write the weights to a folder and send its "
    'path, as {"update_info": {"path": "/folder"}} or {"weight_dir": "/folder"}; TRL does so with '
    "weight_transfer=rlboost.trl.WeightTransfer(url), and trainers with vLLM's engines with rlboost.vllm.TrainerInit"
)
_OWN_WORKERS = (
    "workers run no code of a trainer's own inside of vLLM, which SkyRL's deltas of checkpoints need: write whole "
    "weights to a folder that this machine reads, and send its path to /update_weights, as "
    '{"update_info": {"path": "/folder"}}'
)
_OF_TEXT = frozenset(
    {
        "detokenize",
        "include_stop_str_in_output",
        "output_kind",
        "skip_special_tokens",
        "spaces_between_special_tokens",
    }
)
"""Sampling parameters that change no token, where only tokens are returned."""


# --- bodies ---


class _UpdateInfo(BaseModel):
    path: str | None = None
    uri: str | None = None
    """Of SkyRL's deltas, in a format of its own."""


class Update(BaseModel):
    """The body of `/update_weights`; of `/finish_weight_update`, which has no folder."""

    update_info: _UpdateInfo = _UpdateInfo()
    weight_dir: str = ""
    model_path: str = ""
    weight_version: str | int = ""
    version: str | int = ""

    @property
    def folder(self) -> str:
        """Return the folder with weights, empty if there is none."""
        return self.weight_dir or self.model_path or self.update_info.path or ""

    @property
    def label(self) -> str:
        """Return the trainer's own name of the version, empty if it has none."""
        return str(self.weight_version) or str(self.version)


class _Init(BaseModel):
    init_info: dict[str, Any] = {}


class _Adapter(BaseModel):
    lora_name: str = Field(min_length=1)
    lora_path: str = ""


class _SamplingParams(BaseModel):
    model_config = ConfigDict(extra="allow")
    logprobs: int = 0


class Generation(BaseModel):
    """The body of `/inference/v1/generate`."""

    model_config = ConfigDict(extra="forbid")
    token_ids: list[int]
    sampling_params: _SamplingParams = _SamplingParams()
    model: str | None = None
    request_id: str = ""
    output_mode: Literal["tokens"] = "tokens"
    stream: bool = False
    features: Any = None
    content_parts: Any = None


# --- the app ---


def create_app(gateway: Gateway, api_key: str = "", host: str = "127.0.0.1") -> FastAPI:
    """Return the gateway's app.

    Args:
        gateway: what it serves.
        api_key: which requests need as bearer token or as password of the URL; without one, only those are accepted
            that name this machine as it or a client here would.
        host: where it listens.

    """
    statuses = {Superseded: 409, Conflict: 409, ConfigError: 400}

    def status_of(error: RLBoostError) -> int:
        return statuses.get(type(error), 503)

    app = guarded_app(gateway.running, status_of, api_key, host, "RLBOOST_GATEWAY_API_KEY")

    @app.exception_handler(TimeoutError)
    async def waited(_: Request, __: TimeoutError) -> JSONResponse:
        return error_answer(503, f"generation was paused, or requests were in flight, for {PAUSE_LIMIT_S:g} s")

    _add_state(app, gateway)
    _add_weights(app, gateway)
    _add_completions(app, gateway)
    add_sglang(app, gateway)
    return app


def guarded_app(
    running: Callable[[], AbstractAsyncContextManager[None]],
    status_of: Callable[[RLBoostError], int],
    api_key: str,
    host: str,
    variable: str,
) -> FastAPI:
    """Return an app without routes that answers errors as OpenAI's clients read them.

    It rejects requests of web pages, and those that lack the API key, or without one do not name this machine.

    Args:
        running: entered while the app runs.
        status_of: HTTP status of an error.
        api_key: as in `create_app`.
        host: where it listens.
        variable: the environment variable that has the key.

    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with running():
            yield

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> JSONResponse:
        return error_answer(error.status, error.message)

    @app.exception_handler(RLBoostError)
    async def failed(_: Request, error: RLBoostError) -> JSONResponse:
        return error_answer(status_of(error), str(error))

    @app.middleware("http")
    async def authorized(request: Request, answer: Any) -> Response:
        if "Origin" in request.headers:
            return error_answer(403, "a web page has sent this: only programs may use this server")
        if not api_key and not _is_local(named := request.headers.get("Host", ""), host):
            advice = f"use http://localhost or http://{host}, or set {variable}"
            return error_answer(403, f"the Host {named!r} is not this machine's: {advice}")
        is_open = not api_key or request.url.path == "/health"
        if not is_open and not is_token(credential_of(request.headers), api_key):
            how = "send it as bearer token, or as http://key:KEY@host"
            return error_answer(401, f"the API key is missing or wrong: {how}")
        response: Response = await answer(request)
        return response

    return app


def _is_local(named: str, host: str) -> bool:
    """Return True if a Host header names this machine itself, not a name that a web page has made resolve to it."""
    with suppress(ValueError):
        name = urlsplit(f"//{named}").hostname or ""
        return name in {"localhost", host.lower()} or ip_address(name).is_loopback
    return False


def error_answer(status: int, message: str) -> JSONResponse:
    """Return an error as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status)


def _add_state(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = await gateway.state(f"/v1/models/{gateway.fleet.job_id}")
        return {"object": "list", "data": [{**model, "id": gateway.model}]}

    @app.get("/server_info")
    @app.get("/get_server_info")
    async def info() -> dict[str, Any]:
        model = {"model": gateway.model, "dtype": f"torch.{gateway.fleet.dtype or 'bfloat16'}"}
        return {
            **server_info(gateway),
            "vllm_config": {
                "model_config": model,
                "parallel_config": {"data_parallel_size": 1, "tensor_parallel_size": 1, "world_size": 1},
                # No worker holds adapters beside its model: ranks and numbers have no limit of its own.
                "lora_config": {"max_lora_rank": 512, "max_loras": 1 << 16} if gateway.has_weights else None,
                "weight_transfer_config": {"backend": "filesystem"},
            },
        }

    @app.get("/get_world_size")
    async def world_size() -> dict[str, int]:
        return {"world_size": 1}


def _add_weights(app: FastAPI, gateway: Gateway) -> None:  # noqa: C901 - a table of routes
    @app.post("/pause")
    async def pause(mode: str | None = None) -> dict[str, str]:
        gateway.pause(mode)
        if mode == "wait":
            await gateway.until_idle()
        return {"status": "paused"}

    @app.post("/resume")
    async def resume() -> dict[str, str]:
        gateway.resume()
        return {"status": "resumed"}

    @app.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        return {"is_paused": gateway.is_paused}

    @app.post("/init_weight_transfer_engine")
    async def init(request: Request) -> dict[str, str]:
        if "master_address" in (await given(request, _Init)).init_info:
            raise Refused(501, _NCCL)
        return {"message": "Weight transfer initialized"}

    @app.post("/update_weights")
    async def update(request: Request) -> dict[str, Any]:
        update = await given(request, Update)
        if update.update_info.uri:
            raise Refused(501, f"update_info.uri: {_OWN_WORKERS}")
        if not update.folder:
            raise Refused(501, _NCCL)
        version, n_serving = await gateway.update(update.folder, update.label)
        return {"message": "Weights updated", "weight_version": str(version), "workers_serving": n_serving}

    @app.get("/weight_info")
    async def weight_info() -> dict[str, str]:
        return {"weight_version": gateway.newest_label}

    @app.post("/finish_weight_update")
    async def finish(request: Request) -> dict[str, str]:
        if label := (await given(request, Update)).label:
            gateway.name(label)
        return {"message": "Weight update finished"}

    @app.post("/fetch_weights")
    @app.post("/collective_rpc")
    async def own_workers(request: Request) -> None:
        raise Refused(501, f"{request.url.path}: {_OWN_WORKERS}")

    @app.post("/start_weight_update")
    @app.post("/shutdown_weight_transfer_engine")
    @app.post("/reset_prefix_cache")
    async def nothing_to_do() -> dict[str, str]:
        return {"message": "done"}

    @app.post("/v1/load_lora_adapter")
    @app.post("/load_lora_adapter")
    async def load_adapter(request: Request) -> Response:
        asked = await given(request, _Adapter)
        if not asked.lora_path:
            raise Refused(422, "lora_path: missing: the folder of the adapter, which this machine reads")
        n_serving = await gateway.load_adapter(asked.lora_name, asked.lora_path)
        return Response(f"Success: LoRA adapter '{asked.lora_name}' added successfully; {n_serving} workers serve it.")

    @app.post("/v1/unload_lora_adapter")
    @app.post("/unload_lora_adapter")
    async def unload_adapter(request: Request) -> Response:
        asked = await given(request, _Adapter)
        gateway.unload_adapter(asked.lora_name)
        return Response(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")


def _add_completions(app: FastAPI, gateway: Gateway) -> None:
    async def proxied(request: Request) -> Response:
        body, path = gateway.for_manager(await body_of(request)), request.url.path
        if not body.get("stream"):
            status, answer = await gateway.complete(path, body)
            return Response(answer, status, media_type="application/json")
        blocks = gateway.stream(path, body)
        status = int(await anext(blocks))
        return StreamingResponse(
            blocks, status, media_type="text/event-stream" if status == 200 else "application/json"
        )

    for path in _PROXIED:
        app.post(path, response_model=None)(proxied)

    @app.post("/inference/v1/generate")
    async def generate(request: Request) -> dict[str, Any]:
        return await _generated(gateway, await given(request, Generation))


async def _generated(gateway: Gateway, asked: Generation) -> dict[str, Any]:
    """Answer vLLM's request for tokens by tokens (`/inference/v1/generate`)."""
    for name in ("features", "content_parts"):
        if getattr(asked, name):
            raise Refused(400, f"{name}: not supported: the fleet generates text only")
    if asked.stream:
        raise Refused(400, "stream: not supported by /inference/v1/generate: use /v1/completions")
    if not 0 <= asked.sampling_params.logprobs <= 1:
        raise Refused(400, "logprobs: only those of the sampled tokens are returned here: use /v1/completions")
    given = asked.sampling_params.model_dump(exclude={*_OF_TEXT, "logprobs"}, exclude_none=True)
    # 0 has those of the sampled tokens, and no others.
    own = {"model": asked.model, "prompt": asked.token_ids, "return_token_ids": True, "logprobs": 0}
    status, answer = await gateway.complete("/v1/completions", gateway.for_manager({**given, **own}))
    if status != 200:
        raise Refused(status, message_of(answer))
    made = json.loads(answer)
    return {
        "request_id": asked.request_id or made["id"],
        "choices": [_choice(choice) for choice in made["choices"]],
        # Those of the one prompt.
        **{name: value for name, value in made["choices"][0].items() if name.startswith("prompt_")},
    }


def _choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    pairs = zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True)
    content = [{"token": f"token_id:{token}", "logprob": logprob, "top_logprobs": []} for token, logprob in pairs]
    return {
        "index": choice["index"],
        "token_ids": choice["token_ids"],
        "finish_reason": choice["finish_reason"],
        "logprobs": {"content": content},
        "weight_versions": choice.get("weight_versions"),
    }
