"""Whether TRL learns the same on a fleet whose workers and manager are killed as on one that is left alone.

    OMP_NUM_THREADS=1 python -m benchmarks.trl_curve [--seeds 1,2,3] [--steps 40]

TRL's own GRPOTrainer trains Countdown, 16 prompts with 8 completions in each step, with two spot workers. Of the kills
of a seed six are of a worker that generates, without a notice, and one is of the manager.

One JSON line for each seed and fleet: the mean reward of each step, the share of held-out problems that a sampled
answer solves, and the audit. A sample that is lost or delivered twice ends the benchmark with an error.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

from datasets import load_dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rlboost.examples.countdown import reward
from rlboost.examples.countdown.make_data import eval_problems
from rlboost.examples.countdown.measure import completions, measured
from rlboost.examples.countdown.tokenizer import pretrained
from rlboost.fleet import Fleet
from rlboost.trl import rollout_func
from tests.support.black_box import ROOT, BlackBox, Observer, black_box

MODEL = str(ROOT / "examples/countdown/base")
N_KILLS = 7
HELD_OUT_EVERY = 10
"""Steps."""


class HeldOut(TrainerCallback):  # type: ignore[misc]
    """Measures the model at the beginning of some steps, and at the end."""

    def __init__(self) -> None:
        self.found: dict[int, float] = {}

    def on_step_begin(self, _args: Any, state: Any, _control: Any, *, model: Any, **_: Any) -> None:
        """See `TrainerCallback`."""
        if state.global_step % HELD_OUT_EVERY == 0:
            self._measure(state.global_step, model)

    def on_train_end(self, _args: Any, state: Any, _control: Any, *, model: Any, **_: Any) -> None:
        """See `TrainerCallback`."""
        self._measure(state.global_step, model)

    def _measure(self, step: int, model: Any) -> None:
        was_training = model.training
        model.eval()
        problems = eval_problems()
        self.found[step] = measured(problems, completions(model, pretrained(), problems)).accuracy
        model.train(was_training)


def train(fleet: Fleet, seed: int, steps: int) -> dict[str, Any]:
    """Train on a fleet; return rewards by step."""
    tokenizer, held_out = pretrained(), HeldOut()

    def score(prompts: Any, completions: Any, completion_ids: Any, **columns: Any) -> list[float | None]:
        raw = [tokenizer.decode(ids) for ids in completion_ids]
        given = {name: columns[name] for name in ("numbers", "target")}
        return reward.score(prompts, completions, completion_ids, completions_raw=raw, **given)

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=MODEL,
            reward_funcs=score,
            processing_class=tokenizer,
            train_dataset=load_dataset("json", data_files=str(ROOT / "examples/countdown/train.jsonl"), split="train"),
            rollout_func=rollout_func(fleet),
            callbacks=[held_out],
            args=GRPOConfig(
                output_dir=folder,
                num_generations=8,
                per_device_train_batch_size=128,
                max_completion_length=256,
                learning_rate=7e-4,
                lr_scheduler_type="constant_with_warmup",
                warmup_steps=3,
                adam_beta2=0.95,
                max_steps=steps,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                beta=0.0,
                epsilon_high=0.28,
                seed=seed,
                bf16=False,
                model_init_kwargs={"dtype": "float32"},
                disable_tqdm=True,
            ),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    return {"rewards": rewards, "held_out": held_out.found}


def kill_all(box: BlackBox, job: str, seed: int, steps: int) -> None:
    """Kill a worker or the manager in each of some steps, while samples are generated."""
    at = sorted(random.Random(seed).sample(range(2, steps - 2), N_KILLS))
    for number, step in enumerate(at):
        box.until_step(job, step, 3600.0)
        box.until_busy(job)
        box.kill("manager" if number == N_KILLS // 2 else "preemptible")


def run(seed: int, steps: int, *, kills: bool) -> dict[str, Any]:
    """Train on a fleet of its own; return the row."""
    with tempfile.TemporaryDirectory() as folder, black_box(Path(folder) / "state", workers=2, trainers=0) as box:
        with Fleet(box.url, box.token, job="countdown-trl", model=MODEL) as fleet:
            (job,) = (one["id"] for one in box.get("/v1/jobs"))
            killer = threading.Thread(target=kill_all, args=(box, job, seed, steps), name="killer")
            with closing(Observer(box.redis_url, job)) as observer:
                if kills:
                    killer.start()
                found = train(fleet, seed, steps)
                if kills:
                    killer.join()
                audit = box.get(f"/v1/jobs/{job}/audit")
                n_samples = observer.check()
            fleet.end()
        if not n_samples == audit["requested"] == audit["delivered"] or audit["duplicates"] or audit["dropped"]:
            raise RuntimeError(f"samples were lost or delivered twice: {audit}")
    return {"seed": seed, "kills": N_KILLS if kills else 0, **found, "audit": audit}


def main() -> None:
    """Print a line for each seed and fleet."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--seeds", default="1,2,3")
    arguments.add_argument("--steps", type=int, default=40)
    given = arguments.parse_args()
    for seed in map(int, given.seeds.split(",")):
        rows = [run(seed, given.steps, kills=kills) for kills in (False, True)]
        for row in rows:
            print(json.dumps(row), flush=True)
        same = all(rows[0][name] == rows[1][name] for name in ("rewards", "held_out"))
        print(json.dumps({"seed": seed, "the_same": same}), flush=True)


if __name__ == "__main__":
    main()
