"""The trainer as a process, with a real Redis and a real weight store; the manager answers from a script."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from pyarrow import parquet
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlboost.shared.data.vision import FAMILIES, vision_of
from rlboost.shared.ids import SampleId
from rlboost.shared.messages import GroupRequested, JobReport, StepReport
from rlboost.shared.model.folder import read_config, require_scores
from rlboost.shared.process.waiting import Waits
from rlboost.shared.streams import names
from rlboost.shared.weights.cache import Cache
from rlboost.shared.weights.client import StoreClient
from rlboost.shared.weights.puller import Puller
from tests.support import tiny_vision
from tests.support.eventually import eventually
from tests.support.model_folder import write_model, write_tokenizer
from tests.support.scripted_manager import Answer, Script, ScriptedManager, scripted
from tests.support.service_process import TOKEN
from tests.support.trainer_site import STEPS, Machine, Site

pytestmark = pytest.mark.timeout(300)
STOP_GRACE_S = 20.0
"""What supervisors, containers and units wait between SIGTERM and SIGKILL."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer, and prompts."""
    folder = tmp_path_factory.mktemp("files")
    write_tokenizer(write_model(folder / "model"))
    for name, n in (("train", 10), ("eval", 3)):
        rows = [{"prompt": f"t{5 + i} t{20 + i}", "row": i} for i in range(n)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """One for all tests, since a trainer takes seconds to import torch; each test has jobs of its own."""
    try:
        found = Machine(tmp_path_factory.mktemp("machine"))
    except FileNotFoundError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))
    with found.running():
        yield found


@pytest.fixture
async def site(machine: Machine, files: Path) -> AsyncIterator[Site]:
    site = Site(machine, files)
    yield site
    for job_id in site.jobs:
        await site.command(job_id, "cancel")
    await site.bus.close()


def two_versions(request: GroupRequested, sample: int) -> Answer:
    """Answer with samples that lived through an update: half of their tokens are of the version before."""
    answer = scripted(request, sample)
    [(worker, version, n)] = answer.spans
    if request.max_staleness == 0 or version == 0:
        return answer
    return answer.model_copy(update={"spans": [(worker, version - 1, n // 2), (worker, version, n - n // 2)]})


async def train(site: Site, job_id: str, script: Script = scripted, **changes: Any) -> ScriptedManager:
    """Run a job without a disturbance."""
    async with site.manager(job_id) as manager:
        manager.script = script
        await site.create(job_id, **changes)
        report = await site.ended(job_id)
    assert report.state == "completed", report.error
    return manager


async def train_killed(site: Site, job_id: str, step: int, script: Script = scripted, **changes: Any) -> None:
    """Run a job whose trainer is killed once, in a step that has half of its samples; the step has no evaluation."""
    async with site.manager(job_id) as manager:
        manager.script, manager.withholds = script, withholding(step, 2)
        await site.create(job_id, **changes)
        await site.waits_in(job_id, step, manager)
        site.trainer.kill()
        await manager.release()
        await asyncio.to_thread(site.trainer.start)
        report = await site.ended(job_id)
    assert report.state == "completed", report.error


async def test_a_job_runs_to_its_end(site: Site, machine: Machine, tmp_path: Path) -> None:
    await train(site, "plain")
    assert await site.head("plain") == STEPS
    steps = [report for report in await site.reports("plain") if isinstance(report, StepReport)]
    assert [report.step for report in steps] == [0, 1, 2, 3, 4, 5]
    assert [report.step for report in steps if "eval/reward_mean" in report.metrics] == [0, 2, 4, 5]
    assert all(report.metrics["grad_norm"] > 0 for report in steps[:STEPS])
    assert all(report.train_s == report.metrics["time/train_s"] > 0 for report in steps[:STEPS])
    assert not any("off_policy/tis_capped" in report.metrics for report in steps), (
        "strictly on-policy: nothing to weigh"
    )
    assert {r.trainer for r in await site.reports("plain") if isinstance(r, JobReport)} == {"the-trainer"}
    run = machine.folder / "runs" / "plain"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"step": report.step, **report.metrics} for report in steps]
    assert json.loads((run / "job.json").read_text())["steps"] == STEPS
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000004", "step-000005"]
    assert await published(site, "plain", tmp_path) == site.model("plain")
    assert await site.bus.lease_values([names.trainer_lease("plain")]) == [None]


async def published(site: Site, job_id: str, tmp_path: Path) -> dict[str, bytes]:
    """Return the newest weights as a worker gets them."""
    async with StoreClient(site.store.url, TOKEN) as client:
        puller = Puller(client, Cache(tmp_path / "pulled"), Waits())
        pulled = await puller.pull(job_id, await site.head(job_id))
        found = {entry.name: bytes(data) for entry, data in pulled.tensors()}
        puller.close()
    return found


async def test_a_trainer_killed_anywhere_ends_with_the_same_bits_from_the_same_samples(
    site: Site, machine: Machine
) -> None:
    curriculum = {"skip_solved_above": 0.6, "skip_failed_below": 0.3}
    data = {"train": str(site.files / "train.jsonl"), "eval": str(site.files / "eval.jsonl")}
    changes: dict[str, Any] = {
        "data": {**data, "prompts_per_step": 4, "curriculum": curriculum},
        "log": {"tensorboard": True},
    }
    undisturbed = await train(site, "undisturbed", **changes)
    async with site.manager("killed") as manager:
        # Step 1 half delivered and half trained, before the first checkpoint; step 3, behind it; the last evaluation.
        for step, first_group in ((1, 2), (3, 0), (5, 0)):
            manager.withholds = withholding(step, first_group)
            if step == 1:
                await site.create("killed", **changes)
            await site.waits_in("killed", step, manager)
            site.trainer.kill()
            if step > 1:  # its successor has waited for it once
                await site.expire_lease("killed")
            await manager.release()
            await asyncio.to_thread(site.trainer.start)
        report = await site.ended("killed")
    assert report.state == "completed", report.error
    assert site.model("killed") == site.model("undisturbed")
    assert set(manager.answered.values()) == {1}
    assert manager.answered.keys() == undisturbed.answered.keys()
    asked = {request.group: (request.seed, request.prompt) for request in undisturbed.requests}
    assert {request.group: (request.seed, request.prompt) for request in manager.requests} == asked
    assert "weights_restored" not in [kind for kind, _ in await site.events("killed")]
    steps = {report.step: report for report in await site.reports("killed") if isinstance(report, StepReport)}
    assert sum(steps[step].metrics["data/skipped_solved"] for step in range(STEPS)) > 0
    shown = EventAccumulator(str(machine.folder / "runs/killed/tensorboard")).Reload()
    told = [(event.step, event.value) for event in shown.Scalars("reward/mean")]
    assert told == [(step, pytest.approx(steps[step].metrics["reward/mean"])) for step in range(STEPS)]


async def test_killed_job_with_epochs_entropies_and_masks_ends_with_the_same_bits(site: Site) -> None:
    changes: dict[str, Any] = {
        "algorithm": {
            "group_size": 3,
            "updates_per_step": 2,
            "epochs": 2,
            "old_logprobs": "recomputed",
            "entropy_coef": 0.01,
            "mask_truncated": True,
        },
        "optimizer": {"lr": 1e-3, "warmup_steps": 1, "decay": 0.9, "schedule": "cosine"},
        "eval": None,
    }

    def cut(request: GroupRequested, sample: int) -> Answer:
        return scripted(request, sample, finish="length" if SampleId.unpack(sample).member == 0 else "stop")

    await train(site, "all-options", cut, **changes)
    await train_killed(site, "all-options-killed", 3, cut, **changes)
    assert site.model("all-options-killed") == site.model("all-options")
    reports = [one for one in await site.reports("all-options") if isinstance(one, StepReport)]
    rates = [one.metrics["lr"] for one in reports]
    assert rates == sorted(rates[:1]) + sorted(rates[1:], reverse=True)
    assert (rates[0], rates[1]) == (0.0, 1e-3)
    for one in reports:
        assert one.metrics["completions/masked_ratio"] == pytest.approx(1 / 3)
        assert 3 < one.metrics["policy/entropy"] < 6


async def test_killed_trainer_of_a_taught_job_ends_with_the_same_bits(site: Site, tmp_path: Path) -> None:
    teacher = write_tokenizer(write_model(tmp_path / "teacher", "qwen3-tied", seed=1))
    algorithm = {"name": "distill", "group_size": 3, "updates_per_step": 2, "teacher": {"model": str(teacher)}}
    changes: dict[str, Any] = {"algorithm": algorithm, "steps": 3}
    await train(site, "taught", **changes)
    await train_killed(site, "taught-killed", 1, **changes)
    assert site.model("taught-killed") == site.model("taught")
    steps = [report for report in await site.reports("taught") if isinstance(report, StepReport)]
    assert all(report.metrics["kl"] > 0 for report in steps[:3])


def withholding(step: int, first_group: int) -> Callable[[int], bool]:
    def decide(sample: int) -> bool:
        sample_id = SampleId.unpack(sample)
        return sample_id.step == step and sample_id.group >= first_group

    return decide


async def test_with_staleness_a_killed_trainer_finds_again_what_had_come_for_later_steps(site: Site) -> None:
    ahead = {"elastic": {"max_staleness": 2}}
    undisturbed = await train(site, "ahead", two_versions, **ahead)
    steps = [report for report in await site.reports("ahead") if isinstance(report, StepReport)]
    assert [report.metrics.get("off_policy/staleness", 0.0) > 0 for report in steps] == [False, *[True] * 4, False]
    assert all("off_policy/tis_capped" in report.metrics for report in steps[:STEPS])
    async with site.manager("ahead-killed") as manager:
        manager.script = two_versions
        # All of the next two steps is there when step 1, and behind a checkpoint step 3, lack their last groups.
        lacking = {1: 2, 3: 3}

        def withheld(sample: int) -> bool:
            return any(withholding(step, first_group)(sample) for step, first_group in lacking.items())

        manager.withholds = withheld
        await site.create("ahead-killed", **ahead)
        for step in list(lacking):
            await site.waits_in("ahead-killed", step, manager)
            site.trainer.kill()
            await site.expire_lease("ahead-killed")
            del lacking[step]
            await manager.release(withheld)
            await asyncio.to_thread(site.trainer.start)
        report = await site.ended("ahead-killed")
    assert report.state == "completed", report.error
    assert set(manager.answered.values()) == {1}
    assert manager.answered.keys() == undisturbed.answered.keys()
    assert {r.group: r.seed for r in manager.requests} == {r.group: r.seed for r in undisturbed.requests}
    assert "weights_restored" not in [kind for kind, _ in await site.events("ahead-killed")]
    trained = {report.step: report for report in await site.reports("ahead-killed") if isinstance(report, StepReport)}
    assert all(report.metrics["samples/duplicates"] == 0 for report in trained.values())
    assert site.model("ahead-killed") == site.model("ahead")


async def test_stopped_trainer_exits_with_0_and_its_successor_resumes_at_once(site: Site) -> None:
    async with site.manager("stopped") as manager:
        manager.withholds = withholding(2, 0)
        await site.create("stopped")
        await site.waits_in("stopped", 2, manager)
        assert await asyncio.to_thread(site.trainer.stop) == 0
        assert await site.bus.lease_values([names.trainer_lease("stopped")]) == [None]
        await manager.release()
        await asyncio.to_thread(site.trainer.start)
        assert (await site.ended("stopped")).state == "completed"


async def test_job_waits_for_a_restarted_weight_store(site: Site) -> None:
    async with site.manager("storeless") as manager:
        manager.withholds = withholding(1, 0)
        await site.create("storeless")
        await site.waits_in("storeless", 1, manager)
        site.store.kill()
        await manager.release()

        async def waits_for_the_store() -> bool:
            waiting = (await site.lease("storeless")).get("waiting") or {}
            return "weight store" in waiting.get("subject", "")

        await eventually(waits_for_the_store)
        await asyncio.to_thread(site.store.start)
        assert (await site.ended("storeless")).state == "completed"
    assert await site.head("storeless") == STEPS


async def test_redis_may_be_killed_while_a_job_runs(tmp_path: Path, files: Path) -> None:
    with Machine(tmp_path, aof=True).running() as machine:
        site = Site(machine, files)
        async with site.manager("brokerless") as manager:
            manager.withholds = withholding(1, 2)
            await site.create("brokerless")
            await site.waits_in("brokerless", 1, manager)
            await asyncio.to_thread(machine.redis.restart)
            await manager.release()
            assert (await site.ended("brokerless")).state == "completed"
            assert set(manager.answered.values()) == {1}
        await site.bus.close()


async def test_trainer_without_redis_ends_in_order_before_its_supervisor_kills_it(tmp_path: Path, files: Path) -> None:
    """As when a whole machine or Compose project is stopped: Redis may end first."""
    with Machine(tmp_path, aof=True).running() as machine:
        site = Site(machine, files)
        async with site.manager("unplugged") as manager:
            manager.withholds = withholding(1, 2)
            await site.create("unplugged")
            await site.waits_in("unplugged", 1, manager)
            machine.redis.kill()
            began = time.monotonic()
            assert await asyncio.to_thread(site.trainer.stop) == 0
            assert time.monotonic() - began < STOP_GRACE_S
            await asyncio.to_thread(machine.redis.start)
            await asyncio.to_thread(site.trainer.start)
            await manager.release()
            assert (await site.ended("unplugged")).state == "completed"
        await site.bus.close()


async def test_a_reward_function_that_hangs_or_raises_costs_its_groups_and_no_more(site: Site, files: Path) -> None:
    rows = [{"prompt": f"{word} t7", "row": i} for i, word in enumerate(["hang", "raise", "exit", *["t9"] * 5])]
    data = site.folder / "bad.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    async with site.manager("bad"):
        await site.create(
            "bad",
            data={"train": str(data), "prompts_per_step": 8},
            reward={"function": "tests.support.reward_functions:mixed", "timeout_s": 0.5},
            eval=None,
            steps=2,
        )
        report = await site.ended("bad")
    assert report.state == "completed", report.error
    for step in [report for report in await site.reports("bad") if isinstance(report, StepReport)]:
        dropped = {name: n for name, n in step.metrics.items() if name.startswith("groups/dropped/")}
        assert dropped == {
            "groups/dropped/timeout": 1.0,
            "groups/dropped/raised": 1.0,
            "groups/dropped/crashed": 1.0,
        }
    told = [fields["reason"] for kind, fields in await site.events("bad") if kind == "group_dropped"]
    assert sorted(told) == sorted(["timeout", "raised", "crashed"] * 2)


async def test_a_job_trains_on_verls_parquet_by_several_rewards_of_both_signatures(site: Site) -> None:
    texts = [*(f"t{n} t7" for n in range(5, 13)), "t5 " * 40]
    same = {"data_source": "sums", "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"index": 7}}
    data = site.folder / "verl.parquet"
    parquet.write_table(pa.Table.from_pylist([{"prompt": text, **same} for text in texts]), data)
    functions = "tests.support.reward_functions"
    async with site.manager("verl"):
        await site.create(
            "verl",
            data={"train": str(data), "prompts_per_step": 8, "max_prompt_tokens": 10},
            reward={
                "functions": [
                    {"function": f"{functions}:compute_score", "weight": 0.5, "name": "right"},
                    {"function": f"{functions}:lengths", "weight": 2.0},
                ],
            },
            eval=None,
            steps=2,
        )
        report = await site.ended("verl")
    assert report.state == "completed", report.error
    for step in [report for report in await site.reports("verl") if isinstance(report, StepReport)]:
        row = step.metrics
        assert row["groups/dropped"] == 0
        assert row["reward/mean"] == pytest.approx(0.5 * row["reward/right/mean"] + 2 * row["reward/lengths/mean"])
        assert row["reward/lengths/mean"] > 0
    [left_out] = [fields for kind, fields in await site.events("verl") if kind == "prompts_filtered"]
    assert (left_out["train_filtered"], left_out["train_remaining"]) == (1, 8)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "wrong-reward": ({"reward": {"function": "no.such.module:f"}}, "PYTHONPATH"),
    "wrong-model": ({"model": "nowhere/at-all/really"}, "is not a directory"),
    "wrong-data": ({"data": {"train": "nowhere.jsonl"}, "eval": None}, "nowhere.jsonl"),
    "wrong-length": ({"sampling": {"max_tokens": 500}}, "sampling.max_tokens"),
    "wrong-teacher": (
        {"algorithm": {"name": "distill", "teacher": {"model": "nowhere/at-all/really"}}},
        "algorithm.teacher.model: 'nowhere/at-all/really' is not a directory",
    ),
}


@pytest.mark.parametrize("job_id", list(WRONG))
async def test_a_job_that_cannot_run_fails_with_the_reason(site: Site, job_id: str) -> None:
    changes, text = WRONG[job_id]
    await site.create(job_id, **changes)
    report = await site.ended(job_id)
    assert report.state == "failed"
    assert text in report.error


async def test_jobs_run_one_after_the_other_and_each_can_be_cancelled(site: Site) -> None:
    async with site.manager("first") as first, site.manager("second"), site.manager("third"):
        first.withholds = withholding(1, 0)
        for job_id in ("first", "second", "third"):
            await site.create(job_id, steps=1)
        await site.command("second", "cancel")
        await first.release()
        assert (await site.ended("first")).state == "completed"
        assert (await site.ended("second")).state == "cancelled"
        assert (await site.ended("third")).state == "completed"


async def test_the_health_routes_answer(site: Site) -> None:
    async with httpx.AsyncClient(base_url=site.trainer.url) as client:
        assert (await client.get("/healthz")).json() == {"status": "ok"}
        assert (await client.get("/readyz")).json() == {"ready": True, "missing": None, "waiting": []}
        assert (await client.get("/metrics")).status_code == 401


TUNING = 120


async def fine_tuned(site: Site, job_id: str, kill_at: int | None = None, **changes: Any) -> JobReport:
    """Imitate, or prefer, for `TUNING` steps without anybody who could generate; the trainer is killed after a step.

    Steps take milliseconds: many must follow the one at which it is killed.
    """
    file = site.folder / "pairs.jsonl"
    columns = {"completion": 20, "chosen": 20, "rejected": 60}
    rows = [
        {"prompt": f"t{5 + i}", **{name: f"t{first + i} t{40 + i}" for name, first in columns.items()}}
        for i in range(10)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw = {
        "kind": "sft",
        "model": str(site.files / "model"),
        "data": {"train": str(file), "prompts_per_step": 8},
        "optimizer": {"lr": 1e-2, "warmup_steps": 2},
        "trainer": {"checkpoint_every": 10},
        "steps": TUNING,
        **changes,
    }
    await site.submit(job_id, raw)
    if kill_at is not None:

        async def got_there() -> bool:
            reports = await site.reports(job_id)
            return any(isinstance(report, StepReport) and report.step >= kill_at for report in reports)

        await eventually(got_there, within_s=120)
        site.trainer.kill()
        await site.expire_lease(job_id)
        assert not await site.has_ended(job_id)
        await asyncio.to_thread(site.trainer.start)
    report = await site.ended(job_id)
    assert report.state == "completed", report.error
    return report


async def test_sft_without_workers_survives_a_kill_and_its_model_is_evaluated(
    site: Site, machine: Machine, tmp_path: Path
) -> None:
    await fine_tuned(site, "tuned")
    await fine_tuned(site, "tuned-killed", kill_at=30)
    [resumed] = [fields for kind, fields in await site.events("tuned-killed") if kind == "job_resumed"]
    assert resumed["step"] >= 20
    assert site.model("tuned-killed") == site.model("tuned") == await published(site, "tuned", tmp_path)
    assert await site.head("tuned") == TUNING
    lines = (machine.folder / "runs/tuned/metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert len(losses) == TUNING
    assert losses[-1] < losses[0] / 3
    async with site.manager("judged") as manager:
        data = {"eval": str(site.files / "eval.jsonl")}
        reward = {"function": "tests.support.reward_functions:lengths"}
        model = str(machine.folder / "runs/tuned/model")
        raw = {"kind": "eval", "model": model, "data": data, "reward": reward, "sampling": {"max_tokens": 24}}
        await site.submit("judged", {**raw, "eval": {"samples": 12, "pass_reward": 0.5}})
        report = await site.ended("judged")
    async with site.manager("greedy"):
        greedy = {"max_tokens": 24, "temperature": 0}
        await site.submit("greedy", {**raw, "sampling": greedy, "eval": {"samples": 12}})
        assert (ended := await site.ended("greedy")).state == "completed", ended.error
    assert report.state == "completed", report.error
    assert len(manager.answered) == 12
    assert await published(site, "judged", tmp_path / "judged") == site.model("tuned")
    [step] = [report for report in await site.reports("judged") if isinstance(report, StepReport)]
    assert [name for name in step.metrics if name.startswith("eval/pass@")] == [
        "eval/pass@1",
        "eval/pass@2",
        "eval/pass@4",
    ]
    assert 0 < step.metrics["eval/pass@1"] < step.metrics["eval/pass@4"] <= 1
    assert not (machine.folder / "runs/judged/model").exists()


@pytest.mark.parametrize("family", FAMILIES)
async def test_sft_on_images_survives_a_kill_and_begins_with_the_loss_of_transformers(site: Site, family: str) -> None:
    folder = site.folder / family
    vision = vision_of(read_config(tiny_vision.write(folder, steepness=0.5, family=family)))
    assert vision is not None
    rows, losses = [], []
    for i, color in enumerate(tiny_vision.COLORS):
        image = tiny_vision.square(color, i)
        (folder / f"{color}.png").write_bytes(tiny_vision.png(image))
        question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " which color"}]}
        rows.append({"messages": [question, {"role": "assistant", "content": color}], "images": [f"{color}.png"]})
        shown = tiny_vision.Shown(folder, vision, tiny_vision.SHORT, image)
        answer = [tiny_vision.WORDS.index(color), tiny_vision.WORDS.index("<|im_end|>")]
        losses.append(shown.loss(tiny_vision.make(steepness=0.5, family=family), answer).item())
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": str(folder / "train.jsonl"), "prompts_per_step": len(rows)}
    await fine_tuned(site, f"pictures-{family}", kill_at=15, model=str(folder), data=data, steps=90)
    lines = (site.folder / f"runs/pictures-{family}/metrics.jsonl").read_text().splitlines()
    found = [json.loads(line)["loss"] for line in lines]
    assert found[0] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    assert len(found) == 90
    assert found[-1] < found[0] / 3


@pytest.mark.parametrize("weights", ["full", "lora"])
async def test_dpo_without_workers_survives_a_kill_and_prefers_the_chosen(
    site: Site, machine: Machine, weights: str
) -> None:
    steady, killed = (f"preferred-{weights}-{name}" for name in ("steady", "killed"))
    changes: dict[str, Any] = {"kind": "dpo", "elastic": {"weights": weights}, "steps": 120}
    await fine_tuned(site, steady, **changes)
    await fine_tuned(site, killed, kill_at=20, **changes)
    [resumed] = [fields for kind, fields in await site.events(killed) if kind == "job_resumed"]
    assert resumed["step"] >= 10
    assert site.model(killed) == site.model(steady)
    lines = (machine.folder / f"runs/{steady}/metrics.jsonl").read_text().splitlines()
    first, *_, last = [json.loads(line) for line in lines]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert first["rewards/margins"] == pytest.approx(0.0, abs=1e-4)
    assert last["rewards/accuracies"] == 1.0
    assert last["loss"] < first["loss"] - 0.1


async def test_a_reward_model_survives_a_kill_and_learns_to_prefer_held_out_pairs(site: Site, machine: Machine) -> None:
    """The better completion has more of the token t7; which pairs are seen does not matter."""
    rng = random.Random(3)
    pairs: list[dict[str, str]] = []
    while len(pairs) < 160:
        prompt, *words = ([f"t{rng.randrange(8, 90)}" for _ in range(5)] for _ in range(3))
        words[0][:2] = ["t7", "t7"]
        for completion in words:
            rng.shuffle(completion)
        pairs.append(dict(zip(("prompt", "chosen", "rejected"), map(" ".join, (prompt, *words)), strict=True)))
    held_out = site.folder / "held_out.jsonl"
    train = site.folder / "preferences.jsonl"
    for file, rows in ((train, pairs[:120]), (held_out, pairs[120:])):
        file.write_text("".join(json.dumps({**row, "prompt": f"{row['prompt']} "}) + "\n" for row in rows))
    changes: dict[str, Any] = {
        "kind": "reward",
        "data": {"train": str(train), "eval": str(held_out), "prompts_per_step": 16},
        "eval": {"every": 80},
        "optimizer": {"lr": 3e-3},
        "steps": 160,
    }
    await fine_tuned(site, "scores", **changes)
    await fine_tuned(site, "scores-killed", kill_at=20, **changes)
    [resumed] = [fields for kind, fields in await site.events("scores-killed") if kind == "job_resumed"]
    assert resumed["step"] >= 10
    assert site.model("scores-killed") == site.model("scores")
    lines = (machine.folder / "runs/scores/metrics.jsonl").read_text().splitlines()
    evaluated = [row for row in map(json.loads, lines) if "eval/loss" in row]
    assert evaluated[0]["eval/accuracy"] < 0.8
    assert evaluated[-1]["eval/accuracy"] > 0.95
    require_scores(machine.folder / "runs/scores/model")
    assert await site.head("scores") == -1
