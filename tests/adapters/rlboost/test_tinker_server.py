"""Tinker's API, by the requests that its client was recorded to send."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from rlboost.tinker import server
from rlboost.tinker.routes import DOLLARS
from rlboost.tinker.wire import PROTOBUF, _encoded, _fields
from tests.support.eventually import eventually
from tests.support.tinker_golden import SESSION, body_of, golden
from tests.support.tinker_site import NAME, Site

URL = "http://localhost"


@asynccontextmanager
async def client_of(site: Site) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=site.app)
    async with (
        site.app.router.lifespan_context(site.app),
        httpx.AsyncClient(transport=transport, base_url=URL, timeout=60) as http,
    ):
        yield http


class Caller:
    """A session."""

    def __init__(self, http: httpx.AsyncClient, session: str) -> None:
        self.http, self.session = http, session

    @classmethod
    async def begin(cls, http: httpx.AsyncClient) -> Caller:
        answer = await http.post("/api/v1/create_session", json={"tags": [], "sdk_version": "0.38.0"})
        return cls(http, answer.json()["session_id"])

    async def post(self, route: str, status: int = 200, /, **body: Any) -> Any:
        answer = await self.http.post(f"/api/v1/{route}", json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def result(self, asked: dict[str, Any]) -> httpx.Response:
        answer = await self.http.post("/api/v1/retrieve_future", json={"request_id": asked["request_id"]})
        assert answer.status_code == 200, answer.text
        return answer

    async def model(self, number: int = 0, **lora: Any) -> str:
        options = {"rank": 4, "seed": 1, **lora}
        body = {"session_id": self.session, "model_seq_id": number, "base_model": NAME, "lora_config": options}
        answer = await self.result(await self.post("create_model", **body))
        return str(answer.json()["model_id"])

    async def forward_backward(self, seq_id: int) -> dict[str, Any]:
        """Send the recorded batch of supervised data under another number."""
        request = next(one for one in golden() if one["path"].endswith("/forward_backward"))
        body = body_of(request, self.session)
        assert body.count(b"\x10\x01") == 1  # the field of the number
        content = body.replace(b"\x10\x01", bytes([0x10, seq_id])).replace(b"\x30\x01", b"\x30\x00")
        answer = await self.http.post("/api/v1/forward_backward", content=content, headers={"Content-Type": PROTOBUF})
        return dict(answer.json())

    async def sampler(self, model: str, seq_id: int, number: int, **more: Any) -> str:
        body = {"model_id": model, "seq_id": seq_id, "sampling_session_seq_id": number, **more}
        answer = await self.result(await self.post("save_weights_for_sampler", **body))
        return str(answer.json()["sampling_session_id"])

    async def sample(self, sampler: str, seq_id: int, **more: Any) -> dict[str, Any]:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
        body = {"sampling_session_id": sampler, "seq_id": seq_id, "prompt": prompt, "sampling_params": {}, **more}
        return dict(await self.post("asample", **body))


def tokens_of(answer: httpx.Response) -> list[list[int]]:
    assert answer.headers["Content-Type"] == PROTOBUF, answer.text
    return [np.frombuffer(_fields(one)[2][0], "<i4").tolist() for one in _fields(answer.content)[1]]


async def test_recorded_requests_of_the_client_are_answered(tmp_path: Path) -> None:
    site = Site(tmp_path)
    session, failed = SESSION, []
    async with client_of(site) as http:
        for request in golden():
            headers = {"Content-Type": request["type"]} if request["type"] else {}
            path = request["path"].replace(SESSION, session)
            answer = await http.request(request["method"], path, content=body_of(request, session), headers=headers)
            assert answer.status_code == 200, (request, answer.text)
            if path.endswith("create_session"):
                session = answer.json()["session_id"]
                assert answer.json()["warning_message"] is None
            if path.endswith("retrieve_future") and answer.headers["Content-Type"] != PROTOBUF:
                failed += [answer.text] if "error" in answer.json() else []
            if path.endswith("weights_info"):
                assert answer.json()["lora_rank"] == 4
            if path.endswith("/checkpoints"):
                assert len(answer.json()["checkpoints"]) == 2
    assert failed == []
    options = site.fleet.asked[0][1]
    seen = {key: options[key] for key in ("n", "max_tokens", "temperature", "top_k", "top_p", "stop_token_ids")}
    assert seen == {
        "n": 2,
        "max_tokens": 5,
        "temperature": 0.5,
        "top_k": 9,
        "top_p": 0.9,
        "stop_token_ids": [*site.model.end_tokens, 4],
    }
    # The base model, that of the two newest sampling sessions, base, a named one: all in turn, and released.
    assert site.fleet.released == list(range(site.fleet.version))


async def test_older_weights_are_published_again_once_samples_of_newer_ones_end(tmp_path: Path) -> None:
    site = Site(tmp_path)
    async with client_of(site) as http:
        caller = await Caller.begin(http)
        model = await caller.model()
        old = await caller.sampler(model, 1, 0)
        await caller.result(await caller.forward_backward(2))
        await caller.result(await caller.post("optim_step", model_id=model, seq_id=3, adam_params={}))
        new = await caller.sampler(model, 4, 1)
        site.fleet.go.clear()
        asked = [await caller.sample(one, i) for i, one in enumerate((new, new, old))]
        results = [asyncio.create_task(caller.result(one)) for one in asked]
        await eventually(lambda: len(site.fleet.asked) == 2)
        later = await caller.sample(new, 9)  # it waits for that of the old weights
        assert site.fleet.version == 1
        site.fleet.go.set()
        found = [tokens_of(await one)[0][0] for one in results]
        assert found == [1, 1, 2]
        assert tokens_of(await caller.result(later)) == [[3, 3, 3]]
    (_, first, second, third) = site.fleet.published
    assert all((first.adapter[name] == third.adapter[name]).all() for name in first.adapter)
    assert any((first.adapter[name] != second.adapter[name]).any() for name in first.adapter)


async def test_base_model_is_sampled_with_an_adapter_of_zeros(tmp_path: Path) -> None:
    site = Site(tmp_path)
    async with client_of(site) as http:
        caller = await Caller.begin(http)
        body = {"session_id": caller.session, "base_model": NAME}
        base = (await caller.post("create_sampling_session", sampling_session_seq_id=7, **body))["sampling_session_id"]
        own = await caller.sampler(await caller.model(), 1, 0)
        for i, sampler in enumerate((base, own, base)):
            await caller.result(await caller.sample(sampler, i))
    published = site.fleet.published
    assert [bool(weights.adapter) for weights in published] == [False, True, True]
    assert not any(tensor.any() for tensor in published[-1].adapter.values())


async def test_checkpoint_that_replaces_one_of_its_name_is_published(tmp_path: Path) -> None:
    site = Site(tmp_path)
    async with client_of(site) as http:
        caller = await Caller.begin(http)
        model = await caller.model()
        for seq_id in (1, 2):
            save = {"model_id": model, "seq_id": seq_id, "path": "one", "overwrite": True}
            path = (await caller.result(await caller.post("save_weights", **save))).json()["path"]
            body = {"session_id": caller.session, "sampling_session_seq_id": seq_id, "model_path": path}
            sampler = (await caller.post("create_sampling_session", **body))["sampling_session_id"]
            await caller.result(await caller.sample(sampler, seq_id))
    assert site.fleet.version == 2, "the base model, then each of them"


async def test_request_that_never_comes_fails_the_next_step_and_is_not_executed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MISSING_LIMIT_S", 0.1)
    site = Site(tmp_path)
    async with client_of(site) as http:
        caller = await Caller.begin(http)
        step = {"model_id": await caller.model(), "seq_id": 2, "adam_params": {}}
        failed = (await caller.result(await caller.post("optim_step", **step))).json()
        assert "request 1 has not arrived" in failed["error"]
        late = (await caller.result(await caller.forward_backward(1))).json()
    assert "request 1 came after later ones had begun" in late["error"]


async def test_requests_of_a_model_are_executed_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    site = Site(tmp_path)
    async with client_of(site) as http:
        caller = await Caller.begin(http)
        model = await caller.model()
        step = await caller.post("optim_step", model_id=model, seq_id=2, adam_params={"learning_rate": 0.1})
        forward = await caller.forward_backward(1)
        assert await caller.forward_backward(1) == forward  # sent again, it is the same request
        assert (await caller.result(forward)).headers["Content-Type"] == PROTOBUF
        assert (await caller.result(step)).json()["metrics"]["grad_norm"] > 0
        another = await caller.post("optim_step", 400, model_id=model, seq_id=2, adam_params={"learning_rate": 0.2})
        assert "was another one" in another["error"]["message"]


async def test_wrong_request_fails_its_result_and_later_ones_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MISSING_LIMIT_S", 0.01)
    site = Site(tmp_path)
    async with client_of(site) as http:
        caller = await Caller.begin(http)
        model = await caller.model()
        wrong = await caller.post("optim_step", model_id=model, seq_id=1, adam_params={"beta1": 2.0})
        assert "adam_params.beta1" in (await caller.result(wrong)).json()["error"]
        late = await caller.post("save_weights", model_id=model, seq_id=4, path="../x")  # 2 and 3 never come
        error = (await caller.result(late)).json()
        assert (error["category"], "the name '../x'" in error["error"]) == ("user", True)
        cases: list[tuple[str, dict[str, Any], int]] = [
            ("optim_step", {"model_id": "x:train:0", "seq_id": 1, "adam_params": {}}, 404),
            ("asample", {"sampling_session_id": "x", "seq_id": 1}, 422),
            ("create_sampling_session", {"session_id": "x", "sampling_session_seq_id": 0, "base_model": NAME}, 410),
            ("session_heartbeat", {"session_id": "x"}, 410),
            ("retrieve_future", {"request_id": "x"}, 410),
            ("copy_weights", {}, 404),
        ]
        for path, body, status in cases:
            await caller.post(path, status, **body)
        other = {"session_id": caller.session, "model_seq_id": 5, "base_model": "other"}
        unknown = await caller.result(await caller.post("create_model", **other))
        assert unknown.json()["error"] == f"base_model: 'other' is not served here: use {NAME!r}"
        own = await caller.sampler(model, 5, 0)
        seed = await caller.http.post(
            "/api/v1/asample", json={"sampling_session_id": own, "sampling_params": {"seed": 1}}
        )
        assert (seed.status_code, "sampling_params.seed" in seed.text) == (422, True)


def sparse(starts: list[int], shape: list[int]) -> bytes:
    columns = [np.asarray(starts, "<i8").tobytes(), np.asarray([0, 1], "<i8").tobytes()]
    csr = _encoded(1, np.ones(2, "<f4").tobytes()) + _encoded(2, columns[0]) + _encoded(3, columns[1])
    tensor = _encoded(2, csr) + _encoded(3, 1) + b"".join(_encoded(4, n) for n in shape)
    return _encoded(2, _encoded(1, "weights") + _encoded(2, tensor))


@pytest.mark.parametrize(
    "datum",
    [_encoded(1, 5), sparse([0, 1 << 60, 2], [2, 2]), sparse([0, 1, 2], [2, 1 << 60]), sparse([0, 3, 2], [2, 2])],
    ids=["type", "start", "shape", "descending"],
)
async def test_batch_that_cannot_be_read_fails_the_next_step(tmp_path: Path, datum: bytes) -> None:
    """The gradients of the batch before it are not all of the step's."""
    async with client_of(Site(tmp_path)) as http:
        caller = await Caller.begin(http)
        model = await caller.model()
        await caller.result(await caller.forward_backward(1))
        body = _encoded(1, model) + _encoded(2, 2) + _encoded(3, datum) + _encoded(4, "cross_entropy")
        sent = await http.post("/api/v1/forward_backward", content=body, headers={"Content-Type": PROTOBUF})
        assert (await caller.result(sent.json())).json()["category"] == "user"
        step = await caller.post("optim_step", model_id=model, seq_id=3, adam_params={})
        assert "a forward_backward of this step has failed" in (await caller.result(step)).json()["error"]


async def test_number_beyond_a_limit_is_rejected_by_name(tmp_path: Path) -> None:
    async with client_of(Site(tmp_path)) as http:
        caller = await Caller.begin(http)
        model = await caller.model()
        sampler = await caller.sampler(model, 1, 0)
        prompt = {"chunks": [{"tokens": [5]}]}
        body = {"sampling_session_id": sampler, "seq_id": 1, "prompt": prompt, "sampling_params": {}}
        many = await caller.post("asample", 422, num_samples=10**12, **body)
        assert "num_samples" in many["error"]["message"]
        saved = await caller.post("save_weights", model_id=model, seq_id=2, path="x", ttl_seconds=10**15)
        assert "ttl_seconds" in (await caller.result(saved)).json()["error"]
        content = _encoded(1, 7) + _encoded(2, b"x")
        damaged = await http.post("/api/v1/forward_backward", content=content, headers={"Content-Type": PROTOBUF})
        assert (damaged.status_code, "no protobuf" in damaged.text) == (422, True)


async def test_sample_that_the_fleet_drops_fails_with_the_reason(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.fleet.dropped = "too many attempts"
    async with client_of(site) as http:
        caller = await Caller.begin(http)
        own = await caller.sampler(await caller.model(), 1, 0)
        error = (await caller.result(await caller.sample(own, 0))).json()
    assert (error["category"], "too many attempts" in error["error"]) == ("server", True)


async def test_dollars_of_a_call_are_in_a_header(tmp_path: Path) -> None:
    site = Site(tmp_path, price_per_hour=3600.0)
    async with client_of(site) as http:
        caller = await Caller.begin(http)
        model = await caller.model()
        trained = await caller.result(await caller.forward_backward(1))
        own = await caller.sampler(model, 2, 0)
        sampled = await caller.result(await caller.sample(own, 0, num_samples=2))
    assert float(trained.headers[DOLLARS]) > 0
    assert float(sampled.headers[DOLLARS]) == pytest.approx(2 * 3 * 4e-6)


async def test_checkpoint_survives_the_server_and_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(tmp_path)
    async with client_of(site) as http:
        caller = await Caller.begin(http)
        model = await caller.model()
        await caller.result(await caller.forward_backward(1))
        await caller.result(await caller.post("optim_step", model_id=model, seq_id=2, adam_params={}))
        saved = await caller.post("save_weights", model_id=model, seq_id=3, path="one", ttl_seconds=3600)
        path = (await caller.result(saved)).json()["path"]
    again = Site(tmp_path)
    async with client_of(again) as http:
        caller = await Caller.begin(http)
        body = {"session_id": caller.session, "model_seq_id": 0, "path": path, "optimizer": True}
        loaded = (await caller.result(await caller.post("load_weights", **body))).json()
        assert loaded["model_id"] == f"{caller.session}:train:0"
        assert again.model._adapters[f"m-{caller.session}-train-0"].steps == 1
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 3601)
        again.tinker._sweep()
        body["model_seq_id"] = 1
        gone = (await caller.result(await caller.post("load_weights", **body))).json()
    assert "it has expired" in gone["error"]


async def test_weights_without_a_name_are_retained_for_some_saves(tmp_path: Path) -> None:
    site = Site(tmp_path)
    async with client_of(site) as http:
        caller = await Caller.begin(http)
        model = await caller.model()
        samplers = [await caller.sampler(model, i + 1, i) for i in range(server.N_EPHEMERAL + 1)]
        gone = (await caller.result(await caller.sample(samplers[0], 0))).json()
        assert "there is no checkpoint" in gone["error"]
        assert tokens_of(await caller.result(await caller.sample(samplers[1], 0)))
        await caller.http.post(f"/api/v1/sessions/{caller.session}/finish")
    assert list((tmp_path / "checkpoints").glob("*/*/*")) == []


async def test_only_programs_of_this_machine_or_with_the_key_are_answered(tmp_path: Path) -> None:
    site = Site(tmp_path)
    async with client_of(site) as http:
        for headers in ({"Origin": "http://localhost"}, {"Host": "tinker.example"}):
            assert (await http.get("/api/v1/healthz", headers=headers)).status_code == 403
    site = Site(tmp_path, api_key="tml-right")
    async with client_of(site) as http:
        assert (await http.get("/api/v1/healthz", headers={"X-API-Key": "tml-wrong"})).status_code == 401
        answer = await http.get("/api/v1/healthz", headers={"X-API-Key": "tml-right", "Host": "tinker.example"})
        assert answer.status_code == 200
        assert json.loads(answer.text) == {"status": "ok"}
