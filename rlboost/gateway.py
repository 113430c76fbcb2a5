"""Makes a fleet look like one vLLM server, for trainers and clients that know vLLM's routes.

It runs beside the trainer, in a process of its own: it publishes the folders with weights that the trainer names, and
sends completions on to the manager, which generates them on the fleet. Two differences from vLLM: nothing is stopped
while weights are updated, as workers pull them while they generate; and NCCL is refused, since it would make each
worker a fixed rank of the trainer.

Consumes: requests of vLLM's API (vLLM 0.32).
Produces: versions of one external job, and completions.
Waits for: the manager, up to the fleet's `retry_for_s`; a resume, up to `PAUSE_LIMIT_S`.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from rlboost.fleet import AsyncFleet
from rlboost.shared.errors import RLBoostError
from rlboost.shared.http.access import credential_of, is_token
from rlboost.shared.http.aiohttp_sessions import aiohttp_session
from rlboost.shared.http.server_url import MAX_REDIRECTS, redirected_origin
from rlboost.shared.ids import new_token
from rlboost.shared.proxies import internal
from rlboost.shared.secrets import bearer
from rlboost.shared.tls import client_verification

PAUSE_LIMIT_S = 3600.0
"""How long a request waits for `/resume`."""
SERVE_LIMIT_S = 300.0
"""How long an update waits until a worker serves the new version."""
_RETRY_S = 0.25
_BUSY = frozenset({429, 503})
"""Statuses after which a request is sent again."""
_IGNORED = frozenset({"cache_salt", "kv_transfer_params", "priority", "request_id", "spaces_between_special_tokens"})
"""Fields that change no token here."""
_PROXIED = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
_NCCL = (
    "the workers of a fleet come and go, so none is a rank of the trainer: write the weights to a folder and send its "
    'path, as {"update_info": {"path": "/folder"}} or {"weight_dir": "/folder"}; TRL does so with '
    "weight_transfer=rlboost.trl.WeightTransfer(url)"
)


def _has_weights(folder: str) -> bool:
    return any(Path(folder).glob("*.safetensors"))


def _with_config(*folders: str) -> str | None:
    return next((folder for folder in folders if Path(folder, "config.json").is_file()), None)


class Refused(Exception):
    """A request that cannot be answered as vLLM would."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class Gateway:
    """One job as one vLLM server.

    Args:
        fleet: of the job, entered while the gateway runs.
        url: of the manager.
        token: of a scope that may complete (`job`).
        model: the name that clients use, besides the job's; a folder is published as the first version.
        retry_for_s: how long a request is sent again while the manager is unavailable or full.

    """

    def __init__(self, fleet: AsyncFleet, url: str, token: str, model: str, retry_for_s: float = 300.0) -> None:
        self.fleet, self.model, self._folder = fleet, model, os.path.realpath(model)
        self._url, self._authorization, self._retry_for_s = url.rstrip("/"), bearer("the token", token), retry_for_s
        self._http: aiohttp.ClientSession | None = None
        self._running = asyncio.Event()
        """Set unless the trainer has paused generation."""
        self._running.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._n_in_flight = 0
        self.label = ""
        """The trainer's own name of the newest version."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Attach to the job while the body runs, and publish its first version."""
        connector = aiohttp.TCPConnector(limit=0, ssl=client_verification())
        self._http = aiohttp_session(
            internal, self._url, timeout=aiohttp.ClientTimeout(total=None, connect=10), connector=connector
        )
        try:
            async with self.fleet:
                if self.fleet.version < 0 and await asyncio.to_thread(_has_weights, self.model):
                    await self.fleet.publish(self.model)
                yield
        finally:
            await self._http.close()

    # --- weights ---

    async def update(self, body: Mapping[str, Any]) -> int:
        """Publish the folder that an update names; return once a worker serves it."""
        info = body.get("update_info") or {}
        folder = body.get("weight_dir") or body.get("model_path") or info.get("path")
        if not folder:
            raise Refused(501, _NCCL)
        if not await asyncio.to_thread(_has_weights, folder):
            raise Refused(400, f"{folder}: this machine reads no *.safetensors there: name a folder that it shares")
        before, config = self.fleet.version, await asyncio.to_thread(_with_config, folder, self.model)
        version = await self.fleet.publish(folder, config=config)
        if before >= 0:
            await self.fleet.complete_step(step=before)
        self.label = str(body.get("weight_version") or body.get("version") or version)
        await self._until_served(version)
        return version

    async def _until_served(self, version: int) -> None:
        limit = time.monotonic() + SERVE_LIMIT_S
        while not await self._is_served(version):
            if time.monotonic() > limit:
                raise Refused(503, f"version {version} is published, and no worker serves it after {SERVE_LIMIT_S:g} s")
            await asyncio.sleep(0.05)

    async def _is_served(self, version: int) -> bool:
        """Return True if a worker serves the version, or if there is none that could."""
        workers = json.loads((await self.send("GET", "/v1/workers"))[1])
        own = [one for one in workers if one.get("job") == self.fleet.job_id and not one.get("left_at")]
        return not own or any((one.get("version") or 0) >= version for one in own if one["state"] == "ready")

    def pause(self, mode: str | None) -> None:
        """Hold new requests until `resume`; those in flight continue."""
        if mode == "abort":
            raise Refused(400, "mode: abort throws samples away: use keep, with which they continue, or wait")
        self._running.clear()

    def resume(self) -> None:
        """Let requests begin."""
        self._running.set()

    @property
    def is_paused(self) -> bool:
        """Return True while new requests are held."""
        return not self._running.is_set()

    async def until_idle(self) -> None:
        """Wait until no request is in flight."""
        async with asyncio.timeout(PAUSE_LIMIT_S):
            await self._idle.wait()

    # --- completions ---

    @asynccontextmanager
    async def in_flight(self) -> AsyncIterator[None]:
        """Wait for a resume, then count a request while the body runs."""
        async with asyncio.timeout(PAUSE_LIMIT_S):
            await self._running.wait()
        self._n_in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._n_in_flight -= 1
            if not self._n_in_flight:
                self._idle.set()

    def for_manager(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return a request's body with the manager's name of the model, without fields that change nothing."""
        model = body.get("model")
        # A folder has several names.
        if model not in {self.model, self.fleet.job_id, None} and os.path.realpath(str(model)) != self._folder:
            raise Refused(404, f"the model {model!r} does not exist: this gateway serves {self.model!r}")
        return {**{name: value for name, value in body.items() if name not in _IGNORED}, "model": self.fleet.job_id}

    async def complete(self, path: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        """Return status and body of the manager's answer to a request that is not streamed."""
        async with self.in_flight():
            return await self.send("POST", path, body)

    async def send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, bytes]:
        """Send a request to the manager, again while it is unavailable or full; return status and body."""
        answer, content = await self._answered(method, path, body, is_whole=True)
        return answer.status, content

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
        """Yield the blocks of a streamed answer; the first is its status, as text."""
        async with self.in_flight():
            answer, _ = await self._answered("POST", path, body, is_whole=False)
            try:
                yield str(answer.status).encode()
                async for block in answer.content.iter_any():
                    yield block
            finally:
                answer.close()

    async def _answered(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, is_whole: bool
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """Return the manager's answer, with its body if it is to be read whole."""
        assert self._http is not None, "used outside of `running`"
        # Sent again with one key, a request is generated once.
        headers = {"Authorization": self._authorization, "Idempotency-Key": new_token(16)}
        limit, origin, redirects = time.monotonic() + self._retry_for_s, self._url, 0
        while True:
            is_last, leader = time.monotonic() >= limit, None
            try:
                answer = await self._http.request(
                    method, f"{origin}{path}", json=body, headers=headers, allow_redirects=False
                )
                leader = redirected_origin(str(answer.url), answer.status, answer.headers.get("Location", ""))
                if leader is None and (answer.status not in _BUSY or is_last):
                    return answer, await answer.read() if is_whole else b""
                answer.release()
            except aiohttp.ClientError:
                if is_last:
                    raise
            redirects = redirects + 1 if leader else 0
            origin = leader if leader and redirects <= MAX_REDIRECTS else self._url
            if origin == self._url:
                await asyncio.sleep(_RETRY_S)

    async def generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer vLLM's request for tokens by tokens (`/inference/v1/generate`)."""
        for name in ("features", "content_parts"):
            if body.get(name):
                raise Refused(400, f"{name}: not supported: the fleet generates text only")
        if body.get("stream"):
            raise Refused(400, "stream: not supported by /inference/v1/generate: use /v1/completions")
        given = {name: value for name, value in (body.get("sampling_params") or {}).items() if value is not None}
        given = {name: value for name, value in given.items() if name not in {"detokenize", "output_kind", *_IGNORED}}
        for_model = self.for_manager({"model": body.get("model")})
        if int(given.get("logprobs", 0)) > 1:
            raise Refused(400, "logprobs: only those of the sampled tokens are returned here: use /v1/completions")
        # 0 has those of the sampled tokens, and no others.
        asked = {**given, **for_model, "prompt": body["token_ids"], "return_token_ids": True, "logprobs": 0}
        status, answer = await self.complete("/v1/completions", asked)
        made = json.loads(answer)
        if status != 200:
            raise Refused(status, str(made.get("error", {}).get("message", answer[:200])))
        return {
            "request_id": body.get("request_id") or made["id"],
            "choices": [_choice(choice) for choice in made["choices"]],
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


def create_app(gateway: Gateway, api_key: str = "") -> FastAPI:
    """Return the gateway's app; with an `api_key`, requests need it as bearer token or as password of the URL."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with gateway.running():
            yield

    app = FastAPI(title="RLBoost as a vLLM server", lifespan=lifespan)

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> JSONResponse:
        return _error(error.status, error.message)

    @app.exception_handler(RLBoostError)
    async def failed(_: Request, error: RLBoostError) -> JSONResponse:
        return _error(503, str(error))

    @app.middleware("http")
    async def authorized(request: Request, answer: Any) -> Response:
        if "Origin" in request.headers:
            return _error(403, "a web page has sent this: only programs may use the gateway")
        if api_key and request.url.path != "/health" and not _has_key(request, api_key):
            return _error(401, "the API key is missing or wrong: send it as bearer token, or as http://key:KEY@host")
        response: Response = await answer(request)
        return response

    _add_state(app, gateway)
    _add_weights(app, gateway)
    _add_completions(app, gateway)
    return app


def _has_key(request: Request, api_key: str) -> bool:
    return is_token(credential_of(request.headers), api_key)


def _error(status: int, message: str) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status)


def _add_state(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = json.loads((await gateway.send("GET", f"/v1/models/{gateway.fleet.job_id}"))[1])
        return {"object": "list", "data": [{**model, "id": gateway.model}]}

    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        model = {"model": gateway.model, "dtype": f"torch.{gateway.fleet.dtype or 'bfloat16'}"}
        return {
            "vllm_config": {
                "model_config": model,
                "parallel_config": {"data_parallel_size": 1, "tensor_parallel_size": 1, "world_size": 1},
                "lora_config": None,
                "weight_transfer_config": {"backend": "filesystem"},
            }
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
        if "master_address" in (await _body(request)).get("init_info", {}):
            raise Refused(501, _NCCL)
        return {"message": "Weight transfer initialized"}

    @app.post("/update_weights")
    async def update(request: Request) -> dict[str, Any]:
        version = await gateway.update(await _body(request))
        return {"message": "Weights updated", "weight_version": str(version)}

    @app.get("/weight_info")
    async def weight_info() -> dict[str, str]:
        return {"weight_version": gateway.label or str(gateway.fleet.version)}

    @app.post("/finish_weight_update")
    async def finish(request: Request) -> dict[str, str]:
        gateway.label = str((await _body(request)).get("weight_version") or gateway.label)
        return {"message": "Weight update finished"}

    @app.post("/start_weight_update")
    @app.post("/shutdown_weight_transfer_engine")
    @app.post("/reset_prefix_cache")
    async def nothing_to_do() -> dict[str, str]:
        return {"message": "done"}

    @app.post("/v1/load_lora_adapter")
    @app.post("/load_lora_adapter")
    async def adapter() -> None:
        raise Refused(501, "adapters are not supported by the gateway: send merged weights")


def _add_completions(app: FastAPI, gateway: Gateway) -> None:
    async def proxied(request: Request) -> Response:
        body, path = gateway.for_manager(await _body(request)), request.url.path
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
        return await gateway.generate(await _body(request))


async def _body(request: Request) -> dict[str, Any]:
    """Return a request's body, empty if it has none."""
    text = await request.body()
    try:
        body = json.loads(text) if text else {}
    except ValueError as error:
        raise Refused(400, f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused(400, "the body is no JSON object")
    return body
