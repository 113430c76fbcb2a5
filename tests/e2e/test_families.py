"""A model whose files have a tower and other names than transformers' trains on its text, with vLLM workers."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from tests.support import families, vllm_engines
from tests.support.black_box import black_box, check_engine_and_trainer_agree
from tests.support.model_folder import write_tokenizer

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def test_gemma_3_trains_with_vllm_while_a_worker_is_killed(tmp_path: Path) -> None:
    vllm_engines.require_installed()
    with black_box(tmp_path / "state", workers=2, engine="vllm") as box, closing(box.http):
        model = write_tokenizer(families.write(tmp_path / "state" / "model", "gemma3"))
        rows = tmp_path / "state" / "rows.jsonl"
        rows.write_text("\n".join(json.dumps({"prompt": f"t{3 + n % 80} t{4 + n % 80}"}) for n in range(32)))
        spec = {
            "name": "gemma",
            "model": str(model),
            "data": {"train": str(rows), "prompts_per_step": 8},
            "reward": {"function": "tests.support.reward_functions:lengths", "timeout_s": 5},
            "algorithm": {"name": "grpo", "group_size": 8},
            "sampling": {"max_tokens": 16},
            "optimizer": {"lr": 1e-3},
            "steps": 4,
        }
        check_engine_and_trainer_agree(box, spec)
