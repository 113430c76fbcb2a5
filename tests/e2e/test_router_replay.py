"""A job on a mixture of experts whose routers replay the engines' decisions, while a worker is killed."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

from tests.support.black_box import ROOT, Observer, black_box
from tests.support.small_job import check, small_job

pytestmark = pytest.mark.timeout(900)


def mixture(folder: Path) -> Path:
    """Write a random mixture of experts with the tokenizer of the example."""
    base = ROOT / "examples/countdown/base"
    shutil.copytree(base, folder)
    known = AutoConfig.from_pretrained(base)
    config = Qwen3MoeConfig(
        vocab_size=known.vocab_size,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=known.max_position_embeddings,
        bos_token_id=known.bos_token_id,
        eos_token_id=known.eos_token_id,
        pad_token_id=known.pad_token_id,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_every_trained_token_is_replayed_after_a_worker_is_killed(tmp_path: Path) -> None:
    spec = small_job(steps=3)
    spec["model"] = str(mixture(tmp_path / "model"))
    spec["trainer"] |= {"router_replay": "R3", "router_aux_loss_coef": 0.001}
    spec["algorithm"]["equal_groups"] = "keep"  # a random model earns nothing
    spec["sampling"]["max_tokens"] = 64
    with black_box(tmp_path / "state", workers=2) as box:
        job_id = box.submit(spec)
        with closing(Observer(box.redis_url, job_id)) as observer:
            assert box.until_busy(job_id)
            box.kill("preemptible")
            box.until_completed(job_id)
        check(box, job_id, observer, spec)
        rows = box.get(f"/v1/jobs/{job_id}/metrics")[: spec["steps"]]
    assert [row["moe/replayed"] for row in rows] == [1.0] * spec["steps"]
    assert all(row["mismatch_kl"] < 1e-5 for row in rows)
    assert all(row["moe/max_load"] >= 1 for row in rows)
