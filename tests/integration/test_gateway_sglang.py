"""The fleet as one SGLang server: the requests of slime (August 2026), as its engines and rollouts send them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.support import tiny_models
from tests.support.gateway_site import PROMPT, Served, folder_of, serving, started
from tests.support.published_model import policy as model
from tests.support.serving_system import System, until

SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "max_new_tokens": 12,
    "stop": None,
    "stop_token_ids": None,
    "skip_special_tokens": False,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
}
"""Of slime's `generate`, with its defaults."""


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with started(tmp_path_factory.mktemp("sglang"), ends=(2,)) as system:
        yield system


@pytest.fixture(scope="module")
def served(system: System) -> Iterator[Served]:
    with serving(system, "sglang") as served:
        yield served


def generated(served: Served, **more: Any) -> dict[str, Any]:
    sampling = SAMPLING | more.pop("sampling", {})
    body = {"sampling_params": sampling, "return_logprob": True, "input_ids": PROMPT} | more
    answer = served.http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_engine_is_found_as_one_of_a_device(served: Served) -> None:
    for path in ("/server_info", "/get_server_info"):
        info = served.http.get(path).json()
        assert [info[name] for name in ("tp_size", "pp_size", "ep_size", "num_gpus")] == [1] * 4
        assert info["enable_memory_saver"] is False  # slime compares it with its own setting
        assert info["disaggregation_mode"] not in {"prefill", "decode"}
        assert info["vllm_config"]["parallel_config"]["world_size"] == 1
    assert served.http.get("/health_generate").status_code == 200
    assert served.http.get("/model_info").json()["model_path"] == served.http.get("/server_info").json()["model_path"]


def test_samples_are_of_the_weights_of_the_last_update(served: Served, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(served.system.model)
    for seed in (1, 2):
        assert served.http.post("/pause_generation", json={}).status_code == 200
        assert served.http.get("/flush_cache").status_code == 200
        body = {"model_path": str(folder_of(tmp_path, seed)), "weight_version": str(seed)}
        updated = served.http.post("/update_weights_from_disk", json=body)
        assert (updated.status_code, updated.json()["success"]) == (200, True), updated.text
        assert served.http.post("/continue_generation", json={}).status_code == 200
        assert served.http.get("/get_weight_version").json() == {"weight_version": str(seed)}
        until(lambda seed=seed: generated(served)["meta_info"]["weight_version"] == str(seed))
        made = [generated(served, sampling={"sampling_seed": i}) for i in range(8)]
        made = [one for one in made if one["meta_info"]["weight_version"] == str(seed)]
        assert made
        for one in made:
            meta = one["meta_info"]
            tokens = [token for _, token, _ in meta["output_token_logprobs"]]
            assert tokens == one["output_ids"]
            expected = tiny_models.logprobs(model(seed), PROMPT, tokens)
            assert [logprob for logprob, _, _ in meta["output_token_logprobs"]] == pytest.approx(expected, abs=1e-4)
            assert one["text"] == tokenizer.decode(tokens)
            assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(PROMPT), len(tokens))
            ended = tokens[-1] == 2
            reason = {"type": "stop", "matched": 2} if ended else {"type": "length", "length": 12}
            assert meta["finish_reason"] == reason


def test_text_ends_before_what_stopped_it_unless_it_is_kept(served: Served) -> None:
    first = generated(served, sampling={"sampling_seed": 5, "temperature": 0.0})["output_ids"]
    stop = {"sampling_seed": 5, "temperature": 0.0, "stop_token_ids": [first[3]]}
    kept = generated(served, sampling=stop)
    cut = generated(served, sampling=stop | {"no_stop_trim": False})
    end = first.index(first[3])
    assert kept["output_ids"] == cut["output_ids"] == first[: end + 1]
    tokenizer = AutoTokenizer.from_pretrained(served.system.model)
    assert (kept["text"], cut["text"]) == (tokenizer.decode(first[: end + 1]), tokenizer.decode(first[:end]))
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": first[3]}


def test_several_completions_are_a_list(served: Served) -> None:
    body = {"sampling_params": SAMPLING | {"n": 3}, "input_ids": PROMPT}
    made = served.http.post("/generate", json=body).json()
    assert len(made) == 3
    assert all("output_token_logprobs" not in one["meta_info"] for one in made)


def test_pause_holds_requests_and_abort_ends_them(served: Served) -> None:
    served.http.post("/pause_generation", json={})
    with ThreadPoolExecutor(4) as pool:
        held = [pool.submit(generated, served, rid=f"held-{i}") for i in range(3)]
        until(lambda: load(served) == 3)
        served.http.post("/abort_request", json={"rid": "held-0"})
        assert held[0].result()["meta_info"]["finish_reason"]["type"] == "abort"
        assert load(served) == 2
        served.http.post("/continue_generation", json={})
        assert all(one.result()["meta_info"]["finish_reason"]["type"] in {"stop", "length"} for one in held[1:])
        # In flight, all are aborted, as slime does at the end of a rollout, and end on the fleet, too.
        job = served.system.http.get("/v1/jobs").json()[0]["id"]
        long = [pool.submit(generated, served, sampling={"max_new_tokens": 150, "ignore_eos": True}) for _ in range(3)]
        until(lambda: load(served) == 3)
        served.http.post("/abort_request", json={"abort_all": True})
        for one in long:
            aborted = one.result()
            assert aborted["meta_info"]["finish_reason"]["type"] in {"abort", "length"}
            if aborted["meta_info"]["finish_reason"]["type"] == "abort":
                assert (aborted["text"], aborted["meta_info"]["output_token_logprobs"]) == ("", [])
        assert load(served) == 0
        until(lambda: not served.system.http.get(f"/v1/jobs/{job}/audit").json()["serving"]["in_flight"])


def load(served: Served) -> int:
    return int(served.http.get("/v1/loads?include=core").json()["loads"][0]["num_total_reqs"])


def test_requests_survive_the_death_of_a_worker(served: Served) -> None:
    with ThreadPoolExecutor(8) as pool:
        running = [
            pool.submit(generated, served, sampling={"max_new_tokens": 120, "ignore_eos": True, "sampling_seed": i})
            for i in range(8)
        ]
        served.system.kill_the_worker_that_runs()
        served.system.hire("w3")
        made = [one.result() for one in running]
    assert all(one["meta_info"]["completion_tokens"] == 120 for one in made)


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/generate", {"input_ids": PROMPT, "return_routed_experts": True}, 422, "return_routed_experts"),
        ("/generate", {"input_ids": PROMPT, "image_data": ["x"]}, 422, "image_data"),
        ("/generate", {"input_ids": PROMPT, "stream": True}, 400, "stream"),
        ("/generate", {"input_ids": PROMPT, "top_logprobs_num": 2}, 400, "top_logprobs_num"),
        ("/generate", {"input_ids": PROMPT, "logprob_start_len": 0}, 400, "logprob_start_len"),
        ("/generate", {"input_ids": PROMPT, "sampling_params": {"custom_params": {"a": 1}}}, 400, "custom_params"),
        ("/generate", {"input_ids": PROMPT, "sampling_params": {"repetition_penalty": 1.2}}, 400, "repetition_penalty"),
        ("/generate", {"input_ids": PROMPT, "sampling_params": {"top_k": [1]}}, 400, "top_k"),
        ("/generate", {"sampling_params": {}}, 400, "input_ids"),
        ("/generate", {"input_ids": [PROMPT]}, 422, "input_ids"),
        ("/pause_generation", {"mode": "stop"}, 422, "mode"),
        ("/update_weights_from_disk", {"model_path": "/nowhere"}, 400, "/nowhere: this machine reads no"),
        ("/update_weights_from_disk", {"model_path": "/w", "load_format": "delta"}, 422, "load_format"),
        ("/init_weights_update_group", {"master_address": "10.0.0.1"}, 501, "--update-weight-transport disk"),
        ("/update_weights_from_distributed", {}, 501, "--update-weight-transport disk"),
        ("/update_weights_from_tensor", {}, 501, "--update-weight-transport disk"),
        ("/pull_weights", {"target_version": 1}, 501, "without deltas"),
        ("/release_memory_occupation", {}, 501, "turn offloading of generation off"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    served: Served, path: str, body: dict[str, Any], status: int, text: str
) -> None:
    answer = served.http.post(path, json=body)
    assert (answer.status_code, text in answer.json()["error"]["message"]) == (status, True), answer.text
