"""Run the Python blocks of the documentation; those that need a system are in `tests/integration/test_serving.py`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rlboost.jobs.check import check_job
from rlboost.loss import TokenBatch
from tests.support.doc_snippets import DOCS, blocks_in
from tests.support.generated_docs import ROOT
from tests.support.model_folder import write_model, write_tokenizer

RUN_ELSEWHERE = (
    "def score(prompts",  # tests/unit/repository/test_docs.py
    "from rlboost.environments import",  # tests/unit/repository/test_docs.py
    "from games import",  # tests/unit/repository/test_docs.py
    "client.",  # tests/integration/test_serving.py
    "with Fleet(",  # tests/integration/test_external_trainers.py
    "rlboost.vllm import",  # tests/integration/test_gateway.py
    "rlboost.sandbox import",  # tests/docker/test_sandbox.py
)
"""Texts in blocks that other tests run."""
LOSS, SKIP, AGENT = "batch: TokenBatch", "def skip(", "from agents import"
PYTHON = [(doc.name, block) for doc in DOCS for block in blocks_in(doc, "python")]


def defined_in(block: str) -> dict[str, Any]:
    module: dict[str, Any] = {"__name__": "shown"}
    exec(block, module)
    return module


@pytest.mark.parametrize(("page", "block"), PYTHON, ids=[page for page, _ in PYTHON])
def test_python_block_is_run_by_a_test(page: str, block: str) -> None:
    assert any(text in block for text in (LOSS, SKIP, AGENT, *RUN_ELSEWHERE)), f"no test runs this block of {page}"
    compile(block, page, "exec")


def test_shown_losses_have_a_gradient() -> None:
    shown = [block for _, block in PYTHON if LOSS in block]
    assert shown
    for block in shown:
        (loss,) = (value for name, value in defined_in(block).items() if re.search(rf"def {name}\(", block))
        logprobs = torch.tensor([-0.5, -1.0, -2.0], requires_grad=True)
        batch = TokenBatch(logprobs, logprobs.detach() + 0.1, torch.tensor([1.0, 1.0, -1.0]), (2, 1))
        losses = loss(batch)
        losses.sum().backward()
        assert losses.shape == logprobs.shape
        assert logprobs.grad is not None
        assert logprobs.grad.abs().sum() > 0


def test_shown_curricula_decide_for_a_prompt() -> None:
    shown = [block for _, block in PYTHON if SKIP in block]
    assert shown
    for block in shown:
        skip = defined_in(block)["skip"]
        assert skip([0.5], 10, {"difficulty": 1}) in (True, False)
        assert skip([], 0, {}) in (True, False)


def test_shown_agents_are_defined_with_their_packages() -> None:
    shown = [block for _, block in PYTHON if AGENT in block]
    assert shown
    assert all("run" in defined_in(block) for block in shown)


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_shown_job_passes_the_check(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (reward, *_), (job, *_) = (blocks_in(ROOT / page, language) for language in ("python", "yaml"))
    rows = [{"prompt": f"t{n} t{n + 1}", "answer": f"t{n}"} for n in range(3, 40)]
    (tmp_path / "reward.py").write_text(reward)
    for name in ("train", "eval"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = write_tokenizer(write_model(tmp_path / "model"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "reward", raising=False)
    raw = yaml.safe_load(job) | {"model": str(model), "sampling": {"max_tokens": 16}}
    assert check_job(raw).problems == []
