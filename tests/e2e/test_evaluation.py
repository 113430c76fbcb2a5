"""A model evaluated, trained and exported by the command line, against what transformers says of the same weights."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml

from rlboost.shared.ids import SampleId
from tests.support import vllm_engines
from tests.support.black_box import BlackBox, Observer, black_box
from tests.support.countdown_model import EXAMPLE, CountdownModel, Decoded
from tests.support.small_job import samples_of, small_job

pytestmark = pytest.mark.timeout(600)

MAX_TOKENS = 96
TIMES = 7
"""How often each problem is asked of a greedy evaluation: for as long as it takes to kill a worker in the middle."""
N_PROBLEMS = 40
"""Of the example's, where any will do."""
JOB = str(EXAMPLE / "job.yaml")


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlackBox]:
    with black_box(tmp_path_factory.mktemp("system") / "state", workers=2) as system:
        yield system


@pytest.fixture(scope="module")
def base() -> CountdownModel:
    return CountdownModel(EXAMPLE / "base")


class Trained(NamedTuple):
    """A job of two steps, and its weights of before the last."""

    job_id: str
    observer: Observer
    folder: Path
    model: CountdownModel
    problems: list[Decoded]
    """Decoded greedily by `model`."""


@pytest.fixture(scope="module")
def trained(box: BlackBox, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    spec = small_job(steps=2)
    spec["optimizer"]["warmup_steps"] = 0  # the first step changes the weights
    (folder / "job.yaml").write_text(yaml.safe_dump({**spec, "eval": None}))
    with box.start("run", str(folder / "job.yaml"), "--json") as command:
        assert command.stdout is not None
        job_id = json.loads(command.stdout.readline())["id"]
        with closing(Observer(box.redis_url, job_id)) as observer:
            box.until_completed(job_id)
    out = folder / "version-1"
    said = box.command("export", job_id, "--version", "1", "--out", str(out))
    assert said == f"version 1 of {job_id} is in {out}\n"
    model = CountdownModel(out)
    return Trained(job_id, observer, out, model, model.clear_problems(MAX_TOKENS))


def held_out(rows: Iterable[dict[str, Any]], folder: Path) -> str:
    """Return the override that makes these the held-out problems."""
    (folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"data.eval={folder / 'eval.jsonl'}"


def share(problems: Sequence[Decoded]) -> float:
    return sum(problem.passes for problem in problems) / len(problems)


def completions(observer: Observer) -> Iterator[tuple[tuple[int, ...], list[int], dict[str, Any]]]:
    """Yield prompt, tokens and message of each finished sample whose request was seen."""
    for sample, (body,) in observer.finished.items():
        if sample not in observer.admitted:
            continue
        prompt = np.frombuffer(observer.admitted[sample]["prompt"], "<i4").tolist()
        yield tuple(prompt), np.frombuffer(body["tokens"], "<i4").tolist(), body


def test_greedy_evaluation_with_a_killed_worker_gives_the_models_accuracy(
    box: BlackBox, base: CountdownModel, tmp_path: Path
) -> None:
    problems = base.clear_problems(MAX_TOKENS)
    assert 0 < share(problems) < 1
    n_samples = TIMES * len(problems)
    pids = {process["name"]: process["pid"] for process in box.processes("preemptible")}
    greedy = (
        "sampling.temperature=0",
        f"sampling.max_tokens={MAX_TOKENS}",
        held_out((problem.row for problem in problems), tmp_path),
    )
    with box.start("eval", JOB, *greedy, f"--samples={n_samples}") as command:
        assert command.stderr is not None
        job_id = command.stderr.readline().removeprefix("created ").strip()
        with closing(Observer(box.redis_url, job_id)) as observer:
            victim = kill_within_a_sample(box, observer, pids)
            printed, trouble = command.communicate(timeout=120)
    assert command.returncode == 0, trouble + box.logs()

    assert observer.check() == n_samples
    expected = {tuple(problem.prompt): problem.tokens for problem in problems}
    assert all(tokens == expected[prompt] for prompt, tokens, _ in completions(observer))
    spans = [{name_of(worker) for worker, _, _ in body["spans"]} for _, _, body in completions(observer)]
    assert any(victim in names and len(names) > 1 for names in spans), "what the killed worker had made was kept"
    assert box.get(f"/v1/jobs/{job_id}/audit")["preemptions"] == {"without_notice": 1}

    accuracy, length = share(problems), np.mean([len(problem.tokens) for problem in problems])
    metrics = {f"eval/pass@{k}": accuracy for k in (1, 2, 4)} | {"eval/reward_mean": accuracy}
    metrics["eval/mean_length"] = float(length)
    title, *table = printed.splitlines()
    assert title == f"{EXAMPLE / 'base'}, evaluated by {job_id}"
    assert dict(line.split() for line in table if line) == {name: f"{value:.4g}" for name, value in metrics.items()}
    left = box.state / "runs" / job_id
    assert sorted(path.name for path in left.iterdir()) == ["job.json", "metrics.jsonl", "record"]
    (row,) = map(json.loads, (left / "metrics.jsonl").read_text().splitlines())
    assert {name: row[name] for name in row if name.startswith("eval/")} == pytest.approx(metrics)


def kill_within_a_sample(box: BlackBox, observer: Observer, pids: dict[str, int]) -> str:
    """Kill a worker that has sent a part of a sample, and return its name; `pids` has all that may die."""
    victims: list[str] = []

    def is_killed() -> bool:
        for name in sorted({name_of(worker) for _, worker in list(observer.flushed)} & set(pids)):
            os.kill(pids[name], signal.SIGSTOP)
            time.sleep(0.3)  # until what it has sent is delivered
            sent = {sample for sample, worker in list(observer.flushed) if name_of(worker) == name}
            if sent - set(observer.finished):
                os.kill(pids[name], signal.SIGKILL)
                victims.append(name)
                return True
            os.kill(pids[name], signal.SIGCONT)
        return False

    box.until(is_killed, "a spot worker has sent a part of a sample")
    return victims[0]


def name_of(worker: str) -> str:
    """Return what the process is called, whose worker has a name of its own each time it starts."""
    return worker.rpartition("-")[0]


def test_pass_at_k_is_how_often_one_of_k_completions_passes(
    box: BlackBox, base: CountdownModel, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in (EXAMPLE / "eval.jsonl").read_text().splitlines()[:N_PROBLEMS]]
    by_prompt: dict[tuple[int, ...], tuple[dict[str, Any], list[bool]]] = {
        tuple(base.tokenizer(row["prompt"])["input_ids"]): (row, []) for row in rows
    }
    with box.start("eval", JOB, held_out(rows, tmp_path), f"--samples={4 * len(rows)}", "--json") as command:
        assert command.stderr is not None
        job_id = command.stderr.readline().removeprefix("created ").strip()
        with closing(Observer(box.redis_url, job_id)) as observer:
            printed, trouble = command.communicate(timeout=120)
    assert command.returncode == 0, trouble + box.logs()
    assert observer.check() == 4 * len(rows)
    for prompt, tokens, _ in completions(observer):
        row, passed = by_prompt[prompt]
        passed.append(base.passes(row, tokens))
    metrics = json.loads(printed)["metrics"]
    for k in (1, 2, 4):
        rates = [np.mean([any(some) for some in itertools.combinations(p, k)]) for _, p in by_prompt.values()]
        assert metrics[f"eval/pass@{k}"] == pytest.approx(np.mean(rates))
    assert metrics["eval/pass@1"] < metrics["eval/pass@2"] < metrics["eval/pass@4"]


def test_each_held_out_set_is_sampled_by_its_own_settings(box: BlackBox, base: CountdownModel, tmp_path: Path) -> None:
    problems = base.clear_problems(MAX_TOKENS)[:16]
    held_out((problem.row for problem in problems), tmp_path)
    rows = {"data": str(tmp_path / "eval.jsonl"), "samples": len(problems)}
    sets = {
        "greedy": {**rows, "sampling": {"temperature": 0, "max_tokens": MAX_TOKENS}},
        "short": {**rows, "samples": 2 * len(problems), "sampling": {"max_tokens": 2}},
    }
    report = json.loads(box.command("eval", JOB, "eval.samples=8", f"eval.sets={json.dumps(sets)}", "--json"))
    metrics = report["metrics"]
    assert metrics["eval/greedy/pass@1"] == pytest.approx(share(problems))
    assert metrics["eval/greedy/mean_length"] == pytest.approx(np.mean([len(problem.tokens) for problem in problems]))
    assert 0 < metrics["eval/short/mean_length"] <= 2
    assert metrics["eval/mean_length"] > 2
    assert {name for name in metrics if "pass@" in name} == {
        *("eval/pass@1", "eval/greedy/pass@1", "eval/short/pass@1", "eval/short/pass@2")
    }
    assert box.get(f"/v1/jobs/{report['job']['id']}/audit")["delivered"] == 8 + 3 * len(problems)


def test_an_exported_version_is_the_one_that_made_its_samples(trained: Trained, base: CountdownModel) -> None:
    of_version = [
        (prompt, tokens, np.frombuffer(body["logprobs"], "<f4"))
        for prompt, tokens, body in completions(trained.observer)
        if {version for _, version, _ in body["spans"]} == {1}
    ]
    assert len(of_version) == 64
    for prompt, tokens, engine_logprobs in of_version[::8]:
        assert engine_logprobs == pytest.approx(trained.model.logprobs(prompt, tokens), abs=1e-4)
        assert engine_logprobs != pytest.approx(base.logprobs(prompt, tokens), abs=1e-3)


@pytest.mark.long
def test_an_exported_folder_evaluates_as_it_decodes(box: BlackBox, trained: Trained, tmp_path: Path) -> None:
    problems = trained.problems
    greedy = (
        "sampling.temperature=0",
        f"sampling.max_tokens={MAX_TOKENS}",
        held_out((problem.row for problem in problems), tmp_path),
    )
    model = ("--model", str(trained.folder))
    report = json.loads(box.command("eval", trained.job_id, *greedy, *model, f"--samples={len(problems)}", "--json"))
    assert report["model"] == str(trained.folder)
    assert report["metrics"]["eval/pass@1"] == pytest.approx(share(problems))


@pytest.mark.long
def test_vllm_completes_text_with_an_exported_folder_as_transformers_does(trained: Trained) -> None:
    vllm_engines.require()
    from vllm import SamplingParams  # noqa: PLC0415 - see require

    problems = trained.problems[:32]
    with vllm_engines.offline(trained.folder, slots=32) as engine:
        answers = engine.generate(
            [problem.row["prompt"] for problem in problems],
            SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, skip_special_tokens=False, logprobs=0),
            use_tqdm=False,
        )
    for problem, answer in zip(problems, answers, strict=True):
        assert answer.prompt_token_ids == problem.prompt
        (output,) = answer.outputs
        assert list(output.token_ids) == problem.tokens
        engine_logprobs = [step[token].logprob for step, token in zip(output.logprobs, problem.tokens, strict=True)]
        assert engine_logprobs == pytest.approx(trained.model.logprobs(problem.prompt, problem.tokens), abs=5e-5)


def test_same_job_and_seed_draw_the_same_samples(box: BlackBox) -> None:
    """Two jobs of one system, which have different numbers; training and evaluation, token for token."""
    spec = small_job(steps=2, seed=7)
    spec["optimizer"] = {"lr": 1e-30}  # so that the rounding of another order of arrival changes no weight
    found = []
    for _ in range(2):
        job_id = box.submit(spec)
        with closing(Observer(box.redis_url, job_id)) as observer:
            box.until_completed(job_id)
        found.append({SampleId.unpack(s)[1:]: tuple(body["tokens"]) for s, (body,) in observer.finished.items()})
    assert len(found[0]) == samples_of(spec)
    assert found[0] == found[1]
