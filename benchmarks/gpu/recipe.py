"""Throughput, memory and the parts of a step of the recipe GSM8K on one GPU; or a whole recipe, with its curve.

    python -m benchmarks.gpu.recipe [--gpus 0] [--engine vllm] [--steps 4]
    python -m benchmarks.gpu.recipe --whole NAME [a.b=v ...]           # or: make gpu RECIPE=NAME

The first has random weights of the sizes of the recipe's model, problems that are made here, and a reward that is right
by chance: it learns nothing. Trainer and one reserved worker share the device. It prints one line of JSON. Run it twice
for a warm start: the second one finds vLLM's compilation cache.

The second runs the recipe's job.yaml. It needs the model (among the downloads of Hugging Face, or as `--model FOLDER`)
and the data (`prepare.py` of the recipe downloads them, or put the files into build/recipes/NAME). It continues a run
that was cut off, and draws build/recipes/NAME/curve.png.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

from rlboost.client import Client
from rlboost.jobs import new_folder
from rlboost.jobs.file import complete
from rlboost.jobs.hub import is_hub_id
from rlboost.local.cluster import LocalCluster
from rlboost.local.processes import LocalOptions
from rlboost.local.spec_file import SystemSpec, local_options
from rlboost.recipes import write_rows
from rlboost.recipes.gsm8k.prepare import row
from rlboost.shared.errors import RLBoostError
from rlboost.shared.job.file import load
from rlboost.shared.job.spec import parse
from rlboost.shared.messages import ENDED

FOLDER = Path("build/recipes")
N_ROWS = 1024
CURVES = ("reward/mean", "eval/pass@1", "eval/rewards/accuracies")
SHORT = ("data.prompts_per_step=64", "sampling.max_tokens=256", "eval.samples=64", "eval.every=1000")
"""64 x 8 completions, about as long as answers are; random weights end none earlier."""
_BY_CHANCE = '''"""Right by chance, so that groups differ and are trained."""


def score(completion_ids, **columns):
    return [float(sum(ids) % 2) for ids in completion_ids]
'''
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_POLL_INTERVAL_S = 1.0
_TIMES = ("time/step_s", "time/seeding_s", "time/wait_s", "time/train_s", "time/publish_s")


class Ran(NamedTuple):
    """What a completed job measured."""

    rows: list[dict[str, Any]]
    """Metrics of each step, and of the last evaluation."""
    start: dict[str, float]
    """Seconds of the reserved engine's start, by phase."""
    peak_bytes: int
    """Most memory in use on the first GPU, by `nvidia-smi` once a second; 0 without a GPU."""

    def summary(self) -> dict[str, Any]:
        """Return the medians of the steps without the first one, which compiles and warms up."""
        trained = [row for row in self.rows if "time/publish_s" in row]
        rows = trained[1:] or trained
        return {
            **{name: round(median(row.get(name, 0.0) for row in rows), 3) for name in _TIMES},
            "tokens_per_s": round(median(row["perf/tokens_per_s"] for row in rows)),
            "peak_gib": round(self.peak_bytes / 2**30, 1),
            "first_token": self.start,
        }


async def run(options: LocalOptions, job: dict[str, Any]) -> Ran:
    """Run a job in a system of its own, or continue the one of its name that is in the system's state folder.

    Raises:
        SystemExit: the job failed or was cancelled, or the one to continue differs from `job`.

    """
    peak_bytes = 0
    async with LocalCluster(options) as cluster:
        with Client(cluster.url, cluster.token) as client:
            jobs = [one for one in client.jobs.list() if one["state"] not in {"failed", "cancelled"}]
            known = [one["id"] for one in jobs if one["name"] == job["name"]]
            job_id = known[-1] if known else client.jobs.create(job)["id"]
            if known and parse(client.jobs.spec(job_id)) != parse(job):
                raise SystemExit(f"{job_id} began with other values: give the same ones, or remove {options.state_dir}")
            shown: dict[str, Any] = client.jobs.show(job_id)
            while shown["state"] not in ENDED:
                await asyncio.sleep(_POLL_INTERVAL_S)
                shown = await asyncio.to_thread(client.jobs.show, job_id)
                peak_bytes = max(peak_bytes, await asyncio.to_thread(_used_bytes) if options.layout.trainers else 0)
            if shown["state"] != "completed":
                raise SystemExit(f"the job {shown['state']}: {shown['error']}")
            rows = client.jobs.metrics(job_id)
    log = options.state_dir / "logs" / "reserved-1.log"
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
    start: dict[str, Any] = next((line for line in lines if line["event"] == "first_token"), {})
    return Ran(rows, {name: value for name, value in start.items() if name.endswith("_s")}, peak_bytes)


def _used_bytes() -> int:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return int(done.stdout.split()[0]) << 20 if done.returncode == 0 else 0


def measure(spec: SystemSpec, steps: int, model: str | None) -> dict[str, Any]:
    """Return what steps of the recipe GSM8K cost, with random weights if no model is given."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="rlboost-bench-") as folder:
        os.chdir(folder)
        try:
            new_folder.make(Path(), recipe="gsm8k")
            Path("by_chance.py").write_text(_BY_CHANCE, encoding="utf-8")
            for name in ("train.jsonl", "eval.jsonl"):
                write_rows(Path(name), map(row, problems()))
            if model is None:
                _write_random_model(Path("model"))
            chosen = [f"model={model or 'model'}", f"steps={steps}", "reward.function=by_chance:score"]
            job = load("job.yaml", [*chosen, *SHORT, *_device(spec)])
            return asyncio.run(run(local_options(spec, Path(".rlboost")), complete(job))).summary()
        finally:
            os.chdir(here)


def whole(name: str, spec: SystemSpec, model: str | None, overrides: list[str]) -> Ran:
    """Run a recipe at its size, or what is left of it, and draw its curve.

    Raises:
        ConfigError: there is no such recipe, or no such device.
        SystemExit: the model is not at hand, its data cannot be prepared, or the job failed.

    """
    options = local_options(spec, Path(".rlboost"))
    folder = FOLDER / name.replace("-", "_")
    if not (folder / "job.yaml").exists():
        new_folder.make(folder, recipe=name)
    os.chdir(folder)
    job = load("job.yaml", [*_device(spec), *overrides])
    job["model"] = _at_hand(str(job["model"])) if model is None else model
    if job["data"]["train"] == "train.jsonl" and not Path("train.jsonl").exists():
        readme = Path("README.md").read_text(encoding="utf-8").split()
        module = next((word for word in readme if word.startswith("rlboost.recipes.")), "")
        program = ["prepare.py"] if Path("prepare.py").exists() else ["-m", module]
        if subprocess.run([sys.executable, *program], check=False).returncode != 0:
            raise SystemExit(f"the data of {name} cannot be prepared: put train.jsonl and eval.jsonl into {folder}")
    ran = asyncio.run(run(options, complete(job)))
    draw(ran, name)
    return ran


def draw(ran: Ran, name: str) -> None:
    """Draw rewards and held-out results by step into `curve.png`."""
    import matplotlib as mpl  # noqa: PLC0415 - only a whole recipe needs it

    mpl.use("agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - likewise

    figure, axes = plt.subplots(figsize=(7, 4))
    for metric in CURVES:
        points = [(one["step"], one[metric]) for one in ran.rows if metric in one]
        if points:
            axes.plot(*zip(*points, strict=True), label=metric, marker="o" if metric.startswith("eval") else "")
    axes.set(xlabel="step", title=name)
    axes.legend()
    figure.savefig("curve.png", dpi=150)
    plt.close(figure)


def problems() -> list[dict[str, str]]:
    """Return problems with GSM8K's columns."""
    rng = Random(0)
    made = []
    for _ in range(N_ROWS):
        a, b, c = (rng.randint(2, 99) for _ in range(3))
        question = f"A box holds {a} pens. Ann buys {b} boxes and gives {c} pens to Tom. How many pens does she have?"
        made.append({"question": question, "answer": f"{a}*{b}=<<{a}*{b}={a * b}>>{a * b}.\n#### {a * b - c}"})
    return made


def _device(spec: SystemSpec) -> list[str]:
    return [] if spec.gpus else ["trainer.dtype=float32", "trainer.offload=none"]


def _at_hand(model: str) -> str:
    """Return the folder of a model among the downloads of Hugging Face."""
    if not is_hub_id(model):
        return model
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - only a whole recipe needs it
    from huggingface_hub.errors import LocalEntryNotFoundError  # noqa: PLC0415 - likewise

    try:
        return str(snapshot_download(model, local_files_only=True))
    except LocalEntryNotFoundError:
        raise SystemExit(f"{model} is not at hand: hf download {model}, or --model FOLDER") from None


def _write_random_model(folder: Path) -> None:
    """Write random weights of the sizes of Qwen2.5-0.5B, with a tokenizer of bytes."""
    import torch  # noqa: PLC0415 - a whole recipe does not need it here
    from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: PLC0415 - likewise

    from tests.support.chat_tokenizers import byte_tokenizer  # noqa: PLC0415 - likewise

    tokenizer = byte_tokenizer(_TEMPLATE)
    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model: Any = Qwen2ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="a.b=v", help="with --whole: override values of the job file")
    parser.add_argument("--whole", metavar="NAME", help="a recipe to run at its size")
    parser.add_argument("--gpus", default="0", help="of trainer and engine; empty: on the CPU")
    parser.add_argument("--engine", choices=("torch", "vllm"), default="vllm")
    parser.add_argument("--steps", type=int, default=4, help="without --whole")
    parser.add_argument("--model", help="its folder")
    args = parser.parse_args()
    model = None if args.model is None else str(Path(args.model).absolute())
    if model is not None:
        os.environ.setdefault("RLBOOST_TRAINER_FOLDERS", model)
    spec = SystemSpec(gpus=args.gpus, engine=args.engine, reserved=1, workers=0)
    try:
        if args.whole is None:
            found = measure(spec, args.steps, model)
        else:
            found = whole(args.whole, spec, model, args.overrides).summary()
    except RLBoostError as error:
        raise SystemExit(f"make gpu: {error}") from error
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
