"""Jobs of kind external: a trainer outside of the system publishes and samples over HTTP, whatever dies."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import peft
import pytest
import torch

from rlboost.client import Client, ClientError
from rlboost.fleet import Fleet, Group, Superseded
from rlboost.services.weight_store.app import MAX_EXTERNAL_RANKS
from rlboost.shared.errors import ConfigError, Conflict, Fatal
from rlboost.shared.messages import Admitted, GroupRequested
from rlboost.shared.redis.bus import RedisBus
from rlboost.shared.streams import names
from rlboost.shared.streams.bus import START
from rlboost.shared.weights.manifest import Part
from tests.support import published_model, tiny_models
from tests.support.doc_snippets import blocks_in
from tests.support.generated_docs import ROOT
from tests.support.published_model import policy as model
from tests.support.service_process import TOKEN
from tests.support.serving_system import TEMPLATE, WAIT_S, System, until

LOOP = next(block for block in blocks_in(ROOT / "docs/own-trainer.md", "python") if "with Fleet(" in block)
PROMPTS = [[5 + i, 7, 9, 11 + i] for i in range(12)]
N = 4


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    system = System(tmp_path_factory.mktemp("external"), TEMPLATE)
    try:
        system.start_services()
        yield system
    finally:
        system.close()


def fleet_of(system: System, job: str, **options: Any) -> Fleet:
    defaults: dict[str, Any] = {"model": str(system.model), "retry_for_s": WAIT_S}
    return Fleet(system.manager.url, TOKEN, job=job, **defaults | options)


def by_index(groups: Sequence[Group]) -> list[Group]:
    return sorted(groups, key=lambda group: group.index)


def audit(system: System, job_id: str) -> dict[str, Any]:
    found: dict[str, Any] = system.http.get(f"/v1/jobs/{job_id}/audit").json()
    return found


def test_samples_have_the_tokens_and_logprobs_of_the_published_weights(system: System) -> None:
    with fleet_of(system, "exact") as fleet:
        for version in range(2):
            policy = model(version)
            assert fleet.publish(policy) == version == fleet.version
            groups = by_index(list(fleet.generate(PROMPTS, n=N, max_tokens=12)))
            assert [group.index for group in groups] == list(range(len(PROMPTS)))
            for group in groups:
                assert not group.dropped
                assert len(group.samples) == N
                for sample in group.samples:
                    assert {span[1] for span in sample.spans} == {version}
                    assert sum(span[2] for span in sample.spans) == len(sample.tokens) == 12
                    expected = tiny_models.logprobs(policy, PROMPTS[group.index], sample.tokens)
                    assert sample.logprobs == pytest.approx(expected, abs=1e-4)
            fleet.complete_step({"reward": 0.5})
        found = audit(system, fleet.job_id)
        assert found["requested"] == found["delivered"] == 2 * len(PROMPTS) * N
        until(lambda: system.http.get(f"/v1/jobs/{fleet.job_id}").json()["step"] == 2)
        fleet.end()
        until(lambda: system.http.get(f"/v1/jobs/{fleet.job_id}").json()["state"] == "completed")
        with pytest.raises(Superseded, match="has ended"):
            fleet.complete_step()


def adapted(seed: int, **config: Any) -> Any:
    """Return a model with a LoRA adapter that changes it."""
    torch.manual_seed(seed)
    lora = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear", "init_lora_weights": False}
    return peft.get_peft_model(model(0), peft.LoraConfig(**lora | config))


def test_adapter_is_sampled_as_the_model_that_it_is_merged_into(system: System) -> None:
    with fleet_of(system, "adapter", deltas=True) as fleet:
        policy = adapted(0)
        for version in (1, 2):  # version 0 is the model below
            assert fleet.publish(policy) == version
            assert fleet.publish(policy, if_changed=True) == version
            groups = by_index(list(fleet.generate(PROMPTS, n=N, max_tokens=12)))
            merged = copy.deepcopy(policy).merge_and_unload()
            for group in groups:
                for sample in group.samples:
                    assert {span[1] for span in sample.spans} == {version}
                    expected = tiny_models.logprobs(merged, PROMPTS[group.index], sample.tokens)
                    assert sample.logprobs == pytest.approx(expected, abs=1e-4)
            unadapted = tiny_models.logprobs(model(0), PROMPTS[0], groups[0].samples[0].tokens)
            assert groups[0].samples[0].logprobs != pytest.approx(unadapted, abs=1e-2)
            if version == 1:
                with torch.no_grad():
                    for name, tensor in policy.named_parameters():
                        if "lora_B" in name:
                            tensor.mul_(-1)
        headers = {"Authorization": f"Bearer {TOKEN}"}
        versions = httpx.get(f"{system.store.url}/v1/models/{fleet.job_id}", headers=headers).json()["versions"]
        assert [(one["version"], one["base_version"]) for one in versions] == [(0, None), (1, 0), (2, 0)]
        assert versions[2]["n_bytes"] < versions[0]["n_bytes"] / 2
    with fleet_of(system, "adapter") as fleet:  # its successor, which has the same adapter
        assert fleet.publish(policy) == 2
        assert by_index(list(fleet.generate(PROMPTS, n=N, max_tokens=12))) == groups
        # Another model below it is a version of its own, and so is the whole model.
        policy.get_base_model().model.norm.weight.data = policy.get_base_model().model.norm.weight.data * 2
        assert fleet.publish(policy) == 4
        assert fleet.publish(model(1)) == 5
        assert not any(group.dropped for group in fleet.generate(PROMPTS[:2], max_tokens=4))
        counts = audit(system, fleet.job_id)
        assert counts["requested"] == counts["delivered"] == 2 * len(PROMPTS) * N + 2
        fleet.end()


def test_trainer_that_died_before_its_first_adapter_continues_with_its_model(system: System) -> None:
    policy = adapted(3)
    with fleet_of(system, "half") as fleet:
        assert fleet.publish(model(0)) == 0
    with fleet_of(system, "half") as fleet:
        assert fleet.publish(policy) == 1
        assert not any(group.dropped for group in fleet.generate(PROMPTS[:2], max_tokens=4))
        fleet.end()


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"use_rslora": True}, "use_rslora"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens.*not a LoRA tensor of a linear layer"),
        ({"modules_to_save": ["norm"]}, "norm.* is trained, and is no tensor of the adapter"),
        ({"bias": "lora_only"}, "bias"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_adapter_that_workers_cannot_merge_is_rejected_by_name(
    system: System, change: dict[str, Any], why: str
) -> None:
    with fleet_of(system, "unmergeable") as fleet:
        with pytest.raises(ConfigError, match=why) as found:
            fleet.publish(adapted(0, **change))
        assert "train the whole model" in str(found.value)
        assert fleet.version == -1


def test_adapter_that_is_merged_is_rejected(system: System) -> None:
    policy = adapted(0)
    policy.merge_adapter()
    with fleet_of(system, "unmergeable") as fleet, pytest.raises(ConfigError, match="unmerge_adapter"):
        fleet.publish(policy)


def test_other_ranks_of_a_trainer_have_no_fleet(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with fleet_of(system, "ranks") as fleet:
        fleet.complete_step()
        fleet.checkpointed()
        fleet.end()
        for call in (lambda: fleet.publish(model(0)), lambda: next(fleet.generate(PROMPTS)), lambda: fleet.job_id):
            with pytest.raises(ConfigError, match="that of rank 0 has the fleet"):
                call()
    assert not [job for job in system.http.get("/v1/jobs").json() if job["name"] == "ranks"]
    with fleet_of(system, "ranks", rank=0) as fleet:
        assert fleet.publish(model(0)) == 0


def test_shown_loop_trains(system: System) -> None:
    class Batch(list[Any]):
        def add(self, *sample: Any) -> None:
            self.append(sample)

    batch, saved = Batch(), list[int]()
    given = {
        "token": TOKEN,
        "first": 0,
        "last": 2,
        "model": model(0),
        "prompts": PROMPTS,
        "eos": 2,
        "batch": batch,
        "reward": 0.5,
        "update": lambda trained, _: [parameter.data.mul_(1.01) for parameter in trained.parameters()],
        "save": lambda _, step: saved.append(step),
    }
    shown = LOOP.replace("http://10.0.0.5:8700", system.manager.url).replace("Qwen/Qwen3-0.6B", str(system.model))
    exec(shown.replace('job="sums"', 'job="shown"').replace("max_tokens=512", "max_tokens=8"), given)
    assert saved == [0, 1]
    assert len(batch) == 2 * 8 * len(PROMPTS)
    found = next(job for job in system.http.get("/v1/jobs").json() if job["name"] == "shown")
    until(lambda: system.http.get(f"/v1/jobs/{found['id']}").json()["state"] == "completed")
    rows = system.http.get(f"/v1/jobs/{found['id']}/metrics").json()
    assert [(row["step"], row["reward"]) for row in rows] == [(0, 0.5), (1, 0.5)]


def test_nothing_is_lost_or_generated_twice_when_worker_manager_and_store_are_killed(system: System) -> None:
    with fleet_of(system, "kills") as fleet:
        fleet.publish(model(0))
        found: list[Group] = []

        def generate() -> None:
            found.extend(fleet.generate(PROMPTS * 4, n=N, max_tokens=200))

        collecting = threading.Thread(target=generate)
        collecting.start()
        until(lambda: audit(system, fleet.job_id)["tokens_generated"] > 500)
        system.kill_the_worker_that_runs()
        system.hire("w3")
        system.manager.kill()
        time.sleep(1.0)
        system.manager.start()
        until(lambda: len(found) > 4)
        system.store.kill()
        system.store.start()
        collecting.join(WAIT_S)
        assert fleet.publish(model(1)) == 1
        counts = audit(system, fleet.job_id)
    assert sorted(group.index for group in found) == list(range(len(PROMPTS) * 4))
    assert all(len(group.samples) == N and not group.dropped for group in found)
    assert any(len(sample.spans) > 1 for group in found for sample in group.samples), "no sample has migrated"
    policy = model(0)
    for group in found:
        for sample in group.samples:
            expected = tiny_models.logprobs(policy, PROMPTS[group.index % len(PROMPTS)], sample.tokens)
            assert sample.logprobs == pytest.approx(expected, abs=1e-4)
    assert counts["requested"] == counts["delivered"] == len(PROMPTS) * 4 * N
    assert counts["dropped"] == {}


def test_successor_of_a_killed_trainer_gets_the_same_samples(system: System) -> None:
    first = fleet_of(system, "succession").open()
    first.publish(model(0))
    before = by_index(list(first.generate(PROMPTS, n=N, max_tokens=24)))
    following = first.generate(PROMPTS[:4], n=N, max_tokens=200)
    next(following)  # it dies while it collects these
    generated = audit(system, first.job_id)["requested"]
    with pytest.raises(ClientError, match="has a trainer"):
        fleet_of(system, "succession", lease_s=2.0).open()
    with fleet_of(system, "succession", replace=True) as successor:
        assert successor.job_id == first.job_id
        assert successor.version == 0
        again = by_index(list(successor.generate(PROMPTS, n=N, max_tokens=24)))
        assert again == before
        assert len(list(successor.generate(PROMPTS[:4], n=N, max_tokens=200))) == 4
        counts = audit(system, first.job_id)
        assert counts["requested"] == generated == counts["delivered"]

        # The first one comes back: whatever it asks for is rejected.
        with pytest.raises(Superseded, match="another one has attached"):
            list(first.generate(PROMPTS))
        with pytest.raises(Superseded, match="epoch"):
            first.publish(model(5))
        with pytest.raises(Superseded):
            first.complete_step()
        assert successor.publish(model(1)) == 1
        successor.checkpointed(step=0)
        with pytest.raises(ClientError, match="a checkpoint covers all before 1"):
            list(successor.generate(PROMPTS, step=0))
        assert len(list(successor.generate(PROMPTS, n=2, max_tokens=4))) == len(PROMPTS)
    first.close()


def test_checkpoint_keeps_the_samples_of_later_steps_for_a_successor(system: System) -> None:
    with fleet_of(system, "ahead") as fleet:
        fleet.publish(model(0))
        ahead = by_index(list(fleet.generate(PROMPTS, n=2, max_tokens=8, step=1)))  # for the step after the next
        list(fleet.generate(PROMPTS, n=2, max_tokens=8, step=0))
        fleet.checkpointed(step=0)
    with fleet_of(system, "ahead") as fleet:
        assert by_index(list(fleet.generate(PROMPTS, n=2, max_tokens=8, step=1))) == ahead
        counts = audit(system, fleet.job_id)
        assert counts["requested"] == counts["delivered"] == 2 * 2 * len(PROMPTS)


def workers_of(system: System) -> set[int]:
    """Return the processes of the fleet, once there are at least two."""

    def present() -> set[int]:
        workers = system.http.get("/v1/workers").json()
        return {worker["pid"] for worker in workers if worker["state"] not in {"left", "lost"}}

    until(lambda: len(present()) >= 2)
    return present()


def refused_versions(system: System, job_id: str) -> set[int]:
    text = system.http.get(f"/v1/jobs/{job_id}/events", params={"follow": False}).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    return {event["fields"]["version"] for event in events if event["kind"] == "weights_refused"}


def test_version_with_wrong_tensors_is_refused_and_the_right_one_served(system: System) -> None:
    before, policy = workers_of(system), model(0)
    compiled = {f"_orig_mod.{name}": tensor for name, tensor in policy.state_dict().items()}
    with fleet_of(system, "compiled") as fleet:
        assert fleet.publish(compiled, config=published_model.config(2).to_dict()) == 0
        for _ in range(2):
            groups = list(fleet.generate(PROMPTS, n=2, max_tokens=4))
            assert len(groups) == len(PROMPTS)
            assert all("version 0 does not load on w" in reason for group in groups for reason in group.dropped)
            assert all("no tensor '_orig_mod." in reason for group in groups for reason in group.dropped)
            assert not any(group.samples for group in groups)
            fleet.complete_step()
        assert refused_versions(system, fleet.job_id) == {0}
        assert audit(system, fleet.job_id)["dropped"] == {"refused": 2 * 2 * len(PROMPTS)}
        assert workers_of(system) == before, "the fleet serves all jobs"

        assert fleet.publish(policy) == 1
        assert not any(group.dropped for group in fleet.generate(PROMPTS, n=2, max_tokens=4))
        fleet.complete_step()
        # A worker has loaded version 1, so its tensors are those of the model.
        with pytest.raises(
            Fatal, match=r"version 2 .* other tensors than version 1: 24 new, such as _orig_mod\..*'module"
        ):
            fleet.publish(compiled)
        assert fleet.version == 1
        assert not any(group.dropped for group in fleet.generate(PROMPTS, n=2, max_tokens=4))
        fleet.end()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model_type": "nonsense"}, "no causal language model can be built"),
        ({"dtype": "float99"}, "no causal language model can be built"),
        ({"intermediate_size": 64}, "config.json requires"),
        ({"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True}, "use the vllm engine"),
    ],
)
def test_model_that_no_worker_runs_ends_no_worker(system: System, change: dict[str, Any], why: str) -> None:
    before, policy = workers_of(system), model(0)
    with fleet_of(system, f"unusable-{next(iter(change)).replace('_', '-')}") as fleet:
        fleet.publish(policy, config=published_model.config(2).to_dict() | change)
        groups = list(fleet.generate(PROMPTS, n=2, max_tokens=4))
        assert all(why in reason for group in groups for reason in group.dropped)
        assert not any(group.samples for group in groups)
        fleet.end()
    with fleet_of(system, "afterwards") as fleet:
        fleet.publish(policy)
        assert not any(group.dropped for group in fleet.generate(PROMPTS, n=2, max_tokens=4))
        fleet.end()
    assert workers_of(system) == before


@pytest.fixture(scope="module")
def raw(system: System) -> Iterator[Any]:
    """Return a function that sends requests of an attached trainer of a job with one version."""
    with fleet_of(system, "raw") as fleet:
        fleet.publish(model(0))
        at = fleet._fleet._at

        def send(method: str, part: str, **options: Any) -> httpx.Response:
            return system.http.request(method, f"/v1{at.path}/{part}", **options)

        send.epoch = at.epoch  # type: ignore[attr-defined]
        send.job = at.job_id  # type: ignore[attr-defined]
        yield send


PART = Part(rank=0, chunks=(), tensors=()).encode()
GROUP = {"step": 0, "number": 0, "prompt": [3, 4]}


@pytest.mark.parametrize(
    ("change", "status", "text"),
    [
        ({"prompt": []}, 422, "groups.0.prompt: .* at least one"),
        ({"prompt": [1, -2]}, 422, "a list of token ids"),
        ({"prompt": "abc"}, 422, "a list of token ids"),
        ({"n": 257}, 422, "groups.0.n: should be 256 or less"),
        ({"number": 1 << 16}, 422, "groups.0.number"),
        ({"version": 7}, 409, "version 7 of job .* is not published: its newest is 0"),
        ({"sampling": {"temperature": 0.001}}, 422, "sampling.temperature"),
        ({"sampling": {"top_k": -1}}, 422, "groups.0.sampling.top_k: should be 0 or more, not -1"),
        ({"sampling": {"best_of": 3}}, 422, "groups.0.sampling.best_of: unknown key"),
        ({"max_staleness": 99}, 422, "groups.0.max_staleness"),
    ],
)
def test_invalid_groups_are_rejected_by_name(raw: Any, change: dict[str, Any], status: int, text: str) -> None:
    answer = raw("POST", "groups", json={"epoch": raw.epoch, "groups": [GROUP | change]}, timeout=30)
    assert answer.status_code == status
    assert re.search(text, answer.json()["detail"]), answer.json()["detail"]


def test_token_ids_outside_the_vocabulary_are_rejected_by_name(system: System) -> None:
    """Those of workers do not count for a request that names its vocabulary."""
    with fleet_of(system, "vocabulary") as fleet:
        fleet.publish(model(0))
        with pytest.raises(ClientError, match=r"the prompt of group 1: token id 96 is outside the model's 0\.\.95"):
            list(fleet.generate([[5, 7], [5, 96]], max_tokens=4))
        assert [len(group.samples) for group in fleet.generate([[5, 7]], max_tokens=4)] == [1]
        with asyncio.Runner() as runner:
            requests = runner.run(requested(system, fleet.job_id))
        assert {request.vocab_size for request in requests} == {96}


async def requested(system: System, job_id: str) -> list[GroupRequested]:
    """Return the requests of a job that the manager has admitted."""
    bus = RedisBus(system.redis.url)
    try:
        entries = await bus.read({names.TOKEN_LOG: START}, count=10_000)
    finally:
        await bus.close()
    admitted = [entry.message.request for entry in entries if isinstance(entry.message, Admitted)]
    return [request for request in admitted if request.job_id == job_id]


def test_requests_that_fit_no_job_are_rejected_by_name(system: System, raw: Any) -> None:
    assert raw("POST", "groups", content=b"\xc1", headers={"Content-Type": "application/msgpack"}).status_code == 422
    assert raw("POST", "groups", content=b"{", headers={"Content-Type": "application/json"}).status_code == 422
    for large, kind in (
        (b"\xdd\x00\xff\xff\xff" + b"\x90" * (2 << 20), "msgpack"),
        (b"[" + b"[]," * (2 << 20), "json"),
    ):
        many = raw("POST", "groups", content=large, headers={"Content-Type": f"application/{kind}"})
        assert (many.status_code, "cannot be read as" in many.text, "1048576" in many.text) == (422, True, True)
    for cursor in ("9" * 20 + "-0", "9" * 15 + "-0"):
        report = {"epoch": raw.epoch, "step": 0, "checkpoint": {"step": 0, "cursor": cursor}}
        assert raw("POST", "steps", json=report).status_code == 422
    for number in ("wait_s", "train_s"):
        assert raw("POST", "steps", json={"epoch": raw.epoch, "step": 0, number: 1e308}).status_code == 422
    body = json.dumps({"epoch": raw.epoch, "step": 0, "metrics": {"\ud800": 1.0}})
    half = raw("POST", "steps", content=body, headers={"Content-Type": "application/json"})
    assert (half.status_code, "half of a character" in half.text) == (422, True)
    body = json.dumps({"name": "x", "model": "m", "reward": {"function": "a:b", "arguments": {"a": "\ud800"}}})
    job = system.http.post("/v1/jobs", content=body, headers={"Content-Type": "application/json"})
    assert (job.status_code, "half of a character" in job.text) == (422, True)
    late = raw("POST", "groups", json={"epoch": raw.epoch + 1, "groups": [GROUP]})
    assert (late.status_code, late.json()["title"]) == (409, "Superseded")
    assert raw("GET", "finished", params={"epoch": raw.epoch, "after": "x"}).status_code == 422
    own = system.create_job("ours", str(system.model))
    answer = system.http.post(f"/v1/jobs/{own}/trainer", json={"trainer": "t"})
    assert answer.status_code == 409
    assert "only jobs of kind external" in answer.json()["detail"]
    assert system.http.post("/v1/jobs/none/trainer", json={"trainer": "t"}).status_code == 404
    system.http.post(f"/v1/jobs/{raw.job}/pause")
    until(lambda: system.http.get(f"/v1/jobs/{raw.job}").json()["state"] == "paused")
    paused = raw("POST", "groups", json={"epoch": raw.epoch, "groups": [GROUP]})
    assert (paused.status_code, paused.json()["title"]) == (409, "Paused")
    system.http.post(f"/v1/jobs/{raw.job}/resume")
    until(lambda: system.http.get(f"/v1/jobs/{raw.job}").json()["state"] == "running")
    assert raw("POST", "groups", json={"epoch": raw.epoch, "groups": [GROUP]}).status_code == 202


def test_samples_are_returned_as_json_and_released_by_a_checkpoint(raw: Any) -> None:
    prompt = {"step": 3, "number": 1, "prompt": [3, 4], "n": 2, "sampling": {"max_tokens": 4}}
    assert raw("POST", "groups", json={"epoch": raw.epoch, "groups": [prompt]}).status_code == 202
    cursor, found = "0-0", list[dict[str, Any]]()
    while len(found) < 2:
        answer = raw("GET", "finished", params={"epoch": raw.epoch, "after": cursor, "wait_s": 5}, timeout=30).json()
        found += [sample for sample in answer["samples"] if sample["step"] == 3]
        cursor = answer["cursor"]
    assert sorted(sample["member"] for sample in found) == [0, 1]
    assert all(len(sample["tokens"]) == len(sample["logprobs"]) == 4 for sample in found)
    report = {"epoch": raw.epoch, "step": 3, "checkpoint": {"step": 4, "cursor": cursor}}
    assert raw("POST", "steps", json=report).status_code == 202
    before = raw("POST", "steps", json=report | {"checkpoint": {"step": 0, "cursor": "1-0"}})
    assert before.status_code == 202  # nothing that is released comes back
    old = raw("GET", "finished", params={"epoch": raw.epoch, "after": "1-0"})
    assert (old.status_code, old.json()["title"]) == (409, "Released")


def test_other_requests_under_the_same_numbers_are_rejected(system: System) -> None:
    with fleet_of(system, "other-data") as fleet:
        fleet.publish(model(0))
        list(fleet.generate(PROMPTS, max_tokens=4))
    with fleet_of(system, "other-data") as fleet:
        assert fleet.publish(model(0)) == 0
        with pytest.raises(ClientError, match="group 0 of step 0 was requested with another prompt"):
            list(fleet.generate([[9, 9]], max_tokens=4))
        assert len(list(fleet.generate(PROMPTS, max_tokens=4))) == len(PROMPTS)  # its call counts as the first
    with fleet_of(system, "other-data", resume=False) as fleet:
        assert fleet.publish(model(0)) == 1
        assert len(list(fleet.generate([[9, 9]], max_tokens=4))) == 1
    for change, name in (({"model": "another"}, "model"), ({"elastic": {"share": 2.0}}, "elastic.share")):
        with pytest.raises(ConfigError, match=f"{name}: the job exists and has"):
            fleet_of(system, "other-data", **change).open()


def test_trainers_of_one_name_share_a_job_and_one_of_them_has_it(system: System) -> None:
    def opened(fleet: Fleet) -> Fleet | None:
        try:
            return fleet.open()
        except Superseded:  # the other one has attached at the same moment
            return None

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(opened, (fleet_of(system, "both", trainer="me") for _ in range(2))))
    fleets = [fleet for fleet in found if fleet is not None]
    assert len({fleet.job_id for fleet in fleets}) == 1
    lost = found.count(None)
    for fleet in fleets:
        try:
            fleet.publish(model(0))
        except (Superseded, Conflict):
            lost += 1
        fleet.close()
    assert lost == 1


def test_interrupted_generation_can_go_on(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    with fleet_of(system, "interrupted") as fleet:
        fleet.publish(model(0))
        groups = fleet.generate(PROMPTS[:4], n=1, max_tokens=200)
        result = Future.result

        def interrupted(future: Any, timeout: float | None = None) -> Any:
            if threading.current_thread() is not threading.main_thread():  # asyncio's, in the thread of the fleet
                return result(future, timeout)
            time.sleep(0.5)
            monkeypatch.setattr(Future, "result", result)
            raise KeyboardInterrupt

        monkeypatch.setattr(Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(groups)
        assert len(list(fleet.generate(PROMPTS, n=1, max_tokens=2))) == len(PROMPTS)
        fleet.end("stopped")
        fleet.end("stopped")  # as after a lost reply


def test_paused_job_is_generated_for_after_its_resume(system: System) -> None:
    with fleet_of(system, "pauses") as fleet:
        fleet.publish(model(0))
        system.http.post(f"/v1/jobs/{fleet.job_id}/pause")
        until(lambda: system.http.get(f"/v1/jobs/{fleet.job_id}").json()["state"] == "paused")
        threading.Timer(1.0, lambda: system.http.post(f"/v1/jobs/{fleet.job_id}/resume")).start()
        assert len(list(fleet.generate(PROMPTS, max_tokens=2))) == len(PROMPTS)


def test_superseded_trainer_does_not_replace_a_part(system: System) -> None:
    with fleet_of(system, "parts") as fleet:
        fleet.publish(model(0))
        old = {"Authorization": f"Bearer {fleet._fleet._at.access.credential}"}
        job = fleet.job_id
        with fleet_of(system, "parts", replace=True) as successor:
            late = httpx.put(f"{system.store.url}/v1/models/{job}/versions/1/parts/0", headers=old, content=PART)
            assert late.status_code == 409, late.text
            own = {"Authorization": f"Bearer {successor._fleet._at.access.credential}"}
            far = httpx.put(f"{system.store.url}/v1/models/{job}/versions/9/parts/0", headers=own, content=PART)
            assert far.status_code == 409, far.text
            assert successor.publish(model(1)) == 1


def test_trainer_token_is_for_its_own_job_only(system: System) -> None:
    with fleet_of(system, "mine") as fleet, fleet_of(system, "other") as other:
        fleet.publish(model(0))
        with Client(system.manager.url, TOKEN) as admin:
            token = admin.tokens.create("trainer", job=fleet.job_id)["secret"]
            with pytest.raises(ClientError, match="name the job"):
                admin.tokens.create("trainer")
        job, others = fleet.job_id, other.job_id
    with Fleet(system.manager.url, token, job=job) as fleet:
        assert fleet.publish(model(1)) == 1
        assert len(list(fleet.generate(PROMPTS, max_tokens=4))) == len(PROMPTS)
    with pytest.raises(ClientError, match="is for the trainer of job mine-"):
        Fleet(system.manager.url, token, job=others).open()
    headers = {"Authorization": f"Bearer {token}"}
    for path in ("jobs", f"jobs/{job}", f"jobs/{job}/samples", "workers", "weights", "tokens"):
        assert httpx.get(f"{system.manager.url}/v1/{path}", headers=headers).status_code == 403
    assert httpx.get(f"{system.store.url}/v1/models", headers=headers).status_code == 401


def test_publishing_credential_is_for_its_own_job_only(system: System) -> None:
    with fleet_of(system, "writer") as fleet, fleet_of(system, "reader") as other:
        credential = fleet._fleet._at.access.credential
        headers = {"Authorization": f"Bearer {credential}"}
        for method, path, status in (
            ("PUT", f"{other.job_id}/versions/0/parts/0", 403),
            ("POST", f"{other.job_id}/versions/0/commit", 403),
            ("GET", f"{other.job_id}/head", 403),
            ("GET", f"{fleet.job_id}/versions/0", 403),
            ("DELETE", fleet.job_id, 403),
            ("POST", f"{fleet.job_id}/versions/0/pin", 403),
        ):
            body = {"expect": -1, "parts": ["0" * 64], "config_json": "{}"}
            answer = httpx.request(method, f"{system.store.url}/v1/models/{path}", headers=headers, json=body)
            assert answer.status_code == status, (method, path, answer.text)


def test_publishing_credential_fills_neither_memory_nor_disk(system: System) -> None:
    """Parts have no limit of the store's size: they have limits of their own."""
    with fleet_of(system, "greedy") as fleet:
        headers = {"Authorization": f"Bearer {fleet._fleet._at.access.credential}"}
        at = f"{system.store.url}/v1/models/{fleet.job_id}/versions"
        of_last = Part(rank=MAX_EXTERNAL_RANKS - 1, chunks=(), tensors=()).encode()
        many = PART[:-1] + b',"more":[' + b"{}," * (2 << 20) + b"0]}"
        for path, body, status, text in (
            (f"0/parts/{MAX_EXTERNAL_RANKS - 1}", of_last, 204, ""),
            (f"0/parts/{MAX_EXTERNAL_RANKS}", PART, 422, f"ranks below {MAX_EXTERNAL_RANKS}"),
            ("1/parts/0", PART, 409, "not the next one"),
            ("0/parts/0", many, 422, "1048576"),
        ):
            answer = httpx.put(f"{at}/{path}", content=body, headers=headers)
            assert (answer.status_code, text in answer.text) == (status, True), answer.text
