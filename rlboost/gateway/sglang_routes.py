"""The routes of SGLang that a gateway answers, as slime (August 2026) and its like call them.

They are the gateway's own completions and updates under SGLang's names. Requests in flight continue through a pause and
an update, unless `abort` is asked for.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Literal

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from rlboost.gateway.gateway import Gateway, Refused, given, message_of
from rlboost.shared.ids import new_token

_FROM_DISK = (
    "the workers of a fleet come and go, so none is a rank of the trainer: write the weights to a folder and send its "
    "path to /update_weights_from_disk (slime: --update-weight-transport disk, without deltas)"
)
_REFUSED = {
    "/init_weights_update_group": _FROM_DISK,
    "/update_weights_from_distributed": _FROM_DISK,
    "/update_weights_from_tensor": _FROM_DISK,
    "/pull_weights": _FROM_DISK,
    "/release_memory_occupation": "the fleet has devices of its own: turn offloading of generation off",
    "/resume_memory_occupation": "the fleet has devices of its own: turn offloading of generation off",
    "/load_lora_adapter_from_tensors": "write the adapter to a folder and send its path to /load_lora_adapter",
}
_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    **{name: name for name in ("ignore_eos", "min_p", "n", "stop", "stop_token_ids", "temperature", "top_p")},
}
"""SGLang's name of a sampling parameter -> ours."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
}
"""Parameters that are not supported -> the values with which they change nothing."""
_OF_TEXT = frozenset({"no_stop_trim", "skip_special_tokens", "spaces_between_special_tokens"})
_ALL_TOKENS = 1 << 30
"""SGLang's `top_k` without a limit, as is -1."""


class Generation(BaseModel):
    """The body of `/generate`."""

    model_config = ConfigDict(extra="forbid")
    input_ids: list[int] = []
    text: str = ""
    sampling_params: dict[str, Any] = {}
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = Field(0, ge=0)
    return_text_in_logprobs: bool = False
    stream: bool = False
    rid: str = ""
    model: str | None = None


class Update(BaseModel):
    """The body of `/update_weights_from_disk`."""

    model_path: str
    load_format: Literal["auto", "safetensors"] = "auto"
    weight_version: str | int = ""
    abort_all_requests: bool = False


class Pause(BaseModel):
    """The body of `/pause_generation`."""

    mode: Literal["abort", "in_place", "retract"] | None = None


class Abort(BaseModel):
    """The body of `/abort_request`."""

    rid: str = ""
    abort_all: bool = False


class _Running:
    """The requests of `/generate` in flight, by their ids."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[tuple[int, bytes]]] = {}
        self._aborted: set[str] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    async def complete(self, gateway: Gateway, rid: str, body: Mapping[str, Any]) -> tuple[int, bytes] | None:
        """Return the manager's answer; None if the request was aborted, which ends it on the fleet, too."""
        if rid in self._tasks:
            raise Refused(400, f"rid: a request {rid!r} is in flight")
        task = self._tasks[rid] = asyncio.create_task(gateway.complete("/v1/completions", body), name=f"generate-{rid}")
        try:
            return await task
        except asyncio.CancelledError:
            if rid not in self._aborted:
                raise
            return None
        finally:
            task.cancel()
            del self._tasks[rid]
            self._aborted.discard(rid)

    def abort(self, asked: Abort) -> None:
        """Abort a request, or all."""
        for rid in [*self._tasks] if asked.abort_all else [asked.rid] if asked.rid in self._tasks else []:
            self._aborted.add(rid)
            self._tasks[rid].cancel()


def add_sglang(app: FastAPI, gateway: Gateway) -> None:
    """Add SGLang's routes."""
    running = _Running()
    _add_weights(app, gateway, running)
    _add_state(app, gateway, running)

    @app.post("/generate")
    async def generate(request: Request) -> dict[str, Any] | list[dict[str, Any]]:
        asked = await given(request, Generation)
        body, rid = _completion_body(asked), asked.rid or new_token()
        answer = await running.complete(gateway, rid, gateway.for_manager(body))
        if answer is None:
            return _answer(asked, rid, {"token_ids": [], "finish_reason": "abort"}, gateway.newest_label)
        status, content = answer
        if status != 200:
            raise Refused(status, message_of(content))
        made = []
        for choice in json.loads(content)["choices"]:
            spans = choice.get("weight_versions")
            one = _answer(asked, rid, choice, spans[-1]["version"] if spans else gateway.newest_label)
            one["meta_info"]["weight_versions"] = spans
            if (text := await asyncio.to_thread(_text, gateway, asked.sampling_params, choice)) is not None:
                one["text"] = text
            made.append(one)
        return made if asked.sampling_params.get("n", 1) != 1 else made[0]


def _add_weights(app: FastAPI, gateway: Gateway, running: _Running) -> None:  # noqa: C901 - a table of routes
    @app.post("/update_weights_from_disk")
    async def update(request: Request) -> dict[str, Any]:
        asked = await given(request, Update)
        if asked.abort_all_requests:
            running.abort(Abort(abort_all=True))
        version, n_serving = await gateway.update(asked.model_path, str(asked.weight_version))
        message = f"version {version} is published, and {n_serving} workers serve it"
        return {"success": True, "message": message, "num_paused_requests": 0}

    @app.get("/get_weight_version")
    @app.get("/weight_version")
    async def weight_version() -> dict[str, str]:
        return {"weight_version": gateway.newest_label}

    @app.post("/pause_generation")
    async def pause(request: Request) -> dict[str, str]:
        asked = await given(request, Pause)
        gateway.pause(None)
        if asked.mode == "abort":
            running.abort(Abort(abort_all=True))
        return {"status": "ok", "message": "Generation paused successfully."}

    @app.post("/continue_generation")
    async def resume() -> dict[str, str]:
        gateway.resume()
        return {"status": "ok", "message": "Generation continued successfully."}

    @app.post("/abort_request")
    async def abort(request: Request) -> Response:
        running.abort(await given(request, Abort))
        return Response()

    @app.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush() -> Response:
        return Response("Cache flushed: workers keep none across versions.\n")

    def refuse(path: str, why: str) -> None:
        @app.post(path)
        async def refused() -> None:
            raise Refused(501, why)

    for path, why in _REFUSED.items():
        refuse(path, why)


def _add_state(app: FastAPI, gateway: Gateway, running: _Running) -> None:
    @app.get("/health_generate")
    async def health() -> Response:
        await gateway.state("/v1/workers")
        return Response()

    @app.get("/model_info")
    @app.get("/get_model_info")
    async def model_info() -> dict[str, Any]:
        names = {"model_path": gateway.model, "tokenizer_path": gateway.model}
        return {**names, "is_generation": True, "weight_version": gateway.newest_label}

    @app.get("/v1/loads")
    async def loads() -> dict[str, Any]:
        n = len(running)
        return {"loads": [{"dp_rank": 0, "num_running_reqs": n, "num_waiting_reqs": 0, "num_total_reqs": n}]}


def server_info(gateway: Gateway) -> dict[str, Any]:
    """Return what SGLang's clients read of `/server_info`: a server on one device, which is not offloaded."""
    return {
        "model_path": gateway.model,
        "tokenizer_path": gateway.model,
        "served_model_name": gateway.model,
        **dict.fromkeys(("tp_size", "dp_size", "pp_size", "ep_size", "num_gpus"), 1),
        "disaggregation_mode": "null",
        "enable_memory_saver": False,
        "weight_version": gateway.newest_label,
    }


def _completion_body(asked: Generation) -> dict[str, Any]:
    """Return the request of `/v1/completions` that generates the same.

    Raises:
        Refused: it would not.

    """
    for name, is_refused, advice in (
        ("stream", asked.stream, "use /v1/completions"),
        ("top_logprobs_num", asked.top_logprobs_num > 0, "use logprobs of /v1/completions"),
        ("logprob_start_len", asked.logprob_start_len >= 0, "log-probabilities of prompts are not known"),
        ("return_text_in_logprobs", asked.return_text_in_logprobs, "decode output_ids"),
    ):
        if is_refused:
            raise Refused(400, f"{name}: not supported by /generate: {advice}")
    if bool(asked.input_ids) == bool(asked.text):
        raise Refused(400, "input_ids: give the token ids of one prompt, or its text")
    body: dict[str, Any] = {"max_tokens": 128}
    for name, value in asked.sampling_params.items():
        if value is None or name in _OF_TEXT or value in _NEUTRAL.get(name, ()):
            continue
        if name == "top_k":
            body |= {} if value in (-1, _ALL_TOKENS) else {"top_k": value}
        elif name in _NAMES:
            body[_NAMES[name]] = value
        else:
            raise Refused(400, f"sampling_params.{name}: not supported by /generate: remove it")
    own = {"model": asked.model, "prompt": asked.input_ids or asked.text, "return_token_ids": True, "logprobs": 0}
    return {**body, **own}


def _answer(asked: Generation, rid: str, choice: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Return one completion in SGLang's form, without its text."""
    tokens: list[int] = choice["token_ids"]
    reason: dict[str, Any] = {"type": choice["finish_reason"]}
    if reason["type"] == "length":
        reason["length"] = len(tokens)
    elif reason["type"] == "stop":
        reason["matched"] = choice.get("stop_reason") or (tokens[-1] if tokens else None)
    meta = {
        "id": rid,
        "finish_reason": reason,
        "prompt_tokens": len(choice.get("prompt_token_ids") or asked.input_ids),
        "completion_tokens": len(tokens),
        "cached_tokens": 0,
        "weight_version": version,
    }
    if asked.return_logprob:
        logprobs = (choice.get("logprobs") or {"token_logprobs": []})["token_logprobs"]
        meta["output_token_logprobs"] = [[one, token, None] for one, token in zip(logprobs, tokens, strict=True)]
        meta["input_token_logprobs"] = []
    return {"text": "", "output_ids": tokens, "meta_info": meta}


def _text(gateway: Gateway, sampling: Mapping[str, Any], choice: Mapping[str, Any]) -> str | None:
    """Return a completion's text as SGLang decodes it; None if the model's folder has no tokenizer."""
    tokenizer = gateway.tokenizer
    if tokenizer is None:
        return None
    tokens, stop, is_trimmed = choice["token_ids"], choice.get("stop_reason"), not sampling.get("no_stop_trim", False)
    if is_trimmed and choice["finish_reason"] == "stop" and not isinstance(stop, str):
        tokens = tokens[:-1]
    text: str = tokenizer.decode(
        tokens,
        skip_special_tokens=sampling.get("skip_special_tokens", True),
        spaces_between_special_tokens=sampling.get("spaces_between_special_tokens", True),
    )
    return text.partition(stop)[0] if is_trimmed and isinstance(stop, str) and stop else text
