"""What a checkpoint costs the training, written between two steps and beside them: `python -m benchmarks.checkpoints`.

A model of some ten million parameters, AdamW, one thread. *Between* is what the device waits for when the checkpoint is
copied, written, digested and forced to the disk before the next step; *beside* is what it waits for when only the copy
is made before it. The steps during which it is written then share the machine with that.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from rlboost.services.trainer.adapters.checkpoint_folder import CheckpointFolder
from rlboost.services.trainer.adapters.torch.policy import TorchPolicy
from rlboost.services.trainer.domain.plan import TrainingRow
from rlboost.services.trainer.ports.engine import PolicySettings
from rlboost.services.trainer.ports.storage import TrainState
from tests.support.losses import clipped_loss
from tests.support.training_rows import training_row

_VOCABULARY = 16_000
_ROWS, _TOKENS = 2, 32


def model(folder: Path, layers: int) -> int:
    """Write a model and return how many parameters it has."""
    config = Qwen3Config(
        vocab_size=_VOCABULARY,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config)
    made.save_pretrained(folder)
    return sum(parameter.numel() for parameter in made.parameters())


def rows(seed: int) -> list[TrainingRow]:
    """Return samples of random tokens."""
    rng = random.Random(seed)
    return [
        training_row(
            [rng.randrange(_VOCABULARY) for _ in range(_TOKENS)],
            [rng.randrange(_VOCABULARY) for _ in range(_TOKENS)],
            [-9.0] * _TOKENS,
            rng.uniform(-1, 1),
        )
        for _ in range(_ROWS)
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="where checkpoints go; a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        n_parameters = model(folder / "model", options.layers)
        policy = TorchPolicy(PolicySettings(), device="cpu")
        policy.load_hf(folder / "model")
        store = CheckpointFolder(folder / "checkpoints")
        loss = clipped_loss(0.2, 0.2)
        numbers = iter(range(1_000_000))

        def step() -> None:
            policy.accumulate([rows(next(numbers))], loss)
            policy.step(1e-5)

        def save() -> None:
            store.save(TrainState(next(numbers), "0-0", 1), policy.snapshot())

        step()
        quiet = [_timed(step) for _ in range(options.rounds)]
        between, beside, during, writing = [], [], [], []
        for _ in range(options.rounds):
            between.append(_timed(save))
            began = time.monotonic()
            write = policy.snapshot()
            beside.append(time.monotonic() - began)
            state = TrainState(next(numbers), "0-0", 1)
            thread = threading.Thread(target=lambda: writing.append(_timed(lambda: store.save(state, write))))  # noqa: B023
            thread.start()
            while thread.is_alive():
                during.append(_timed(step))
            thread.join()
        n_bytes = sum(file.stat().st_size for file in folder.glob(f"checkpoints/step-{state.step:06d}/*"))
    print(f"{n_parameters / 1e6:.1f} M parameters, checkpoints of {n_bytes / 1e6:.0f} MB; medians of {options.rounds}")
    for text, values in (
        ("a step", quiet),
        ("a step while a checkpoint is written", during),
        ("waited for, written between two steps", between),
        ("waited for, written beside them", beside),
        ("until it is durable, beside them", writing),
    ):
        print(f"{text:40} {statistics.median(values):8.3f} s   ({min(values):.3f} to {max(values):.3f})")


def _timed(call: Callable[[], None]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


if __name__ == "__main__":
    main()
