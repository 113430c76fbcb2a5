"""The torch trainer on a GPU that it shares: what a CPU cannot show. Run with `pytest -m gpu tests/gpu`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rlboost.services.trainer.adapters.torch.policy import TorchPolicy  # noqa: E402 - only where torch is
from rlboost.services.trainer.ports.engine import PolicySettings  # noqa: E402 - only where torch is
from rlboost.shared.job.training import LoraSpec, OptimizerSpec  # noqa: E402 - its like
from tests.support import large_model  # noqa: E402 - its like
from tests.support.losses import clipped_loss  # noqa: E402 - its like
from tests.support.packed_models import check_packed_attention  # noqa: E402 - its like
from tests.support.policy_comparison import bits  # noqa: E402 - its like
from tests.support.training_rows import rows, training_row  # noqa: E402 - its like

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

LOSS, RATE = clipped_loss(0.2, 0.28), 1e-3
BATCHES = [rows(12, seed=1), rows(9, seed=2), rows(7, seed=3)]
SMALL = 96 << 20
"""What may stay on the device: rotary tables, scalars, and cuBLAS's workspaces, 33 MiB for each thread on an H100."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of about 80 M parameters, large enough to see memory that is not freed."""
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    return large_model.write(tmp_path_factory.mktemp("model"))


def policy(model: Path, **choices: Any) -> TorchPolicy:
    settings: dict[str, Any] = {"dtype": "bfloat16", "reference": True, **choices}
    made = TorchPolicy(PolicySettings(optimizer=OptimizerSpec(lr=RATE), **settings), device="cuda")
    made.load_hf(model)
    return made


def on_device() -> int:
    return int(torch.cuda.memory_reserved())


def emptied() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return on_device()


@pytest.mark.parametrize("window", [0, 1, 4, 100])
@pytest.mark.parametrize("head", [8, 12, 64])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 3e-2)])
def test_packed_attention_on_a_gpu_equals_a_mask(window: int, head: int, dtype: str, tolerance: float) -> None:
    """In bfloat16 by torch's variable-length attention, but for a head size that it does not support."""
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    check_packed_attention(window, "cuda", getattr(torch, dtype), head, tolerance)


@pytest.mark.parametrize("lora", [None, LoraSpec()], ids=["model", "adapter"])
@pytest.mark.parametrize("offload", ["optimizer", "all"])
def test_offload_between_calls_changes_no_bit(model: Path, offload: Any, lora: LoraSpec | None) -> None:
    steady, resting = policy(model, lora=lora), policy(model, lora=lora, offload=offload)
    for batch in BATCHES:
        for part in (batch[:4], batch[4:]):
            assert resting.accumulate([part], LOSS) == steady.accumulate([part], LOSS)
            resting.offload()
        assert resting.step(RATE) == steady.step(RATE)
        resting.offload()
        assert bits(resting) == bits(steady)
        assert resting.logprobs([batch]) == steady.logprobs([batch])
        resting.offload()


def test_offload_all_frees_gpu_memory(model: Path) -> None:
    before = emptied()
    engine = policy(model, offload="all")
    for batch in BATCHES:
        engine.accumulate([batch], LOSS)
        engine.step(RATE)
    engine.accumulate([BATCHES[0]], LOSS)
    busy = emptied()
    engine.offload()
    assert on_device() - before < SMALL
    assert busy - before > 16 * sum(parameter.numel() for parameter in engine.rank.module.parameters())
    hosts = [host for _, host in engine.rank._offloader._offloaded_weights.values()]
    assert hosts
    assert all(host is None or host.is_pinned() for host in hosts)


def test_offload_optimizer_keeps_weights_on_gpu(model: Path) -> None:
    engine = policy(model, offload="optimizer", reference=False)
    engine.accumulate([BATCHES[0]], LOSS)
    engine.step(RATE)
    busy = emptied()
    engine.offload()
    n = sum(parameter.numel() for parameter in engine.rank.module.parameters())
    assert busy - on_device() > 7.5 * n, "two moments of four bytes"
    assert all(parameter.is_cuda for parameter in engine.rank.module.parameters())


def test_checkpoint_is_saved_and_loaded_while_offloaded(model: Path, tmp_path: Path) -> None:
    steady, resting = policy(model), policy(model, offload="all")
    for engine in (steady, resting):
        engine.accumulate([BATCHES[0]], LOSS)
        engine.step(RATE)
    resting.offload()
    resting.snapshot()(tmp_path)
    loaded = policy(model, offload="all")
    loaded.load(tmp_path)
    for engine in (steady, loaded):
        engine.accumulate([BATCHES[1]], LOSS)
    assert loaded.step(RATE) == steady.step(RATE)
    assert bits(loaded) == bits(steady)


@pytest.mark.parametrize("lora", [None, LoraSpec(dropout=0.1)], ids=["model", "adapter"])
def test_activation_checkpointing_reduces_gpu_memory(model: Path, lora: LoraSpec | None) -> None:
    # Few trained tokens, so that the logits are small compared with the layers' activations.
    row = training_row([7] * 500, [8] * 8, [-9.0] * 8)

    def peak_of(engine: TorchPolicy) -> int:
        engine.accumulate([[row]], LOSS)  # gradients are there from then on
        emptied()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        engine.accumulate([[row] * 16], LOSS)
        return int(torch.cuda.max_memory_allocated() - before)

    without, within = (
        peak_of(policy(model, reference=False, lora=lora, activation_checkpointing=on)) for on in (False, True)
    )
    assert within < without / 2
