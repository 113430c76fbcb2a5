"""OpenAI's routes: completions of a running job's newest weights, by the fleet that makes its samples."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Annotated, Any

from fastapi import APIRouter, Body, Header, Request, Response

from services.rollout_manager.app import Manager
from services.rollout_manager.domain.jobs import Job
from services.rollout_manager.serving_answers import Completer, Wanted
from services.rollout_manager.serving_model import ServedModel, Untranslatable, load
from services.rollout_manager.serving_sessions import Sessions
from services.rollout_manager.serving_shapes import AskedCompletion, problem, read_chat, read_completion
from services.rollout_manager.settings import Settings
from shared.bus import Bus

MODELS_KEPT = 8

Key = Annotated[str | None, Header(alias="Idempotency-Key")]
Session = Annotated[str | None, Header(alias="X-Session-ID")]
Raw = Annotated[dict[str, Any], Body()]


def add_serving(router: APIRouter, manager: Manager, bus: Bus, settings: Settings) -> None:
    """Add the routes."""
    models_read = Models()
    sessions = Sessions(manager, bus)
    completer = Completer(manager, sessions, settings.serve_limit_s)

    @router.get("/models", tags=["serving"])
    async def models() -> dict[str, Any]:
        """Jobs whose weights are served."""
        return {"object": "list", "data": [_shown(manager, job) for job in _served(manager)]}

    @router.get("/models/{model}", tags=["serving"])
    async def model(model: str) -> dict[str, Any]:
        return _shown(manager, _job_of(manager, model))

    @router.post("/completions", tags=["serving"], response_model=None)
    async def completions(raw: Raw, request: Request, idempotency_key: Key = None) -> Response:
        asked = read_completion(raw)
        job = _job_of(manager, asked.model)
        served = await models_read.of(job)
        prompt = await _prompt_of(served, asked)
        wanted = Wanted(asked, job, served, prompt, asked.max_tokens, idempotency_key)
        return await completer.answer(wanted, request)

    @router.post("/chat/completions", tags=["serving"], response_model=None)
    async def chat(raw: Raw, request: Request, idempotency_key: Key = None, session: Session = None) -> Response:
        asked = read_chat(raw)
        if session and asked.n > 1:
            raise problem(400, "Invalid value", "a conversation (X-Session-ID) has one answer a turn", param="n")
        job = _job_of(manager, asked.model)
        served = await models_read.of(job)
        messages = [message.plain() for message in asked.messages]
        turn = None
        try:
            if session:
                turn = await sessions.turn(job.id, session, served, messages)
            prompt = turn.prompt if turn else await asyncio.to_thread(served.chat, messages)
        except Untranslatable as error:
            raise problem(400, "Invalid messages", str(error), param="messages") from error
        most = asked.max_completion_tokens or asked.max_tokens or job.spec.sampling.max_tokens
        return await completer.answer(Wanted(asked, job, served, prompt, most, idempotency_key, turn), request)


class Models:
    """What the manager knows of jobs' models, each read once where it has a tokenizer."""

    def __init__(self) -> None:
        """Know none."""
        self._read: OrderedDict[str, ServedModel] = OrderedDict()

    async def of(self, job: Job) -> ServedModel:
        """Return a job's model.

        Raises:
            Problem: 400, its files are there and cannot be used.

        """
        name = job.spec.model
        if name not in self._read:
            try:
                model = await asyncio.to_thread(load, name)
            except Untranslatable as error:
                raise problem(400, "Invalid model", str(error), param="model") from error
            if model.tokenizer is None:
                return model  # its folder may come yet
            self._read[name] = model
        self._read.move_to_end(name)
        while len(self._read) > MODELS_KEPT:
            self._read.popitem(last=False)
        return self._read[name]


# --- which job --------------------------------------------------------------------------------------------------------


def _served(manager: Manager) -> list[Job]:
    world = manager.world
    return [job for job in world.active_jobs() if job.state == "running" and world.committed.get(job.id, -1) >= 0]


def _shown(manager: Manager, job: Job) -> dict[str, Any]:
    return {
        "id": job.id,
        "object": "model",
        "created": int(job.created_at),
        "owned_by": "rlboost",
        "name": job.spec.name,
        "root": job.spec.model,
        "weight_version": manager.world.committed.get(job.id, -1),
    }


def _job_of(manager: Manager, model: str) -> Job:
    """Return the running job of this id or name, the newest where a name is of several."""
    found = [job for job in manager.world.jobs.values() if model in (job.id, job.spec.name)]
    if not found:
        there = ", ".join(job.id for job in _served(manager)) or "none"
        detail = f"there is no job {model!r}; jobs whose weights are served: {there}"
        raise problem(404, "Model not found", detail, param="model")
    job = max(found, key=lambda job: (job.state == "running", not job.ended, job.no))
    if job.ended:
        what = "its weights are not served any more: load its model folder elsewhere, or run a job that begins with it"
    elif job.state == "paused":
        what = f"resume it (rlboost resume {job.id})"
    elif job.state == "pending" or manager.world.committed.get(job.id, -1) < 0:
        what = "its first weights are not there yet: try again in a while"
    else:
        return job
    raise problem(409, "Model not served", f"job {job.id} is {job.state}: {what}", param="model")


# --- the prompt -------------------------------------------------------------------------------------------------------


async def _prompt_of(model: ServedModel, asked: AskedCompletion) -> list[int]:
    prompt = asked.prompt
    if isinstance(prompt, list) and not isinstance(prompt[0], int):
        (prompt,) = prompt
    if not isinstance(prompt, str):
        return [token for token in prompt if isinstance(token, int)]
    try:
        return await asyncio.to_thread(model.encode, prompt, special=True)
    except Untranslatable as error:
        raise problem(400, "Invalid prompt", str(error), param="prompt") from error
