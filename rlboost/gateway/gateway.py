"""Makes a fleet look like one vLLM or SGLang server, for trainers and clients that know their routes.

It runs beside the trainer, in a process of its own: it publishes the folders with weights that the trainer names, and
sends completions on to the manager, which generates them on the fleet. Two differences from vLLM: nothing is stopped
while weights are updated, as workers pull them while they generate; and NCCL is refused, since it would make each
worker a fixed rank of the trainer.

Consumes: requests of the APIs of vLLM (0.32) and SGLang.
Produces: versions of one external job, and completions.
Waits for: the manager while it is unavailable, up to `retry_for_s`, and for its answer, up to `ANSWER_LIMIT_S`; a
resume, up to `PAUSE_LIMIT_S`; a worker that serves new weights, up to `SERVE_LIMIT_S`.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from fastapi import Request
from pydantic import BaseModel, ValidationError

from rlboost.fleet import AsyncFleet
from rlboost.publishing import weights_of_folders
from rlboost.shared.http.server_url import MAX_REDIRECTS, redirected_origin
from rlboost.shared.ids import new_token
from rlboost.shared.proxies import aiohttp_session, internal
from rlboost.shared.secrets import bearer
from rlboost.shared.tls import client_verification
from rlboost.shared.validation import describe

_Model = TypeVar("_Model", bound=BaseModel)

ANSWER_LIMIT_S = 660.0
"""How long the manager may send nothing: its `RLBOOST_MANAGER_SERVE_LIMIT_S` of 600 s, and a margin."""
PAUSE_LIMIT_S = 3600.0
"""How long a request waits for `/resume`."""
SERVE_LIMIT_S = 300.0
"""How long an update waits until a worker serves the new version."""
_RETRY_S = 0.25
_BUSY = frozenset({429, 503})
"""Statuses after which a request is sent again."""
IGNORED = frozenset({"cache_salt", "kv_transfer_params", "priority", "request_id", "spaces_between_special_tokens"})
"""Fields that change no token here."""
_EVENT = b"data: "


def _has_weights(folder: str) -> bool:
    files = list(Path(folder).glob("*.safetensors"))
    if unusual := [file for file in files if not file.is_file()]:
        raise Refused(400, f"{unusual[0]} is no file: a pipe, say, would be waited for without end")
    return bool(files)


def _with_config(folder: str, model: str) -> str:
    """Return a folder with `config.json`: that of the weights, or the model's, which may be one of Hugging Face."""
    for one in (folder, model):
        if Path(one, "config.json").is_file():
            return one
    from huggingface_hub import hf_hub_download  # noqa: PLC0415 - a library of those who load models

    try:
        return str(Path(hf_hub_download(model, "config.json")).parent)
    except (OSError, ValueError) as error:
        what = f"{folder} has no config.json, and none is found of the model {model!r}"
        raise Refused(
            400, f"{what}: write it beside the weights, or start the gateway with a folder: {error}"
        ) from error


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
        answer_limit_s: how long the manager may send nothing until a request fails.

    """

    def __init__(
        self,
        fleet: AsyncFleet,
        url: str,
        token: str,
        model: str,
        retry_for_s: float = 300.0,
        answer_limit_s: float = ANSWER_LIMIT_S,
    ) -> None:
        self.fleet, self.model, self._folder = fleet, model, os.path.realpath(model)
        self._url, self._authorization, self._retry_for_s = url.rstrip("/"), bearer("the token", token), retry_for_s
        self._answer_limit_s = answer_limit_s
        self._http: aiohttp.ClientSession | None = None
        self._running = asyncio.Event()
        """Set unless the trainer has paused generation."""
        self._running.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._n_in_flight = 0
        self._updating = asyncio.Lock()
        self.has_weights = False
        """Whether the model is a folder with weights, on which adapters can be loaded."""
        self._labels: dict[str, str] = {}
        """Version -> the trainer's own name of it."""
        self._adapters: set[str] = set()
        """Names of adapters, which requests give as their model. All of them are served by the newest version."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Attach to the job while the body runs, and publish its first version."""
        connector = aiohttp.TCPConnector(limit=0, ssl=client_verification())
        timeout = aiohttp.ClientTimeout(total=None, connect=10, sock_read=self._answer_limit_s)
        self._http = aiohttp_session(internal, self._url, timeout=timeout, connector=connector)
        try:
            async with self.fleet:
                self.has_weights = await asyncio.to_thread(_has_weights, self.model)
                if self.fleet.version < 0 and self.has_weights:
                    await self.fleet.publish(self.model)
                yield
        finally:
            await self._http.close()

    # --- weights ---

    async def update(self, folder: str, label: str) -> tuple[int, int]:
        """Publish a folder with weights, unless the newest version has them, as the version with the trainer's label.

        Returns:
            the version, and how many workers serve it: at least one, or 0 if the job has no workers.

        """
        async with self._updating:
            before, version = self.fleet.version, await self._published(folder)
            await self._follow(before, version, label or str(version))
            self._adapters.clear()
        return version, await self._until_served(version)

    async def load_adapter(self, name: str, folder: str) -> int:
        """Publish a folder with a PEFT adapter, on the model of the gateway's folder, and let requests name it.

        Returns:
            how many workers serve it, as `update` does.

        """
        if not self.has_weights:
            why = (
                f"adapters need the model below them: start the gateway with a folder of its weights, not {self.model}"
            )
            raise Refused(501, why)
        async with self._updating:
            before = self.fleet.version
            try:
                weights = await asyncio.to_thread(weights_of_folders, folder, self.model)
            except (OSError, ValueError) as error:
                # With vLLM's status prime-rl tries again, as a shared folder may show files late.
                status = 404 if isinstance(error, FileNotFoundError) else 400
                raise Refused(status, f"lora_path: the adapter in {folder!r} cannot be read: {error}") from error
            version = await self.fleet.publish(weights, if_changed=True)
            await self._follow(before, version, name)
            self._adapters.add(name)
        return await self._until_served(version)

    async def _follow(self, before: int, version: int, label: str) -> None:
        """End the step of the version before, unless that is the newest still, and name the newest one."""
        if 0 <= before < version:
            await self.fleet.complete_step(step=before)
        self._labels[str(version)] = label

    def unload_adapter(self, name: str) -> None:
        """Let requests no longer name an adapter; the newest version is served on."""
        self._adapters.discard(name)

    async def _published(self, folder: str) -> int:
        from safetensors import SafetensorError  # noqa: PLC0415 - a library of those who load models

        try:
            if not await asyncio.to_thread(_has_weights, folder):
                raise Refused(400, f"{folder}: this machine reads no *.safetensors there: name a folder that it shares")
            config = await asyncio.to_thread(_with_config, folder, self.model)
            return await self.fleet.publish(folder, config=config, if_changed=True)
        except (OSError, ValueError, SafetensorError) as error:
            raise Refused(400, f"{folder!r}: the weights there cannot be read: {error}") from error

    async def _until_served(self, version: int) -> int:
        """Return how many ready workers serve a version once there is one, 0 if the job has no workers."""
        limit = time.monotonic() + SERVE_LIMIT_S
        while True:
            job_id = self.fleet.job_id
            workers = [one for one in await self.state("/v1/workers") if job_id in (one["job_id"], *one["alongside"])]
            present = [one for one in workers if one["state"] not in {"lost", "left"}]
            ready = (one for one in present if one["state"] == "ready")
            versions = [{**one["alongside"], one["job_id"]: one["weight_version"]}.get(job_id) for one in ready]
            n_serving = len([one for one in versions if one is not None and one >= version])
            if n_serving or not present:
                return n_serving
            if time.monotonic() > limit:
                raise Refused(503, f"version {version} is published, and no worker serves it after {SERVE_LIMIT_S:g} s")
            await asyncio.sleep(0.05)

    def name(self, label: str) -> None:
        """Call the newest version as the trainer does."""
        self._labels[str(self.fleet.version)] = label

    def label_of(self, version: str) -> str:
        """Return the trainer's own name of a version, its number if it has none."""
        return self._labels.get(version, version)

    @property
    def newest_label(self) -> str:
        """Return the trainer's own name of the newest version."""
        return self.label_of(str(self.fleet.version))

    @cached_property
    def tokenizer(self) -> Any:
        """Return the model's tokenizer, None if there is none; reads files."""
        from transformers import AutoTokenizer  # noqa: PLC0415 - a library of those who load models

        with suppress(OSError, ValueError):
            return AutoTokenizer.from_pretrained(self.model)
        return None

    def pause(self, mode: str | None) -> None:
        """Hold new requests until `resume`; those in flight continue."""
        if mode not in {None, "keep", "wait", "abort"}:
            raise Refused(400, f"mode: {mode!r} is unknown: use keep or wait")
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
        is_base = model in {self.model, self.fleet.job_id} or os.path.realpath(str(model)) == self._folder
        if is_base and self.fleet.is_adapter:
            named = ", ".join(sorted(self._adapters)) or "as it was loaded"
            raise Refused(404, f"the model {model!r} is served with an adapter on it: name the adapter ({named})")
        # After a restart of the gateway, the names of adapters are not known.
        is_adapter = model in self._adapters or (self.fleet.is_adapter and not self._adapters)
        if not (is_base or is_adapter or model is None):
            raise Refused(404, f"the model {model!r} does not exist: this gateway serves {self.model!r}")
        return {**{name: value for name, value in body.items() if name not in IGNORED}, "model": self.fleet.job_id}

    def for_client(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return an answer of the manager, or one event of it, with the client's names of model and versions."""
        # The first events of streamed responses and messages have the model one level below.
        for part in (answer, answer.get("response"), answer.get("message")):
            if isinstance(part, dict) and "model" in part:
                part["model"] = self.model
        for choice in answer.get("choices", ()):
            for span in (*(choice.get("weight_versions") or ()), *choice.get("prompt_weight_versions", ())):
                span["version"] = self.label_of(span["version"])
        return answer

    async def complete(self, path: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        """Return status and body of the manager's answer to a request that is not streamed."""
        async with self.in_flight():
            answer, content = await self._answered("POST", path, body, is_whole=True)
        if answer.status == 200:
            content = json.dumps(self.for_client(json.loads(content))).encode()
        return answer.status, content

    async def state(self, path: str) -> Any:
        """Return what the manager answers to a GET."""
        answer, content = await self._answered("GET", path, None, is_whole=True)
        if answer.status != 200:
            raise Refused(answer.status, message_of(content))
        return json.loads(content)

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
        """Yield the lines of a streamed answer; the first is its status, as text."""
        async with self.in_flight():
            answer, _ = await self._answered("POST", path, body, is_whole=False)
            try:
                yield str(answer.status).encode()
                rest = b""
                async for block in answer.content.iter_any():
                    *lines, rest = (rest + block).split(b"\n")
                    yield b"".join(self._line_for_client(line) + b"\n" for line in lines)
                if rest:
                    yield rest
            finally:
                answer.close()

    def _line_for_client(self, line: bytes) -> bytes:
        if not line.startswith(_EVENT + b"{"):
            return line
        return _EVENT + json.dumps(self.for_client(json.loads(line.removeprefix(_EVENT)))).encode()

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
            except aiohttp.SocketTimeoutError as error:
                what = f"{method} {path}: the manager at {origin} has sent nothing for {self._answer_limit_s:g} s"
                raise Refused(504, f"{what}, and ends requests after RLBOOST_MANAGER_SERVE_LIMIT_S") from error
            except aiohttp.ClientError as error:
                if is_last:
                    what = f"the manager at {origin} was unavailable for {self._retry_for_s:g} s"
                    raise Refused(503, f"{what}: {error}") from error
            redirects = redirects + 1 if leader else 0
            origin = leader if leader and redirects <= MAX_REDIRECTS else self._url
            if origin == self._url:
                await asyncio.sleep(_RETRY_S)


def message_of(content: bytes) -> str:
    """Return the text of an error that the manager has answered."""
    with suppress(ValueError, KeyError, TypeError):
        return str(json.loads(content)["error"]["message"])
    return content[:500].decode(errors="replace")


async def body_of(request: Request) -> dict[str, Any]:
    """Return a request's body, empty if it has none."""
    text = await request.body()
    try:
        body = json.loads(text) if text else {}
    except ValueError as error:
        raise Refused(400, f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refused(400, "the body is no JSON object")
    return body


async def given(request: Request, model: type[_Model]) -> _Model:
    """Return a request's body as a model, without what is null, or changes nothing."""
    body = {name: value for name, value in (await body_of(request)).items() if value is not None}
    try:
        return model.model_validate(
            {name: value for name, value in body.items() if name == "request_id" or name not in IGNORED}
        )
    except ValidationError as error:
        raise Refused(422, "; ".join(describe(error, model))) from error
