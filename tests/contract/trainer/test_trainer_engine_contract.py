"""The contract of policy engines: torch in one process, FSDP2 and megatron-core in several, and the fake."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.domain.loss.function import add_sums
from rlboost.services.trainer.ports.engine import Loaded, PolicyEngine, PolicySettings
from rlboost.shared.errors import Corrupt, Fatal
from rlboost.shared.job.training import LoraSpec, Offload, OptimizerSpec
from rlboost.shared.weights.manifest import Shard
from rlboost.shared.wire import F32, U8, unpack
from tests.support import rank_policies
from tests.support.engine_steps import LOSS, RATE, train
from tests.support.model_folder import write_model
from tests.support.policy_comparison import bits
from tests.support.trainer_fakes import FakeEngine
from tests.support.training_rows import rows, with_loss_mask

New = Callable[[], PolicyEngine]
Kept = Callable[[str, int], PolicyEngine]
RANKS: dict[str, dict[str, Any]] = {
    "megatron-bfloat16": {"data_parallel": 2, "distributed_optimizer": True, "offload": "all"},
    "fsdp-bfloat16": {"backend": "torch", "data_parallel": 2, "offload": "optimizer"},
    "fsdp-adapter": {"backend": "torch", "data_parallel": 2, "offload": "all", "lora": LoraSpec(rank=3)},
}


def torch_engine(
    folder: Path, *, dtype: str = "float32", lora: LoraSpec | None = None, offload: Offload = "none"
) -> TorchPolicy:
    engine = TorchPolicy(
        PolicySettings(optimizer=OptimizerSpec(lr=RATE), dtype=dtype, lora=lora, offload=offload), device="cpu"
    )
    engine.load_hf(folder)
    return engine


@pytest.fixture(scope="module")
def kept() -> Iterator[Kept]:
    """Engines by kind and number whose processes live on between tests, for they take seconds to start."""
    started: dict[str, list[PolicyEngine]] = {kind: [] for kind in RANKS}
    with ExitStack() as stack:

        def get(kind: str, number: int) -> PolicyEngine:
            while len(started[kind]) <= number:
                made = rank_policies.policy(OptimizerSpec(lr=RATE), dtype="bfloat16", **RANKS[kind])
                started[kind].append(stack.enter_context(made))
            return started[kind][number]

        yield get


IN_RANKS = [pytest.param(kind, marks=pytest.mark.long if kind == "fsdp-adapter" else ()) for kind in RANKS]


@pytest.fixture(params=["torch", "torch-bfloat16", "torch-untied", "torch-adapter", *IN_RANKS, "fake", "fake-adapter"])
def new(request: pytest.FixtureRequest, tmp_path: Path, kept: Kept) -> Iterator[New]:
    """Makes engines of one kind, each freshly loaded from the same model."""
    made: list[PolicyEngine] = []
    n_kept = itertools.count()

    def make() -> PolicyEngine:
        adapter = request.param.endswith("-adapter")
        if request.param.startswith("fake"):
            engine: PolicyEngine = FakeEngine("{}" if adapter else "")
            engine.load_hf(tmp_path)
        else:
            family = "llama-untied" if request.param == "torch-untied" else "qwen3-tied"
            folder = tmp_path / "model"
            if not folder.exists():
                write_model(folder, family)
            if request.param in RANKS:
                engine = kept(request.param, next(n_kept))
                engine.load_hf(folder)
                return engine
            dtype = "bfloat16" if request.param == "torch-bfloat16" else "float32"
            # The contract holds for any setting of `offload`.
            offload: Offload = "all" if adapter else "optimizer" if request.param == "torch-untied" else "none"
            engine = torch_engine(folder, dtype=dtype, lora=LoraSpec() if adapter else None, offload=offload)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


def trained(engine: PolicyEngine) -> Loaded:
    """Return what the engine trains."""
    return "adapter" if engine.adapter_json else "base"


def test_step_changes_the_weights(new: New) -> None:
    engine = new()
    before = bits(engine)
    assert train(engine, 0) > 0
    assert bits(engine) != before


def test_step_without_gradients_changes_nothing(new: New) -> None:
    engine = new()
    before = bits(engine)
    assert engine.step(RATE) == 0.0
    assert bits(engine) == before


def test_engine_is_deterministic(new: New) -> None:
    first, second = new(), new()
    for seed in range(3):
        train(first, seed)
        train(second, seed)
    assert bits(first) == bits(second)


def test_micro_batches_equal_one_batch(new: New) -> None:
    whole, parts = new(), new()
    batch = [*rows(5), *with_loss_mask(rows(3, seed=1))]
    sums = whole.accumulate([batch], LOSS)
    norm = whole.step(RATE)
    many: dict[str, float] = {}
    for row in batch:
        add_sums(many, parts.accumulate([[row]], LOSS))
    assert parts.step(RATE) == pytest.approx(norm, rel=2e-2 if _rounds(parts) else 1e-4)
    for name, value in sums.items():
        assert many[name] == pytest.approx(value, rel=2e-2, abs=0.3 if _rounds(parts) else 1e-3)
    if not _rounds(parts):
        for (_, left), (_, right) in zip(bits(whole), bits(parts), strict=True):
            # Adam divides by the gradient's own size, so a rounding of a tiny gradient shows most.
            np.testing.assert_allclose(np.frombuffer(left, F32), np.frombuffer(right, F32), atol=RATE / 50)


def _rounds(engine: PolicyEngine) -> bool:
    return next(engine.export_shards()).dtype == "bfloat16"


def test_accumulate_counts_completion_tokens(new: New) -> None:
    engine = new()
    batch = rows()
    assert engine.accumulate([batch[:2], batch[2:]], LOSS)["tokens"] == sum(len(row.completion) // 4 for row in batch)


def test_logprobs_return_one_column_per_row(new: New) -> None:
    engine, other = new(), new()
    batch = rows()
    engine.accumulate([batch], LOSS)
    columns = engine.logprobs([batch[:2], batch[2:]])
    other.accumulate([batch], LOSS)
    assert engine.step(RATE) == other.step(RATE)
    assert [len(column) for column in columns] == [len(row.completion) for row in batch]
    assert bits(engine) == bits(other)


def test_masked_tokens_are_context_only(new: New) -> None:
    engine = new()
    plain, batch = rows(), with_loss_mask(rows())
    assert engine.accumulate([batch], LOSS)["tokens"] == sum(row.n_loss_tokens for row in batch)
    for row, whole, part in zip(batch, engine.logprobs([plain]), engine.logprobs([batch]), strict=True):
        expected = unpack(whole, F32)[unpack(row.loss_mask, U8).astype(bool)]
        assert unpack(part, F32) == pytest.approx(expected, abs=1e-5)


def test_checkpoint_resumes_exactly(new: New, tmp_path: Path) -> None:
    steady, restored = new(), new()
    train(steady, 0)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    steady.snapshot()(folder)
    restored.load(folder)
    assert bits(restored) == bits(steady)
    assert train(restored, 1) == train(steady, 1)
    assert bits(restored) == bits(steady)


def test_snapshot_is_independent_of_further_training(new: New, tmp_path: Path) -> None:
    steady, restored = new(), new()
    train(steady, 0)
    before = bits(steady)
    write = steady.snapshot()
    train(steady, 1)
    writing = threading.Thread(target=write, args=(tmp_path,))
    writing.start()
    after = train(steady, 2)
    writing.join()
    restored.load(tmp_path)
    assert bits(restored) == before
    train(restored, 1)
    assert train(restored, 2) == after
    assert bits(restored) == bits(steady)


def test_offload_between_calls_changes_nothing(new: New, tmp_path: Path) -> None:
    steady, resting = new(), new()
    batch = rows()
    resting.offload()
    for engine in (steady, resting):
        engine.accumulate([batch[:3]], LOSS)
    resting.offload()
    assert bits(resting) == bits(steady)
    assert resting.logprobs([batch]) == steady.logprobs([batch])
    resting.offload()
    for engine in (steady, resting):
        engine.accumulate([batch[3:]], LOSS)
    resting.offload()
    resting.offload()
    assert resting.step(RATE) == steady.step(RATE)
    resting.offload()
    assert bits(resting, "model") == bits(steady, "model")
    resting.snapshot()(tmp_path)
    steady.load(tmp_path)
    resting.load(tmp_path)
    assert train(resting, 1) == train(steady, 1)
    assert bits(resting) == bits(steady)


def test_load_drops_accumulated_gradients(new: New, tmp_path: Path) -> None:
    steady, interrupted = new(), new()
    for engine in (steady, interrupted):
        train(engine, 0)
    steady.snapshot()(tmp_path)
    interrupted.accumulate([rows(seed=1)], LOSS)
    interrupted.load(tmp_path)
    assert interrupted.step(RATE) == 0.0
    assert bits(interrupted) == bits(steady)
    assert train(interrupted, 2) == train(steady, 2)
    assert bits(interrupted) == bits(steady)


def test_invalid_checkpoint_is_corrupt(new: New, tmp_path: Path) -> None:
    with pytest.raises(Corrupt):
        new().load(tmp_path)


def test_exported_shards_load_exactly(new: New) -> None:
    one, other = new(), new()
    train(one, 0)
    other.load_shards(_copied(one), trained(one))
    assert bits(other) == bits(one)


def test_adapter_training_leaves_the_base_unchanged(new: New) -> None:
    engine = new()
    base, adapter = bits(engine, "base"), bits(engine, "adapter")
    train(engine, 0)
    assert (bits(engine, "base") == base) is (trained(engine) == "adapter")
    assert bits(engine, trained(engine)) != (adapter if engine.adapter_json else base)


def test_base_below_an_adapter_can_be_replaced(new: New) -> None:
    engine, other = new(), new()
    shards = [shard._replace(data=bytes(len(shard.data))) for shard in engine.export_shards("base")]
    before = bits(other, "adapter") if other.adapter_json else []
    other.load_shards(shards)
    assert all(not any(data) for _, data in bits(other, "base"))
    assert bits(other, "adapter") == before or not other.adapter_json


def test_shards_of_another_model_are_rejected(new: New) -> None:
    engine = new()
    what = trained(engine)
    shards = _copied(engine)
    with pytest.raises(Fatal, match="lack"):
        engine.load_shards(shards[1:], what)
    with pytest.raises(Fatal, match="does not belong"):
        engine.load_shards([shards[0]._replace(name="another"), *shards[1:]], what)


def test_one_process_exports_whole_tensors(new: New) -> None:
    for shard in new().export_shards():
        assert shard.local_shape == shard.global_shape
        assert set(shard.offset) <= {0}


def _copied(engine: PolicyEngine) -> list[Shard]:
    return [shard._replace(data=bytes(shard.data)) for shard in engine.export_shards(trained(engine))]
