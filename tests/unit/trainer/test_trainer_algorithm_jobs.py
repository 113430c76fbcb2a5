"""Whole jobs with other algorithms than the default, and what a step does with losses that are no numbers."""

from __future__ import annotations

import itertools
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlboost.services.trainer.adapters.user_code import load_loss
from rlboost.services.trainer.domain.advantages import Experience, gae_advantages
from rlboost.services.trainer.domain.loss.function import LossFn
from rlboost.services.trainer.domain.plan import TrainingRow, plan_step
from rlboost.services.trainer.ports.engine import NotFinite
from rlboost.services.trainer.ports.samples import RewardBatch, Scores
from rlboost.shared.errors import ConfigError
from rlboost.shared.ids import SampleId
from rlboost.shared.job.algorithm import PRESETS
from rlboost.shared.messages import GroupRequested
from rlboost.shared.wire import F32, I32, length, unpack
from tests.support.jobs import with_teacher
from tests.support.scripted_manager import Answer, scripted
from tests.support.trainer_fakes import FakeEngine
from tests.support.trainer_rig import Rig, spec
from tests.support.training_rows import advantage_of


class Recording(FakeEngine):
    """Notes what was asked of it, and which rows it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.rows: list[TrainingRow] = []

    def logprobs(self, batches: Any) -> list[bytes]:
        self.calls.append("logprobs")
        return super().logprobs(batches)

    def reference_logprobs(self, batches: Any) -> list[bytes]:
        self.calls.append("reference")
        return super().reference_logprobs(batches)

    def values(self, batches: Any) -> list[bytes]:
        self.calls.append("values")
        return super().values(batches)

    def accumulate(self, batches: Any, loss: LossFn) -> dict[str, float]:
        self.calls.append("accumulate")
        self.rows += [row for batch in batches for row in batch]
        return super().accumulate(batches, loss)

    def step(self, learning_rate: float) -> float:
        self.calls.append("step")
        return super().step(learning_rate)


def rig_of(folder: Path, engine: FakeEngine | None = None, **changes: Any) -> Rig:
    algorithm = {"group_size": 2, "updates_per_step": 2, **changes.pop("algorithm", {})}
    rig = Rig(folder, spec(**{"steps": 1, "algorithm": algorithm, **changes}))
    if engine is not None:
        rig.make_engine = lambda: engine
    return rig


async def completed(rig: Rig) -> dict[str, float]:
    """Run the job; return the metrics of its last step."""
    async with rig.trainer():
        await rig.command("create")
        report = await rig.ended()
        assert (report.state, report.error) == ("completed", "")
    return (await rig.steps())[-1].metrics


@pytest.mark.parametrize("name", sorted(PRESETS))
async def test_a_job_runs_to_its_end_with_every_algorithm(tmp_path: Path, name: str) -> None:
    rig = rig_of(tmp_path, algorithm=with_teacher(name=name), steps=2)
    assert (await completed(rig))["tokens/trained"] > 0
    assert sorted(rig.weights.versions) == [0, 1, 2]


def cut_if(is_cut: Callable[[int], bool]) -> Any:
    """Let samples with these numbers end at `sampling.max_tokens`."""

    def script(request: GroupRequested, sample: int) -> Answer:
        return scripted(request, sample, finish="length" if is_cut(SampleId.unpack(sample).member) else "stop")

    return script


@pytest.mark.parametrize("name", ["grpo", "reinforce++", "ppo", "dpo"])
async def test_truncated_completions_are_masked_and_still_in_the_baseline(tmp_path: Path, name: str) -> None:
    engine = Recording()
    rig = rig_of(tmp_path, engine, algorithm={"name": name, "group_size": 3, "mask_truncated": True})
    rig.manager.script = cut_if(lambda number: number == 0)
    rig.reward = lambda _: Scores((7.0, 0.0, 1.0))
    metrics = await completed(rig)
    assert len(engine.rows) == 4 * 2
    assert (metrics["completions/masked_ratio"], metrics["reward/mean"]) == pytest.approx((1 / 3, 8 / 3))
    if name == "grpo":
        std = float(np.std([7.0, 0.0, 1.0], ddof=1)) + 1e-4
        assert sorted({advantage_of(row) for row in engine.rows}) == pytest.approx([-8 / 3 / std, -5 / 3 / std])


@pytest.mark.parametrize("name", ["grpo", "gspo", "ppo", "dpo"])
async def test_step_of_masked_completions_only_changes_no_weights(tmp_path: Path, name: str) -> None:
    engine = Recording()
    rig = rig_of(tmp_path, engine, algorithm={"name": name, "mask_truncated": True}, steps=4)
    rig.manager.script = cut_if(lambda _: True)
    metrics = await completed(rig)
    assert (engine.rows, metrics["completions/masked_ratio"]) == ([], 1.0)
    assert rig.weights.versions[0] == rig.weights.versions[4]
    assert all(map(math.isfinite, metrics.values()))
    assert "tokens/trained" not in metrics
    assert [event["name"] for kind, event in await rig.events() if kind == "warning"] == ["completions_masked"]


@pytest.mark.parametrize("old_logprobs", ["sampled", "recomputed"])
async def test_each_epoch_repeats_the_updates_of_the_first(tmp_path: Path, old_logprobs: str) -> None:
    engine = Recording()
    rig = rig_of(tmp_path, engine, algorithm={"epochs": 3, "old_logprobs": old_logprobs, "equal_groups": "keep"})
    metrics = await completed(rig)
    calls = [call for call in engine.calls if call != "logprobs"]
    first = calls[: len(calls) // 3]
    assert (calls, first.count("step"), first[-1]) == (first * 3, 2, "step")
    n = len(engine.rows) // 3
    assert n == 4 * 2
    assert all(one is other for one, other in zip(engine.rows, engine.rows[:n] * 3, strict=True))
    assert {bool(row.proximal) for row in engine.rows} == {old_logprobs == "recomputed"}
    assert metrics["tokens/trained"] == 3 * sum(row.n_loss_tokens for row in engine.rows[:n])


async def test_pairs_are_weighed_by_the_present_weights_in_each_epoch(tmp_path: Path) -> None:
    engine = Recording()
    await completed(rig_of(tmp_path, engine, algorithm={"name": "dpo", "updates_per_step": 1, "epochs": 2}))
    assert 2 * engine.calls.count("reference") == engine.calls.count("accumulate")
    others = [call for call in engine.calls if call != "reference"]
    assert [call for call, _ in itertools.groupby(others)] == ["logprobs", "accumulate", "step"] * 2


@pytest.mark.parametrize(("epochs", "n_columns"), [(1, 0), (3, 1)])
async def test_reference_is_asked_once_for_all_epochs(tmp_path: Path, epochs: int, n_columns: int) -> None:
    engine = Recording()
    changes = {"name": "grpo", "kl_coef": 0.1, "epochs": epochs, "equal_groups": "keep"}
    await completed(rig_of(tmp_path, engine, algorithm=changes))
    assert epochs * engine.calls.count("reference") == n_columns * engine.calls.count("accumulate")
    assert {bool(row.reference) for row in engine.rows} == {epochs > 1}


async def test_critic_is_asked_once_for_all_epochs(tmp_path: Path) -> None:
    engine = Recording()
    await completed(rig_of(tmp_path, engine, algorithm={"name": "ppo", "epochs": 2}))
    assert calls_of(engine) == ["values", *["accumulate", "step"] * 4]


@pytest.mark.parametrize("changes", [{"old_logprobs": "recomputed"}, {"name": "ppo"}, {"name": "dpo"}])
async def test_trainer_killed_in_a_step_of_epochs_ends_with_the_same_bits(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    weights = []
    for name, is_killed in (("whole", False), ("killed", True)):
        (tmp_path / name).mkdir()
        rig = rig_of(tmp_path / name, algorithm={"epochs": 3, **changes}, steps=5)
        if is_killed:
            await rig.killed_in(3)
        assert (await (rig.resume() if is_killed else rig.run())).state == "completed"
        weights.append(rig.weights.versions[5])
    assert weights[0] == weights[1]
    once = rig_of(tmp_path, algorithm=changes, steps=5)
    await once.run()
    assert once.weights.versions[5] != weights[0]


def equal_in(*rows: int) -> Any:
    """Give all completions of these prompts the same reward, and those of others a different one each."""

    def reward(batch: RewardBatch) -> Scores:
        n = len(batch.completion_ids)
        return Scores((1.0,) * n if batch.columns["row"][0] in rows else tuple(float(i) for i in range(n)))

    return reward


@pytest.mark.parametrize(("name", "trained"), [("grpo", 2 * 7), ("dapo", 2 * 7), ("dr_grpo", 2 * 10), ("rloo", 2 * 10)])
async def test_groups_of_equal_rewards_are_dropped_and_counted_or_kept(tmp_path: Path, name: str, trained: int) -> None:
    engine = Recording()
    algorithm = {"name": name, "overlong_penalty": 0, **({"resample": 0} if name == "dapo" else {})}
    rig = rig_of(tmp_path, engine, algorithm=algorithm, data={"train": "t", "prompts_per_step": 10})
    rig.reward = equal_in(1, 4, 7)
    metrics = await completed(rig)
    assert len(engine.rows) == trained
    assert metrics.get("groups/excluded/equal_rewards", 0.0) == (3.0 if trained < 20 else 0.0)
    assert metrics["frac_reward_zero_std"] == pytest.approx(0.3)
    assert metrics["groups/dropped"] == 0.0


async def test_reinforce_pp_normalizes_advantages_over_the_whole_step(tmp_path: Path) -> None:
    engine = Recording()
    await completed(rig_of(tmp_path, engine, algorithm={"name": "reinforce++"}))
    values = [advantage_of(row) for row in engine.rows]
    assert len(values) == 8
    assert sum(values) == pytest.approx(0.0, abs=1e-6)
    assert sum(value**2 for value in values) / 8 == pytest.approx(1.0, abs=1e-6)


async def test_overlong_penalty_lowers_advantages_and_is_reported(tmp_path: Path) -> None:
    engine = Recording()
    algorithm = {"name": "dr_grpo", "overlong_penalty": 3.0, "overlong_fraction": 1.0}
    rig = rig_of(tmp_path, engine, algorithm=algorithm)
    rig.reward = lambda batch: Scores((0.0,) * len(batch.completion_ids))
    metrics = await completed(rig)
    groups: dict[bytes, list[TrainingRow]] = {}
    for row in engine.rows:
        groups.setdefault(row.prompt, []).append(row)
    lost = {id(row): 3.0 * length(row.completion, I32) / 8 for row in engine.rows}
    for rows in groups.values():
        mean = sum(lost[id(row)] for row in rows) / len(rows)
        assert [advantage_of(row) for row in rows] == pytest.approx([mean - lost[id(row)] for row in rows])
    assert metrics["reward/overlong_penalty"] == pytest.approx(sum(lost.values()) / len(lost))
    assert metrics["reward/mean"] == 0.0, "what the reward function said"


@pytest.mark.parametrize(
    ("old_logprobs", "max_staleness", "asks"),
    [("auto", 0, False), ("recomputed", 0, True), ("sampled", 1, False), ("auto", 1, True)],
)
async def test_the_first_weights_are_asked_where_the_ratio_is_to_them(
    tmp_path: Path, old_logprobs: str, max_staleness: int, asks: bool
) -> None:
    engine = Recording()
    algorithm = {"old_logprobs": old_logprobs}
    await completed(rig_of(tmp_path, engine, algorithm=algorithm, elastic={"max_staleness": max_staleness}))
    calls = [call for call, _ in itertools.groupby(engine.calls)]
    assert calls == ["logprobs"] * asks + ["accumulate", "step"] * 2
    assert all(bool(row.proximal) is asks for row in engine.rows)


def calls_of(engine: Recording) -> list[str]:
    return [call for call, _ in itertools.groupby(engine.calls)]


@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
async def test_with_a_critic_each_token_has_an_advantage_of_its_own(tmp_path: Path, kl_coef: float) -> None:
    """The fake critic expects 0.5 everywhere, the fake reference says -1.5 of each token."""
    engine = Recording()
    critic = {"gamma": 0.9, "gae_lambda": 0.5}
    metrics = await completed(rig_of(tmp_path, engine, algorithm={"name": "ppo", "kl_coef": kl_coef, "critic": critic}))
    assert calls_of(engine) == ["values", *["reference"] * (kl_coef > 0), *["accumulate", "step"] * 2]
    step = [
        Experience(
            float(n % 3),
            np.full(n, 0.5),
            kl_coef * (unpack(row.sampled, F32).astype(float) + 1.5) if kl_coef else None,
        )
        for row in engine.rows
        for n in [length(row.completion, I32)]
    ]
    expected = gae_advantages(step, 0.9, 0.5)
    for row, advantages, returns in zip(engine.rows, expected.advantages, expected.returns, strict=True):
        assert unpack(row.advantages, F32) == pytest.approx(advantages, abs=1e-6)
        assert unpack(row.returns, F32) == pytest.approx(returns, abs=1e-6)
        assert set(unpack(row.values, F32)) == {0.5}
        assert bool(row.reference) is (kl_coef > 0)
    assert metrics["advantage/mean"] == pytest.approx(expected.advantage_mean)
    assert metrics["advantage/std"] == pytest.approx(expected.advantage_std)
    assert metrics["value/explained_variance"] == pytest.approx(expected.explained_variance)


async def test_with_a_critic_and_older_tokens_the_first_weights_are_asked_as_well(tmp_path: Path) -> None:
    engine = Recording()
    await completed(rig_of(tmp_path, engine, algorithm={"name": "ppo"}, elastic={"max_staleness": 1}))
    assert calls_of(engine) == ["values", "logprobs", *["accumulate", "step"] * 2]
    assert all(row.proximal and row.advantages for row in engine.rows)


@pytest.mark.parametrize(("equal_groups", "trained"), [("keep", 8), ("drop", 4)])
async def test_groups_of_equal_rewards_train_with_a_critic_unless_dropped(
    tmp_path: Path, equal_groups: str, trained: int
) -> None:
    engine = Recording()
    rig = rig_of(tmp_path, engine, algorithm={"name": "ppo", "equal_groups": equal_groups})
    rig.reward = equal_in(*[group.row for group in plan_step(rig.rl_job, 1, 0, 10, ())[:2]])
    metrics = await completed(rig)
    assert len(engine.rows) == trained
    assert metrics.get("groups/excluded/equal_rewards", 0.0) == (0.0 if trained == 8 else 2.0)


async def test_evaluation_step_with_a_critic_reports_no_advantages(tmp_path: Path) -> None:
    data = {"train": "t", "eval": "e", "prompts_per_step": 4}
    rig = rig_of(tmp_path, algorithm={"name": "ppo"}, data=data, eval={"every": 5, "samples": 3})
    metrics = await completed(rig)
    assert "eval/reward_mean" in metrics
    assert not {"advantage/mean", "advantage/std", "value/explained_variance"} & set(metrics)
    assert "advantage/std" in (await rig.steps())[0].metrics


async def test_a_group_of_completions_without_a_token_has_no_pair(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, algorithm={"name": "dpo"})

    def script(request: GroupRequested, sample: int) -> Answer:
        empty = {"tokens": b"", "logprobs": b"", "spans": []} if SampleId.unpack(sample).group == 0 else {}
        return scripted(request, sample).model_copy(update=empty)

    rig.manager.script = script
    rig.reward = lambda batch: Scores(tuple(map(float, range(len(batch.completions)))))
    metrics = await completed(rig)
    assert metrics["groups/excluded/equal_rewards"] == 1.0
    assert metrics["tokens/trained"] > 0


class Moved(Recording):
    """Says of tokens that they became likelier with each update: by 0.1, then 0.2."""

    def logprobs(self, batches: Any) -> list[bytes]:
        self.calls.append("logprobs")
        by = 0.1 * (1 + self.calls.count("step"))
        return [np.full(length(row.completion, I32), by - 1.5, F32).tobytes() for rows in batches for row in rows]


@pytest.mark.parametrize("budget", [16, 1000])
async def test_pairs_are_weighed_by_the_weights_of_their_own_update(tmp_path: Path, budget: int) -> None:
    engine = Moved()
    algorithm = {"name": "dpo", "group_size": 4, "preference": {"beta": 2.0}}
    rig = rig_of(tmp_path, engine, algorithm=algorithm, trainer={"micro_batch_tokens": budget})
    scores = {}

    def reward(batch: RewardBatch) -> Scores:
        found = tuple(float(sum(ids) % 7) if batch.columns["row"][0] % 2 else 1.0 for ids in batch.completion_ids)
        scores[batch.columns["row"][0]] = sorted(found)
        return Scores(found)

    rig.reward = reward
    metrics = await completed(rig)
    groups = [group for group in scores.values() if group[0] < group[-1]]
    assert len(engine.rows) == 2 * len(groups) > 0
    assert metrics.get("groups/excluded/equal_rewards", 0.0) == 4 - len(groups)
    pairs: dict[bytes, list[TrainingRow]] = {}
    for row in engine.rows:
        pairs.setdefault(row.prompt, []).append(row)
        assert not row.proximal
        assert set(unpack(row.reference, F32)) == {-1.5}
    losses = []
    for pair in pairs.values():
        best, worst = sorted(pair, key=lambda row: -advantage_of(row))
        assert sum(unpack(best.completion, I32)) % 7 > sum(unpack(worst.completion, I32)) % 7
        further = length(best.completion, I32) - length(worst.completion, I32)
        by = [0.1 * update for update in (1, 2)]
        weights = [2 * 2.0 / (1 + math.exp(2.0 * moved * further)) for moved in by]
        weight = advantage_of(best)
        update = int(abs(weight - weights[1]) < abs(weight - weights[0]))
        assert weight == -advantage_of(worst) == pytest.approx(weights[update], rel=1e-5)
        losses.append(math.log1p(math.exp(-2.0 * by[update] * further)))
    # The fake engine divides by tokens, the real ones by completions.
    assert metrics["loss"] * metrics["tokens/trained"] == pytest.approx(2 * sum(losses), rel=1e-5)
    assert 0 <= metrics["rewards/accuracies"] <= 1


class Mismatched(Recording):
    """Says of each update's tokens that they are further from what the engine said."""

    def accumulate(self, batches: Any, loss: LossFn) -> dict[str, float]:
        numbers = super().accumulate(batches, loss)
        by_update = 10.0 ** self.calls.count("step")
        return {**numbers, "mismatch_kl": 0.25 * by_update * numbers["tokens"]}


@pytest.mark.parametrize(("old_logprobs", "expected"), [("sampled", 0.25), ("recomputed", None)])
async def test_mismatch_covers_the_tokens_scored_by_the_first_weights(
    tmp_path: Path, old_logprobs: str, expected: float | None
) -> None:
    """Without a pass of their own, those are the first update's; with one, all."""
    engine = Mismatched()
    metrics = await completed(rig_of(tmp_path, engine, algorithm={"old_logprobs": old_logprobs}))
    assert engine.calls.count("step") == 2
    if expected is None:
        assert 0.25 < metrics["mismatch_kl"] < 2.5
    else:
        assert metrics["mismatch_kl"] == pytest.approx(expected)


class Breaking(Recording):
    """A loss, or a gradient, that is not finite in the third step."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def accumulate(self, batches: Any, loss: LossFn) -> dict[str, float]:
        if self._where == "loss" and self.calls.count("step") == 4:
            raise NotFinite("the loss is nan")
        return super().accumulate(batches, loss)

    def step(self, learning_rate: float) -> float:
        if self._where == "gradient" and self.calls.count("step") == 4:
            raise NotFinite("the gradient's norm is inf")
        return super().step(learning_rate)


@pytest.mark.parametrize(("where", "said"), [("loss", "the loss is nan"), ("gradient", "the gradient's norm is inf")])
async def test_non_finite_loss_fails_the_job_and_dumps_the_batch(tmp_path: Path, where: str, said: str) -> None:
    rig = rig_of(tmp_path, Breaking(where), steps=5)
    report = await rig.run()
    assert report.state == "failed"
    assert f"step 3: {said}; version 2 stays the newest" in report.error
    assert "not-finite-step-2.jsonl" in report.error
    assert "lower optimizer.lr" in report.error
    assert sorted(rig.weights.versions) == [0, 1, 2]
    [(name, rows)] = rig.folder.batches.items()
    assert name == "not-finite-step-2.jsonl"
    assert 0 < len(rows) <= 4
    assert f"the {len(rows)} samples" in report.error
    assert all(length(row.sampled, F32) == length(row.completion, I32) for row in rows)


def test_a_trainer_starts_without_waiting_for_torch() -> None:
    code = "import sys, rlboost.services.trainer.__main__; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_users_loss_is_found_by_its_path() -> None:
    assert load_loss("tests.support.reward_functions:doubled")(3) == 6  # type: ignore[arg-type]


def test_a_loss_that_raises_is_named_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "raising_loss", raising=False)
    (tmp_path / "raising_loss.py").write_text("def loss(batch):\n    return batch.advantage\n")
    with pytest.raises(ConfigError) as caught:
        load_loss("raising_loss:loss")(None)  # type: ignore[arg-type]
    assert "algorithm.loss: raising_loss:loss raised AttributeError" in str(caught.value)
    assert "raising_loss.py:2)" in str(caught.value)
    assert "return batch.advantage" in str(caught.value)


def test_edited_loss_is_reloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "edited_loss", raising=False)
    file = tmp_path / "edited_loss.py"
    for number in (1, 22):
        file.write_text(f"def loss(batch):\n    return {number}\n")
        os.utime(file, ns=(number * 10**9, number * 10**9))
        assert load_loss("edited_loss:loss")(None) == number  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("no_such_module:f", "cannot be imported: ModuleNotFoundError"),
        ("rlboost.rewards.code:scores", "is not allowed: it is internal to rlboost; did you mean"),
        ("tests.support.eventually:LIMIT_S", "is not a function: it is of the type float"),
    ],
)
def test_a_loss_that_cannot_be_had_is_refused_by_name(path: str, text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"algorithm.loss: {path} {text}")):
        load_loss(path)
