"""Jobs of `kind: sft`, `dpo` and `reward` on fakes: what they do without a worker, and how they go on after a kill."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from rlboost.services.trainer.domain.loss.function import LossFn, TokenBatch, sft_loss
from rlboost.services.trainer.domain.metrics import OfflineStep
from rlboost.services.trainer.domain.plan import TrainingRow
from rlboost.services.trainer.ports.engine import NotFinite
from rlboost.services.trainer.ports.samples import Prompt
from rlboost.services.trainer.ports.storage import JobResources
from rlboost.shared.data.examples import LABEL
from rlboost.shared.job.spec import JobSpec, parse
from rlboost.shared.messages import JobCommand
from rlboost.shared.wire import I32, length, pack
from tests.support.eventually import eventually
from tests.support.trainer_fakes import FakeEngine
from tests.support.trainer_rig import JOB, Rig
from tests.support.training_rows import advantage_of

STEPS = 7


def sft(**changes: Any) -> JobSpec:
    raw: dict[str, Any] = {
        "kind": "sft",
        "model": "m",
        "data": {"train": "t.jsonl", "prompts_per_step": 4},
        "optimizer": {"lr": 0.01},
        "trainer": {"checkpoint_every": 2, "micro_batch_tokens": 16},
        "steps": STEPS,
    }
    return parse({**raw, **changes})


class OfflineRig(Rig):
    """Rows of a prompt and three to five tokens to imitate, with two worse ones for pairs."""

    def build(self, job: JobSpec, job_id: str, created: datetime) -> JobResources:
        rows = [Prompt(f"p{i}", pack([1, i], I32), {}, pack([3 + i] * (2 + i % 3) + [2], I32)) for i in range(10)]
        if job.kind in ("dpo", "reward"):
            rows = [replace(row, rejected=pack([13 + i, 2], I32)) for i, row in enumerate(rows)]
        built = super().build(job, job_id, created)
        return replace(built, data=replace(built.data, train=rows, evaluation=rows[:3] * len(job.held_out)))


class Hanging(FakeEngine):
    """Hangs in the update of one step."""

    def __init__(self, hangs_in: int) -> None:
        super().__init__()
        self._left = hangs_in
        self.hangs = False
        self.goes_on = threading.Event()

    def step(self, learning_rate: float) -> float:
        if not self._left:
            self.hangs = True
            self.goes_on.wait(60.0)
        self._left -= 1
        return super().step(learning_rate)


async def kill_in_update(rig: OfflineRig, step: int) -> None:
    """Kill the trainer of a new job in the update of a step, and let its lease run out."""
    engine = Hanging(step)
    rig.make_engine = lambda: engine
    async with rig.trainer(killed=True):
        await rig.command("create")
        await eventually(lambda: engine.hangs)
    engine.goes_on.set()
    rig.make_engine = FakeEngine
    rig.lease_runs_out()


async def run(rig: Rig) -> None:
    assert (await rig.run()).state == "completed"


async def test_held_out_rows_are_evaluated_before_the_first_step_and_after_the_last(tmp_path: Path) -> None:
    raw = sft().model_dump(mode="json")
    rig = OfflineRig(tmp_path, parse({**raw, "data": raw["data"] | {"eval": "e.jsonl"}, "eval": {"every": 3}}))
    await run(rig)
    evaluated = {step: row for step, row in rig.folder.rows.items() if "eval/loss" in row}
    assert sorted(evaluated) == [0, 3, 6, STEPS]
    assert all(row["eval/loss"] == 1.0 for row in evaluated.values()), "the log-probability of FakeEngine"
    assert evaluated[STEPS] == {"eval/loss": 1.0, "eval/perplexity": pytest.approx(math.e)}
    assert "loss" in rig.folder.rows[3]


@pytest.mark.parametrize(("kind", "metric"), [("sft", "perplexity"), ("dpo", "rewards/margins")])
async def test_each_held_out_set_has_metrics_of_its_own(tmp_path: Path, kind: str, metric: str) -> None:
    evaluation = {"every": STEPS, "sets": {"math": {"data": "m"}, "code": {"data": "c"}}}
    rig = OfflineRig(tmp_path, sft(kind=kind, eval=evaluation))
    await run(rig)
    row = rig.folder.rows[STEPS]
    assert {f"eval/{name}/{one}" for name in ("math", "code") for one in ("loss", metric)} <= set(row)
    assert row[f"eval/math/{metric}"] == row[f"eval/code/{metric}"], "the rows of this rig's sets are the same"
    assert not {"eval/loss", f"eval/{metric}"} & set(row)


def noted(rig: OfflineRig) -> list[TrainingRow]:
    """Return a list that gets the rows that the rig's engine trains."""
    seen: list[TrainingRow] = []

    class Noting(FakeEngine):
        def accumulate(self, batches: Any, loss: LossFn) -> dict[str, float]:
            seen.extend(row for rows in batches for row in rows)
            return super().accumulate(batches, loss)

    rig.make_engine = Noting
    return seen


async def test_pairs_give_trls_metrics_of_training_and_of_held_out_rows(tmp_path: Path) -> None:
    """A token's log ratio is 0.5 (`FakeEngine`); completions have 3, 4 or 5 tokens and 2."""
    data = {"train": "t", "eval": "e", "prompts_per_step": 10}
    algorithm = {"preference": {"beta": 0.2, "label_smoothing": 0.1}}
    rig = OfflineRig(tmp_path, sft(kind="dpo", data=data, eval={"every": 5}, algorithm=algorithm, steps=1))
    seen = noted(rig)
    await run(rig)
    row, after = rig.folder.rows[0], rig.folder.rows[1]
    margins = [0.2 * 0.5 * (1 + i % 3) for i in range(10)]
    losses = [0.9 * math.log1p(math.exp(-m)) + 0.1 * math.log1p(math.exp(m)) for m in margins]
    assert row["loss"] * row["tokens/trained"] == pytest.approx(2 * sum(losses)), "the fake divides by tokens"
    assert row["rewards/margins"] == pytest.approx(sum(margins) / 10)
    assert row["rewards/rejected"] == pytest.approx(0.2)
    assert row["rewards/chosen"] == pytest.approx(0.2 + sum(margins) / 10)
    assert (row["rewards/accuracies"], row["logps/rejected"], row["logps/chosen"]) == (1.0, -2.0, -3.9)
    assert "perplexity" not in row
    assert after == {
        "eval/loss": pytest.approx(sum(losses[:3]) / 3),
        "eval/rewards/accuracies": 1.0,
        "eval/rewards/margins": pytest.approx(0.2),
    }
    assert len(seen) == 20
    better = [advantage_of(row) for row in seen if length(row.completion, I32) > 2]
    worse = [advantage_of(row) for row in seen if length(row.completion, I32) == 2]
    assert sorted(better) == sorted(-weight for weight in worse)
    assert min(better) > 0


async def test_a_job_trains_without_a_worker_and_publishes_its_last_version(tmp_path: Path) -> None:
    rig = OfflineRig(tmp_path, sft())
    await run(rig)
    assert rig.manager.requests == []
    assert sorted(rig.weights.versions) == [STEPS]
    untrained = FakeEngine()
    untrained.load_hf(Path("m"))
    assert rig.folder.model == rig.weights.versions[STEPS] != list(untrained.export_shards())
    assert sorted(rig.folder.rows) == [report.step for report in await rig.steps()] == list(range(STEPS))
    assert ("model_saved", {"path": "model"}) in await rig.events()


async def test_a_job_that_an_earlier_version_stored_is_trained(tmp_path: Path) -> None:
    stored = (Path(__file__).parents[2] / "golden/jobs/sft.json").read_text()
    rig = OfflineRig(tmp_path)
    async with rig.trainer():
        await rig.append(JobCommand(command_id="create", action="create", job_id=JOB, job_no=1, spec_json=stored))
        assert (await rig.ended()).state == "completed"
    assert sorted(rig.folder.rows) == [0, 1]


async def test_an_adapter_comes_with_the_model_that_it_belongs_to(tmp_path: Path) -> None:
    rig = OfflineRig(tmp_path, sft(elastic={"weights": "lora"}))
    rig.make_engine = lambda: FakeEngine('{"r": 1}')
    await run(rig)
    assert sorted(rig.weights.versions) == [0, STEPS]
    assert rig.weights.adapters == {STEPS: (0, '{"r": 1}')}
    assert rig.folder.adapter == rig.weights.versions[STEPS]


async def test_each_row_is_seen_once_an_epoch_in_micro_batches_of_the_given_size(tmp_path: Path) -> None:
    rig = OfflineRig(tmp_path, sft(data={"train": "t", "prompts_per_step": 5}, steps=4))
    seen: list[bytes] = []

    class Noting(FakeEngine):
        def accumulate(self, batches: Any, loss: LossFn) -> dict[str, float]:
            assert all(sum(row.n_tokens for row in rows) <= 16 for rows in batches)
            seen.extend(row.prompt for rows in batches for row in rows)
            return super().accumulate(batches, loss)

    rig.make_engine = Noting
    await run(rig)
    assert len(set(seen[:10])) == len(set(seen[10:])) == 10
    assert seen[:10] != seen[10:]


@pytest.mark.parametrize(
    ("kind", "killed_in"), [*(("sft", i) for i in (0, 1, 2, STEPS - 1)), ("dpo", 1), ("reward", 1)]
)
async def test_a_killed_trainers_successor_ends_with_the_same_bits(tmp_path: Path, kind: str, killed_in: int) -> None:
    steady, killed = (OfflineRig(tmp_path / name, sft(kind=kind)) for name in "ab")
    await run(steady)
    await kill_in_update(killed, killed_in)
    assert (await killed.resume()).state == "completed"
    assert killed.weights.versions == steady.weights.versions
    assert killed.folder.model == steady.folder.model
    assert sorted(killed.folder.rows) == list(range(STEPS))


async def test_a_reward_model_trains_on_the_last_tokens_of_pairs_and_is_not_published(tmp_path: Path) -> None:
    """All scores are -1 (`FakeEngine`), so only the margins and the coefficient change the loss."""
    data = {"train": "t", "eval": "e", "prompts_per_step": 10}
    algorithm = {"center_rewards_coefficient": 0.01}
    rig = OfflineRig(tmp_path, sft(kind="reward", data=data, eval={"every": 5}, algorithm=algorithm, steps=1))
    seen = noted(rig)
    await run(rig)
    row, after = rig.folder.rows[0], rig.folder.rows[1]
    assert row["loss"] == pytest.approx(math.log(2) + 0.01 * 4)
    assert (row["accuracy"], row["margin"], row["mean_reward"]) == (0.0, 0.0, -1.0)
    assert (row["min_reward"], row["max_reward"]) == (-1.0, -1.0)
    assert after == {
        "eval/loss": pytest.approx(math.log(2) + 0.01 * 4),
        "eval/accuracy": 0.0,
        "eval/margin": 0.0,
        "eval/mean_reward": -1.0,
    }
    assert row["tokens/trained"] == sum(3 + i % 3 for i in range(10)) + 20
    assert {length(one.completion, I32) for one in seen} == {1}
    assert sorted({advantage_of(one) for one in seen}) == pytest.approx([-1 + 0.08, 1 + 0.08])
    assert rig.weights.versions == {}
    assert rig.folder.model


async def test_a_reward_model_trains_on_labels_in_place_of_pairs(tmp_path: Path) -> None:
    """All scores are -1 (`FakeEngine`)."""

    class Labelled(OfflineRig):
        def build(self, job: JobSpec, job_id: str, created: datetime) -> JobResources:
            built = super().build(job, job_id, created)
            rows = [replace(row, rejected=b"", columns={LABEL: float(i % 2)}) for i, row in enumerate(built.data.train)]
            return replace(built, data=replace(built.data, train=rows, evaluation=rows[:3]))

    data = {"train": "t", "eval": "e", "prompts_per_step": 10}
    rig = Labelled(tmp_path, sft(kind="reward", data=data, eval={"every": 5}, steps=1))
    await run(rig)
    wrong, right = math.log1p(math.e), math.log1p(1 / math.e)
    row, after = rig.folder.rows[0], rig.folder.rows[1]
    assert row["loss"] == pytest.approx((wrong + right) / 2)
    assert (row["accuracy"], row["mean_reward"]) == (0.5, -1.0)
    assert "margin" not in row
    assert after == {
        "eval/loss": pytest.approx((wrong + 2 * right) / 3),
        "eval/accuracy": pytest.approx(2 / 3),
        "eval/mean_reward": -1.0,
    }


@pytest.mark.parametrize("column", ["completion", "rejected"])
async def test_resume_with_other_completions_fails_the_job(tmp_path: Path, column: str) -> None:
    class Changing(OfflineRig):
        builds = 0

        def build(self, job: JobSpec, job_id: str, created: datetime) -> JobResources:
            self.builds += 1
            built = super().build(job, job_id, created)
            other: Any = {column: pack([40, 2], I32)} if self.builds > 1 else {}
            first, *others = built.data.train
            return replace(built, data=replace(built.data, train=[replace(first, **other), *others]))

    rig = Changing(tmp_path, sft(kind="dpo"))
    await kill_in_update(rig, 3)
    report = await rig.resume()
    assert report.state == "failed"
    assert "data.train has 10 prompts as when the job was interrupted, but" in report.error


async def test_committed_sft_version_replaces_the_retrained_one(tmp_path: Path) -> None:
    rig = OfflineRig(tmp_path, sft())
    await run(rig)
    committed = [shard._replace(data=b"\x00\x00\x80?" * 2) for shard in rig.weights.versions[STEPS]]
    again = OfflineRig(tmp_path / "again", sft())
    again.weights.versions[STEPS] = committed
    await run(again)
    assert again.folder.model == committed
    assert ("weights_restored", {"version": STEPS}) in await again.events()


async def test_sft_job_stops_while_paused_and_can_be_cancelled(tmp_path: Path) -> None:
    rig = OfflineRig(tmp_path, sft(steps=1_000))
    engine = Hanging(3)
    rig.make_engine = lambda: engine
    async with rig.trainer() as trainer:
        await rig.command("create")
        await eventually(lambda: engine.hangs)
        await rig.command("pause")
        await eventually(lambda: trainer._current is not None and not trainer._current.unpaused.is_set())
        engine.goes_on.set()
        await rig.waits_for("a resume")
        assert len(await rig.steps()) == 4
        await rig.command("resume")
        await rig.command("cancel")
        assert (await rig.ended()).state == "cancelled"


async def test_non_finite_sft_loss_fails_the_job_and_dumps_the_rows(tmp_path: Path) -> None:
    class Broken(FakeEngine):
        def accumulate(self, batches: Any, loss: LossFn) -> dict[str, float]:
            raise NotFinite("the loss is nan")

    rig = OfflineRig(tmp_path, sft())
    rig.make_engine = Broken
    report = await rig.run()
    assert report.state == "failed"
    assert report.error.startswith("step 1: the loss is nan")
    assert "not-finite-step-0.jsonl" in report.error
    assert len(rig.folder.batches["not-finite-step-0.jsonl"]) == 4
    assert rig.weights.versions == {}


async def test_omitted_rows_are_reported(tmp_path: Path) -> None:
    rig = OfflineRig(tmp_path, sft(steps=1, data={"train": "t", "max_prompt_tokens": 9, "max_completion_tokens": 5}))
    rig.n_too_long = 3
    await run(rig)
    [reason] = [fields["reason"] for kind, fields in await rig.events() if kind == "prompts_filtered"]
    assert reason == "more than 9 tokens (data.max_prompt_tokens) or more than 5 tokens (data.max_completion_tokens)"


def test_the_loss_is_the_cross_entropy_of_the_completions_tokens() -> None:
    logits = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    targets = torch.tensor([1, 4, 0, 6, 2])
    logprobs = torch.log_softmax(logits, -1)[torch.arange(5), targets]
    total, sums = sft_loss(TokenBatch(logprobs, torch.zeros(5), torch.ones(5), (2, 3)))
    (ours,) = torch.autograd.grad(total / sums["divisor"], logits)
    mean = torch.nn.functional.cross_entropy(logits, targets)
    (theirs,) = torch.autograd.grad(mean, logits)
    assert sums == {"loss": pytest.approx(5 * mean.item()), "tokens": 5.0, "divisor": 5.0}
    assert torch.allclose(ours, theirs, atol=1e-12)


def test_the_run_log_has_loss_and_perplexity_a_token() -> None:
    step = OfflineStep({"loss": 6.0, "tokens": 12.0, "divisor": 12.0}, [4, 8], 0.7, 1e-3, train_s=2.0)
    assert step.metrics() == {
        "loss": 0.5,
        "perplexity": pytest.approx(math.exp(0.5)),
        "grad_norm": 0.7,
        "lr": 1e-3,
        "tokens/trained": 12.0,
        "completions/mean_length": 6.0,
        "completions/max_length": 8.0,
        "time/step_s": 2.0,
        "time/train_s": 2.0,
        "perf/tokens_per_s": 6.0,
    }
    shared = replace(step, device_wait_s=1.0).metrics()
    times = {"time/step_s": 3.0, "time/train_s": 2.0, "time/device_wait_s": 1.0, "perf/tokens_per_s": 4.0}
    assert shared == step.metrics() | times


async def test_step_on_a_shared_device_tells_how_long_it_waited(tmp_path: Path) -> None:
    rig = OfflineRig(tmp_path, sft())
    rig.shared_device = "gpu"
    await run(rig)
    assert [rig.folder.rows[step]["time/device_wait_s"] for step in range(1, STEPS)] == [0.0] * (STEPS - 1)
