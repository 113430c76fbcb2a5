"""The fleet as one vLLM server: real manager, store and workers behind a gateway."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import peft
import pytest
import requests
import torch
from huggingface_hub import constants
from openai import OpenAI
from safetensors.torch import save_file

from rlboost.shared.errors import ConfigError, Fatal
from rlboost.trl import WeightTransfer
from tests.support import tiny_models
from tests.support.doc_snippets import blocks_in
from tests.support.gateway_site import PROMPT, Served, folder_of, serving, started
from tests.support.generated_docs import ROOT
from tests.support.ports import reserved_port
from tests.support.published_model import policy as model
from tests.support.serving_system import TEMPLATE, System, until

KEY = "a-key-of-a-gateway"
TRANSPORT = next(block for block in blocks_in(ROOT / "docs/own-trainer.md", "python") if "rlboost.vllm" in block)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with started(tmp_path_factory.mktemp("gateway")) as system:
        yield system


@pytest.fixture(scope="module")
def served(system: System) -> Iterator[Served]:
    with serving(system, "served") as served:
        yield served


def test_generated_tokens_have_the_logprobs_of_the_weights_that_were_sent(served: Served, tmp_path: Path) -> None:
    for seed in (1, 2):
        for path, body in (
            ("/pause?mode=keep", None),
            ("/start_weight_update", {"is_checkpoint_format": True}),
            ("/update_weights", {"update_info": {"path": str(folder_of(tmp_path, seed))}}),
            ("/finish_weight_update", {"weight_version": f"step-{seed}"}),
            ("/resume", None),
        ):
            assert served.http.post(path, json=body).status_code == 200
        assert served.http.get("/weight_info").json() == {"weight_version": f"step-{seed}"}
        until(lambda seed=seed: matches(served, seed))
    shutil.rmtree(tmp_path)


def matches(served: Served, seed: int) -> bool:
    """Return True if a completion is of this policy: the workers switch one by one."""
    (choice,) = served.generate(8).json()["choices"]
    content = choice["logprobs"]["content"]
    assert [one["token"] for one in content] == [f"token_id:{token}" for token in choice["token_ids"]]
    expected = tiny_models.logprobs(model(seed), PROMPT, choice["token_ids"])
    is_of_policy = [one["logprob"] for one in content] == pytest.approx(expected, abs=1e-4)
    n_tokens = len(choice["token_ids"])
    assert is_of_policy == (choice["weight_versions"] == [{"version": f"step-{seed}", "start": 0, "end": n_tokens}])
    return is_of_policy


@pytest.mark.parametrize("n_top", [0, 1, 3])
def test_tokens_of_prompts_have_the_logprobs_of_the_weights_that_were_sent(
    served: Served, tmp_path: Path, n_top: int
) -> None:
    """As clients of vLLM score a completion of another model; prime-rl's asks for one of the most likely tokens."""
    served.update(folder_of(tmp_path, 20))
    until(lambda: samples_are_of(served, model(20)))
    prompts = [[5, 7, 9, 11, 2, 30], [8], [6, 5]]
    body = {"prompt": prompts, "max_tokens": 1, "n": 2, "prompt_logprobs": n_top}
    choices = served.http.post("/v1/completions", json=body).json()["choices"]
    sampling = {"max_tokens": 1, "temperature": 0.5, "prompt_logprobs": n_top, "top_p": 0.9, "output_kind": 2}
    one = served.http.post("/inference/v1/generate", json={"token_ids": prompts[0], "sampling_params": sampling}).json()
    assert len(choices) == 2 * len(prompts)
    for choice, (first, *given) in zip(
        [*choices, one], [p for p in [*prompts, prompts[0]] for _ in range(2)], strict=False
    ):
        head, *places = choice["prompt_logprobs"]
        assert head is None
        assert [next(iter(place)) for place in places] == [str(token) for token in given]
        found = [next(iter(place.values()))["logprob"] for place in places]
        assert found == pytest.approx(tiny_models.logprobs(model(20), [first], given), abs=1e-4)
        for place, token in zip(places, given, strict=True):
            ranks = {name: value["rank"] for name, value in place.items()}
            assert sorted(rank for rank in ranks.values() if rank) == [*range(1, n_top + 1)]
            values = [value["logprob"] for value in place.values() if value["rank"]]
            assert values == sorted(values, reverse=True) or ranks[str(token)]
        spans = choice["prompt_weight_versions"]
        newest = served.http.get("/weight_info").json()["weight_version"]
        assert spans == ([{"version": newest, "start": 1, "end": 1 + len(given)}] if given else [])
    for n in (1, 0):  # as lm-eval and older clients of OpenAI score a text
        asked = {"prompt": prompts, "max_tokens": n, "temperature": 0, "echo": True, "logprobs": n_top}
        asked["return_tokens_as_token_ids"] = True
        answer = served.http.post("/v1/completions", json=asked).json()
        assert answer["usage"]["completion_tokens"] == n * len(prompts)
        for choice, prompt in zip(answer["choices"], prompts, strict=True):
            lists = choice["logprobs"]
            assert {len(lists[name]) for name in lists} == {len(prompt) + n}
            assert lists["tokens"][: len(prompt)] == [f"token_id:{token}" for token in prompt]
            assert lists["token_logprobs"][0] is lists["top_logprobs"][0] is None
            expected = tiny_models.logprobs(model(20), prompt[:1], prompt[1:])
            assert lists["token_logprobs"][1 : len(prompt)] == pytest.approx(expected, abs=1e-4)
            places = zip(lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True)
            for name, value, top in [*places][1:]:
                assert top[name] == value
                assert len(top) in {max(n_top, 1), n_top + 1}


@pytest.mark.parametrize(
    "sampling",
    [
        {"stop_token_ids": [2], "logprobs": 1, "skip_special_tokens": False, "top_k": -1, "min_p": 0.0},
        {"min_tokens": 1, "skip_special_tokens": True, "include_stop_str_in_output": True, "logprobs": 1, "stop": None},
        {"n": 1, "logprobs": 0, "output_kind": 2, "prompt_logprobs": None},
    ],
    ids=["prime-rl", "SkyRL", "SkyRL's Tinker server"],
)
def test_sampling_parameters_of_trainers_are_answered(served: Served, sampling: dict[str, Any]) -> None:
    sampling = {"max_tokens": 6, "temperature": 1.0, "top_p": 1.0, **sampling}
    answer = served.generate(6, sampling_params=sampling, model=str(served.system.model), priority=0)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) > 0
    assert "prompt_logprobs" not in answer.json()


def test_update_is_answered_when_a_worker_serves_it(served: Served, tmp_path: Path) -> None:
    made = served.update(folder_of(tmp_path, 3))
    workers = served.system.http.get("/v1/workers").json()
    serving = [
        one for one in workers if (one["state"], str(one["weight_version"])) == ("ready", made["weight_version"])
    ]
    assert 1 <= made["workers_serving"] <= len(serving)


def test_equal_weights_are_one_version_at_once_and_again(served: Served, tmp_path: Path) -> None:
    (before,) = {served.update(folder_of(tmp_path, 4))["weight_version"] for _ in range(2)}
    folder_of(tmp_path, 5)
    with ThreadPoolExecutor(4) as pool:
        made = {one["weight_version"] for one in pool.map(served.update, [tmp_path] * 4)}
    assert made == {str(int(before) + 1)}


def test_spans_name_the_versions_of_a_completion_that_an_update_meets(served: Served, tmp_path: Path) -> None:
    seeds = count(6)

    def met() -> bool:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(served.generate, 400)
            after = served.update(folder_of(tmp_path, next(seeds)))["weight_version"]
        (choice,) = running.result().json()["choices"]
        spans = choice["weight_versions"]
        assert [one["start"] for one in spans] == [0, *(one["end"] for one in spans[:-1])]
        assert spans[-1]["end"] == len(choice["token_ids"])
        return [one["version"] for one in spans] == [str(int(after) - 1), after]

    until(met)


def test_client_of_openai_completes_and_streams(served: Served) -> None:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        (one,) = client.models.list().data
        assert one.id == str(served.system.model)
        made: Any = client.completions.create(model=one.id, prompt=PROMPT, max_tokens=6, seed=(1 << 63) - 1, logprobs=0)
        assert len(made.choices[0].logprobs.token_logprobs) == made.usage.completion_tokens
        asked = {"extra_body": {"return_token_ids": True}}
        blocks: Any = list(
            client.completions.create(model=one.id, prompt=PROMPT, max_tokens=6, stream=True, **asked)  # type: ignore[call-overload]
        )
        assert blocks[-1].choices[0].finish_reason in {"stop", "length"}
        n_tokens = sum(len(block.choices[0].token_ids) for block in blocks)
        (span,) = blocks[-1].choices[0].weight_versions
        assert (span["start"], span["end"]) == (0, n_tokens)
        assert {made.model, *(block.model for block in blocks)} == {one.id}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_answers_have_the_gateways_name_of_the_model(served: Served, path: str) -> None:
    chat = "input" if path == "/v1/responses" else "messages"
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {"model": str(served.system.model), chat: [{"role": "user", "content": "t5 t7"}], limit: 4}
    assert served.http.post(path, json=body).json()["model"] == body["model"]
    streamed = served.http.post(path, json={**body, "stream": True}).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    parts = [part for one in events for part in (one, *one.values()) if isinstance(part, dict)]
    assert {part["model"] for part in parts if "model" in part} == {body["model"]}


def test_requests_survive_the_death_of_manager_and_worker(served: Served) -> None:
    with ThreadPoolExecutor(16) as pool:
        scoring = {"max_tokens": 2000, "prompt_logprobs": 0}
        made = [
            pool.submit(
                served.generate, 2000, request_id=f"r{i}", **({"sampling_params": scoring} if i % 4 == 0 else {})
            )
            for i in range(16)
        ]
        served.system.kill_the_worker_that_runs()
        served.system.manager.kill()
        served.system.manager.start()
        served.system.hire("w3")
        for i, one in enumerate(made):
            assert one.result().status_code == 200
            assert one.result().json()["request_id"] == f"r{i}"
            if i % 4 == 0:
                assert len(one.result().json()["prompt_logprobs"]) == len(PROMPT)


def test_pause_holds_new_requests_and_wait_ends_those_in_flight(served: Served) -> None:
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(served.generate, 1000)
        until(lambda: served.gateway._n_in_flight)
        assert served.http.post("/pause", params={"mode": "wait"}).json() == {"status": "paused"}
        assert served.gateway._n_in_flight == 0
        assert running.result().status_code == 200
        assert served.http.get("/is_paused").json() == {"is_paused": True}
        held = pool.submit(served.generate, 1)
        time.sleep(0.3)
        assert not held.done()
        served.http.post("/resume")
        assert held.result().status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/pause?mode=abort", {}, 400, "throws samples away"),
        ("/init_weight_transfer_engine", {"init_info": {"master_address": "10.0.0.1"}}, 501, "none is a rank"),
        ("/update_weights", {"update_info": {"names": ["w"]}}, 501, "send its path"),
        (
            "/update_weights",
            {"update_info": {"target_version": 1, "uri": "s3://b/v1"}},
            501,
            "update_info.uri: workers",
        ),
        ("/fetch_weights", {"target_version": 1, "uri": "file:///d/v1"}, 501, "/fetch_weights: workers"),
        ("/collective_rpc", {"method": "skyrl_start_weight_update"}, 501, "/collective_rpc: workers"),
        ("/update_weights", {"weight_dir": "/nowhere"}, 400, "/nowhere: this machine reads no"),
        ("/update_weights", {"weight_dir": "\0"}, 400, "this machine reads no"),
        ("/update_weights", {"weight_dir": 5}, 422, "weight_dir: "),
        ("/update_weights", {"update_info": "x"}, 422, "update_info: "),
        ("/init_weight_transfer_engine", {"init_info": "x"}, 422, "init_info: "),
        ("/pause?mode=abrot", {}, 400, "mode: 'abrot' is unknown"),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}, 404, "lora_path: the adapter in '/a'"),
        ("/v1/load_lora_adapter", {"lora_name": "a"}, 422, "lora_path: missing"),
        ("/v1/load_lora_adapter", {"lora_path": "/a"}, 422, "lora_name: missing"),
        ("/v1/completions", {"model": "other", "prompt": PROMPT}, 404, "'other' does not exist"),
        ("/v1/completions", {"prompt": PROMPT, "prompt_logprobs": -1}, 400, "prompt_logprobs"),
        ("/v1/completions", {"prompt": PROMPT, "prompt_logprobs": 0, "stream": True}, 400, "prompt_logprobs: they are"),
        ("/v1/completions", {"prompt": PROMPT, "echo": True, "stream": True}, 400, "echo: prompts are not streamed"),
        ("/v1/completions", {"prompt": PROMPT, "echo": True, "prompt_logprobs": 0}, 400, "prompt_logprobs: echo"),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 0}, 400, "max_tokens: 0 tokens need echo"),
        ("/v1/completions", {"prompt": [[5, 6]] * 600, "prompt_logprobs": 0}, 400, "600 completions and 600 prompts"),
        ("/v1/completions", {"prompt": [1 << 20, 5], "prompt_logprobs": 0}, 400, "outside the model's"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "t5"}], "prompt_logprobs": 0},
            400,
            "prompt_logprobs: not supported",
        ),
        ("/inference/v1/generate", {}, 422, "token_ids: missing"),
        ("/inference/v1/generate", {"token_ids": "x"}, 422, "token_ids: "),
        ("/inference/v1/generate", {"token_ids": PROMPT, "max_tokens": 5}, 422, "max_tokens: unknown key"),
        ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": 5}, 422, "sampling_params: "),
        ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"logprobs": "x"}}, 422, "logprobs: "),
        ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"logprobs": -1}}, 400, "logprobs"),
        ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"max_tokens": "x"}}, 400, "max_tokens"),
        ("/inference/v1/generate", {"token_ids": PROMPT, "stream": True}, 400, "stream"),
        ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"logprobs": 2}}, 400, "logprobs"),
        ("/inference/v1/generate", {"token_ids": PROMPT, "features": {"a": 1}}, 400, "text only"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    served: Served, path: str, body: dict[str, Any], status: int, text: str
) -> None:
    answer = served.http.post(path, json=body)
    assert (answer.status_code, text in answer.json()["error"]["message"]) == (status, True), answer.text


def test_web_pages_are_no_clients(served: Served) -> None:
    headers = {"Origin": "http://evil.example", "Content-Type": "text/plain"}
    answer = served.http.post("/update_weights", content=b'{"weight_dir": "/"}', headers=headers)
    assert answer.status_code == 403


def test_without_a_key_only_names_of_this_machine_are_served(served: Served) -> None:
    def status_of(host: str, path: str = "/is_paused") -> int:
        return served.http.get(path, headers={"Host": host}).status_code

    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:8000", "127.0.0.2", "[::1]:8000"):
        assert status_of(host) == 200, host
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "10.0.0.5", "[::1", "a@b"):
        assert status_of(host) == 403, host
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert status_of("localhost", path) == 404, path


def test_folder_that_cannot_be_read_is_refused(served: Served, tmp_path: Path) -> None:
    def refused(path: str, field: str, text: str, status: int = 400) -> None:
        answer = served.http.post(path, json={field: str(tmp_path), "lora_name": "a"}, timeout=30.0)
        assert (answer.status_code, text in answer.text) == (status, True), answer.text

    adapter = ("/v1/load_lora_adapter", "lora_path")
    for name in ("model.safetensors", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes(b"no weights")
    (tmp_path / "adapter_config.json").write_text("{}")
    refused("/update_weights", "weight_dir", "cannot be read")
    refused(*adapter, "cannot be read")
    for name in ("model.safetensors", "adapter_model.safetensors"):
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)  # whoever opens it waits for a writer
    refused("/update_weights", "weight_dir", "safetensors is no file")
    refused(*adapter, "it has no file adapter_model.safetensors", 404)


def test_transport_of_vllms_trainer_side_publishes_each_version(served: Served, tmp_path: Path) -> None:
    vllm = pytest.importorskip("vllm.distributed.weight_transfer", reason="run 'make install-vllm'")
    policy, shown = model(7), TRANSPORT.replace("http://localhost:8000", served.url)
    ranks = [{**vars(vllm), "rank": rank, "model": policy} for rank in (1, 0)]
    for rank in ranks:  # the other one takes part in gathering, and sends nothing
        exec(shown, rank)
    other, sender = (rank["engine"] for rank in ranks)
    until(lambda: samples_are_of(served, policy))
    for label in ("first", "second"):
        with torch.no_grad():
            policy.get_parameter("model.norm.weight").mul_(1.5)
        other.send_weights(label)
        sender.send_weights(label)
        assert served.http.get("/weight_info").json() == {"weight_version": label}
        until(lambda: samples_are_of(served, policy))
    folder = sender._folder._path
    assert folder.is_dir()
    sender.shutdown()
    other.shutdown()
    assert not folder.exists()
    for options, why in (({}, "give one, such as ModuleSource"), ({"source": Halves(policy)}, "held_names")):
        with pytest.raises(ConfigError, match=why):
            vllm.WeightTransferTrainerFactory.trainer_init(
                ranks[0]["TrainerInit"](rank=0), client=sender.client, **options
            )


class Halves:
    """A source that has a part in each process."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy

    def held_names(self) -> list[str]:
        return [name for name, _ in self._policy.named_parameters()][:2]


def samples_are_of(served: Served, policy: Any) -> bool:
    (choice,) = served.generate(8).json()["choices"]
    expected = tiny_models.logprobs(policy, PROMPT, choice["token_ids"])
    return [one["logprob"] for one in choice["logprobs"]["content"]] == pytest.approx(expected, abs=1e-4)


def test_adapters_are_served_as_the_model_that_they_are_merged_into(system: System, tmp_path: Path) -> None:
    policy = peft.get_peft_model(
        model(0), peft.LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", init_lora_weights=False)
    )
    with reserved_port() as port:
        served = Served(system, port, "adapters")
        try:
            assert served.http.get("/server_info").json()["vllm_config"]["lora_config"]["max_lora_rank"] >= 64
            for version in (1, 2):
                policy.save_pretrained(tmp_path / "adapter")
                name = f"policy-v{version}"
                body = {"lora_name": name, "lora_path": str(tmp_path / "adapter"), "load_inplace": False}
                loaded = served.http.post("/v1/load_lora_adapter", json=body)
                assert (loaded.status_code, name in loaded.text) == (200, True), loaded.text
                until(lambda: samples_are_of(served, policy))
                (choice,) = served.generate(4, model=name).json()["choices"]
                assert choice["weight_versions"] == [{"version": name, "start": 0, "end": len(choice["token_ids"])}]
                again = served.http.post("/v1/load_lora_adapter", json=body)
                assert (again.status_code, served.http.get("/weight_info").json()["weight_version"]) == (200, name)
                with torch.no_grad():
                    for part, tensor in policy.named_parameters():
                        if "lora_B" in part:
                            tensor.mul_(-1)
            base = served.generate(4, model=str(system.model))
            assert (base.status_code, "name the adapter (policy-v1, policy-v2)" in base.text) == (404, True), base.text
            served.http.post("/v1/unload_lora_adapter", json={"lora_name": "policy-v1"})
            assert served.generate(4, model="policy-v1").status_code == 404
        finally:
            served.close()
    with reserved_port() as port:  # a restart, after which a trainer continues to name its adapter
        served = Served(system, port, "adapters")
        try:
            until(lambda: served.http.get("/health").is_success)
            assert served.generate(4, model="policy-v2").status_code == 200
            made = served.update(folder_of(tmp_path, 9))  # whole weights again, under the model's name
            assert made["weight_version"] == "3"  # after the model and two adapters
            assert served.generate(4, model="policy-v2").status_code == 404
            until(lambda: samples_are_of(served, model(9)))
        finally:
            served.close()


def test_adapters_need_the_model_below_them(system: System, tmp_path: Path) -> None:
    with reserved_port() as port:
        served = Served(system, port, "no-model", model="acme/none")
        try:
            body = {"lora_name": "a", "lora_path": str(tmp_path)}
            answer = served.http.post("/v1/load_lora_adapter", json=body)
            assert (answer.status_code, "start the gateway with a folder" in answer.text) == (501, True), answer.text
            assert served.http.get("/server_info").json()["vllm_config"]["lora_config"] is None
        finally:
            served.close()


def test_nccl_is_refused_to_vllms_client(served: Served) -> None:
    vllm = pytest.importorskip("vllm.distributed.weight_transfer", reason="run 'make install-vllm'")
    client = vllm.HTTPVLLMWeightSyncClient(served.url)
    with pytest.raises(requests.HTTPError, match="501") as refused:
        client.init_weight_transfer_engine({"master_address": "10.0.0.1", "master_port": 1, "world_size": 2})
    assert refused.value.response is not None
    assert "rlboost.vllm.TrainerInit" in refused.value.response.text


def test_configuration_of_a_model_of_hugging_face_is_that_of_its_repository(
    system: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--acme--tiny/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text((system.model / "config.json").read_text())
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "weights").mkdir()
    for name, status in (("tiny", 200), ("unknown", 400)):
        with reserved_port() as port:
            served = Served(system, port, f"hub-{name}", model=f"acme/{name}")
            try:
                folder = folder_of(tmp_path / "weights", 8)
                answer = served.http.post("/update_weights", json={"weight_dir": str(folder)})
                assert answer.status_code == status, answer.text
                assert status == 200 or "none is found of the model 'acme/unknown'" in answer.text
            finally:
                served.close()


def test_manager_that_hangs_is_named(system: System) -> None:
    with reserved_port() as port:
        hasty = Served(system, port, "hasty", answer_limit_s=1.0)
        try:
            until(lambda: hasty.generate(1).status_code == 200)
            os.kill(system.manager.pid, signal.SIGSTOP)
            try:
                answer = hasty.generate(1)
            finally:
                os.kill(system.manager.pid, signal.SIGCONT)
            assert (answer.status_code, "has sent nothing for 1 s" in answer.text) == (504, True), answer.text
        finally:
            hasty.close()


def test_weights_are_published_while_the_job_has_no_worker(tmp_path: Path) -> None:
    alone = System(tmp_path, TEMPLATE)
    save_file(dict(model(0).named_parameters()), alone.model / "model.safetensors")
    (tmp_path / "weights-1").mkdir()
    try:
        alone.manager.start()
        alone.store.start()
        with reserved_port() as port:
            served = Served(alone, port, "alone")
            try:
                made = served.update(folder_of(tmp_path / "weights-1", 1))
                assert (made["weight_version"], made["workers_serving"]) == ("1", 0)
            finally:
                served.close()
    finally:
        alone.close()


def test_bodies_that_are_no_objects_are_refused(served: Served) -> None:
    for content in (b"{", b"[1]"):
        assert served.http.post("/v1/completions", content=content).status_code == 400


def test_key_is_taken_as_bearer_token_and_from_the_url(
    system: System, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with reserved_port() as port:
        guarded = Served(system, port, "guarded", KEY)
        try:
            assert guarded.http.get("/health").status_code == 200
            assert guarded.http.get("/v1/models").status_code == 401
            assert guarded.http.get("/v1/models", auth=("any", KEY)).status_code == 200
            assert guarded.http.get("/v1/models", auth=("any", "other")).status_code == 401
            headers = {"Authorization": f"Bearer {KEY}", "Host": "gateway.example"}
            assert guarded.http.get("/v1/models", headers=headers).status_code == 200
            check_weight_transfer(guarded, tmp_path, caplog)
        finally:
            guarded.close()


def check_weight_transfer(guarded: Served, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """TRL's client of a gateway with a key: it shows the URL without the password."""
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, "httpx")  # which a library may have raised
    with reserved_port() as unused, ExitStack() as ended:

        def transfer(key: str, port: int) -> WeightTransfer:
            made = WeightTransfer(f"http://any:{key}@127.0.0.1:{port}", tmp_path)
            ended.callback(made.destroy)
            return made

        port = int(guarded.url.rpartition(":")[2])
        right = transfer(KEY, port)
        right.init_weight_transfer()
        right.send_weights(model(1).named_parameters())
        with pytest.raises(Fatal, match=f"^{guarded.url}/is_paused: 401: ") as refused:
            transfer(f"{KEY}-no", port).init_weight_transfer()
        with pytest.raises(Fatal, match=f"^http://127.0.0.1:{unused}/pause: ") as failed:
            transfer(KEY, unused).pause()
    assert KEY not in f"{refused.value} {failed.value} {caplog.text}"
    assert f"{guarded.url}/update_weights" in caplog.text
