"""A reward model learns a rule from pairs, then policies learn the rule from the reward model, while workers die.

For one policy the trainer's reward process holds the reward model, for the other the workers serve it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from rlboost.shared.model.folder import digest_of_weights
from tests.support.black_box import black_box
from tests.support.model_folder import write_model, write_tokenizer
from tests.support.reward_functions import even_words

pytestmark = pytest.mark.timeout(600)

LENGTH, STEPS = 8, 12
PROMPTS, GROUP = 8, 16


def write_rows(file: Path, rows: list[dict[str, str]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def pairs(n: int) -> list[dict[str, str]]:
    """Return pairs of random words: the better one has more even words."""
    rng, found = random.Random(5), list[dict[str, str]]()
    while len(found) < n:
        prompt, *texts = (" ".join(f"t{rng.randrange(3, 96)}" for _ in range(m)) for m in (2, LENGTH, LENGTH))
        worse, better = sorted(texts, key=lambda text: even_words([text])[0])
        if even_words([better])[0] - even_words([worse])[0] > 0.3:
            found.append({"prompt": f"{prompt} ", "chosen": better, "rejected": worse})
    return found


def test_a_policy_learns_from_a_reward_model_what_it_learned_from_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLBOOST_TRAINER_FOLDERS", str(tmp_path))
    model, rows = str(write_tokenizer(write_model(tmp_path / "model"))), pairs(400)
    train = write_rows(tmp_path / "train.jsonl", rows[:320])
    held_out = write_rows(tmp_path / "held_out.jsonl", rows[320:])
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": row["prompt"]} for row in rows[:32]])
    judge: dict[str, Any] = {
        "kind": "reward",
        "model": model,
        "data": {"train": train, "eval": held_out, "prompts_per_step": 32},
        "eval": {"every": 50},
        "optimizer": {"lr": 3e-3},
        "trainer": {"checkpoint_every": 50},
        "steps": 50,
    }
    with black_box(tmp_path / "state", workers=2) as box:
        judge_id = box.submit(judge)
        box.until_completed(judge_id)
        evaluated = [row for row in box.get(f"/v1/jobs/{judge_id}/metrics") if "eval/accuracy" in row]
        assert evaluated[-1]["eval/accuracy"] > 0.95
        scores = box.state / "runs" / judge_id / "model"
        rule = {"function": "tests.support.reward_functions:even_words", "weight": 0.0}
        policy: dict[str, Any] = {
            "model": model,
            "data": {"train": prompts, "prompts_per_step": PROMPTS},
            "reward": {"functions": [{"model": str(scores)}, rule], "timeout_s": 60},
            "algorithm": {"group_size": GROUP},
            "sampling": {"max_tokens": LENGTH},
            "optimizer": {"lr": 6e-3},
            "trainer": {"checkpoint_every": 4},
            "steps": STEPS,
        }
        policy_id = box.submit(policy)
        box.until_step(policy_id, 3)
        box.until_busy(policy_id)
        box.kill("preemptible")
        box.until_completed(policy_id)
        metrics = [row for row in box.get(f"/v1/jobs/{policy_id}/metrics") if "reward/even_words/mean" in row]
        assert [row["step"] for row in metrics] == list(range(STEPS))
        assert all(row["groups/dropped"] == 0 for row in metrics)
        assert metrics[-1]["reward/mean"] == pytest.approx(metrics[-1]["reward/model/mean"])
        assert metrics[0]["reward/even_words/mean"] < 0.6
        assert metrics[-1]["reward/even_words/mean"] > 0.75
        samples = box.get(f"/v1/jobs/{policy_id}/samples")
        assert {json.dumps(one["reward_models"]) for one in samples} == {
            json.dumps({str(scores): digest_of_weights(scores)})
        }

        parts = [{"model": "scores", "name": "served"}, {"model": str(scores), "name": "held", "weight": 0.0}, rule]
        served_id = box.submit({**policy, "models": {"scores": {"model": str(scores)}}, "reward": {"functions": parts}})
        box.until_step(served_id, 3)
        box.until_busy(f"{served_id}.scores")
        box.kill("preemptible")
        box.until_completed(served_id)
        metrics = [row for row in box.get(f"/v1/jobs/{served_id}/metrics") if "reward/even_words/mean" in row]
        assert [row["step"] for row in metrics] == list(range(STEPS))
        assert all(row["groups/dropped"] == 0 for row in metrics)
        assert metrics[-1]["reward/even_words/mean"] > 0.75
        for sample in box.get(f"/v1/jobs/{served_id}/samples"):
            assert sample["rewards"]["served"] == pytest.approx(sample["rewards"]["held"], abs=0.05)  # in bfloat16
            assert sample["verdicts"]["served"]["job_id"] == f"{served_id}.scores"
            assert set(sample["reward_models"].values()) == {digest_of_weights(scores)}
            assert set(sample["reward_models"]) == {"scores", str(scores)}
        audit = box.get(f"/v1/jobs/{served_id}.scores/audit")
        assert audit["requested"] == audit["delivered"] == STEPS * PROMPTS * GROUP
        assert (audit["dropped"], audit["duplicates"]) == ({}, 0)
        assert [one["job_id"] for one in box.get(f"/v1/jobs/{served_id}/cost")["models"]] == [f"{served_id}.scores"]
