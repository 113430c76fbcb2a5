"""Records what Tinker's client sends: `python -m tests.support.tinker_golden --write`, with `tinker` installed.

The file has the requests of one program in order, as `golden` returns them, with `SESSION` for the session's id.
"""

from __future__ import annotations

import base64
import json
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response

from tests.support.ports import reserved_port
from tests.support.tinker_site import NAME, Site

FILE = Path(__file__).parents[1] / "golden" / "tinker.json"
SESSION = "0" * 32
"""In place of the id of the session that was recorded, which is as long."""
_LEFT_OUT = ("telemetry", "session_heartbeat", "client/dynamic_config")
"""Routes whose requests come at any time, or describe a machine."""


def golden() -> list[dict[str, str]]:
    """Return the requests: `method`, `path`, `type`, and the body as `text` or, of protobuf, as `base64`."""
    found: list[dict[str, str]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def body_of(request: dict[str, str], session: str) -> bytes:
    """Return a request's body, of another session."""
    body = base64.b64decode(request["base64"]) if "base64" in request else request.get("text", "").encode()
    return body.replace(SESSION.encode(), session.encode())


def record(app: FastAPI) -> list[dict[str, str]]:
    """Return the list to which the app adds its requests from now on."""
    requests: list[dict[str, str]] = []

    @app.middleware("http")
    async def recorded(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        body, path = await request.body(), request.url.path
        kind = request.headers.get("content-type", "")
        if not path.endswith(_LEFT_OUT):
            content = base64.b64encode(body) if "protobuf" in kind else body
            name = "base64" if "protobuf" in kind else "text"
            requests.append({"method": request.method, "path": path, "type": kind, name: content.decode()})
        return await answer(request)

    return requests


def program(url: str) -> str:
    """Call what the server supports; return the session's id."""
    import tinker  # noqa: PLC0415 - its requests are replayed without it
    from tinker import types  # noqa: PLC0415 - likewise

    service = tinker.ServiceClient(base_url=url, api_key="tml-any")
    client = service.create_lora_training_client(base_model=NAME, rank=4, seed=3).result()
    prompt, n = types.ModelInput.from_ints([5, 6, 7, 8]), 4
    targets = [6, 7, 8, 9]
    supervised = types.Datum(prompt, {"target_tokens": targets, "weights": [0.0, 1.0, 1.0, 0.5]})
    several = types.Datum(
        prompt,
        {"target_tokens": np.array([[t, 3] for t in targets]), "weights": np.full((n, 2), 0.5, np.float32)},
    )
    sampled = types.Datum(
        prompt, {"target_tokens": targets, "logprobs": [-4.0] * n, "advantages": [0.0, 1.0, -1.0, 0.5]}
    )
    client.forward([supervised], "cross_entropy").result()
    client.forward_backward([supervised, several], "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=1e-2, grad_clip_norm=1.0, weight_decay=0.1)).result()
    client.forward_backward([sampled], "importance_sampling").result()
    client.forward_backward([sampled], "ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}).result()
    client.forward_backward([sampled], "cispo").result()
    client.forward_backward_custom([supervised], lambda _, given: (-given[0].sum(), {})).result()
    client.optim_step(types.AdamParams()).result()
    state = client.save_state("one", ttl_seconds=3600, user_metadata={"a": "b"}).result().path
    weights = client.save_weights_for_sampler("two").result().path
    newest = client.save_weights_and_get_sampling_client().result()
    inflight = client.save_weights_and_get_sampling_client(kind="inflight").result()
    base = service.create_sampling_client(base_model=NAME).result()
    named = service.create_sampling_client(model_path=weights).result()
    params = types.SamplingParams(max_tokens=5, temperature=0.5, top_k=9, top_p=0.9, stop=[4])
    for sampling in (newest, base, named, inflight):
        sampling.sample(prompt, 2, params).result()
    newest.sample(prompt, 1, types.SamplingParams(), include_prompt_logprobs=True).result()
    base.compute_logprobs(prompt, prompt_logprobs_last_n=2).result()
    service.create_training_client_from_state_with_optimizer(state).result()
    rest = service.create_rest_client()
    rest.list_checkpoints(client.model_id).result()
    rest.list_user_checkpoints().result()
    rest.get_weights_info_by_tinker_path(state).result()
    rest.delete_checkpoint_from_tinker_path(weights).result()
    session: str = client.model_id.partition(":")[0]
    service.close("success").result()
    return session


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, reserved_port() as port:
        site = Site(Path(folder))
        requests = record(site.app)
        server = uvicorn.Server(uvicorn.Config(site.app, port=port, log_level="warning"))
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started:
            time.sleep(0.05)
        try:
            session = program(f"http://127.0.0.1:{port}")
        finally:
            server.should_exit = True
            thread.join()
    for request in requests:
        if "base64" in request:
            body = base64.b64decode(request["base64"]).replace(session.encode(), SESSION.encode())
            request["base64"] = base64.b64encode(body).decode()
        else:
            request["text"] = request["text"].replace(session, SESSION)
        request["path"] = request["path"].replace(session, SESSION)
    if "--write" in sys.argv:
        FILE.write_text(json.dumps(requests, indent=1) + "\n", encoding="utf-8")
    print(len(requests), "requests")


if __name__ == "__main__":
    main()
